//! Counts of clean copies. A tier can evict clean copies at once, without a write-back or a loss.
//!
//! A copy is clean if its layers are also resident below or, on the last tier, above. There is no
//! flag per block: each verb adds the difference between before and after. Invariant: `clean` is
//! exact after every verb. Cost: O(tiers) for a run or a block with all layers or none, else
//! O(tiers²).

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, TierId};
use crate::tier::ResidencyState;

use super::Blocks;

/// Resident layers of a block, by tier.
type PerTier = SmallVec<[Layers; 4]>;

impl<T: Copy + PartialEq + Default> Blocks<T> {
    /// Number of clean copies on a tier.
    #[must_use]
    pub(crate) fn clean_copies(&self, tier: TierId) -> u64 {
        self.tiers[tier].clean
    }

    /// Whether a tier can evict its copy at once without a loss.
    #[must_use]
    pub(crate) fn is_clean(&self, tier: TierId, block: BlockId) -> bool {
        Self::covered(tier, &self.per_tier(block))
    }

    /// Resident layers of a block on a tier.
    #[inline]
    pub(super) fn resident_layers(&self, tier: TierId, block: BlockId) -> Layers {
        let residency = self.places[tier].table.get(block);
        if residency.state == ResidencyState::Resident { residency.have } else { Layers::NONE }
    }

    fn per_tier(&self, block: BlockId) -> PerTier {
        (0..self.tiers.len()).map(|tier| self.resident_layers(tier, block)).collect()
    }

    /// Whether a tier holds layers, all of them also held by the tiers below (on the last tier:
    /// above).
    fn covered(tier: TierId, resident: &PerTier) -> bool {
        // The last tier has no tier below.
        let others = if tier + 1 == resident.len() { 0..tier } else { tier + 1..resident.len() };
        // Ranges may be covered piecewise by several tiers.
        let left = resident[others].iter().try_fold(resident[tier], |left, &at| left.without(at));
        !resident[tier].is_empty() && left.is_some_and(Layers::is_empty)
    }

    /// Updates the counts after a change of a block's resident layers on a tier from `before`.
    pub(super) fn recount(&mut self, tier: TierId, block: BlockId, before: Layers) {
        let (mut full, mut partial) = (0_u64, !before.is_empty() && before != self.all);
        for at in 0..self.tiers.len() {
            let resident = self.resident_layers(at, block);
            full |= u64::from(resident == self.all) << at;
            partial |= !resident.is_empty() && resident != self.all;
        }
        // Bitmaps of tiers are enough for full copies. Partial copies are compared by layer range.
        if partial {
            self.recount_partial(tier, block, before);
        } else {
            let others = full & !(1 << tier);
            self.count_clean(others | u64::from(before == self.all) << tier, full, 1);
        }
    }

    /// Updates the counts after a change of all blocks of a run on a tier, from `before` (all
    /// layers or none) to the opposite. `known`: a tier known to have all of them fully resident,
    /// if any.
    pub(super) fn recount_run(
        &mut self,
        tier: TierId,
        blocks: &Range<BlockId>,
        before: Layers,
        known: Option<TierId>,
    ) {
        let mut others = 0_u64;
        for at in (0..self.tiers.len()).filter(|&at| at != tier) {
            if known == Some(at) || self.places[at].table.all_full(blocks.clone()) {
                others |= 1 << at;
            } else if !self.places[at].table.none_present(blocks.clone()) {
                // The blocks differ on this tier, so count them individually.
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

    /// Updates the counts for `blocks` blocks with full copies on the tiers of bitmap `before`, and
    /// now on the tiers of `now`.
    fn count_clean(&mut self, before: u64, now: u64, blocks: u64) {
        let last = self.tiers.len() - 1;
        let clean = |copies: u64, at: TierId| {
            // A copy below makes it clean. On the last tier a copy above does.
            let others = if at == last { copies & !(1 << at) } else { copies >> at >> 1 };
            u64::from(copies >> at & 1 == 1 && others > 0) * blocks
        };
        for (at, tier) in self.tiers.iter_mut().enumerate() {
            tier.clean = tier.clean + clean(now, at) - clean(before, at);
        }
    }

    fn recount_partial(&mut self, tier: TierId, block: BlockId, before: Layers) {
        let now = self.per_tier(block);
        let mut earlier = now.clone();
        earlier[tier] = before;
        for at in 0..now.len() {
            let (was, is) = (Self::covered(at, &earlier), Self::covered(at, &now));
            let count = &mut self.tiers[at].clean;
            *count = *count + u64::from(is) - u64::from(was);
        }
    }
}
