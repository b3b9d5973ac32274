//! Routers: which machine a request is sent to.
//!
//! Invariant: the choice depends on the requests before and on what is given, nothing else. Cost:
//! O(machines) at most, and what the directory takes for those that look at hits.

mod hash;
mod least_loaded;
mod locality;
mod round_robin;
mod score;

use std::fmt::Debug;

use crate::event::MachineId;
use crate::request::Request;

pub use hash::Hash;
pub use least_loaded::LeastLoaded;
pub use locality::{Locality, RATIO_ONE};
pub use round_robin::RoundRobin;
pub use score::Score;

/// State of a machine that a router may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// Requests there that have not ended.
    pub load: u64,
    /// Tokens of the prompt that the directory finds there; 0 for a router that does not look.
    pub hit: u64,
    /// Tokens of the prompts there that have not ended; 0 for a router that does not look.
    pub queued: u64,
}

/// Sends requests to machines.
pub trait Router: Debug + Send {
    /// Whether it looks at hits and queued tokens.
    fn looks(&self) -> bool {
        false
    }

    /// The machine for a request, of at least one.
    fn route(&mut self, request: &Request, machines: &[Candidate]) -> MachineId;
}
