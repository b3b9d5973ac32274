//! The run: events in their order, until none is left.
//!
//! Invariant: requests are asked for when their time is known, so a trace of any length streams; records
//! are reported in the order of arrival. Cost: O(log events) per event, plus the machines' work.

mod arrivals;
mod fetch;
mod handoffs;
mod machines;
mod results;
mod route;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use kvtrie_core::{
    BlockEvent, CostModel, Error, LoadMode, Locked, Manager, Nanos, Result, Settings, TierSpec,
};

use crate::call::{Report, Reporting};
use crate::cost::Cost;
use crate::decision::{Backlog, Decision};
use crate::directory::{Directory, Learning};
use crate::engine::{self, Engine, Limits, Service};
use crate::event::{Event, Events, Kind, MachineId};
use crate::machine::Machine;
use crate::network::{Network, PeerSpec};
use crate::peers::{Fetch, Peers};
use crate::record::Record;
use crate::remote::{Lookup, RemoteStore, SharedStore};
use crate::request::Request;
use crate::router::Router;
use crate::timeline::{Sample, Timeline, Track};
use crate::transfer::Transfer;
use arrivals::Arrivals;
use fetch::{FIRST_FETCH, Fetching};
use handoffs::Handoffs;
use machines::{Queues, check_groups, check_machines, track_store};

/// Hardware of one machine, where machines differ.
#[derive(Clone, Debug)]
pub struct Hardware {
    /// Its tiers, of the same kinds as those of the others.
    pub tiers: Vec<TierSpec>,
    /// How long tokens take on its engine.
    pub price: Arc<dyn Cost>,
    /// What its manager takes that for.
    pub cost: CostModel,
}

/// Configuration of a run.
#[derive(Debug)]
pub struct Config {
    /// Of every machine's manager.
    pub settings: Settings,
    /// How many machines.
    pub machines: usize,
    /// Hardware of each machine, which takes the place of that in `settings` and `service`; empty if
    /// machines do not differ.
    pub hardware: Vec<Hardware>,
    /// Whether leases load.
    pub load: LoadMode,
    /// Settings of the engines.
    pub service: Service,
    /// How moves take their time.
    pub transfer: Transfer,
    /// Router of requests.
    pub router: Box<dyn Router>,
    /// Network between machines that ask each other for blocks; `None` if they do not.
    pub peers: Option<PeerSpec>,
    /// Network between machines that hand requests over, if they do not ask each other for blocks.
    pub network: Option<PeerSpec>,
    /// Which blocks machines find in the last tier, a store of all machines; `None` if a tier `remote`
    /// belongs to one machine.
    pub remote: Option<Lookup>,
    /// How routers and peers learn which machine has which blocks.
    pub directory: Learning,
    /// Whether all calls are kept.
    pub logged: bool,
}

/// A machine with its engine.
#[derive(Debug)]
struct Server {
    machine: Machine,
    engine: Box<dyn Engine>,
    /// How long tokens take on the engine.
    cost: Arc<dyn Cost>,
    fetch: Fetching,
    /// When it begins loads that wait.
    due: Option<Nanos>,
}

/// A run.
#[derive(Debug)]
pub struct Simulation {
    servers: Vec<Server>,
    router: Box<dyn Router>,
    directory: Box<dyn Directory>,
    /// How late the directory learns of a change; `None` if it needs none.
    delay: Option<Nanos>,
    /// By machine: changes that the directory will learn of, in order.
    updates: Vec<VecDeque<Vec<BlockEvent>>>,
    /// Number of other machines reported with each decision; `None` reports no decisions.
    decisions: Option<usize>,
    /// Work of the machines, if the router uses it or its decisions are reported.
    backlog: Option<Backlog>,
    keep: u64,
    events: Events,
    now: Nanos,
    transfer: Transfer,
    peers: Option<Peers>,
    network: Option<Network>,
    remote: Option<SharedStore>,
    handoffs: Option<Handoffs>,
    /// Blocks in the network, by the number of their transmission.
    fetches: BTreeMap<u64, Fetch>,
    next_fetch: u64,
    /// Events at which loads are due.
    due_events: usize,
    /// Reports of tools to come.
    reports: BTreeMap<u64, Report>,
    next_report: u64,
    /// Whether a request's blocks are loaded from when it comes in.
    prefetches: bool,
    /// Number of clients that wait for an answer before the next request; 0 for an open trace.
    clients: usize,
    /// Records that wait for an earlier request's.
    early: BTreeMap<u64, Record>,
    next_record: u64,
    timeline: Timeline,
}

