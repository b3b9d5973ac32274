//! Load-or-recompute planner: loads or computes each block of a path, to have the whole path ready
//! as early as possible.
//!
//! Invariant: a plan is never later than the better of loading everything and computing everything.
//! Times are nanoseconds from the start of the plan. Cost: see the solvers. 256 blocks take 3
//! microseconds if all are cached on one lane, 15 to 30 with holes or more lanes.

mod deadline;
mod holes;
pub(crate) mod layerwise;
mod one_lane;
pub(crate) mod pipeline;
mod several;
#[cfg(test)]
mod twin;

use crate::time::Nanos;

/// Source of a block's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Resident, or in flight.
    Resident {
        /// Ready time.
        ready: Nanos,
    },
    /// Loadable or recomputable.
    Load {
        /// Lane of the load. Lanes are FIFO.
        lane: usize,
        /// Time the load occupies the lane.
        time: Nanos,
        /// Earliest start of the load.
        from: Nanos,
    },
    /// Must be computed.
    Missing,
}

/// A block of a path, in logical order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Time to compute it.
    pub compute: Nanos,
    /// Source of the KV.
    pub source: Source,
}

/// Choice for each block, and the finish time of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// Whether each step is loaded. A block neither loaded nor resident is computed.
    pub load: Vec<bool>,
    /// Ready time of the whole path, by [`evaluate`].
    pub finish: Nanos,
    /// Whether the choice is optimal.
    pub exact: bool,
}

/// Ready time of the whole path under the choice `load`, one flag per step. Flags of steps without
/// a load are ignored.
///
/// Lane `l` is free from `lane_free[l]` on (from 0 if not listed) and serves its loads in logical
/// order. A block is computed after all blocks before it are computed or have arrived. Computing a
/// block occupies the whole device.
#[must_use]
pub(crate) fn evaluate(steps: &[Step], load: &[bool], lane_free: &[Nanos]) -> Nanos {
    run(steps, load, &mut frees(steps, lane_free))
}

/// [`evaluate`] with all lanes listed in `free`, which is overwritten.
fn run(steps: &[Step], load: &[bool], free: &mut [Nanos]) -> Nanos {
    let mut ready = 0;
    for (step, &load) in steps.iter().zip(load) {
        ready = match step.source {
            Source::Resident { ready: arrival } => ready.max(arrival),
            Source::Load { lane, time, from } if load => {
                free[lane] = free[lane].max(from).saturating_add(time);
                ready.max(free[lane])
            }
            Source::Load { .. } | Source::Missing => ready.saturating_add(step.compute),
        };
    }
    ready
}

/// Solver: finds the choice with the earliest finish, optimal if `Solution::exact`.
///
/// Exact if on each lane deeper blocks take no longer to load and no less to compute. Otherwise
/// exact on a single lane unless load times have too many different sums, and on several lanes with
/// up to twelve choices. In the remaining cases the choice is good, and never later than computing
/// or loading all.
#[must_use]
pub fn solve(steps: &[Step], lane_free: &[Nanos]) -> Solution {
    let (load, exact) = if steps.iter().all(|step| step.lane().is_none()) {
        (vec![false; steps.len()], true)
    } else if let Some(load) = one_lane::solve(steps, lane_free) {
        (load, true)
    } else if deadline::regular(steps) {
        (deadline::solve(steps, lane_free).0, true)
    } else if let Some(lane) = single(steps) {
        holes::solve(steps, lane, lane_free)
    } else {
        several::solve(steps, lane_free)
    };
    let finish = evaluate(steps, &load, lane_free);
    Solution { load, finish, exact }
}

/// The lane, if there is exactly one.
fn single(steps: &[Step]) -> Option<usize> {
    let mut lanes = steps.iter().filter_map(Step::lane);
    let lane = lanes.next()?;
    lanes.all(|other| other == lane).then_some(lane)
}

impl Step {
    fn lane(&self) -> Option<usize> {
        match self.source {
            Source::Load { lane, .. } => Some(lane),
            Source::Resident { .. } | Source::Missing => None,
        }
    }
}

/// The better of computing all and loading all.
fn plain(steps: &[Step], lane_free: &[Nanos]) -> (Vec<bool>, Nanos) {
    let load: Vec<bool> = steps.iter().map(|step| step.lane().is_some()).collect();
    let compute = vec![false; steps.len()];
    let (loaded, computed) =
        (evaluate(steps, &load, lane_free), evaluate(steps, &compute, lane_free));
    if loaded < computed { (load, loaded) } else { (compute, computed) }
}

