//! Solver for a single lane and a path without holes: compute the first blocks, load the rest.
//!
//! Invariant: with equal load times, and computing times not falling with depth, an optimal choice
//! of this form exists, since swapping a load with a later computation never delays anything. Cost:
//! a pass for the prefix sums, then a binary search.

use super::{Source, Step};
use crate::time::Nanos;

/// The number `k` of leading blocks to compute, and the finish `T = min_k max(R(k), (N - k) * load)`
/// with `R(k)` the time to compute the first `k`. Loads start at `free`.
#[must_use]
pub(crate) fn split(compute: &[Nanos], load: Nanos, free: Nanos) -> (usize, Nanos) {
    let mut computed = Vec::with_capacity(compute.len() + 1);
    computed.push(0);
    computed.extend(compute.iter().scan(0, |sum: &mut Nanos, time| {
        *sum = sum.saturating_add(*time);
        Some(*sum)
    }));
    let loaded = |k: usize| match (compute.len() - k) as u64 {
        0 => 0,
        rest => free.saturating_add(load.saturating_mul(rest)),
    };
    // R rises and the end of the loads falls with k: a binary search for their crossing.
    let crossing = partition(computed.len(), |k| computed[k] < loaded(k));
    let finish = |k: usize| computed[k].max(loaded(k));
    match crossing.checked_sub(1) {
        Some(before) if finish(before) <= finish(crossing) => (before, finish(before)),
        _ => (crossing, finish(crossing)),
    }
}

/// The choice for steps of the form required by [`split`], otherwise `None`.
pub(super) fn solve(steps: &[Step], lane_free: &[Nanos]) -> Option<Vec<bool>> {
    let Source::Load { lane, time, from } = steps.first()?.source else { return None };
    let free = lane_free.get(lane).copied().unwrap_or(0);
    let begin = free.max(from);
    let alike = steps.iter().all(|step| match step.source {
        Source::Load { lane: on, time: takes, from } => {
            on == lane && takes == time && free.max(from) == begin
        }
        Source::Resident { .. } | Source::Missing => false,
    });
    if !alike || !steps.is_sorted_by_key(|step| step.compute) {
        return None;
    }
    let compute: Vec<Nanos> = steps.iter().map(|step| step.compute).collect();
    let (k, _) = split(&compute, time, begin);
    Some((0..steps.len()).map(|i| i >= k).collect())
}

/// The first of `0..len` with `before` false. `before` must be monotone, and false for the last.
fn partition(len: usize, before: impl Fn(usize) -> bool) -> usize {
    let (mut lo, mut hi) = (0, len - 1);
    while lo < hi {
        let middle = usize::midpoint(lo, hi);
        if before(middle) {
            lo = middle + 1;
        } else {
            hi = middle;
        }
    }
    lo
}

#[cfg(test)]
mod tests {
    use super::split;
    use crate::plan::twin::{Random, brute_force};
    use crate::plan::{Source, Step, solve};

    #[test]
    fn the_binary_search_finds_the_best_split() {
        let mut random = Random::new(2);
        for _ in 0..20_000 {
            let compute: Vec<u64> = (0..random.below(12)).map(|_| random.below(9)).collect();
            let (load, free) = (random.below(9), random.below(12));
            let at = |k: usize| {
                let rest = (compute.len() - k) as u64;
                let loaded = if rest == 0 { 0 } else { free + rest * load };
                loaded.max(compute[..k].iter().sum())
            };
            let best = (0..=compute.len()).map(at).min();
            let (k, finish) = split(&compute, load, free);
            assert_eq!((Some(finish), finish), (best, at(k)), "{compute:?} {load} {free}");
        }
    }

    #[test]
    fn no_other_choice_beats_a_split_where_costs_grow_with_depth() {
        let mut random = Random::new(3);
        for _ in 0..10_000 {
            let mut compute: Vec<u64> = (0..random.below(10)).map(|_| random.below(9)).collect();
            compute.sort_unstable();
            let (time, from, free) = (random.below(9), random.below(9), random.below(9));
            let source = Source::Load { lane: 0, time, from };
            let steps: Vec<Step> =
                compute.iter().map(|&compute| Step { compute, source }).collect();
            let solution = solve(&steps, &[free]);
            assert!(solution.exact);
            assert_eq!(solution.finish, brute_force(&steps, &[free]), "{steps:?} {free}");
            assert_eq!(solution.finish, split(&compute, time, free.max(from)).1);
        }
    }
}
