//! `restore`: `(restore plan without the block - restore plan with it) / idle`, in time.
//!
//! The request is the next of the shortest session through the block, or ends with the block. The
//! plan is the planner's: the device computes the first blocks while lanes load the last.
//! Assumptions: the blocks before it are on its tier or above, as in leaf-only structures. The
//! blocks after it are on the tier below. Every lane is idle, and each tier has its own. The plan
//! then consists of two stretches of equal loads, one per tier. Each stretch is computed up to some
//! block and loaded from there on, so losing a block shortens a stretch and lengthens the next. On
//! a single tier, or if blocks are dropped from the first tier, the difference is the computation
//! of the block.
//!
//! Invariant: under these assumptions the cost is the difference of two best plans. It is exact if
//! the time of a span is the sum over its blocks (an affine curve, without a user's price). Cost:
//! no plan is solved again. Four binary searches over the session's blocks, O(log session) per
//! refresh. Tracking the length of sessions is O(path) per extension.

use super::{Facts, Needs, Policy, Terms};
use crate::cost::{CostModel, layer_weight};
use crate::time::Nanos;

/// The restore plan with and without the block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Restore;

/// The path of a request around a block.
struct RestorePath<'a> {
    facts: &'a Facts,
    cost: &'a CostModel,
}

impl RestorePath<'_> {
    /// Delay of the request if block `at` moves to the tier below.
    fn loss(&self) -> Nanos {
        let (at, end) = (u64::from(self.facts.block), u64::from(self.facts.session_blocks));
        let ready = |resident: u64| {
            let above = match self.facts.reload.own_tier {
                0 => 0,
                load => self.stretch(0, 0, resident, Some(load)),
            };
            self.stretch(above, resident, end.max(at + 1), self.facts.reload.below)
        };
        ready(at).saturating_sub(ready(at + 1))
    }

    /// Ready time of the blocks `from..to` if the blocks before are ready at `after`. The first `k`
    /// are computed and the rest is loaded: `min_k max(after + R(k), (to - from - k) * load)`.
    fn stretch(&self, after: Nanos, from: u64, to: u64, load: Option<Nanos>) -> Nanos {
        let computed = |k: u64| after.saturating_add(self.compute(from, from + k));
        let blocks = to - from;
        let Some(load) = load else { return computed(blocks) };
        let loaded = |k: u64| load.saturating_mul(blocks - k);
        // The computed part grows with k and the loaded part falls: the best is next to the
        // crossing.
        let (mut lo, mut hi) = (0, blocks);
        while lo < hi {
            let middle = u64::midpoint(lo, hi);
            if computed(middle) < loaded(middle) {
                lo = middle + 1;
            } else {
                hi = middle;
            }
        }
        computed(lo).min(if lo > 0 { loaded(lo - 1) } else { Nanos::MAX })
    }

    /// Time to compute consecutive blocks.
    fn compute(&self, from: u64, to: u64) -> Nanos {
        let Facts { context, block, price, ref reload, .. } = *self.facts;
        let at = u64::from(block);
        let first = context.saturating_sub(at * reload.tokens);
        let span = |from: u64, to: u64| {
            self.cost.compute_ns(first + from * reload.tokens, (to - from) * reload.tokens)
        };
        match price {
            // The curve does not include the price, so the block is computed between two spans.
            Some(price) if (from..to).contains(&at) => {
                let own = self.cost.priced_ns(price, reload.tokens);
                span(from, at).saturating_add(own).saturating_add(span(at + 1, to))
            }
            _ => span(from, to),
        }
    }
}

impl Policy for Restore {
    /// Costs are microseconds.
    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms {
        let layer_weight = facts
            .layer
            .map_or(1.0, |layer| layer_weight(layer, facts.model_layers, facts.departure));
        Terms {
            base: facts.price_or(cost.base(facts.context)),
            layer_weight,
            cost: micros(RestorePath { facts, cost }.loss()) * layer_weight,
            ..Terms::NONE
        }
    }

