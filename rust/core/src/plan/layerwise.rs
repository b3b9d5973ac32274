//! Layer-wise solver: a pass computes layer by layer while lanes load layer by layer.
//!
//! The loads of a lane go together, layer 0 of all blocks first. A pass computes all blocks not
//! loaded and the rest of the prompt. Its layer `j` begins when layer `j` of all loaded blocks is
//! resident and layer `j - 1` is done.
//!
//! Invariant: never later than computing or loading everything. It is exact on a single lane if all
//! loads take the same time and have the same earliest start, and deeper blocks compute no faster:
//! any `n` loads then take the same time, and loading the last `n` blocks leaves the least to
//! compute. Cost: O(blocks · layers · lanes).

use super::{Solution, Source, Step, pipeline};
use crate::time::Nanos;

/// Rest of the pass after a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass {
    /// Time to compute the rest of the prompt.
    pub rest: Nanos,
    /// Number of layers of the model.
    pub layers: u16,
}

/// The loads of a lane.
#[derive(Clone, Copy, Debug, Default)]
struct Loads {
    start: Nanos,
    total: u128,
}

/// State of a choice while its steps are added.
struct Sum {
    /// Ready time of all resident blocks.
    resident_ready: Nanos,
    compute: u128,
    lanes: Vec<Loads>,
}

impl Sum {
    /// The empty choice. `lane_free` covers all lanes.
    fn new(lane_free: &[Nanos], pass: Pass) -> Self {
        let lanes = lane_free.iter().map(|&start| Loads { start, total: 0 }).collect();
        Self { resident_ready: 0, compute: u128::from(pass.rest), lanes }
    }

    fn add(&mut self, step: &Step, load: bool) {
        match step.source {
            Source::Resident { ready } => self.resident_ready = self.resident_ready.max(ready),
            Source::Load { lane, time, from } if load => {
                let lane = &mut self.lanes[lane];
                lane.start = lane.start.max(from);
                lane.total += u128::from(time);
            }
            Source::Load { .. } | Source::Missing => self.compute += u128::from(step.compute),
        }
    }

    /// Completion time of the last layer.
    fn finish(&self, layers: u16) -> Nanos {
        let all = u128::from(layers.max(1));
        let arrival = |layer: u128| {
            let loads = self.lanes.iter().filter(|lane| lane.total > 0);
            let end = loads.map(|lane| {
                lane.start.saturating_add(nanos((lane.total * (layer + 1)).div_ceil(all)))
            });
            end.max().unwrap_or(0).max(self.resident_ready)
        };
        let until = |layer: u128| self.compute * layer / all;
        pipeline::finish(
            (0..all).map(|layer| (arrival(layer), nanos(until(layer + 1) - until(layer)))),
        )
    }
}

/// End of the pass under the choice `load`.
#[must_use]
pub(crate) fn evaluate(steps: &[Step], load: &[bool], lane_free: &[Nanos], pass: Pass) -> Nanos {
    let mut sum = Sum::new(&super::frees(steps, lane_free), pass);
    for (step, &load) in steps.iter().zip(load) {
        sum.add(step, load);
    }
    sum.finish(pass.layers)
}

/// Best choice among the choices to load every loadable block from some block on.
#[must_use]
pub(crate) fn solve(steps: &[Step], lane_free: &[Nanos], pass: Pass) -> Solution {
    let free = super::frees(steps, lane_free);
    let mut sum = Sum::new(&free, pass);
    for step in steps {
        sum.add(step, false);
    }
    let (mut from, mut finish) = (steps.len(), sum.finish(pass.layers));
    for (at, step) in steps.iter().enumerate().rev() {
        if let Source::Load { .. } = step.source {
            sum.compute -= u128::from(step.compute);
            sum.add(step, true);
            let found = sum.finish(pass.layers);
            if found < finish {
                (from, finish) = (at, found);
            }
        }
    }
    let loads = |(at, step): (usize, &Step)| at >= from && step.lane().is_some();
    let load = steps.iter().enumerate().map(loads).collect();
    Solution { load, finish, exact: regular(steps, &free) }
}

/// Whether [`solve`] is exact for these steps.
fn regular(steps: &[Step], free: &[Nanos]) -> bool {
    let mut known: Option<(usize, Nanos, Nanos)> = None;
    let mut before = 0;
    steps.iter().all(|step| {
        let Source::Load { lane, time, from } = step.source else { return true };
        let load = (lane, time, from.max(free[lane]));
        let deepens = before <= step.compute;
        before = step.compute;
        deepens && *known.get_or_insert(load) == load
    })
}

fn nanos(time: u128) -> Nanos {
    Nanos::try_from(time).unwrap_or(Nanos::MAX)
}

