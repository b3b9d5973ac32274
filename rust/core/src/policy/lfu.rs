//! `lfu`: the least frequently used block leaves first, then the least recently used.
//!
//! Invariant: a class is a number of uses. The number restarts when the last copy is evicted. Cost:
//! constant.

use super::{Facts, Order, Policy, Terms};
use crate::cost::CostModel;
use crate::time::Nanos;

/// Least frequently used.
#[derive(Debug)]
pub(super) struct Lfu;

impl Policy for Lfu {
    fn deepens(&self) -> bool {
        true
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
    use crate::policy::sample::TestCache;

    #[test]
    fn a_block_that_is_used_often_stays_however_old() {
        let mut cache = TestCache::new("lfu", 3);
        for block in [1, 1, 1, 2, 3, 3] {
            cache.request(&[block]);
        }
        let victims: Vec<_> = (4..8).flat_map(|block| cache.request(&[block])).collect();
        assert_eq!(victims, [2, 4, 5, 6]);
    }
}
