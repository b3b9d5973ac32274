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
        let chosen = self.next % machines.len();
        self.next = chosen + 1;
        chosen
    }
}
