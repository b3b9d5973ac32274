//! Solver for any number of lanes: a bisection on the finish time.
//!
//! For a target finish, a sweep walks the path backwards and keeps, per lane and for the device,
//! the latest time by which the remaining blocks must be ready. A block is loaded if its lane can
//! still load it in time, else computed. All blocks before a computed block must be ready when its
//! computation starts. This is the source of stalls.
//!
//! Invariant: a choice is compared by its real finish with computing everything and loading
//! everything, so the result is never later than either. It is exact if, lane by lane, deeper
//! blocks take no longer to load and no less to compute, for any start times of loads (see
//! [`regular`]). Proof: compare a schedule that meets the target finish with the sweep, from the
//! back up to the first block `i` on which they differ. No schedule loads a block in time if the
//! sweep could not, so the sweep loads `i` and the schedule does not. If the schedule loads an
//! earlier block on the same lane, let `j` be the nearest. Load `i` instead, which needs no more
//! time on the lane and has no earlier deadline, and compute `j`, which delays all blocks in
//! between by at most `r_j <= r_i`, while `i` is not computed. If it loads no earlier block, load
//! `i` too. Either way the finish is still met. Cost: one or two passes per bit of the finish, 256
//! blocks in 15 to 30 microseconds.

use super::{Source, Step, frees, plain, run};
use crate::time::Nanos;

/// Best choice found by the bisection, with its finish.
pub(super) fn solve(steps: &[Step], lane_free: &[Nanos]) -> (Vec<bool>, Nanos) {
    let free = frees(steps, lane_free);
    let (mut best, mut finish) = plain(steps, lane_free);
    let (mut late, mut met) = (0, finish);
    let mut lanes = free.clone();
    let mut load = vec![false; steps.len()];
    while late < met {
        let wanted = Nanos::midpoint(late, met);
        lanes.fill(wanted);
        if !sweep(steps, &free, wanted, &mut lanes, &mut load) {
            late = wanted + 1;
            continue;
        }
        lanes.copy_from_slice(&free);
        let real = run(steps, &load, &mut lanes);
        if real < finish {
            finish = real;
            best.copy_from_slice(&load);
        }
        if real <= wanted {
            met = real;
        } else {
            late = wanted + 1;
        }
    }
    (best, finish)
}

/// Whether [`solve`] is exact for these steps.
pub(super) fn regular(steps: &[Step]) -> bool {
    let mut last: Vec<Option<(Nanos, Nanos)>> = vec![None; frees(steps, &[]).len()];
    steps.iter().all(|step| {
        let Source::Load { lane, time, .. } = step.source else { return true };
        let before = last[lane].replace((time, step.compute));
        before.is_none_or(|(loading, computing)| loading >= time && computing <= step.compute)
    })
}

/// Chooses loads so that all blocks are ready by `ready`, if possible.
///
/// Returns false if the computations alone take longer. `latest[lane]` is the latest end of an
/// earlier load on the lane for the loads already chosen to follow in time.
fn sweep(
    steps: &[Step],
    free: &[Nanos],
    mut ready: Nanos,
    latest: &mut [Nanos],
    load: &mut [bool],
) -> bool {
    for (step, load) in steps.iter().zip(load).rev() {
        *load = false;
        match step.source {
            Source::Resident { .. } => continue,
            Source::Load { lane, time, from } => {
                let start = latest[lane].min(ready).checked_sub(time);
                if let Some(start) = start.filter(|start| *start >= free[lane].max(from)) {
                    latest[lane] = start;
                    *load = true;
                    continue;
                }
            }
            Source::Missing => {}
        }
        match ready.checked_sub(step.compute) {
            Some(before) => ready = before,
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::{regular, solve};
    use crate::plan::twin::{Random, brute_force};
    use crate::plan::{Source, Step, evaluate, plain};

    /// Paths with deeper blocks loading no slower and computing no faster, lane by lane.
    fn even(random: &mut Random, lanes: u64) -> Vec<Step> {
        let mut loading: Vec<u64> = (0..lanes).map(|_| random.below(15)).collect();
        let mut computing = vec![0; loading.len()];
        let mut steps = random.steps(11, lanes);
        for step in &mut steps {
            if let Source::Load { lane, ref mut time, .. } = step.source {
                loading[lane] = loading[lane].saturating_sub(random.below(2) * random.below(3));
                computing[lane] += random.below(3) * random.below(6);
                (*time, step.compute) = (loading[lane], computing[lane]);
            }
        }
        steps
    }

    #[test]
    fn nothing_beats_it_where_loads_get_no_slower_and_costs_grow() {
        let mut random = Random::new(13);
        for case in 0..40_000 {
            let steps = even(&mut random, 1 + case % 3);
            let free = [random.below(9), random.below(9), random.below(9)];
            assert!(regular(&steps));
            let (load, finish) = solve(&steps, &free);
            assert_eq!(finish, evaluate(&steps, &load, &free));
            assert_eq!(finish, brute_force(&steps, &free), "{steps:?} {free:?}");
        }
    }

    #[test]
    fn it_is_never_later_than_the_plain_choices() {
        let mut random = Random::new(9);
        for _ in 0..10_000 {
            let steps = random.steps(60, 3);
            let free = [random.below(30), random.below(30)];
            let (load, finish) = solve(&steps, &free);
            assert_eq!(finish, evaluate(&steps, &load, &free));
            assert!(finish <= plain(&steps, &free).1, "{steps:?} {free:?}");
        }
    }

    /// Distance of the bisection from the best on irregular paths, in thousandths of the best.
    #[test]
    #[expect(clippy::print_stderr, reason = "the gap is a measurement")]
    fn elsewhere_the_gap_is_small() {
        let mut random = Random::new(12);
        let (mut cases, mut above, mut sum, mut worst) = (0, 0, 0, 0);
        while cases < 10_000 {
            let mut steps = random.steps(12, 2);
            for step in &mut steps {
                step.compute += 4;
            }
            let free = [random.below(9), random.below(9)];
            if regular(&steps) {
                continue;
            }
            let (found, best) = (solve(&steps, &free).1, brute_force(&steps, &free));
            let gap = (found - best) * 1000 / best.max(1);
            cases += 1;
            above += u32::from(found > best);
            sum += gap;
            worst = worst.max(gap);
        }
        let mean = sum / cases;
        eprintln!("above the best: {above} of {cases}, mean {mean} per mille, worst {worst}");
        assert!(mean < 20, "mean gap {mean} per mille");
    }
}