    /// Its cost is the time of a plan. Objectives do not apply.
    fn needs(&self) -> Needs {
        Needs::SESSION_BLOCKS.and(Needs::RELOAD)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a cost needs no more than 53 bits")]
fn micros(nanos: Nanos) -> f64 {
    nanos as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::{Restore, RestorePath};
    use crate::cost::CostModel;
    use crate::error::Result;
    use crate::plan::{Source, Step, evaluate, solve};
    use crate::policy::sample::{facts, layer};
    use crate::policy::{Facts, Policy, Reload};
    use crate::time::Nanos;

    /// The plan of a whole path with the first `resident` blocks on the tier, block by block, by
    /// the planner and by trying every choice.
    fn planned(facts: &Facts, cost: &CostModel, resident: u32) -> Nanos {
        let Reload { tokens, own_tier, below } = facts.reload;
        let steps: Vec<Step> = (0..facts.session_blocks)
            .map(|block| Step {
                compute: cost.compute_ns(u64::from(block) * tokens, tokens),
                source: match (block < resident, own_tier, below) {
                    (true, 0, _) => Source::Resident { ready: 0 },
                    (true, time, _) => Source::Load { lane: 0, time, from: 0 },
                    (false, _, Some(time)) => Source::Load { lane: 1, time, from: 0 },
                    (false, _, None) => Source::Missing,
                },
            })
            .collect();
        let choices = (0..1_u32 << steps.len()).map(|choice| {
            let load: Vec<bool> = (0..steps.len()).map(|i| choice >> i & 1 == 1).collect();
            evaluate(&steps, &load, &[])
        });
        let solved = solve(&steps, &[]);
        assert!(solved.exact);
        assert_eq!(choices.min(), Some(solved.finish));
        solved.finish
    }

    #[test]
    fn the_cost_is_the_difference_of_two_plans() -> Result<()> {
        let mut state = 5_u64;
        let mut below = |bound: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            u32::try_from((state >> 33) % u64::from(bound)).expect("small")
        };
        let mut hidden = 0;
        for case in 0..20_000 {
            // Spans and sums of blocks are equal without rounding.
            let alpha = [0.0, 0.25, 1.0][below(3) as usize];
            let cost = CostModel::affine(alpha, 1.0, 0.0, f64::from(4 * (1 + below(6))))?;
            let session_blocks = 1 + below(9);
            let block = below(session_blocks);
            let reload = Reload {
                tokens: 2,
                own_tier: u64::from(below(2) * below(60)),
                below: (case % 3 > 0).then(|| u64::from(below(90))),
            };
            let facts = Facts { reload, ..facts(2 * u64::from(block), block, session_blocks) };
            let (with, without) =
                (planned(&facts, &cost, block + 1), planned(&facts, &cost, block));
            let loss = RestorePath { facts: &facts, cost: &cost }.loss();
            assert_eq!(loss, without.saturating_sub(with), "{facts:?} {cost:?}");
            hidden += u32::from(loss == 0);
        }
        assert!(hidden > 500, "only {hidden} loads are hidden by others");
        Ok(())
    }

    /// Blocks of 32 tokens, at a nanosecond per token without context.
    fn loss(reload: Reload, block: u32, session_blocks: u32) -> Result<Nanos> {
        let cost = CostModel::affine(0.0, 1.0, 0.0, 1.0)?;
        let facts = Facts { reload, ..facts(u64::from(block) * 32, block, session_blocks) };
        Ok(RestorePath { facts: &facts, cost: &cost }.loss())
    }

    #[test]
    fn a_block_costs_what_does_not_hide_behind_the_others() -> Result<()> {
        let reload = |own_tier, below| Reload { tokens: 32, own_tier, below };
        // On a single tier: its computation. If reloadable: the load or the computation.
        assert_eq!([loss(reload(0, None), 3, 9)?, loss(reload(0, None), 3, 4)?], [32, 32]);
        assert_eq!([loss(reload(0, Some(8)), 3, 4)?, loss(reload(0, Some(90)), 3, 4)?], [8, 32]);
        // Four blocks load while a block is computed: with four blocks after it the fifth load is
        // hidden.
        assert_eq!([loss(reload(0, Some(8)), 4, 8)?, loss(reload(0, Some(8)), 3, 8)?], [8, 0]);
        // On a lower tier: its computation minus the saved load.
        assert_eq!(loss(reload(8, None), 3, 4)?, 24);
        Ok(())
    }

    #[test]
    fn the_users_price_takes_the_place_of_the_blocks_own() -> Result<()> {
        let cost = CostModel::affine(0.0, 1.0, 0.0, 1.0)?;
        let reload = Reload { tokens: 32, own_tier: 0, below: None };
        let priced = Facts { price: Some(2.5), reload, ..facts(96, 3, 9) };
        let terms = Restore.terms(&priced, &cost);
        assert!((terms.base - 2.5).abs() < 1e-12 && (terms.cost - 0.08).abs() < 1e-12);
        Ok(())
    }

    #[test]
    fn a_back_layer_costs_its_share() -> Result<()> {
        let cost = CostModel::default_curve(1.0)?;
        let terms = |index| Restore.terms(&layer(index, 4, 1, 4), &cost);
        let (front, back) = (terms(0), terms(3));
        assert!(front.cost > 0.0 && (front.cost - 4.0 * back.cost).abs() < 1e-12);
        assert!((back.layer_weight - 0.25).abs() < 1e-12);
        Ok(())
    }
}
