//! Copies that leave a tier: chosen, and valid until the store that reads them has ended.
//!
//! Their block stands on the tier no more, and its slots may be promised to somebody, who awaits the
//! store. As long as nobody was promised them a request that finds the block takes them back.
//! Invariant: what leaves is on its way one tier down, by the store that still reads it. Cost: O(moves
//! of the block).

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, MoveId, NO_SLOT, Slot, TierId};
use crate::tier::State;

use super::Manager;
use super::moves::End;
use super::survey::Need;
use super::trips::Leaves;

/// What leaves a tier, and by which stores; with layer slots one per layer.
type Leaving = SmallVec<[(MoveId, Leaves); 1]>;

impl Manager {
    /// What leaves a tier of a block, the lowest layers first.
    pub(super) fn leaving(&self, tier: TierId, block: BlockId) -> Leaving {
        let mut leaving = Leaving::new();
        if tier == self.last() {
            return leaving;
        }
        for &id in self.arrival(tier + 1, block).map_or(&[][..], |arrival| &arrival.moves) {
            let Some(trip) = self.moves.get(id) else { continue };
            if let Some(leaves) = trip.leaves.filter(|leaves| leaves.tier == tier && !trip.failed) {
                leaving.push((id, leaves));
            }
        }
        leaving.sort_unstable_by_key(|(_, leaves)| leaves.held);
        leaving
    }

    /// What leaves a tier of a block, if it can be read with what stands there: the layers that are
    /// valid with it.
    pub(super) fn valid_with(
        &self,
        tier: TierId,
        block: BlockId,
        leaving: &Leaving,
    ) -> Option<Layers> {
        let here = self.residency(tier, block);
        if leaving.is_empty() || !matches!(here.state, State::Absent | State::Resident) {
            return None;
        }
        let join = |have: Layers, (_, leaves): &(MoveId, Leaves)| have.join(leaves.held);
        leaving.iter().try_fold(here.have, join)
    }

    /// The slot of a layer that leaves.
    pub(super) fn leaving_slot(leaving: &Leaving, layer: u16) -> Option<Slot> {
        let of = leaving.iter().find(|(_, leaves)| leaves.held.contains(layer));
        of.map(|(_, leaves)| leaves.slot)
    }

    /// Whether a block leaves the first tier, and can stand there whole again at once.
    pub(super) fn can_stay(&self, block: BlockId) -> bool {
        let leaving = self.leaving(0, block);
        let unpromised = |(id, leaves): &(MoveId, Leaves)| {
            self.moves[*id].from == End::Leaving && self.tiers[0].space.is_idle(leaves.slot)
        };
        self.valid_with(0, block, &leaving) == Some(self.all_layers())
            && leaving.iter().all(unpromised)
    }

    /// Keeps the slots of what is to stay from being promised meanwhile, or lets go of them again.
    pub(super) fn withhold(&mut self, needs: &[Need], withheld: bool) {
        for need in needs.iter().filter(|need| need.stays) {
            for (_, leaves) in self.leaving(0, need.block) {
                self.tiers[0].space.withhold(leaves.slot, withheld);
            }
        }
    }

    /// A block that leaves the first tier stands there again. The stores go on, as those of a copy
    /// that is written ahead do.
    pub(super) fn stay(&mut self, block: BlockId) {
        for (id, leaves) in self.leaving(0, block) {
            self.tiers[0].space.undrain(leaves.slot);
            let trip = self.moves.get_mut(id).expect("under way");
            (trip.from, trip.leaves) = (End::Here, None);
            self.stand_again(block, leaves);
        }
    }

    /// A copy stands on its tier again in the slot that it was leaving; the store still reads it.
    pub(super) fn stand_again(&mut self, block: BlockId, leaves: Leaves) {
        let Leaves { tier, slot, held } = leaves;
        let whole = !self.tiers[tier].spec.layer_slots;
        let here = self.residency(tier, block);
        let have = here.have.join(held).expect("it can return");
        let row = match (whole, here.slot) {
            (true, _) => slot,
            (false, NO_SLOT) => self.tiers[tier].space.new_row(),
            (false, row) => row,
        };
        if !whole {
            self.tiers[tier].space.set(row, held.lo, slot);
        }
        self.alter(tier, block, |here| {
            (here.slot, here.have, here.state) = (row, have, State::Resident);
            here.busy += 1;
        });
        self.presence_changed(tier, block);
    }
}
