//! Counts of clean copies: those that can leave their tier at once, without a write and a loss.
//!
//! A copy is clean if its layers are resident below too or, on the last tier, above. No flag is kept
//! per block: a change compares what was clean before with what is now. Invariant: `clean` is the
//! number of clean copies after every verb. Cost: O(tiers) per block that is resident with all layers
//! or none, O(tiers²) otherwise, O(tiers) for a run.

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, TierId};
use crate::tier::State;

use super::Blocks;

/// The resident layers of a block on each tier.
type PerTier = SmallVec<[Layers; 4]>;

impl<T: Copy + PartialEq + Default> Blocks<T> {
    /// How many copies on a tier are clean.
    #[must_use]
    pub fn clean_copies(&self, tier: TierId) -> u64 {
        self.tiers[tier].clean
    }

    /// Whether a copy can leave a tier at once and without a loss.
    #[must_use]
    pub fn is_clean(&self, tier: TierId, block: BlockId) -> bool {
        self.covered(tier, &self.per_tier(block))
    }

    /// The layers of a block that are resident on a tier.
    pub(super) fn resident_layers(&self, tier: TierId, block: BlockId) -> Layers {
        let here = self.tiers[tier].table.get(block);
        if here.state == State::Resident { here.have } else { Layers::NONE }
    }

    fn per_tier(&self, block: BlockId) -> PerTier {
        (0..self.tiers.len()).map(|tier| self.resident_layers(tier, block)).collect()
    }

    /// Whether something is resident on a tier, and all of it on those that make it clean.
    fn covered(&self, tier: TierId, resident: &PerTier) -> bool {
        let others = if tier + 1 == resident.len() { 0..tier } else { tier + 1..resident.len() };
        let left = resident[others].iter().try_fold(resident[tier], |left, &at| left.without(at));
        !resident[tier].is_empty() && left.is_some_and(Layers::is_empty)
    }

    /// Counts a block again of which `before` was resident on a tier until now.
    pub(super) fn recount(&mut self, tier: TierId, block: BlockId, before: Layers) {
        let (mut whole, mut partial) = (0_u64, !before.is_empty() && before != self.all);
        for at in 0..self.tiers.len() {
            let resident = self.resident_layers(at, block);
            whole |= u64::from(resident == self.all) << at;
            partial |= !resident.is_empty() && resident != self.all;
        }
        // Bits of tiers tell whole copies apart; ranges of layers must be compared one by one.
        if partial {
            self.recount_partial(tier, block, before);
        } else {
            let others = whole & !(1 << tier);
            self.count_clean(others | u64::from(before == self.all) << tier, whole, 1);
        }
    }

    /// Counts a run again: all layers of its blocks are resident on a tier now and none were, or the
    /// contrary, as `before` says. A tier where all of them are whole may be named.
    pub(super) fn recount_run(
        &mut self,
        tier: TierId,
        blocks: &Range<BlockId>,
        before: Layers,
        known: Option<TierId>,
    ) {
        let mut others = 0_u64;
        for at in (0..self.tiers.len()).filter(|&at| at != tier) {
            if known == Some(at) || self.tiers[at].table.all_whole(blocks.clone()) {
                others |= 1 << at;
            } else if !self.tiers[at].table.none_present(blocks.clone()) {
                // On this tier the blocks differ.
                for block in blocks.clone() {
                    self.recount(tier, block, before);
                }
                return;
            }
        }
        let (with, without) = (others | 1 << tier, others);
        let (before, now) = if before.is_empty() { (without, with) } else { (with, without) };
        self.count_clean(before, now, u64::from(blocks.end - blocks.start));
    }

    /// Counts blocks that were whole on the tiers of the bits of `before`, and now are on those of
    /// `now`. A whole copy is clean if there is one below or, on the last tier, above.
    fn count_clean(&mut self, before: u64, now: u64, blocks: u64) {
        let last = self.tiers.len() - 1;
        let clean = |copies: u64, at: TierId| {
            let others = if at == last { copies & !(1 << at) } else { copies >> at >> 1 };
            u64::from(copies >> at & 1 == 1 && others > 0) * blocks
        };
        for (at, tier) in self.tiers.iter_mut().enumerate() {
            tier.clean = tier.clean + clean(now, at) - clean(before, at);
        }
    }

    fn recount_partial(&mut self, tier: TierId, block: BlockId, before: Layers) {
        let now = self.per_tier(block);
        let mut past = now.clone();
        past[tier] = before;
        for at in 0..now.len() {
            let (was, is) = (self.covered(at, &past), self.covered(at, &now));
            let count = &mut self.tiers[at].clean;
            *count = *count + u64::from(is) - u64::from(was);
        }
    }
}
