//! Reference solvers by brute force, and random paths for both.
//!
//! Invariant: the same seed gives the same paths. Cost: exponential.

use super::{Source, Step, evaluate};
use crate::time::Nanos;

/// A small generator (xorshift), for reproducible failures on every machine.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }

    /// Up to `most` blocks on up to `lanes` lanes: resident, missing or loadable. Times are small
    /// for frequent ties.
    pub(super) fn steps(&mut self, most: u64, lanes: u64) -> Vec<Step> {
        let holes = self.below(5);
        (0..self.below(most + 1))
            .map(|_| {
                let source = match self.below(10) {
                    kind if kind < holes => Source::Missing,
                    kind if kind < 2 * holes => Source::Resident { ready: self.below(20) },
                    _ => Source::Load {
                        lane: usize::try_from(self.below(lanes)).unwrap_or(0),
                        time: self.below(12),
                        from: self.below(3) * self.below(12),
                    },
                };
                Step { compute: self.below(12), source }
            })
            .collect()
    }
}

/// The earliest finish over every choice.
pub(super) fn brute_force(steps: &[Step], lane_free: &[Nanos]) -> Nanos {
    (0..1u32 << steps.len())
        .map(|choice| {
            let load: Vec<bool> = (0..steps.len()).map(|i| choice >> i & 1 == 1).collect();
            evaluate(steps, &load, lane_free)
        })
        .min()
        .unwrap_or(0)
}

/// The definition, block by block: first all arrivals, then each computation after all blocks before
/// it.
pub(super) fn simulate(steps: &[Step], load: &[bool], lane_free: &[Nanos]) -> Nanos {
    let mut ready: Vec<Option<Nanos>> = vec![None; steps.len()];
    for lane in 0..8 {
        let mut free = lane_free.get(lane).copied().unwrap_or(0);
        for (i, step) in steps.iter().enumerate() {
            match step.source {
                Source::Resident { ready: arrival } => ready[i] = Some(arrival),
                Source::Load { lane: own, time, from } if own == lane && load[i] => {
                    free = free.max(from) + time;
                    ready[i] = Some(free);
                }
                _ => {}
            }
        }
    }
    for i in 0..steps.len() {
        if ready[i].is_none() {
            let start = ready[..i].iter().flatten().copied().max().unwrap_or(0);
            ready[i] = Some(start + steps[i].compute);
        }
    }
    ready.into_iter().flatten().max().unwrap_or(0)
}
