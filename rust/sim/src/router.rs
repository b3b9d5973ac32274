//! Routers: which machine a request is sent to.
//!
//! Invariant: the choice depends on the requests before and on what is given, nothing else. Cost:
//! O(machines) at most.

mod hash;
mod least_loaded;
mod round_robin;

use std::fmt::Debug;

use crate::event::MachineId;
use crate::request::Request;

pub use hash::Hash;
pub use least_loaded::LeastLoaded;
pub use round_robin::RoundRobin;

/// Sends requests to machines.
pub trait Router: Debug + Send {
    /// The machine for a request; `loads` are the requests on each that have not ended.
    fn route(&mut self, request: &Request, loads: &[u64]) -> MachineId;
}
