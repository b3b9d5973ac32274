//! `fifo`: first in, first out, per tier.
//!
//! Invariant: a block's place is the number of the request that made it resident. Hits do not
//! change it. Cost: constant. The index keeps 8 bytes per block.

use super::{Facts, Needs, Order, Policy, Terms};
use crate::cost::CostModel;
use crate::time::Nanos;

/// First in, first out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fifo;

impl Policy for Fifo {
    fn terms(&self, _facts: &Facts, _cost: &CostModel) -> Terms {
        Terms::NONE
    }

    fn order(&self) -> Order {
        Order::Rank
    }

    fn class(&self, _facts: &Facts, _cost: &CostModel) -> u64 {
        0
    }

    fn place(&self, facts: &Facts) -> u64 {
        facts.arrival
    }

    fn needs(&self) -> Needs {
        Needs::ARRIVAL
    }

    /// Number of the request that made the block resident.
    #[expect(clippy::cast_precision_loss, reason = "an explanation needs no more than 53 bits")]
    fn value(&self, facts: &Facts, _cost: f64, _idle: Nanos) -> f64 {
        facts.arrival as f64
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::TestCache;

    #[test]
    fn a_hit_changes_nothing() {
        let mut cache = TestCache::new("fifo", 3);
        cache.request(&[1]);
        cache.request(&[2]);
        cache.request(&[3]);
        cache.request(&[1]);
        assert_eq!(cache.request(&[4]), [1]);
        assert_eq!(cache.request(&[1]), [2]);
    }
}