impl Simulation {
    /// Machines without a block.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that contradict each other.
    pub fn new(config: Config) -> Result<Self> {
        Self::with(config, |settings| Ok(Arc::new(Locked::new(Manager::new(settings)?))))
    }

    /// Machines with managers that `open` gives for the settings.
    ///
    /// # Errors
    /// As [`Simulation::new`], and those of `open`.
    pub fn with(config: Config, open: impl Fn(Settings) -> Result<Arc<Locked>>) -> Result<Self> {
        let Config { mut settings, machines, load, service, transfer, router, .. } = config;
        let Config { hardware, peers, network, remote, directory: learning, logged, .. } = config;
        if machines == 0 || transfer.moves_per_job == 0 {
            return Err(Error::config(format!(
                "machines is {machines} and moves_per_job {}, at least 1 wanted",
                transfer.moves_per_job
            )));
        }
        if let Some(Limits { token_budget, max_running, .. }) = service.kind.limits()
            && !(1..=token_budget).contains(&max_running)
        {
            return Err(Error::config(format!(
                "max_running is {max_running}, 1 to the {token_budget} of token_budget wanted"
            )));
        }
        check_machines(&settings, machines, &hardware, remote)?;
        let network = peers.clone().or(network);
        if network.is_some() || remote.is_some() {
            check_groups(&settings)?;
        }
        let shared = remote.is_some().then(|| settings.tiers.len() - 1);
        let queues = Queues::new(network.as_ref(), shared.map(|tier| &settings.tiers[tier]));
        let entered = |spec: PeerSpec| (queues.of(spec.shares.as_ref()), spec);
        let network = network.map(entered).map(|(queue, spec)| Network::new(spec, queue));
        let remote = remote.zip(settings.tiers.last()).map(|(lookup, tier)| {
            SharedStore::new(RemoteStore::new(tier.blocks as usize, tier.read.latency_ns, lookup))
        });
        let handoffs = match service.kind {
            engine::Kind::Disaggregated(_, prefill) => {
                if !(1..machines).contains(&prefill) {
                    return Err(Error::config(format!(
                        "prefill is {prefill} of {machines} machines, at least 1 and 1 less wanted"
                    )));
                }
                if network.is_none() {
                    return Err(Error::config("requests are handed over, and there is no network"));
                }
                Some(Handoffs::new(prefill))
            }
            _ => None,
        };
        let kinds: Vec<_> = settings.tiers.iter().map(|tier| tier.kind).collect();
        let keep = service.keep;
        let peers = peers.map(|_| {
            Peers::new(&kinds, keep)
                .ok_or_else(|| Error::config("peers send to the tier 'host', which is missing"))
        });
        // A directory that nothing asks learns nothing.
        let delay = match learning {
            Learning::Events(delay) if peers.is_some() || router.looks() => Some(delay),
            _ => None,
        };
        if delay.is_some() {
            settings.block_events = usize::MAX;
        }
        let backlog = router.looks().then(|| Backlog::new(machines));
        let server = |number| {
            let (mut settings, mut service) = (settings.clone(), service.clone());
            if let Some(Hardware { tiers, price, cost }) = hardware.get(number) {
                (settings.tiers, settings.cost) = (tiers.clone(), cost.clone());
                service.cost = Arc::clone(price);
            }
            if remote.is_some() {
                track_store(&mut settings.tiers);
            }
            let (cost, engine) = (Arc::clone(&service.cost), service.open(number));
            let mut machine = Machine::new(number, open(settings)?, load, transfer, logged);
            queues.enter(&mut machine, transfer.mode)?;
            if let Some(store) = &remote {
                machine.share(store.clone());
            }
            Ok(Server { machine, engine, cost, fetch: Fetching::None, due: None })
        };
        Ok(Self {
            servers: (0..machines).map(server).collect::<Result<_>>()?,
            router,
            directory: learning.open(&settings, machines, shared),
            delay,
            updates: vec![VecDeque::new(); if delay.is_some() { machines } else { 0 }],
            decisions: None,
            backlog,
            keep,
            events: Events::default(),
            now: 0,
            transfer,
            peers: peers.transpose()?,
            network,
            remote,
            handoffs,
            fetches: BTreeMap::new(),
            next_fetch: FIRST_FETCH,
            due_events: 0,
            reports: BTreeMap::new(),
            next_report: 0,
            prefetches: false,
            clients: 0,
            early: BTreeMap::new(),
            next_record: 0,
            timeline: Timeline::new(false, 0),
        })
    }