/// `lane_free`, extended to all lanes of the steps.
fn frees(steps: &[Step], lane_free: &[Nanos]) -> Vec<Nanos> {
    let lanes = steps.iter().filter_map(Step::lane).map(|lane| lane + 1).max().unwrap_or(0);
    let mut free = lane_free.to_vec();
    free.resize(lanes.max(free.len()), 0);
    free
}

#[cfg(test)]
mod tests {
    use super::twin::{Random, brute_force, simulate};
    use super::{Solution, Source, Step, evaluate, solve};

    #[test]
    fn the_evaluation_equals_a_simulation() {
        let mut random = Random::new(10);
        for _ in 0..20_000 {
            let steps = random.steps(12, 3);
            let load: Vec<bool> = steps.iter().map(|_| random.below(2) == 1).collect();
            let free = [random.below(9), random.below(9)];
            let found = evaluate(&steps, &load, &free);
            assert_eq!(found, simulate(&steps, &load, &free), "{steps:?} {load:?} {free:?}");
        }
    }

    #[test]
    fn any_small_path_is_solved_exactly() {
        let mut random = Random::new(11);
        for _ in 0..20_000 {
            let lanes = 1 + random.below(3);
            let steps = random.steps(10, lanes);
            let free = [random.below(9), random.below(9)];
            let found = solve(&steps, &free);
            assert!(found.exact);
            assert_eq!(found.finish, brute_force(&steps, &free), "{steps:?} {free:?}");
            assert_eq!(found.finish, evaluate(&steps, &found.load, &free));
            for (step, load) in steps.iter().zip(&found.load) {
                assert!(!load || matches!(step.source, Source::Load { .. }));
            }
        }
    }

    /// One irregular time per case: to compute, to load (up or down), or to begin.
    #[test]
    fn almost_regular_paths_are_not_taken_for_regular_ones() {
        let mut random = Random::new(14);
        for case in 0..20_000 {
            let (time, from, number) =
                (1 + random.below(12), random.below(12), 2 + random.below(8));
            let odd = random.below(number);
            let steps: Vec<Step> = (0..number)
                .map(|i| {
                    let change = |what| if i == odd && case % 4 == what { 3 } else { 1 };
                    let compute = (9 + i / 3) / change(0);
                    let time = time * change(1) / change(2);
                    let from = from * change(3);
                    Step { compute, source: Source::Load { lane: 0, time, from } }
                })
                .collect();
            let found = solve(&steps, &[3]);
            assert_eq!(found.finish, brute_force(&steps, &[3]), "{steps:?}");
            assert!(found.exact);
        }
    }

    #[test]
    fn a_path_without_choices_has_one_answer() {
        let steps = [
            Step { compute: 5, source: Source::Missing },
            Step { compute: 9, source: Source::Resident { ready: 20 } },
            Step { compute: 5, source: Source::Missing },
        ];
        assert_eq!(solve(&steps, &[]), Solution { load: vec![false; 3], finish: 25, exact: true });
        assert_eq!(solve(&[], &[]), Solution { load: vec![], finish: 0, exact: true });
    }

    #[test]
    fn a_hole_in_front_leaves_time_to_load_the_blocks_behind() {
        let load = Source::Load { lane: 0, time: 4, from: 0 };
        let steps = [
            Step { compute: 10, source: Source::Missing },
            Step { compute: 10, source: load },
            Step { compute: 10, source: load },
            Step { compute: 10, source: Source::Missing },
        ];
        let found = solve(&steps, &[0]);
        assert_eq!(found.load, [false, true, true, false]);
        assert_eq!((found.finish, found.exact), (20, true));
    }

    #[test]
    fn a_busy_lane_and_a_late_copy_are_waited_for_or_avoided() {
        let step = |from| Step { compute: 10, source: Source::Load { lane: 0, time: 1, from } };
        assert_eq!(solve(&[step(0)], &[0]).finish, 1);
        assert_eq!(solve(&[step(0)], &[8]).finish, 9);
        assert_eq!(solve(&[step(8)], &[0]).finish, 9);
        let avoided = solve(&[step(0)], &[12]);
        assert_eq!((avoided.finish, avoided.load), (10, vec![false]));
    }
}
