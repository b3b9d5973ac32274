//! Where a block stands, changed in one place, so that clean copies are counted.
//!
//! A copy is clean if its layers stand below too, or, on the last tier, above. Nothing is kept per
//! block: a change compares what was clean before with what is now. Invariant: residencies change
//! nowhere else, but for those of new blocks, which stand nowhere else. Cost: O(1) where a block
//! stands on one tier alone, O(tiers²) otherwise.

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, TierId};
use crate::tier::{Residency, State};

use crate::manager::Manager;

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
            self.tiers[tier].residency.change(block, what);
            return;
        }
        let stood = self.standing(tier, block);
        self.tiers[tier].residency.change(block, what);
        self.recount(tier, block, stood);
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
        } else {
            let others = whole & !(1 << tier);
            self.count_clean(others | u64::from(stood == all) << tier, whole, 1);
        }
    }

    /// All layers of each of these blocks stand on a tier now, or none do; until now it was `stood`,
    /// the contrary. They are known to stand whole on another tier, if one is named.
    pub(super) fn recount_run(
        &mut self,
        tier: TierId,
        blocks: &Range<BlockId>,
        stood: Layers,
        known: Option<TierId>,
    ) {
        let mut others = 0_u64;
        for at in (0..self.tiers.len()).filter(|&at| at != tier) {
            if known == Some(at) || self.tiers[at].residency.all_whole(blocks.clone()) {
                others |= 1 << at;
            } else if !self.tiers[at].residency.none_present(blocks.clone()) {
                for block in blocks.clone() {
                    self.recount(tier, block, stood);
                }
                return;
            }
        }
        let (with, without) = (others | 1 << tier, others);
        let (before, now) = if stood.is_empty() { (without, with) } else { (with, without) };
        self.count_clean(before, now, u64::from(blocks.end - blocks.start));
    }

    /// So many blocks stood whole on the tiers of these bits, and do now. A whole copy is clean if
    /// there is another one below, or, on the last tier, above.
    fn count_clean(&mut self, before: u64, now: u64, blocks: u64) {
        let last = self.last();
        let clean = |copies: u64, at: TierId| {
            let others = if at == last { copies & !(1 << at) } else { copies >> at >> 1 };
            u64::from(copies >> at & 1 == 1 && others > 0) * blocks
        };
        for at in 0..=last {
            let stats = self.meter.tier(at);
            stats.clean = stats.clean + clean(now, at) - clean(before, at);
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