    /// Plays a trace to its end; each record goes to `on_record`, in the order of arrival.
    ///
    /// # Errors
    /// What the trace or `on_record` fail with; [`Error::Config`] for a time before that of the request
    /// before; those of the managers.
    pub fn run(
        &mut self,
        requests: impl IntoIterator<Item = Result<Request>>,
        on_record: impl FnMut(Record) -> Result<()>,
    ) -> Result<()> {
        self.run_deciding(requests, on_record, |_| Ok(()))
    }

    /// The same; each decision of the router goes to `on_decision`, if decisions are reported.
    ///
    /// # Errors
    /// As [`Simulation::run`], and what `on_decision` fails with.
    pub fn run_deciding(
        &mut self,
        requests: impl IntoIterator<Item = Result<Request>>,
        mut on_record: impl FnMut(Record) -> Result<()>,
        mut on_decision: impl FnMut(Decision) -> Result<()>,
    ) -> Result<()> {
        let mut arrivals = Arrivals::new(requests.into_iter(), self.clients);
        arrivals.begin(&mut self.events)?;
        let mut closed = false;
        loop {
            let Some(Event { at, kind, machine, number }) = self.events.pop() else {
                if std::mem::replace(&mut closed, true) {
                    return arrivals.finish();
                }
                self.close_engines()?;
                continue;
            };
            // Nothing happens on a machine then, so the run may end before.
            if kind == Kind::DirectoryUpdate {
                let learned = self.updates[machine].pop_front().unwrap_or_default();
                self.directory.update(machine, &learned);
                continue;
            }
            // The run may end before loads that no request needs.
            if kind == Kind::LoadsDue {
                self.due_events -= 1;
                if self.events.len() == self.due_events {
                    continue;
                }
            }
            if let Some(due) = self.timeline.next_sample(at) {
                self.sample(due);
            }
            self.now = at;
            match kind {
                Kind::Arrival => {
                    if let Some(request) = arrivals.take(number, at, &mut self.events)?
                        && let Some(decision) = self.arrive(request)?
                    {
                        on_decision(decision)?;
                    }
                }
                Kind::TransmissionEnds if number >= FIRST_FETCH => {
                    self.fetch_goes_on(machine, number)?;
                }
                Kind::TransmissionEnds => {
                    let Server { machine, engine, .. } = &mut self.servers[machine];
                    let moves = machine.transmission_ends(number, at)?;
                    engine.ended(&moves, at);
                }
                Kind::StepEnds => {
                    let Server { machine: here, engine, .. } = &mut self.servers[machine];
                    if let Some(began) = engine.step_ends(here, at)? {
                        self.timeline.span(machine, Track::Step, (began, at), 0);
                    }
                }
                Kind::StepBegins => self.step_begins(machine)?,
                Kind::Report => {
                    let report = self.reports.remove(&number).expect("it was announced");
                    let machine = &mut self.servers[machine].machine;
                    machine.calls.report(report, at)?;
                    machine.take(at)?;
                }
                Kind::LoadsDue => self.loads_due(machine)?,
                Kind::DirectoryUpdate => unreachable!("it is taken above"),
            }
            for mut record in self.settle(machine)? {
                let outside = self.servers[record.machine].cost.request();
                record.first_token = record.first_token.map(|first| first.saturating_add(outside));
                record.end = record.end.map(|end| end.saturating_add(outside));
                arrivals.ended(record.id, at.saturating_add(outside), &mut self.events)?;
                self.early.insert(record.id, record);
            }
            while let Some(record) = self.early.remove(&self.next_record) {
                self.next_record += 1;
                on_record(record)?;
            }
        }
    }

    /// No request will come.
    fn close_engines(&mut self) -> Result<()> {
        for number in 0..self.servers.len() {
            let Server { machine, engine, .. } = &mut self.servers[number];
            engine.close(machine, self.now)?;
            self.follow(number)?;
        }
        Ok(())
    }

    /// The directory will learn what has changed on a machine.
    fn notify_directory(&mut self, number: MachineId) -> Result<()> {
        let Some(delay) = self.delay else { return Ok(()) };
        let events = self.servers[number].machine.calls.take_events()?;
        if !events.is_empty() {
            self.updates[number].push_back(events);
            let (at, kind) = (self.now.saturating_add(delay), Kind::DirectoryUpdate);
            self.events.push(Event { at, kind, machine: number, number: 0 });
        }
        Ok(())
    }

