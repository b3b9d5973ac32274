//! Engines: how a machine computes what is sent to it, step by step.
//!
//! Invariant: an engine learns of loads and of time only through these calls. Cost: that of the
//! manager's calls.

mod prefill;
mod serial;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use kvtrie_core::block::MoveId;
use kvtrie_core::error::Result;
use kvtrie_core::time::Nanos;

use crate::cost::Cost;
use crate::event::Kind;
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;
use crate::transfer::Entered;

pub use serial::Serial;

/// How long a prefill waits for its loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wait {
    /// Until all of them have ended.
    #[default]
    All,
    /// Each layer until its own are there.
    Layer,
}

/// What engines of all kinds are told.
#[derive(Clone, Debug)]
pub struct Service {
    /// How long tokens take.
    pub cost: Arc<dyn Cost>,
    /// How long a prefill waits for its loads.
    pub wait: Wait,
    /// Real tokens at a prompt's end that are always computed.
    pub keep: u64,
    /// Nanoseconds between the end of one request and the begin of the next.
    pub gap: Nanos,
}

/// Computes the requests of one machine.
pub trait Engine: Debug + Send {
    /// Takes in a request.
    fn push(&mut self, request: Request, now: Nanos);

    /// How many requests have not ended.
    fn load(&self) -> u64;

    /// The request that the next step begins with, if one can begin now.
    fn head(&self, now: Nanos) -> Option<&Request>;

    /// Begins the request of `head`; `fetched` are the blocks of its prompt that came from a peer.
    ///
    /// # Errors
    /// Those of the manager, but for room.
    fn begin(&mut self, machine: &mut Machine, fetched: Range<usize>, now: Nanos) -> Result<()>;

    /// Begins a step of what was begun before.
    fn go_on(&mut self, now: Nanos);

    /// Moves have entered their lanes.
    fn entered(&mut self, entered: &[Entered], now: Nanos);

    /// Moves have ended.
    fn ended(&mut self, moves: &[MoveId], now: Nanos);

    /// The step that runs has ended.
    ///
    /// # Errors
    /// Those of the manager.
    fn step_ends(&mut self, machine: &mut Machine, now: Nanos) -> Result<()>;

    /// What the engine waits for next, told once.
    fn take_due(&mut self) -> Vec<(Kind, Nanos)>;

    /// Requests that have ended, told once.
    fn take_finished(&mut self) -> Vec<Record>;
}
