//! Where a block stands, changed in one place, so that clean copies are counted.
//!
//! A copy is clean if its layers stand below too, or, on the last tier, above. Nothing is kept per
//! block: a change compares what was clean before with what is now. Invariant: residencies change
//! nowhere else, but for those of new blocks, which stand nowhere else. Cost: O(1) where a block
//! stands on one tier alone, O(tiers²) otherwise.

use crate::block::{BlockId, Layers, Slot, TierId};
use crate::tier::{Residency, State};

use super::Manager;

impl Manager {
    /// Changes a block's residency on a tier.
    pub(super) fn alter(
        &mut self,
        tier: TierId,
        block: BlockId,
        what: impl FnOnce(&mut Residency),
    ) {
        if self.tiers.len() == 1 {
            self.tiers[tier].here.change(block, what);
            return;
        }
        let stood = self.standing(tier, block);
        self.tiers[tier].here.change(block, what);
        self.recount(tier, block, stood);
    }

    /// Takes a block off a tier where it is whole and quiet. Returns its slot.
    pub(super) fn clear(&mut self, tier: TierId, block: BlockId) -> Slot {
        let slot = self.tiers[tier].here.clear(block);
        if self.tiers.len() > 1 {
            self.recount(tier, block, self.all_layers());
        }
        slot
    }

    /// Whether a copy could leave a tier at once and without a loss.
    pub(super) fn clean(&self, tier: TierId, block: BlockId) -> bool {
        self.covered(tier, |tier| self.standing(tier, block))
    }

    /// The layers of a block that stand on a tier.
    fn standing(&self, tier: TierId, block: BlockId) -> Layers {
        let here = self.residency(tier, block);
        if here.state == State::Resident { here.have } else { Layers::NONE }
    }

    /// Whether something stands on a tier, and all of it on those that make it clean.
    fn covered(&self, tier: TierId, stands: impl Fn(TierId) -> Layers) -> bool {
        let mut others = if tier == self.last() { 0..tier } else { tier + 1..self.tiers.len() };
        let all = stands(tier);
        let left = others.try_fold(all, |left, other| left.without(stands(other)));
        !all.is_empty() && left.is_some_and(Layers::is_empty)
    }

    /// Layers `stood` of a block were on a tier until now.
    fn recount(&mut self, tier: TierId, block: BlockId, stood: Layers) {
        let others = || (0..self.tiers.len()).filter(|&other| other != tier);
        let alone = || others().all(|other| self.standing(other, block).is_empty());
        if self.standing(tier, block) == stood || alone() {
            return;
        }
        for at in 0..self.tiers.len() {
            let before = |other| if other == tier { stood } else { self.standing(other, block) };
            let (was, is) = (self.covered(at, before), self.clean(at, block));
            let stats = self.meter.tier(at);
            stats.clean = stats.clean + u64::from(is) - u64::from(was);
        }
    }
}
