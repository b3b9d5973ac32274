//! `fifo`: first in, first out, of the tier.
//!
//! Invariant: a block's place is the request that made it resident; hits do not change it. Cost:
//! constant; 8 bytes per block.

use super::{Event, Facts, Needs, Order, Policy, Terms, block_map::BlockMap};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;

/// First in, first out.
#[derive(Debug, Default)]
pub(super) struct Fifo {
    inserted: BlockMap<u64>,
}

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
        self.inserted.get(facts.id)
    }

    fn needs(&self) -> Needs {
        Needs::EVENTS
    }

    fn on_resident(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        self.inserted.set(event.facts.id, event.request);
        Vec::new()
    }

    /// Number of the request that made it resident.
    #[expect(clippy::cast_precision_loss, reason = "an explanation needs no more than 53 bits")]
    fn value(&self, facts: &Facts, _cost: f64, _idle: Nanos) -> f64 {
        self.inserted.get(facts.id) as f64
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
