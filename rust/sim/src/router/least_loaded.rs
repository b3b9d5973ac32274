//! Least-loaded router.
//!
//! Invariant: ties go to the lowest machine number. Cost: O(machines).

use super::{Candidate, Router};
use crate::event::MachineId;
use crate::request::Request;

/// Routes to the machine with the fewest unfinished requests.
#[derive(Debug, Default)]
pub struct LeastLoaded;

impl Router for LeastLoaded {
    fn route(&mut self, _: &Request, machines: &[Candidate]) -> MachineId {
        (0..machines.len()).min_by_key(|&machine| machines[machine].load).unwrap_or(0)
    }
}
