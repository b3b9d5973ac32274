//! The event loop of a run.
//!
//! Invariant: requests are read only when due, so traces of any length are streamed. Records are
//! reported in arrival order. Cost: O(log events) per event, plus the machines' work.

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

/// Hardware of a machine in a heterogeneous run.
#[derive(Clone, Debug)]
pub struct Hardware {
    /// Tiers of the machine, with the same kinds on every machine.
    pub tiers: Vec<TierSpec>,
    /// Computation time of tokens on the engine.
    pub price: Arc<dyn Cost>,
    /// The manager's cost model of the same engine.
    pub cost: CostModel,
}

/// Configuration of a run.
#[derive(Debug)]
pub struct Config {
    /// Settings of each manager.
    pub settings: Settings,
    /// Number of machines.
    pub machines: usize,
    /// Hardware by machine, replacing the hardware in `settings` and `service`. Empty if all
    /// machines are equal.
    pub hardware: Vec<Hardware>,
    /// Whether leases load.
    pub load: LoadMode,
    /// Settings of the engines.
    pub service: Service,
    /// Timing of moves.
    pub transfer: Transfer,
    /// Router of the requests.
    pub router: Box<dyn Router>,
    /// Network for fetching blocks from peers, if enabled.
    pub peers: Option<PeerSpec>,
    /// Network for handing over requests, if peer fetches are disabled.
    pub network: Option<PeerSpec>,
    /// Lookup policy of the last tier, as a store shared by all machines; `None` for a `remote`
    /// tier of a single machine.
    pub remote: Option<Lookup>,
    /// How routers and peers learn block locations.
    pub directory: Learning,
    /// Whether calls are logged.
    pub logged: bool,
}

/// A machine with its engine.
#[derive(Debug)]
struct Server {
    machine: Machine,
    engine: Box<dyn Engine>,
    /// Computation time of tokens on the engine.
    cost: Arc<dyn Cost>,
    fetch: Fetching,
    /// Time of its next `LoadsDue` event, if any.
    due: Option<Nanos>,
}

/// A simulation run.
#[derive(Debug)]
pub struct Simulation {
    servers: Vec<Server>,
    router: Box<dyn Router>,
    directory: Box<dyn Directory>,
    /// Delay of directory updates, or `None` if updates are not needed.
    delay: Option<Nanos>,
    /// Pending directory updates of each machine, in order.
    updates: Vec<VecDeque<Vec<BlockEvent>>>,
    /// Number of alternatives reported with each decision. `None` disables the report.
    decisions: Option<usize>,
    /// Unfinished work by machine, if the router or the decision report needs it.
    backlog: Option<Backlog>,
    keep: u64,
    events: Events,
    now: Nanos,
    transfer: Transfer,
    peers: Option<Peers>,
    network: Option<Network>,
    remote: Option<SharedStore>,
    handoffs: Option<Handoffs>,
    /// Blocks in the network, by transmission number.
    fetches: BTreeMap<u64, Fetch>,
    next_fetch: u64,
    /// Number of queued `LoadsDue` events.
    due_events: usize,
    /// Future tool reports.
    reports: BTreeMap<u64, Report>,
    next_report: u64,
    /// Whether the blocks of a request are loaded from its arrival on.
    prefetches: bool,
    /// Number of clients, each with a single request at a time. 0 for an open trace.
    clients: usize,
    /// Records waiting for the record of an earlier request.
    early: BTreeMap<u64, Record>,
    next_record: u64,
    timeline: Timeline,
}

impl Simulation {
    /// Create a run with empty machines.
    ///
    /// # Errors
    /// [`Error::Config`] for contradictory settings.
    pub fn new(config: Config) -> Result<Self> {
        Self::with(config, |settings| Ok(Arc::new(Locked::new(Manager::new(settings)?))))
    }

    /// Create a run with managers from `open`.
    ///
    /// # Errors
    /// As [`Simulation::new`], and errors of `open`.
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
        // Without queries, the directory needs no updates.
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

    /// Play a trace to its end. Each record goes to `on_record`, in arrival order.
    ///
    /// # Errors
    /// Errors of the trace, of `on_record` and of the managers, or [`Error::Config`] if arrival
    /// times decrease.
    pub fn run(
        &mut self,
        requests: impl IntoIterator<Item = Result<Request>>,
        on_record: impl FnMut(Record) -> Result<()>,
    ) -> Result<()> {
        self.run_deciding(requests, on_record, |_| Ok(()))
    }

    /// As [`Simulation::run`]. Each router decision goes to `on_decision`, if enabled.
    ///
    /// # Errors
    /// As [`Simulation::run`], and errors of `on_decision`.
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
            // A directory update changes no machine, so the run may end before it.
            if kind == Kind::DirectoryUpdate {
                let learned = self.updates[machine].pop_front().unwrap_or_default();
                self.directory.update(machine, &learned);
                continue;
            }
            // The run may end before prefetches no request needs.
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
                    let Server { machine: server_machine, engine, .. } = &mut self.servers[machine];
                    if let Some(began) = engine.step_ends(server_machine, at)? {
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
            for mut record in self.take_finished(machine)? {
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

    /// Close all engines after the last request.
    fn close_engines(&mut self) -> Result<()> {
        for number in 0..self.servers.len() {
            let Server { machine, engine, .. } = &mut self.servers[number];
            engine.close(machine, self.now)?;
            self.follow(number)?;
        }
        Ok(())
    }

    /// Schedule the directory update for a machine's changes.
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

    /// Schedule the events of work started on a machine, even by an event of a different machine.
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

    /// Schedule an event for the next load with a deadline.
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

    /// Start the loads due on a machine.
    fn loads_due(&mut self, number: MachineId) -> Result<()> {
        let server = &mut self.servers[number];
        server.due = None;
        // The load may have been postponed since.
        if server.machine.calls.next_due()?.is_some_and(|due| due <= self.now) {
            server.machine.calls.loads_due(self.now)?;
            server.machine.take(self.now)?;
        }
        Ok(())
    }

    /// Run the consequences of an event on a machine. Returns the finished requests.
    fn take_finished(&mut self, number: MachineId) -> Result<Vec<Record>> {
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

    /// Report each router decision of later runs, with the best `others` alternatives. `None`
    /// disables the report.
    pub fn report_decisions(&mut self, others: Option<usize>) {
        self.decisions = others;
        if others.is_some() && self.backlog.is_none() {
            self.backlog = Some(Backlog::new(self.servers.len()));
        }
    }

    /// Play the trace with `clients` clients in later runs. Each client plays a conversation at a
    /// time: consecutive requests with the same session, or a single request without a session.
    /// `arrival` is the think time before the request. Requests are numbered in arrival order.
    pub fn close(&mut self, clients: usize) {
        self.clients = clients;
    }

    /// Load the blocks of a request from its arrival on, as far as there is room. No effect with a
    /// single tier.
    pub fn prefetch(&mut self) {
        self.prefetches = self.servers[0].machine.calls.settings().tiers.len() > 1;
    }

    /// Set the conversion of tool reports to hints.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown tier.
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

    /// Record all spans from now on if `spans`, and sample the tiers every `sample_every`
    /// nanoseconds (0 disables samples).
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
