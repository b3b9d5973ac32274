//! `gdsf`: greedy dual size frequency. A block's rank is `clock + uses * cost` as of its last use;
//! the clock is the highest rank that has left.
//!
//! Invariant: the clock never falls, so what is not used sinks below what comes in. All blocks are
//! of one size; uses are forgotten when the last copy goes. Cost: constant; 8 bytes per block.

use std::ops::Range;

use super::memory::Memory;
use super::{Facts, Order, Policy, Seen, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;

/// Rank one in the units of ranks: 2^-20, so that the clock lasts for 2^44 turnovers.
const ONE: f64 = (1 << 20) as f64;

/// Greedy dual size frequency.
#[derive(Debug, Default)]
pub(super) struct Gdsf {
    clock: u64,
    ranks: Memory<u64>,
}

impl Gdsf {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "never negative, and the cast saturates"
    )]
    fn rank(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let worth = (self.terms(seen.facts, seen.cost).cost * ONE).round() as u64;
        self.ranks.set(seen.facts.id, self.clock.saturating_add(worth));
        Vec::new()
    }
}

impl Policy for Gdsf {
    fn name(&self) -> &'static str {
        "gdsf"
    }

    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms {
        let base = facts.price_or(cost.base(facts.context));
        Terms { base, uses: facts.uses, cost: f64::from(facts.uses) * base, ..Terms::NONE }
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

    fn watches(&self) -> bool {
        true
    }

    fn deepens(&self, blocks: Range<BlockId>, alike: bool) -> bool {
        self.ranks.ends_highest(blocks, alike, |rank| rank)
    }

    fn arrived(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        self.rank(seen)
    }

    fn touched(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        self.rank(seen)
    }

    fn left(&mut self, id: BlockId, _print: u64) -> Vec<BlockId> {
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
    use crate::policy::sample::Shelf;

    #[test]
    fn the_clock_lets_old_favourites_sink() {
        let mut shelf = Shelf::new("gdsf", 2);
        for block in [1, 1, 1, 2] {
            shelf.request(&[block]);
        }
        // Ranks 3 and 1; each newcomer enters one above the last victim.
        let victims: Vec<_> = (3..7).flat_map(|block| shelf.request(&[block])).collect();
        assert_eq!(victims, [2, 3, 1, 4]);
    }

    #[test]
    fn a_dear_block_outlives_a_cheap_one() {
        let mut shelf = Shelf::new("gdsf", 4);
        shelf.request(&[1, 2]);
        shelf.request(&[8]);
        shelf.request(&[9]);
        assert_eq!(shelf.request(&[7]), [8]);
    }
}
