//! `retention`: `uses * base_cost / idle`.
//!
//! Invariant: along a path the cost grows with depth at equal uses. Uses count up to [`MOST_USES`].
//! Without reuse they do not count, as in Pensieve's plain formula. Cost: constant.

use super::{Facts, MOST_USES, Needs, Policy, Terms};
use crate::cost::{CostModel, layer_weight};

/// Cost of recomputation times uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retention {
    /// Whether uses count.
    pub(super) reuse: bool,
}

impl Policy for Retention {
    fn deepens(&self) -> bool {
        true
    }

    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms {
        let base = facts.price_or(cost.worth(facts.context));
        let layer_weight = facts
            .layer
            .map_or(1.0, |layer| layer_weight(layer, facts.model_layers, facts.departure));
        let uses = if self.reuse { facts.uses.clamp(1, MOST_USES) } else { 1 };
        let cost = f64::from(uses) * base * layer_weight;
        Terms { base, layer_weight, position_weight: 1.0, uses, cost }
    }

    fn needs(&self) -> Needs {
        if self.reuse { Needs::COST.and(Needs::PAST_USES) } else { Needs::COST }
    }
}

#[cfg(test)]
mod tests {
    use super::Retention;
    use crate::block::Departure;
    use crate::cost::CostModel;
    use crate::error::Result;
    use crate::policy::sample::{evict_all, facts, layer};
    use crate::policy::{Facts, MOST_USES, Policy};

    #[test]
    fn uses_multiply_the_cost_up_to_a_limit() -> Result<()> {
        let cost = CostModel::default_curve(1.0)?;
        let with = |reuse, uses| {
            let terms = Retention { reuse }.terms(&Facts { uses, ..facts(10_700, 1, 4) }, &cost);
            (terms.uses, terms.cost)
        };
        assert_eq!([with(true, 0), with(true, 1), with(true, 5)], [(1, 2.0), (1, 2.0), (5, 10.0)]);
        assert_eq!((with(true, 1000), MOST_USES), ((32, 64.0), 32));
        assert_eq!(with(false, 5), (1, 2.0));
        Ok(())
    }

    #[test]
    fn whole_blocks_are_ranked_by_context_alone() -> Result<()> {
        let cost = CostModel::default_curve(1.0)?;
        let class = |facts: &Facts| Retention { reuse: true }.class(facts, &cost);
        assert_eq!(class(&facts(96, 0, 4)), class(&facts(96, 3, 9)));
        assert!(class(&facts(96, 3, 4)) < class(&facts(97, 3, 4)));
        Ok(())
    }

    #[test]
    fn single_layers_go_from_the_back_and_are_dropped_from_the_front() -> Result<()> {
        let cost = CostModel::default_curve(1.0)?;
        let policy = Retention { reuse: true };
        let demoted = evict_all(&policy, &cost, 4, &[vec![0]], Departure::Demote, 9);
        assert_eq!(demoted, [(3, 0), (2, 0), (1, 0), (0, 0)]);
        let dropped = evict_all(&policy, &cost, 4, &[vec![0]], Departure::Drop, 9);
        assert_eq!(dropped, [(0, 0), (1, 0), (2, 0), (3, 0)]);
        let terms = policy.terms(&layer(3, 4, 0, 1), &cost);
        assert!((terms.layer_weight - 0.25).abs() < 1e-12 && (terms.cost - 0.25).abs() < 1e-12);
        Ok(())
    }

    /// A hot block outlives a deeper block only with reuse.
    #[test]
    fn a_block_that_is_used_often_stays() -> Result<()> {
        let cost = CostModel::default_curve(1.0)?;
        let (hot, deep) = (Facts { uses: 3, ..facts(0, 0, 2) }, facts(10_700, 1, 2));
        let classes = |reuse| {
            let policy = Retention { reuse };
            (policy.class(&hot, &cost), policy.class(&deep, &cost))
        };
        let (with, without) = (classes(true), classes(false));
        assert!(with.0 > with.1 && without.0 < without.1);
        Ok(())
    }
}