    /// Moves that a machine has begun, though the event was another one's.
    fn follow(&mut self, number: MachineId) -> Result<()> {
        let Server { machine, engine, .. } = &mut self.servers[number];
        engine.entered(&machine.executor.take_entered(), self.now);
        for (at, transmission) in machine.executor.take_ends() {
            let kind = Kind::TransmissionEnds;
            self.events.push(Event { at, kind, machine: number, number: transmission });
        }
        for (at, report) in machine.calls.take_reports() {
            let (kind, next) = (Kind::Report, self.next_report);
            self.reports.insert(next, report);
            self.next_report += 1;
            self.events.push(Event { at, kind, machine: number, number: next });
        }
        for (kind, at) in engine.take_wakeups() {
            self.events.push(Event { at, kind, machine: number, number: 0 });
        }
        self.await_loads(number)?;
        self.notify_directory(number)
    }

    /// Comes back when loads that wait on a machine are due.
    fn await_loads(&mut self, number: MachineId) -> Result<()> {
        let server = &mut self.servers[number];
        let due = server.machine.calls.next_due()?.map(|at| at.max(self.now));
        if due.is_some() && server.due.is_none_or(|known| due < Some(known)) {
            let (at, kind) = (due.unwrap_or_default(), Kind::LoadsDue);
            self.events.push(Event { at, kind, machine: number, number: 0 });
            server.due = due;
            self.due_events += 1;
        }
        Ok(())
    }

    /// Begins the loads of a machine that are due.
    fn loads_due(&mut self, number: MachineId) -> Result<()> {
        let server = &mut self.servers[number];
        server.due = None;
        // Other calls may have put it off.
        if server.machine.calls.next_due()?.is_some_and(|due| due <= self.now) {
            server.machine.calls.loads_due(self.now)?;
            server.machine.take(self.now)?;
        }
        Ok(())
    }

    /// Runs the consequences on a machine: transmissions that end, and steps. Returns the requests
    /// that have ended.
    fn settle(&mut self, number: MachineId) -> Result<Vec<Record>> {
        self.follow(number)?;
        self.hand_over(number)?;
        let finished = self.servers[number].engine.take_finished();
        if let Some(backlog) = &mut self.backlog {
            for record in &finished {
                backlog.ended(record.id);
            }
        }
        Ok(finished)
    }

    /// Reports, from the next run on, each decision of the router with the best `others` machines
    /// that it did not choose; `None` reports none.
    pub fn report_decisions(&mut self, others: Option<usize>) {
        self.decisions = others;
        if others.is_some() && self.backlog.is_none() {
            self.backlog = Some(Backlog::new(self.servers.len()));
        }
    }

    /// From the next run on, `clients` clients play the trace's conversations, one each at a time:
    /// requests that follow each other with the same session, or one without. `arrival` is the time
    /// to think between the answer before and the request. Requests are numbered as they come in.
    pub fn close(&mut self, clients: usize) {
        self.clients = clients;
    }

    /// Loads a request's blocks from when it comes in, while others run, as far as there is room.
    /// Without a second tier there is nothing to load.
    pub fn prefetch(&mut self) {
        self.prefetches = self.servers[0].machine.calls.settings().tiers.len() > 1;
    }

    /// How, from now on, reports of tools become hints.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such tier.
    pub fn report_as(&mut self, reporting: Reporting) -> Result<()> {
        let tiers = self.servers[0].machine.calls.settings().tiers.len();
        if reporting.tier >= tiers {
            return Err(Error::config(format!(
                "reports are about tier {}, of {tiers} tiers from 0 on",
                reporting.tier
            )));
        }
        self.servers.iter_mut().for_each(|server| server.machine.calls.reporting = reporting);
        Ok(())
    }

    /// Keeps, from now on, each step and transmission, or a sample of the tiers every
    /// `sample_every` nanoseconds; 0 for none.
    pub fn watch(&mut self, spans: bool, sample_every: Nanos) {
        self.timeline = Timeline::new(spans, sample_every);
        if spans {
            self.servers.iter_mut().for_each(|server| server.machine.executor.keep_spans());
        }
    }

    fn sample(&mut self, at: Nanos) {
        for Server { machine, .. } in &self.servers {
            let manager = machine.calls.manager();
            let tiers = 0..manager.settings().tiers.len();
            let mut resident: Vec<_> = tiers.map(|tier| manager.stats(tier).copies).collect();
            if let (Some(store), Some(last)) = (&self.remote, resident.last_mut()) {
                *last = if machine.number == 0 { store.get().len() as u64 } else { 0 };
            }
            self.timeline.samples.push(Sample { at, machine: machine.number, resident });
        }
    }
}
