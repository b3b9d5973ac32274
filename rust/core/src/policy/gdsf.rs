//! `gdsf`: greedy dual size frequency. A block's rank is `clock + uses * cost` as of its last use;
//! the clock is the highest rank evicted so far.
//!
//! Invariant: the clock never falls, so an unused block sinks below newcomers. All blocks are
//! of one size; uses start anew when the last copy is evicted. Cost: constant; 8 bytes per block.

use super::block_map::BlockMap;
use super::{Event, Facts, Needs, Order, Policy, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;

/// Rank one in the units of ranks: 2^-20, so that the clock lasts for 2^44 turnovers.
const ONE: f64 = (1 << 20) as f64;

/// Greedy dual size frequency.
#[derive(Debug, Default)]
pub(super) struct Gdsf {
    clock: u64,
    ranks: BlockMap<u64>,
}

impl Gdsf {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "never negative, and the cast saturates"
    )]
    /// Sets the rank as of this use.
    fn rank(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        let worth = (self.terms(event.facts, event.cost).cost * ONE).round() as u64;
        // The clock puts this use above those of equal cost before the latest evictions.
        self.ranks.set(event.facts.id, self.clock.saturating_add(worth));
        Vec::new()
    }
}

impl Policy for Gdsf {
    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms {
        let base = facts.price_or(cost.base(facts.context));
        Terms { base, uses: facts.uses, cost: f64::from(facts.uses) * base, ..Terms::NONE }
    }

    fn weighs_cost(&self) -> bool {
        true
    }

    fn order(&self) -> Order {
        Order::Rank
    }

    fn class(&self, _facts: &Facts, _cost: &CostModel) -> u64 {
        0
    }

    fn place(&self, facts: &Facts) -> u64 {
        self.ranks.get(facts.id)
    }

    fn needs(&self) -> Needs {
        Needs::EVENTS
    }

    fn on_resident(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        self.rank(event)
    }

    fn on_hit(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        self.rank(event)
    }

    fn on_evict(&mut self, id: BlockId, _tag: u64) -> Vec<BlockId> {
        // A hint may evict a block of a high rank early; the clock never falls all the same.
        self.clock = self.clock.max(self.ranks.take(id));
        Vec::new()
    }

    /// Its rank, in units of cost.
    #[expect(clippy::cast_precision_loss, reason = "an explanation needs no more than 53 bits")]
    fn value(&self, facts: &Facts, _cost: f64, _idle: Nanos) -> f64 {
        self.ranks.get(facts.id) as f64 / ONE
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::TestCache;

    #[test]
    fn the_clock_lets_old_favourites_sink() {
        let mut cache = TestCache::new("gdsf", 2);
        for block in [1, 1, 1, 2] {
            cache.request(&[block]);
        }
        // Ranks 3 and 1; each newcomer enters one above the last victim.
        let victims: Vec<_> = (3..7).flat_map(|block| cache.request(&[block])).collect();
        assert_eq!(victims, [2, 3, 1, 4]);
    }

    #[test]
    fn a_dear_block_outlives_a_cheap_one() {
        let mut cache = TestCache::new("gdsf", 4);
        cache.request(&[1, 2]);
        cache.request(&[8]);
        cache.request(&[9]);
        assert_eq!(cache.request(&[7]), [8]);
    }
}
