//! The machine with the fewest requests.
//!
//! Invariant: of equal ones the lowest number. Cost: O(machines).

use super::Router;
use crate::event::MachineId;
use crate::request::Request;

/// Sends each request to where the fewest run or wait.
#[derive(Debug, Default)]
pub struct LeastLoaded;

impl Router for LeastLoaded {
    fn route(&mut self, _: &Request, loads: &[u64]) -> MachineId {
        (0..loads.len()).min_by_key(|&machine| loads[machine]).unwrap_or(0)
    }
}
