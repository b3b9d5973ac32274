//! Where a block stands, changed in one place, so that clean copies are counted.
//!
//! A copy is clean if its layers stand below too, or, on the last tier, above. Nothing is kept per
//! block: a change compares what was clean before with what is now. Invariant: residencies change
//! nowhere else, but for those of new blocks, which stand nowhere else. Cost: O(1) where a block
//! stands on one tier alone, O(tiers²) otherwise.

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, Slot, TierId};
use crate::tier::{Residency, State};

use super::Manager;

/// The layers of a block that stand on each tier.
type Standings = SmallVec<[Layers; 4]>;

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
        self.covered(tier, &self.standings(block))
    }

    /// The layers of a block that stand on a tier.
    fn standing(&self, tier: TierId, block: BlockId) -> Layers {
        let here = self.residency(tier, block);
        if here.state == State::Resident { here.have } else { Layers::NONE }
    }

    fn standings(&self, block: BlockId) -> Standings {
        (0..self.tiers.len()).map(|tier| self.standing(tier, block)).collect()
    }

    /// Whether something stands on a tier, and all of it on those that make it clean.
    fn covered(&self, tier: TierId, stands: &Standings) -> bool {
        let others = if tier == self.last() { 0..tier } else { tier + 1..stands.len() };
        let left = stands[others].iter().try_fold(stands[tier], |left, &at| left.without(at));
        !stands[tier].is_empty() && left.is_some_and(Layers::is_empty)
    }

    /// Layers `stood` of a block were on a tier until now.
    fn recount(&mut self, tier: TierId, block: BlockId, stood: Layers) {
        let all = self.all_layers();
        let (mut whole, mut parted) = (0_u64, !stood.is_empty() && stood != all);
        for at in 0..self.tiers.len() {
            let stands = self.standing(at, block);
            whole |= u64::from(stands == all) << at;
            parted |= !stands.is_empty() && stands != all;
        }
        if parted {
            self.recount_parts(tier, block, stood);
            return;
        }
        let (bit, last) = (1 << tier, self.last());
        let before = if stood == all { whole | bit } else { whole & !bit };
        if before == whole {
            return;
        }
        // A whole copy is clean if there is another one below, or, on the last tier, above.
        let clean = |copies: u64, at: TierId| {
            let others = if at == last { copies & !(1 << at) } else { copies >> at >> 1 };
            copies >> at & 1 == 1 && others > 0
        };
        for at in 0..=last {
            let stats = self.meter.tier(at);
            stats.clean =
                stats.clean + u64::from(clean(whole, at)) - u64::from(clean(before, at));
        }
    }

    fn recount_parts(&mut self, tier: TierId, block: BlockId, stood: Layers) {
        let now = self.standings(block);
        let mut before = now.clone();
        before[tier] = stood;
        for at in 0..now.len() {
            let (was, is) = (self.covered(at, &before), self.covered(at, &now));
            let stats = self.meter.tier(at);
            stats.clean = stats.clean + u64::from(is) - u64::from(was);
        }
    }
}
