//! `weighted`: `layer_weight * position_weight * base_cost / idle`, the source document's formula.
//!
//! Invariant: the layer weight of a whole block is the sum over its resident layers, so a block
//! without some of its layers costs less. Cost: constant.

use super::{Facts, Needs, Policy, Terms};
use crate::cost::{CostModel, layer_weight, layers_weight, position_weight};

/// Layer, position and context.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weighted;

impl Policy for Weighted {
    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms {
        let Facts { layers, model_layers, departure, .. } = *facts;
        let base = facts.price_or(cost.worth(facts.context));
        let layer_weight = match facts.layer {
            // With layer slots a single layer leaves at a time.
            Some(layer) => layer_weight(layer, model_layers, departure),
            None => layers_weight(layers, model_layers, departure),
        };
        let position_weight = position_weight(facts.block, facts.session_blocks);
        let cost = layer_weight * position_weight * base;
        Terms { base, layer_weight, position_weight, uses: 1, cost }
    }

    fn needs(&self) -> Needs {
        Needs::SESSION_BLOCKS.and(Needs::COST)
    }
}

#[cfg(test)]
mod tests {
    use super::Weighted;
    use crate::block::{Departure, Layers};
    use crate::cost::CostModel;
    use crate::error::Result;
    use crate::policy::sample::{evict_all, facts, layer};
    use crate::policy::{Facts, Policy};

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * b.abs()
    }

    /// Two layers, 64 tokens in two blocks of 32: (block, layer) and its cost.
    const EXAMPLE: [(u32, u16, f64); 4] =
        [(0, 0, 0.0075), (0, 1, 0.003_75), (1, 0, 0.047), (1, 1, 0.0235)];

    #[test]
    fn the_worked_example_has_the_documents_costs() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        for (block, index, expected) in EXAMPLE {
            let terms = Weighted.terms(&layer(index, 2, block, 2), &cost);
            assert!(close(terms.cost, expected), "{block} {index}: {}", terms.cost);
            assert!(close(terms.layer_weight, if index == 0 { 1.0 } else { 0.5 }));
            assert!(close(terms.position_weight, if block == 0 { 0.5 } else { 1.0 }));
        }
        Ok(())
    }

    #[test]
    fn at_equal_idle_time_the_example_goes_by_ascending_cost() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        let victims = evict_all(&Weighted, &cost, 2, &[vec![0; 2]], Departure::Demote, 50);
        assert_eq!(victims, [(1, 0), (0, 0), (1, 1), (0, 1)]);
        Ok(())
    }

    #[test]
    fn a_back_layer_goes_before_a_front_layer_of_the_same_block() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        for block in 0..4 {
            let class = |index| Weighted.class(&layer(index, 40, block, 4), &cost);
            assert!((1..40).all(|index| class(index) < class(index - 1)));
        }
        Ok(())
    }

    #[test]
    fn a_leading_block_goes_before_a_trailing_one_of_the_same_layer() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        for index in 0..40 {
            let class = |block| Weighted.class(&layer(index, 40, block, 4), &cost);
            assert!((1..4).all(|block| class(block - 1) < class(block)));
        }
        Ok(())
    }

    #[test]
    fn layer_0_is_kept_longest_in_every_block() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        let victims = evict_all(&Weighted, &cost, 40, &[vec![0; 4]], Departure::Demote, 50);
        for id in 0..4 {
            let left: Vec<u16> =
                victims.iter().filter(|victim| victim.1 == id).map(|victim| victim.0).collect();
            assert_eq!(left, (0..40).rev().collect::<Vec<u16>>());
        }
        assert_eq!(victims.first(), Some(&(39, 0)));
        Ok(())
    }

    #[test]
    fn trailing_blocks_are_kept_longest_in_every_layer() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        let victims = evict_all(&Weighted, &cost, 40, &[vec![0; 4]], Departure::Demote, 50);
        for index in 0..40 {
            let left: Vec<u32> =
                victims.iter().filter(|victim| victim.0 == index).map(|victim| victim.1).collect();
            assert_eq!(left, [0, 1, 2, 3]);
        }
        assert_eq!(victims.last(), Some(&(0, 3)));
        Ok(())
    }

    /// The product does not clear a layer before the next, unlike `checkerboard`.
    #[test]
    fn the_product_mixes_layers() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        let cost_of = |index, block| Weighted.terms(&layer(index, 40, block, 4), &cost).cost;
        assert!(cost_of(38, 0) < cost_of(39, 1));
        let cells = || (0..40u16).flat_map(|index| (0..4u32).map(move |block| (index, block)));
        let wrong = cells()
            .flat_map(|a| cells().map(move |b| (a, b)))
            .filter(|((back, i), (front, j))| {
                back > front && cost_of(*back, *i) > cost_of(*front, *j)
            })
            .count();
        assert_eq!(wrong, 3647);
        Ok(())
    }

    #[test]
    fn a_whole_block_costs_what_its_resident_layers_cost() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        for departure in [Departure::Demote, Departure::Drop] {
            let whole = Facts { layers: Layers::new(3, 30), departure, ..facts(64, 2, 4) };
            let single = |index| Facts { layer: Some(index), ..whole };
            let sum: f64 = (3..30).map(|index| Weighted.terms(&single(index), &cost).cost).sum();
            assert!(close(Weighted.terms(&whole, &cost).cost, sum));
        }
        Ok(())
    }
}
