//! Solver for several lanes: branch and bound over few choices, else the bisection of `deadline`.
//!
//! Invariant: never later than the bisection. Exact up to [`FEW`] choices, and wherever the
//! bisection is exact. Cost: the search visits each step at most 2^12 times, pruned by the
//! bisection's finish.

use super::{Source, Step, deadline, frees};
use crate::time::Nanos;

/// Maximum number of choices to search.
const FEW: usize = 12;

struct Best {
    load: Vec<bool>,
    finish: Nanos,
}

/// The choice for steps on any number of lanes, and whether it is exact.
pub(super) fn solve(steps: &[Step], lane_free: &[Nanos]) -> (Vec<bool>, bool) {
    let (load, finish) = deadline::solve(steps, lane_free);
    let choices = steps.iter().filter(|step| step.lane().is_some()).count();
    let mut best = Best { load, finish };
    if choices <= FEW {
        let mut load = vec![false; steps.len()];
        search(steps, 0, 0, &mut frees(steps, lane_free), &mut load, &mut best);
    }
    (best.load, choices <= FEW)
}

/// Branches at each choice from step `i` on and keeps every choice with an earlier finish than
/// `best`.
fn search(
    steps: &[Step],
    i: usize,
    ready: Nanos,
    free: &mut [Nanos],
    load: &mut [bool],
    best: &mut Best,
) {
    if ready >= best.finish {
        return;
    }
    let Some(step) = steps.get(i) else {
        best.load.copy_from_slice(load);
        best.finish = ready;
        return;
    };
    let computed = ready.saturating_add(step.compute);
    match step.source {
        Source::Resident { ready: arrival } => {
            search(steps, i + 1, ready.max(arrival), free, load, best);
        }
        Source::Missing => search(steps, i + 1, computed, free, load, best),
        Source::Load { lane, time, from } => {
            let before = free[lane];
            free[lane] = before.max(from).saturating_add(time);
            load[i] = true;
            search(steps, i + 1, ready.max(free[lane]), free, load, best);
            free[lane] = before;
            load[i] = false;
            search(steps, i + 1, computed, free, load, best);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FEW, solve};
    use crate::plan::twin::{Random, brute_force};
    use crate::plan::{deadline, evaluate};

    #[test]
    fn few_choices_are_searched_exactly() {
        let mut random = Random::new(8);
        for _ in 0..20_000 {
            let steps = random.steps(11, 3);
            let free = [random.below(9), random.below(9), random.below(9)];
            let (load, exact) = solve(&steps, &free);
            let finish = evaluate(&steps, &load, &free);
            assert_eq!(finish, brute_force(&steps, &free), "{steps:?} {free:?}");
            assert!(exact);
        }
    }

    #[test]
    fn many_choices_are_bisected() {
        let mut random = Random::new(9);
        for _ in 0..2_000 {
            let steps = random.steps(60, 3);
            let free = [random.below(30), random.below(30)];
            let (load, exact) = solve(&steps, &free);
            let choices = steps.iter().filter(|step| step.lane().is_some()).count();
            assert_eq!(exact, choices <= FEW);
            let finish = evaluate(&steps, &load, &free);
            assert!(finish <= deadline::solve(&steps, &free).1, "{steps:?} {free:?}");
        }
    }
}
