//! Round-robin router.
//!
//! Invariant: request `i` goes to machine `i mod machines`. Cost: O(1).

use super::{Candidate, Router};
use crate::event::MachineId;
use crate::request::Request;

/// Routes to each machine in turn.
#[derive(Debug, Default)]
pub struct RoundRobin {
    next: MachineId,
}

impl Router for RoundRobin {
    fn route(&mut self, _: &Request, machines: &[Candidate]) -> MachineId {
        let here = self.next % machines.len();
        self.next = here + 1;
        here
    }
}
