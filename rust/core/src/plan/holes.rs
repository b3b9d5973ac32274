//! Solver for a single lane with holes: a dynamic programme over resident, missing and loadable
//! blocks.
//!
//! After `i` blocks with `m` of them loaded let `dp[i][m]` be the earliest time at which the next
//! block may be computed. Loading gives `dp[i+1][m+1] = max(dp[i][m], end of load m+1)`, computing
//! gives `dp[i+1][m] = dp[i][m] + r_i`, and the answer is `min_m dp[N][m]`. If load times differ,
//! the lane's end takes the place of `m`.
//!
//! Invariant: only undominated pairs (lane end, next start) are kept. The future depends on nothing
//! else and never gains from a later pair, so the result is exact. Cost: O(N^2) for equal load
//! times, 256 blocks in about 150 microseconds. For different load times, at most [`MOST`] pairs
//! per block, about a millisecond. Beyond [`MOST`] an even selection is kept and the result is not
//! exact. Four times as many pairs gained 0.1 % on random load times.

use super::{Source, Step, deadline};
use crate::time::Nanos;

/// Maximum number of pairs kept per block.
const MOST: usize = 512;

/// Bit of a pair's trail:
///
/// ```text
/// bit 31: the block is loaded    bits 30..0: index of the pair before
/// ```
const LOADED: u32 = 1 << 31;

#[derive(Clone, Copy)]
struct Partial {
    /// End of the lane's loads.
    lane: Nanos,
    /// Ready time of all blocks so far.
    ready: Nanos,
    trail: u32,
}

/// Best choice for the only lane `lane`, and whether it is exact.
pub(super) fn solve(steps: &[Step], lane: usize, lane_free: &[Nanos]) -> (Vec<bool>, bool) {
    let (fallback, bound) = deadline::solve(steps, lane_free);
    let free = lane_free.get(lane).copied().unwrap_or(0);
    let mut after = compulsory(steps);
    let mut exact = true;
    let mut trails: Vec<u32> = Vec::with_capacity(steps.len() * 8);
    let mut starts = Vec::with_capacity(steps.len());
    let mut now = vec![Partial { lane: free, ready: 0, trail: 0 }];
    let mut next = Vec::new();
    for step in steps {
        after -= compulsory(std::slice::from_ref(step));
        advance(&now, step, bound.saturating_sub(nanos(after)), &mut next);
        if next.len() > MOST {
            thin(&mut next);
            exact = false;
        }
        starts.push(trails.len());
        trails.extend(next.iter().map(|pair| pair.trail));
        std::mem::swap(&mut now, &mut next);
    }
    // The last pair is ready first, because pairs ascend in the lane's end and descend in
    // readiness.
    match now.len().checked_sub(1) {
        Some(last) => (follow(&trails, &starts, last), exact),
        None => (fallback, exact),
    }
}

/// Pairs after `step` with readiness by `bound`, ascending in the lane's end.
fn advance(now: &[Partial], step: &Step, bound: Nanos, next: &mut Vec<Partial>) {
    next.clear();
    let numbered = || now.iter().zip(0u32..);
    match step.source {
        Source::Resident { ready } => {
            for (pair, trail) in numbered() {
                keep(next, Partial { ready: pair.ready.max(ready), trail, ..*pair }, bound);
            }
        }
        Source::Missing => {
            for (pair, trail) in numbered() {
                let ready = pair.ready.saturating_add(step.compute);
                keep(next, Partial { ready, trail, ..*pair }, bound);
            }
        }
        Source::Load { time, from, .. } => {
            let mut computed = numbered().map(|(pair, trail)| Partial {
                lane: pair.lane,
                ready: pair.ready.saturating_add(step.compute),
                trail,
            });
            let mut coming = computed.next();
            for (pair, trail) in numbered() {
                let lane = pair.lane.max(from).saturating_add(time);
                while let Some(pair) = coming.filter(|pair| pair.lane <= lane) {
                    keep(next, pair, bound);
                    coming = computed.next();
                }
                let ready = pair.ready.max(lane);
                keep(next, Partial { lane, ready, trail: trail | LOADED }, bound);
            }
            for pair in coming.into_iter().chain(computed) {
                keep(next, pair, bound);
            }
        }
    }
}

/// Adds a pair with the latest lane end so far, unless it is dominated.
fn keep(pairs: &mut Vec<Partial>, pair: Partial, bound: Nanos) {
    if pair.ready > bound {
        return;
    }
    match pairs.last_mut() {
        Some(last) if last.ready <= pair.ready => {}
        Some(last) if last.lane == pair.lane => *last = pair,
        _ => pairs.push(pair),
    }
}

/// Keeps [`MOST`] pairs, evenly spread and including both ends.
fn thin(pairs: &mut Vec<Partial>) {
    let last = pairs.len() - 1;
    for i in 0..MOST {
        pairs[i] = pairs[i * last / (MOST - 1)];
    }
    pairs.truncate(MOST);
}

