//! Engines: how a machine computes what is sent to it, step by step.
//!
//! Invariant: an engine learns of loads and of time only through these calls. Cost: that of the
//! manager's calls.

mod continuous;
mod prefill;
mod serial;
mod work;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use kvtrie_core::{MoveId, Nanos, Result};

use crate::cost::Cost;
use crate::event::{self, MachineId};
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;
use crate::transfer::Entered;

pub use continuous::{Continuous, Handoff, Pull};
pub use serial::Serial;

/// How long a prefill waits for its loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wait {
    /// Until all of them have ended.
    #[default]
    All,
    /// Each layer until its own are there.
    Layer,
    /// Until all of them have ended, within the step that computes it: other requests of that step
    /// wait too.
    Step,
}

/// Limits of a step of the continuous engine.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most tokens of a step.
    pub token_budget: u64,
    /// The most requests that hold blocks at a time; not above the token budget, so that each of
    /// them can decode in every step.
    pub max_running: u64,
    /// Whether each step that only decodes is a separate event.
    pub token_by_token: bool,
}

/// How an engine chooses what it computes.
#[derive(Clone, Copy, Debug, Default)]
pub enum Kind {
    /// One request after the other.
    #[default]
    Serial,
    /// All at once, in steps.
    Continuous(Limits),
    /// The same, but the first machines, of the given number, compute prompts, and the others
    /// decode.
    Disaggregated(Limits, usize),
}

/// Settings of engines of all kinds.
#[derive(Clone, Debug)]
pub struct Service {
    /// How it chooses what it computes.
    pub kind: Kind,
    /// How long tokens take.
    pub cost: Arc<dyn Cost>,
    /// How long a prefill waits for its loads.
    pub wait: Wait,
    /// Real tokens at a prompt's end that are always computed.
    pub keep: u64,
    /// Nanoseconds between the end of one request and the begin of the next.
    pub gap: Nanos,
    /// How many requests that have ended hold their blocks on a serial engine, as if they ran.
    pub held: usize,
}

impl Kind {
    /// Limits of its steps, if there are any.
    #[must_use]
    pub fn limits(self) -> Option<Limits> {
        match self {
            Self::Serial => None,
            Self::Continuous(limits) | Self::Disaggregated(limits, _) => Some(limits),
        }
    }
}

impl Service {
    /// The engine of a machine, without a request.
    #[must_use]
    pub fn open(&self, machine: MachineId) -> Box<dyn Engine> {
        match self.kind {
            Kind::Serial => Box::new(Serial::new(self.clone())),
            Kind::Disaggregated(limits, prefill) if machine < prefill => {
                Box::new(Continuous::new(self.clone(), limits).giving())
            }
            Kind::Continuous(limits) | Kind::Disaggregated(limits, _) => {
                Box::new(Continuous::new(self.clone(), limits))
            }
        }
    }
}

/// Computes the requests of one machine.
pub trait Engine: Debug + Send {
    /// Takes in a request.
    fn push(&mut self, request: Request, now: Nanos);

    /// Number of requests that have not ended.
    fn load(&self) -> u64;

    /// The request that begins next.
    fn next(&self) -> Option<&Request>;

    /// The same, if it can begin now.
    fn head(&self, now: Nanos) -> Option<&Request>;

    /// A step may begin: what was begun before takes its place in it.
    ///
    /// # Errors
    /// Those of the manager.
    fn step_begins(&mut self, machine: &mut Machine, now: Nanos) -> Result<()>;

    /// Begins the request of `head`; `fetched` are the blocks of its prompt that came from a peer.
    /// Whether it has left the queue: without room it may wait there.
    ///
    /// # Errors
    /// Those of the manager, but for room.
    fn begin(&mut self, machine: &mut Machine, fetched: Range<usize>, now: Nanos) -> Result<bool>;

    /// Begins the step, if it has work and none runs.
    fn go_on(&mut self, now: Nanos);

    /// The next request can begin, which it could not before: its blocks have come from a peer.
    fn wake(&mut self, now: Nanos);

    /// Moves have entered their lanes.
    fn entered(&mut self, entered: &[Entered], now: Nanos);

    /// Moves have ended.
    fn ended(&mut self, moves: &[MoveId], now: Nanos);

    /// The step that runs has ended. Returns when it began; `None` if it did not end but was cut
    /// short before.
    ///
    /// # Errors
    /// Those of the manager.
    fn step_ends(&mut self, machine: &mut Machine, now: Nanos) -> Result<Option<Nanos>>;

    /// No request will come: lets go of what requests that have ended hold.
    ///
    /// # Errors
    /// Those of the manager.
    fn close(&mut self, _: &mut Machine, _: Nanos) -> Result<()> {
        Ok(())
    }

    /// The engine, if it can share requests with those of other machines.
    fn relay(&mut self) -> Option<&mut Continuous> {
        None
    }

    /// Events that the engine waits for next; each is returned once.
    fn take_wakeups(&mut self) -> Vec<(event::Kind, Nanos)>;

    /// Requests that have ended; each is returned once.
    fn take_finished(&mut self) -> Vec<Record>;
}
