//! Routers: choose the machine of a request.
//!
//! Invariant: the choice depends only on earlier requests and the arguments. Cost: at most
//! O(machines), plus the directory's query for routers based on hits.

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

/// Machine state for a router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// Unfinished requests.
    pub load: u64,
    /// Prompt tokens found by the directory, or 0 unless the router looks at hits.
    pub hit: u64,
    /// Prompt tokens of unfinished requests, or 0 unless the router looks at hits.
    pub queued: u64,
}

/// Routing policy.
pub trait Router: Debug + Send {
    /// Whether the policy uses hits and queued tokens.
    fn looks(&self) -> bool {
        false
    }

    /// Choose a machine for a request. `machines` is not empty.
    fn route(&mut self, request: &Request, machines: &[Candidate]) -> MachineId;
}
