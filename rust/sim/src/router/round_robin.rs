//! Machines in turn.
//!
//! Invariant: request `i` goes to machine `i mod machines`. Cost: O(1).

use super::Router;
use crate::event::MachineId;
use crate::request::Request;

/// Sends each request to the next machine.
#[derive(Debug, Default)]
pub struct RoundRobin {
    next: MachineId,
}

impl Router for RoundRobin {
    fn route(&mut self, _: &Request, loads: &[u64]) -> MachineId {
        let here = self.next % loads.len();
        self.next = here + 1;
        here
    }
}
