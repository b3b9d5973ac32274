//! `flat`: `(alpha * context + beta) / idle`, the source document's first formula.
//!
//! Invariant: neither layers nor position nor uses change the cost. Cost: constant.

use super::{Facts, Needs, Policy, Terms};
use crate::cost::CostModel;

/// Cost by context only, for comparison.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flat;

impl Policy for Flat {
    fn deepens(&self) -> bool {
        true
    }

    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms {
        let base = facts.price_or(cost.flat_worth(facts.context));
        Terms { base, layer_weight: 1.0, position_weight: 1.0, uses: 1, cost: base }
    }

    fn needs(&self) -> Needs {
        Needs::COST
    }
}

#[cfg(test)]
mod tests {
    use super::Flat;
    use crate::block::Layers;
    use crate::cost::CostModel;
    use crate::error::Result;
    use crate::policy::sample::{facts, layer};
    use crate::policy::weighted::Weighted;
    use crate::policy::{Facts, Policy};

    /// The classes of both facts, without and with the weights.
    fn classes(a: &Facts, b: &Facts) -> Result<((u64, u64), (u64, u64))> {
        let cost = CostModel::seed(1.0)?;
        let both = |policy: &dyn Policy| (policy.class(a, &cost), policy.class(b, &cost));
        Ok((both(&Flat), both(&Weighted)))
    }

    #[test]
    fn all_layers_cost_the_same() -> Result<()> {
        let (flat, weighted) = classes(&layer(0, 40, 1, 4), &layer(39, 40, 1, 4))?;
        assert_eq!(flat.0, flat.1);
        // Weights 40/40 and 1/40, up to the rounding of each class.
        assert!(weighted.0.abs_diff(weighted.1 * 40) <= 40);
        Ok(())
    }

    #[test]
    fn the_length_of_the_session_is_ignored() -> Result<()> {
        let (flat, weighted) = classes(&facts(0, 0, 1), &facts(0, 0, 100))?;
        assert_eq!(flat.0, flat.1);
        assert!(weighted.0 > weighted.1);
        Ok(())
    }

    #[test]
    fn leading_and_trailing_blocks_of_one_context_cost_the_same() -> Result<()> {
        // Equal context, as with blocks of different sizes: the first of four compared with the
        // last of four.
        let (flat, weighted) = classes(&facts(96, 0, 4), &facts(96, 3, 4))?;
        assert_eq!(flat.0, flat.1);
        assert!(weighted.0 < weighted.1);
        Ok(())
    }

    #[test]
    fn layers_hidden_by_the_pipeline_count_in_full() -> Result<()> {
        // The back half of a block here loads while its front half is computed.
        let front = Facts { layers: Layers::new(0, 20), ..facts(32, 1, 4) };
        let back = Facts { layers: Layers::new(20, 40), ..facts(32, 1, 4) };
        let (flat, weighted) = classes(&front, &back)?;
        assert_eq!(flat.0, flat.1);
        assert!(weighted.0 > weighted.1);
        Ok(())
    }

    #[test]
    fn context_and_nothing_else_sets_the_cost() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        let many = Facts { uses: 9, ..facts(32, 1, 4) };
        assert!((Flat.terms(&many, &cost).cost - 0.042).abs() < 1e-12);
        Ok(())
    }
}
