//! Engines: computation of requests on a machine, step by step.
//!
//! Invariant: these calls are an engine's only source of load events and time. Cost: the manager's
//! calls.

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

/// When a prefill with pending loads starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wait {
    /// After all loads have ended.
    #[default]
    All,
    /// Layer by layer, as the layers arrive.
    Layer,
    /// In its step, after all loads have ended. Delays all requests of the step.
    Step,
}

/// Limits of the continuous engine.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of tokens per step.
    pub token_budget: u64,
    /// Maximum number of requests holding blocks. At most the token budget, so that each request
    /// can decode in every step.
    pub max_running: u64,
    /// Whether each decode-only step is a separate event.
    pub token_by_token: bool,
    /// Whether the full blocks of an answer stay cached. No later prompt matches them.
    pub cache_answers: bool,
}

/// Scheduling of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub enum Kind {
    /// A single request at a time.
    #[default]
    Serial,
    /// Continuous batching.
    Continuous(Limits),
    /// Continuous batching, with prefill on this number of first machines and decode on the rest.
    Disaggregated(Limits, usize),
}

/// Settings of engines of all kinds.
#[derive(Clone, Debug)]
pub struct Service {
    /// Scheduling of requests.
    pub kind: Kind,
    /// Computation time of tokens.
    pub cost: Arc<dyn Cost>,
    /// When a prefill with pending loads starts.
    pub wait: Wait,
    /// Real tokens at the end of a prompt to compute in any case.
    pub keep: u64,
    /// Nanoseconds between the end of a request and the start of the next.
    pub gap: Nanos,
    /// Number of finished requests to keep their blocks on a serial engine, like running requests.
    pub held: usize,
}

impl Kind {
    /// Step limits, if any.
    #[must_use]
    pub fn limits(self) -> Option<Limits> {
        match self {
            Self::Serial => None,
            Self::Continuous(limits) | Self::Disaggregated(limits, _) => Some(limits),
        }
    }
}

impl Service {
    /// Create the idle engine of a machine.
    #[must_use]
    pub fn open(&self, machine: MachineId) -> Box<dyn Engine> {
        match self.kind {
            Kind::Serial => Box::new(Serial::new(self.clone())),
            Kind::Disaggregated(limits, prefill) if machine < prefill => {
                Box::new(Continuous::new(self.clone(), limits).handing_over())
            }
            Kind::Continuous(limits) | Kind::Disaggregated(limits, _) => {
                Box::new(Continuous::new(self.clone(), limits))
            }
        }
    }
}

/// Engine of a machine.
pub trait Engine: Debug + Send {
    /// Enqueue a request.
    fn push(&mut self, request: Request, now: Nanos);

    /// Number of unfinished requests.
    fn load(&self) -> u64;

    /// Next request to start.
    fn next(&self) -> Option<&Request>;

    /// Next request, if it can start now.
    fn head(&self, now: Nanos) -> Option<&Request>;

    /// Prepare a step, and add the requests started before.
    ///
    /// # Errors
    /// Errors of the manager.
    fn step_begins(&mut self, machine: &mut Machine, now: Nanos) -> Result<()>;

    /// Start the request of `head`. `fetched` is the range of its prompt blocks fetched from a
    /// peer. Returns whether the request left the queue: it may wait there for room.
    ///
    /// # Errors
    /// Errors of the manager, except for missing room.
    fn begin(&mut self, machine: &mut Machine, fetched: Range<usize>, now: Nanos) -> Result<bool>;

    /// Start the step if it has work and no step is running.
    fn go_on(&mut self, now: Nanos);

    /// Retry the next request, because its blocks have arrived from a peer.
    fn wake(&mut self, now: Nanos);

    /// Handle moves entering their lanes.
    fn entered(&mut self, entered: &[Entered], now: Nanos);

    /// Handle completed moves.
    fn ended(&mut self, moves: &[MoveId], now: Nanos);

    /// End the running step. Returns its start time, or `None` if the step was cut short before.
    ///
    /// # Errors
    /// Errors of the manager.
    fn step_ends(&mut self, machine: &mut Machine, now: Nanos) -> Result<Option<Nanos>>;

    /// Release the blocks of finished requests after the last request.
    ///
    /// # Errors
    /// Errors of the manager.
    fn close(&mut self, _: &mut Machine, _: Nanos) -> Result<()> {
        Ok(())
    }

    /// This engine, if it can hand over requests to engines of different machines.
    fn relay(&mut self) -> Option<&mut Continuous> {
        None
    }

    /// Take the future events of the engine.
    fn take_wakeups(&mut self) -> Vec<(event::Kind, Nanos)>;

    /// Take the records of finished requests.
    fn take_finished(&mut self) -> Vec<Record>;
}
