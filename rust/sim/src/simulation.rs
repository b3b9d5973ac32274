//! The run: events in their order, until none is left.
//!
//! Invariant: the next request is known and no later one, so a trace of any length streams; records
//! are told in the order of the trace. Cost: O(log events) per event, besides what machines do.

use std::collections::BTreeMap;

use kvtrie_core::error::{Error, Result};
use kvtrie_core::manager::{LoadMode, Settings};
use kvtrie_core::time::Nanos;

use crate::call::Call;
use crate::engine::{Engine, Serial, Service};
use crate::event::{Event, Events, Kind, MachineId};
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;
use crate::router::Router;
use crate::transfer::{Mode, Transfer};

/// What a run is made of.
#[derive(Debug)]
pub struct Config {
    /// Of every machine's manager.
    pub settings: Settings,
    /// How many machines.
    pub machines: usize,
    /// Whether leases load.
    pub load: LoadMode,
    /// What engines are told.
    pub service: Service,
    /// How moves take their time.
    pub transfer: Transfer,
    /// Where requests go.
    pub router: Box<dyn Router>,
    /// Whether all calls are kept.
    pub logged: bool,
}

/// A machine with its engine.
#[derive(Debug)]
struct Server {
    machine: Machine,
    engine: Box<dyn Engine>,
}

/// What a lane has carried, over all machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneUse {
    /// Bytes.
    pub bytes: u64,
    /// Nanoseconds in which it carried something, latency included.
    pub busy: Nanos,
}

/// A run.
#[derive(Debug)]
pub struct Simulation {
    servers: Vec<Server>,
    router: Box<dyn Router>,
    events: Events,
    now: Nanos,
    transfer: Transfer,
    /// Records that wait for an earlier request's.
    early: BTreeMap<u64, Record>,
    next_record: u64,
}

impl Simulation {
    /// Machines without a block.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that contradict each other.
    pub fn new(config: Config) -> Result<Self> {
        let Config { settings, machines, load, service, transfer, router, logged } = config;
        if machines == 0 || transfer.moves_per_job == 0 {
            return Err(Error::config(format!(
                "machines is {machines} and moves_per_job {}, at least 1 wanted",
                transfer.moves_per_job
            )));
        }
        let server = |number| {
            let machine = Machine::new(number, &settings, load, transfer, logged)?;
            Ok(Server { machine, engine: Box::new(Serial::new(service.clone())) })
        };
        Ok(Self {
            servers: (0..machines).map(server).collect::<Result<_>>()?,
            router,
            events: Events::default(),
            now: 0,
            transfer,
            early: BTreeMap::new(),
            next_record: 0,
        })
    }

    /// Plays a trace to its end; each record goes to `told`, in the order of the trace.
    ///
    /// # Errors
    /// What the trace or `told` fail with; [`Error::Config`] for a time before that of the request
    /// before; those of the managers.
    pub fn run(
        &mut self,
        requests: impl IntoIterator<Item = Result<Request>>,
        mut told: impl FnMut(Record) -> Result<()>,
    ) -> Result<()> {
        let mut requests = requests.into_iter();
        let mut coming = self.announce(requests.next())?;
        while let Some(Event { at, kind, machine, number }) = self.events.pop() {
            self.now = at;
            match kind {
                Kind::Arrival => {
                    if let Some(request) = coming.take() {
                        coming = self.announce(requests.next())?;
                        self.arrive(request);
                    }
                }
                Kind::TransmissionEnds => {
                    let Server { machine, engine } = &mut self.servers[machine];
                    let moves = machine.transmission_ends(number, at)?;
                    engine.ended(&moves, at);
                }
                Kind::StepEnds => {
                    let Server { machine, engine } = &mut self.servers[machine];
                    engine.step_ends(machine, at)?;
                }
                Kind::StepBegins => {
                    let Server { machine, engine } = &mut self.servers[machine];
                    if engine.head(at).is_some() {
                        engine.begin(machine, 0..0, at)?;
                    } else {
                        engine.go_on(at);
                    }
                }
                Kind::DirectoryUpdate => {}
            }
            self.settle(machine, &mut told)?;
        }
        Ok(())
    }

    /// The next request will come in.
    fn announce(&mut self, next: Option<Result<Request>>) -> Result<Option<Request>> {
        let Some(request) = next.transpose()? else { return Ok(None) };
        let (at, number) = (request.arrival, request.id);
        if at < self.now {
            return Err(Error::config(format!(
                "request {number} arrives at {at} ns, before the {} ns of the one above",
                self.now
            )));
        }
        self.events.push(Event { at, kind: Kind::Arrival, machine: 0, number });
        Ok(Some(request))
    }

    /// A request is sent to a machine.
    fn arrive(&mut self, request: Request) {
        let loads: Vec<u64> = self.servers.iter().map(|server| server.engine.load()).collect();
        let here = self.router.route(&request, &loads);
        let engine = &mut self.servers[here].engine;
        engine.push(request, self.now);
        for (kind, at) in engine.take_due() {
            self.events.push(Event { at, kind, machine: here, number: 0 });
        }
    }

    /// What has followed on a machine: transmissions that end, steps, and requests that are over.
    fn settle(
        &mut self,
        number: MachineId,
        told: &mut impl FnMut(Record) -> Result<()>,
    ) -> Result<()> {
        let Server { machine, engine } = &mut self.servers[number];
        engine.entered(&machine.executor.take_entered(), self.now);
        for (at, transmission) in machine.executor.take_ends() {
            let kind = Kind::TransmissionEnds;
            self.events.push(Event { at, kind, machine: number, number: transmission });
        }
        for (kind, at) in engine.take_due() {
            self.events.push(Event { at, kind, machine: number, number: 0 });
        }
        for record in engine.take_finished() {
            self.early.insert(record.id, record);
        }
        while let Some(record) = self.early.remove(&self.next_record) {
            self.next_record += 1;
            told(record)?;
        }
        Ok(())
    }

    /// The time of the last event.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// The machines, to look at.
    pub fn machines(&self) -> impl Iterator<Item = &Machine> {
        self.servers.iter().map(|server| &server.machine)
    }

    /// What was asked of a machine's manager, if that was kept.
    #[must_use]
    pub fn log(&self, machine: MachineId) -> &[Call] {
        self.servers[machine].machine.calls.log()
    }

    /// What each lane has carried, by its name, over all machines.
    #[must_use]
    pub fn lanes(&self) -> BTreeMap<String, LaneUse> {
        let mut all: BTreeMap<String, LaneUse> = BTreeMap::new();
        for server in &self.servers {
            let lanes = match self.transfer.mode {
                Mode::Executor => server.machine.executor.lanes(),
                Mode::Predicted => server.machine.calls.manager().lanes(),
            };
            for lane in 0..lanes.len() {
                let of = all.entry(lanes.spec(lane).name.clone()).or_default();
                of.bytes = of.bytes.saturating_add(lanes.bytes(lane));
                of.busy = of.busy.saturating_add(lanes.predicted(lane));
            }
        }
        all
    }
}
