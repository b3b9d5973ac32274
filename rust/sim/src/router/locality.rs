//! Locality router: the longest prefix hit, within a load limit.
//!
//! Invariant: ties go to the least loaded machine, then to the lowest number. Cost: O(machines).

use std::cmp::Reverse;

use super::{Candidate, Router};
use crate::event::MachineId;
use crate::request::Request;

/// Ratio of 1.
pub const RATIO_ONE: u64 = 1 << 32;

/// Routes to the longest prefix hit among machines within the load limit: at most `ratio` times the
/// requests of the least loaded machine, counting this request.
#[derive(Debug)]
pub struct Locality {
    /// Load limit, in units of [`RATIO_ONE`].
    pub ratio: u64,
}

impl Router for Locality {
    fn looks(&self) -> bool {
        true
    }

    fn route(&mut self, _: &Request, machines: &[Candidate]) -> MachineId {
        let with = |machine: &Candidate| u128::from(machine.load) + 1;
        let fewest = machines.iter().map(with).min().unwrap_or(1);
        let fits = |machine: &Candidate| {
            with(machine).saturating_mul(RATIO_ONE.into())
                <= fewest.saturating_mul(self.ratio.into())
        };
        let fitting = machines.iter().enumerate().filter(|(_, machine)| fits(machine));
        let best = fitting.max_by_key(|&(at, machine)| (machine.hit, Reverse((machine.load, at))));
        best.map_or(0, |(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::{Locality, RATIO_ONE};
    use crate::request::Request;
    use crate::router::{Candidate, Router};

    #[test]
    fn hits_decide_unless_load_differs_by_more_than_the_ratio() {
        let route = |ratio, machines: &[(u64, u64)]| {
            let candidate = |&(load, hit)| Candidate { load, hit, queued: 0 };
            let machines: Vec<_> = machines.iter().map(candidate).collect();
            Locality { ratio }.route(&Request::default(), &machines)
        };
        let double = 2 * RATIO_ONE;
        assert_eq!(route(double, &[(1, 48), (0, 16), (0, 0)]), 0);
        // With this request 3 to 1.
        assert_eq!(route(double, &[(2, 48), (0, 16), (0, 0)]), 1);
        assert_eq!(route(3 * RATIO_ONE, &[(2, 48), (0, 16), (0, 0)]), 0);
        assert_eq!(route(double + 1, &[(5, 48), (2, 16)]), 0);
        assert_eq!(route(double, &[(6, 48), (2, 16)]), 1);
        // Equal hits: the least loaded. Equal loads: the lowest number.
        assert_eq!(route(double, &[(1, 16), (0, 16), (0, 16)]), 1);
        assert_eq!(route(RATIO_ONE, &[(0, 0), (1, 16), (0, 0)]), 0);
        assert_eq!(route(u64::MAX, &[(u64::MAX, 1), (0, 0)]), 1);
    }
}