/// Walks back from the last block's pair and returns the choice.
fn follow(trails: &[u32], starts: &[usize], last: usize) -> Vec<bool> {
    let mut load = vec![false; starts.len()];
    let mut pair = last;
    for (load, start) in load.iter_mut().zip(starts).rev() {
        let trail = trails[start + pair];
        *load = trail & LOADED != 0;
        pair = (trail & !LOADED) as usize;
    }
    load
}

/// Time to compute the blocks without any copy.
fn compulsory(steps: &[Step]) -> u128 {
    let missing = steps.iter().filter(|step| step.source == Source::Missing);
    missing.map(|step| u128::from(step.compute)).sum()
}

fn nanos(time: u128) -> Nanos {
    Nanos::try_from(time).unwrap_or(Nanos::MAX)
}

#[cfg(test)]
mod tests {
    use super::{MOST, solve};
    use crate::plan::twin::{Random, brute_force};
    use crate::plan::{Source, Step, evaluate, plain};
    use crate::time::NEVER;

    /// `dp[i][m]` by its definition, for equal load times.
    fn table(steps: &[Step], load: u64, free: u64) -> u64 {
        let end = |m: usize| if m == 0 { 0 } else { free + m as u64 * load };
        let mut dp = vec![Some(0)];
        for step in steps {
            let mut next = vec![None; dp.len() + 1];
            let mut lower = |m: usize, time: u64| {
                next[m] = Some(next[m].map_or(time, |best: u64| best.min(time)));
            };
            for (m, time) in dp.iter().enumerate().filter_map(|(m, time)| Some((m, (*time)?))) {
                match step.source {
                    Source::Resident { ready } => lower(m, time.max(ready)),
                    Source::Missing => lower(m, time.max(end(m)) + step.compute),
                    Source::Load { .. } => {
                        lower(m + 1, time);
                        lower(m, time.max(end(m)) + step.compute);
                    }
                }
            }
            dp = next;
        }
        let finish = |(m, time): (usize, &Option<u64>)| Some((*time)?.max(end(m)));
        dp.iter().enumerate().filter_map(finish).min().unwrap_or(0)
    }

    fn finish(steps: &[Step], free: u64) -> (u64, bool) {
        let (load, exact) = solve(steps, 0, &[free]);
        (evaluate(steps, &load, &[free]), exact)
    }

    #[test]
    fn nothing_beats_it_with_equal_load_times() {
        let mut random = Random::new(4);
        for _ in 0..20_000 {
            let (time, free) = (random.below(9), random.below(12));
            let mut steps = random.steps(11, 1);
            for step in &mut steps {
                if let Source::Load { .. } = step.source {
                    step.source = Source::Load { lane: 0, time, from: 0 };
                }
            }
            let found = finish(&steps, free);
            assert_eq!(found, (brute_force(&steps, &[free]), true), "{steps:?} {free}");
            assert_eq!(found.0, table(&steps, time, free), "{steps:?} {free}");
        }
    }

    #[test]
    fn nothing_beats_it_with_any_load_times() {
        let mut random = Random::new(5);
        for _ in 0..20_000 {
            let steps = random.steps(11, 1);
            let free = random.below(12);
            assert_eq!(
                finish(&steps, free),
                (brute_force(&steps, &[free]), true),
                "{steps:?} {free}"
            );
        }
    }

    #[test]
    fn a_long_path_agrees_with_the_table() {
        let mut random = Random::new(6);
        for _ in 0..50 {
            let (time, free) = (1 + random.below(300), random.below(2000));
            let mut steps = random.steps(256, 1);
            for step in &mut steps {
                step.compute = random.below(300);
                if let Source::Load { .. } = step.source {
                    step.source = Source::Load { lane: 0, time, from: 0 };
                }
            }
            assert_eq!(finish(&steps, free), (table(&steps, time, free), true));
        }
    }

    #[test]
    fn too_many_pairs_are_thinned_and_said_so() {
        let mut random = Random::new(7);
        let step =
            |compute, time| Step { compute, source: Source::Load { lane: 0, time, from: 0 } };
        let steps: Vec<Step> = (0..400)
            .map(|_| step(1_000_000 + random.below(100_000), 900_000 + random.below(500_000)))
            .collect();
        let (load, exact) = solve(&steps, 0, &[0]);
        let found = evaluate(&steps, &load, &[0]);
        assert!(!exact, "{MOST} pairs were enough");
        assert!(found <= plain(&steps, &[0]).1);
        // Both the lane and the device work all the time, so at least a half is won.
        let computed: u64 = steps.iter().map(|step| step.compute).sum();
        assert!(found < computed * 6 / 10, "{found} of {computed}");
    }

    #[test]
    fn a_load_that_never_arrives_saturates() {
        let load = Step { compute: 5, source: Source::Load { lane: 0, time: NEVER, from: 0 } };
        let late = Step { compute: 5, source: Source::Resident { ready: NEVER } };
        assert_eq!(finish(&[load, load], 3), (10, true));
        assert_eq!(finish(&[load, late], 3), (NEVER, true));
        assert_eq!(finish(&[], 3), (0, true));
    }
}
