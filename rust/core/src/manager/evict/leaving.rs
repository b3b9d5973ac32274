//! Leaving copies: evicted from a tier, but valid until their write-back ends.
//!
//! Their block is no longer resident on the tier. Their slots may be promised to a new holder,
//! which awaits the store. A promised slot is never taken back, but a request that finds the block
//! before the promise reclaims it without a copy. Invariant: a leaving copy is in flight one tier
//! down, by the store that reads it. Cost: O(moves of the block).

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, MoveId, Slot, TierId};
use crate::tier::ResidencyState;

use crate::manager::Manager;
use crate::manager::request::matching::residency_scan::MissingBlock;
use crate::transfer::End;
use crate::transfer::Leaves;

/// The stores that read a leaving block, with their slots. With layer slots, a store per layer.
type Leaving = SmallVec<[(MoveId, Leaves); 1]>;

impl Manager {
    /// The leaving copies of a block on a tier, the lowest layers first, without layers already
    /// resident again in different slots.
    pub(crate) fn leaving(&self, tier: TierId, block: BlockId) -> Leaving {
        let mut leaving = Leaving::new();
        // Nothing is written below the last tier, so it has no leaving copies.
        if tier == self.tiers.last() {
            return leaving;
        }
        let have = self.residency(tier, block).have;
        for &id in self.arrival(tier + 1, block).map_or(&[][..], |arrival| &arrival.moves) {
            // The end of a store may remove it before its arrival is settled.
            let Some(flight) = self.moves.get(id) else { continue };
            let stale = |leaves: &Leaves| flight.failed || !have.meet(leaves.held).is_empty();
            if let Some(leaves) =
                flight.leaves.filter(|leaves| leaves.tier == tier && !stale(leaves))
            {
                leaving.push((id, leaves));
            }
        }
        leaving.sort_unstable_by_key(|(_, leaves)| leaves.held);
        leaving
    }

    /// The layers of a block readable on a tier together with its leaving copies, or `None` if they
    /// do not form a single range.
    pub(crate) fn valid_with(
        &self,
        tier: TierId,
        block: BlockId,
        leaving: &Leaving,
    ) -> Option<Layers> {
        let residency = self.residency(tier, block);
        // Arriving or unreadable layers do not join with leaving layers.
        if leaving.is_empty()
            || !matches!(residency.state, ResidencyState::Absent | ResidencyState::Resident)
        {
            return None;
        }
        let join = |have: Layers, (_, leaves): &(MoveId, Leaves)| have.join(leaves.held);
        leaving.iter().try_fold(residency.have, join)
    }

    /// The slot of a leaving layer.
    pub(crate) fn leaving_slot(leaving: &Leaving, layer: u16) -> Option<Slot> {
        let of = leaving.iter().find(|(_, leaves)| leaves.held.contains(layer));
        of.map(|(_, leaves)| leaves.slot)
    }

    /// Whether a leaving block of the first tier can be fully resident there again at once.
    pub(crate) fn can_reclaim(&self, block: BlockId) -> bool {
        let leaving = self.leaving(0, block);
        // A slot with a new holder would be overwritten once the store has ended.
        let unpromised = |(id, leaves): &(MoveId, Leaves)| {
            self.moves[*id].from == End::Leaving && self.blocks.space(0).is_unclaimed(leaves.slot)
        };
        self.valid_with(0, block, &leaving) == Some(self.all_layers())
            && leaving.iter().all(unpromised)
    }

    /// Withholds the slots to be reclaimed from promises while room is made, or ends this.
    pub(crate) fn withhold(&mut self, missing: &[MissingBlock], withheld: bool) {
        for miss in missing.iter().filter(|miss| miss.reclaim) {
            for (_, leaves) in self.leaving(0, miss.block) {
                self.blocks.withhold(0, leaves.slot, withheld);
            }
        }
    }

    /// Reclaims a leaving block of the first tier. Its stores continue as write-ahead stores.
    pub(crate) fn reclaim(&mut self, block: BlockId) {
        for (id, leaves) in self.leaving(0, block) {
            // It was withheld from grants, so it has no new holder.
            self.blocks.withhold(0, leaves.slot, false);
            self.blocks.undrain(0, leaves.slot);
            let flight = self.moves.get_mut(id).expect("in flight");
            (flight.from, flight.leaves) = (End::Resident, None);
            self.make_resident(block, leaves);
        }
    }

    /// Makes a leaving copy resident again in its slot. The store still reads it.
    pub(crate) fn make_resident(&mut self, block: BlockId, leaves: Leaves) {
        let Leaves { tier, slot, held } = leaves;
        self.blocks.restore(tier, block, slot, held);
        self.residency_changed(tier, block);
    }
}
