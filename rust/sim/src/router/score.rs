//! Score router: minimises the weighted sum of computed and queued tokens.
//!
//! Invariant: ties go to the least loaded machine, then to the lowest number. Cost: O(machines).

use super::{Candidate, Router};
use crate::event::MachineId;
use crate::request::Request;

/// Routes to the machine with the lowest score: `hit_weight` times the tokens to compute plus
/// `load_weight` times the queued tokens.
#[derive(Debug)]
pub struct Score {
    /// Weight of a missing prompt token.
    pub hit_weight: u64,
    /// Weight of a prompt token of an unfinished request.
    pub load_weight: u64,
}

impl Router for Score {
    fn looks(&self) -> bool {
        true
    }

    fn route(&mut self, request: &Request, machines: &[Candidate]) -> MachineId {
        let price = |weight: u64, tokens: u64| u128::from(weight) * u128::from(tokens);
        let score = |machine: &Candidate| {
            let computed = request.input.saturating_sub(machine.hit);
            price(self.hit_weight, computed).saturating_add(price(self.load_weight, machine.queued))
        };
        let all = machines.iter().enumerate();
        let best = all.min_by_key(|&(at, machine)| (score(machine), machine.load, at));
        best.map_or(0, |(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::Score;
    use crate::request::Request;
    use crate::router::{Candidate, Router};

    #[test]
    fn the_lowest_sum_wins() {
        let route = |(hit_weight, load_weight), machines: &[(u64, u64, u64)]| {
            let candidate = |&(load, hit, queued)| Candidate { load, hit, queued };
            let machines: Vec<_> = machines.iter().map(candidate).collect();
            let request = Request { input: 64, ..Request::default() };
            Score { hit_weight, load_weight }.route(&request, &machines)
        };
        // 16 + 50 to 64 + 0, then 32 + 50.
        assert_eq!(route((1, 1), &[(1, 48, 50), (0, 0, 0)]), 1);
        assert_eq!(route((1, 1), &[(1, 48, 47), (0, 0, 0)]), 0);
        assert_eq!(route((2, 1), &[(1, 48, 50), (0, 0, 0)]), 0);
        assert_eq!(route((1, 0), &[(9, 48, 900), (0, 32, 0)]), 0);
        // Equal scores: the least loaded. Equal loads: the lowest number.
        assert_eq!(route((1, 1), &[(2, 48, 48), (1, 0, 0), (1, 0, 0)]), 1);
        assert_eq!(route((u64::MAX, u64::MAX), &[(1, 0, u64::MAX), (0, 64, 1)]), 1);
    }
}
