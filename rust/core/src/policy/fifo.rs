//! `fifo`: what came to the tier first leaves first.
//!
//! Invariant: a block's place is the request that brought it; uses do not change it. Cost:
//! constant; 8 bytes per block.

use std::ops::Range;

use super::{Facts, Order, Policy, Seen, Terms, memory::Memory};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;

/// First in, first out.
#[derive(Debug, Default)]
pub(super) struct Fifo {
    brought: Memory<u64>,
}

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

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
        self.brought.get(facts.id)
    }

    fn watches(&self) -> bool {
        true
    }

    fn deepens(&self, blocks: Range<BlockId>, alike: bool) -> bool {
        self.brought.ends_highest(blocks, alike, |brought| brought)
    }

    fn arrived(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        self.brought.set(seen.facts.id, seen.request);
        Vec::new()
    }

    /// The number of the request that brought it.
    #[expect(clippy::cast_precision_loss, reason = "an explanation needs no more than 53 bits")]
    fn value(&self, facts: &Facts, _cost: f64, _idle: Nanos) -> f64 {
        self.brought.get(facts.id) as f64
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::Shelf;

    #[test]
    fn uses_do_not_help() {
        let mut shelf = Shelf::new("fifo", 3);
        shelf.request(&[1]);
        shelf.request(&[2]);
        shelf.request(&[3]);
        shelf.request(&[1]);
        assert_eq!(shelf.request(&[4]), [1]);
        assert_eq!(shelf.request(&[1]), [2]);
    }
}
