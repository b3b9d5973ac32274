//! `lfu`: what was used least often leaves first, the least recently used of those.
//!
//! Invariant: a class is a number of uses; they are forgotten when the last copy goes. Cost:
//! constant.

use std::ops::Range;

use super::{Facts, Order, Policy, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;

/// Least frequently used.
#[derive(Debug)]
pub(super) struct Lfu;

impl Policy for Lfu {
    fn name(&self) -> &'static str {
        "lfu"
    }

    fn deepens(&self, _blocks: Range<BlockId>, alike: bool) -> bool {
        alike
    }

    fn terms(&self, facts: &Facts, _cost: &CostModel) -> Terms {
        Terms { uses: facts.uses, cost: f64::from(facts.uses), ..Terms::NONE }
    }

    fn order(&self) -> Order {
        Order::Rank
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        u64::from(facts.uses)
    }

    /// The number of uses.
    fn value(&self, _facts: &Facts, cost: f64, _idle: Nanos) -> f64 {
        cost
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::Shelf;

    #[test]
    fn what_is_used_often_stays_however_old() {
        let mut shelf = Shelf::new("lfu", 3);
        for block in [1, 1, 1, 2, 3, 3] {
            shelf.request(&[block]);
        }
        let victims: Vec<_> = (4..8).flat_map(|block| shelf.request(&[block])).collect();
        assert_eq!(victims, [2, 4, 5, 6]);
    }
}
