//! The machine with the fewest requests.
//!
//! Invariant: of equal ones the lowest number. Cost: O(machines).

use super::{Candidate, Router};
use crate::event::MachineId;
use crate::request::Request;

/// Sends each request to where the fewest run or wait.
#[derive(Debug, Default)]
pub struct LeastLoaded;

impl Router for LeastLoaded {
    fn route(&mut self, _: &Request, machines: &[Candidate]) -> MachineId {
        (0..machines.len()).min_by_key(|&machine| machines[machine].load).unwrap_or(0)
    }
}