#[cfg(test)]
mod tests {
    use super::{Pass, evaluate, regular, solve};
    use crate::plan::twin::Random;
    use crate::plan::{Source, Step, pipeline};

    /// The definition, layer by layer, in whole numbers: `compute` and load times are multiples of
    /// the number of layers.
    fn simulate(steps: &[Step], load: &[bool], free: &[u64], pass: Pass) -> u64 {
        let layers = u64::from(pass.layers);
        let mut arrival = vec![0; usize::from(pass.layers)];
        for (lane, &free) in free.iter().enumerate() {
            let on = |(step, load): (&Step, &bool)| match step.source {
                Source::Load { lane: own, time, from } if *load && own == lane => {
                    Some((time, from))
                }
                _ => None,
            };
            let loads: Vec<(u64, u64)> = steps.iter().zip(load).filter_map(on).collect();
            let mut at = loads.iter().map(|load| load.1).max().unwrap_or(0).max(free);
            for layer in &mut arrival {
                for (time, _) in &loads {
                    at += time / layers;
                }
                if !loads.is_empty() {
                    *layer = at.max(*layer);
                }
            }
        }
        let mut compute = pass.rest;
        for (step, load) in steps.iter().zip(load) {
            match step.source {
                Source::Resident { ready } => {
                    for at in &mut arrival {
                        *at = ready.max(*at);
                    }
                }
                Source::Load { .. } if *load => {}
                Source::Load { .. } | Source::Missing => compute += step.compute,
            }
        }
        pipeline::finish(arrival.into_iter().map(|at| (at, compute / layers)))
    }

    fn brute_force(steps: &[Step], free: &[u64], pass: Pass) -> u64 {
        let choices = 0..1u32 << steps.len();
        let finish = |choice: u32| {
            let load: Vec<bool> = (0..steps.len()).map(|i| choice >> i & 1 == 1).collect();
            simulate(steps, &load, free, pass)
        };
        choices.map(finish).min().unwrap_or(0)
    }

    /// Steps with times in multiples of the layers, a pass, and the times at which lanes are free.
    fn case(random: &mut Random, most: u64, lanes: u64) -> (Vec<Step>, [u64; 3], Pass) {
        let layers = 1 + random.below(4);
        let mut steps = random.steps(most, lanes);
        for step in &mut steps {
            step.compute *= layers;
            if let Source::Load { ref mut time, .. } = step.source {
                *time = (1 + *time) * layers;
            }
        }
        let rest = random.below(40) * layers;
        let pass = Pass { rest, layers: u16::try_from(layers).unwrap() };
        (steps, [random.below(9), random.below(9), random.below(9)], pass)
    }

    #[test]
    fn the_evaluation_equals_a_simulation_layer_by_layer() {
        let mut random = Random::new(21);
        for _ in 0..20_000 {
            let (steps, free, pass) = case(&mut random, 10, 3);
            let load: Vec<bool> = steps.iter().map(|_| random.below(2) == 1).collect();
            let found = evaluate(&steps, &load, &free, pass);
            assert_eq!(found, simulate(&steps, &load, &free, pass), "{steps:?} {load:?} {pass:?}");
        }
    }

    #[test]
    fn nothing_beats_it_where_loads_are_alike_and_costs_grow() {
        let mut random = Random::new(22);
        for _ in 0..5_000 {
            let (mut steps, free, pass) = case(&mut random, 9, 1);
            let time = (1 + random.below(9)) * u64::from(pass.layers);
            let mut compute = 0;
            for step in &mut steps {
                compute += random.below(3) * u64::from(pass.layers);
                step.compute = compute;
                if let Source::Load { .. } = step.source {
                    step.source = Source::Load { lane: 0, time, from: 0 };
                }
            }
            let found = solve(&steps, &free, pass);
            assert!(found.exact);
            let best = brute_force(&steps, &free, pass);
            assert_eq!(found.finish, best, "{steps:?} {free:?} {pass:?}");
            assert_eq!(found.finish, evaluate(&steps, &found.load, &free, pass));
        }
    }

    #[test]
    fn it_says_exact_only_where_brute_force_agrees_and_is_never_later_than_the_plain_choices() {
        let mut random = Random::new(23);
        for _ in 0..2_000 {
            let (steps, free, pass) = case(&mut random, 8, 3);
            let found = solve(&steps, &free, pass);
            let plain = |load| evaluate(&steps, &vec![load; steps.len()], &free, pass);
            assert!(found.finish <= plain(true).min(plain(false)), "{steps:?} {free:?} {pass:?}");
            assert_eq!(found.exact, regular(&steps, &free));
            let best = brute_force(&steps, &free, pass);
            assert!(found.finish >= best && (!found.exact || found.finish == best), "{steps:?}");
        }
    }
}
