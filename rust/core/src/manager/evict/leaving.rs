//! Copies that leave a tier: evicted, but valid until the write-back that reads them has ended.
//!
//! Their block is no longer resident on the tier, and their slots may be promised to a new holder,
//! which awaits the store; nothing takes a promised slot back. Until then a request that finds the
//! block reclaims them, without a copy.
//! Invariant: a leaving copy is in flight one tier down, by the store that still reads it. Cost:
//! O(moves of the block).

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, MoveId, Slot, TierId};
use crate::tier::ResidencyState;

use crate::manager::Manager;
use crate::manager::request::matching::residency_scan::MissingBlock;
use crate::transfer::End;
use crate::transfer::Leaves;

/// The stores that read a leaving block, with their slots; with layer slots one per layer.
type Leaving = SmallVec<[(MoveId, Leaves); 1]>;

impl Manager {
    /// The leaving copies of a block on a tier, the lowest layers first; without those of layers
    /// that are resident again in other slots.
    pub(crate) fn leaving(&self, tier: TierId, block: BlockId) -> Leaving {
        let mut leaving = Leaving::new();
        // Nothing is written below the last tier, so no copy is ever leaving it.
        if tier == self.tiers.last() {
            return leaving;
        }
        let have = self.residency(tier, block).have;
        for &id in self.arrival(tier + 1, block).map_or(&[][..], |arrival| &arrival.moves) {
            // A store's end may remove it before its arrival is settled.
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

    /// The layers of a block that can be read on a tier with its leaving copies; `None` if they do
    /// not form one range with those that are resident.
    pub(crate) fn valid_with(
        &self,
        tier: TierId,
        block: BlockId,
        leaving: &Leaving,
    ) -> Option<Layers> {
        let here = self.residency(tier, block);
        // Layers that arrive, or that cannot be read, do not join with those that leave.
        if leaving.is_empty()
            || !matches!(here.state, ResidencyState::Absent | ResidencyState::Resident)
        {
            return None;
        }
        let join = |have: Layers, (_, leaves): &(MoveId, Leaves)| have.join(leaves.held);
        leaving.iter().try_fold(here.have, join)
    }

    /// The slot of a leaving layer.
    pub(crate) fn leaving_slot(leaving: &Leaving, layer: u16) -> Option<Slot> {
        let of = leaving.iter().find(|(_, leaves)| leaves.held.contains(layer));
        of.map(|(_, leaves)| leaves.slot)
    }

    /// Whether a block leaves the first tier and can be fully resident there again at once.
    pub(crate) fn can_reclaim(&self, block: BlockId) -> bool {
        let leaving = self.leaving(0, block);
        // A slot with a new holder would be overwritten once the store has ended.
        let unpromised = |(id, leaves): &(MoveId, Leaves)| {
            self.moves[*id].from == End::Leaving && self.blocks.space(0).is_unclaimed(leaves.slot)
        };
        self.valid_with(0, block, &leaving) == Some(self.all_layers())
            && leaving.iter().all(unpromised)
    }

    /// Keeps the slots that are to be reclaimed from being promised while room is made, or ends
    /// that.
    pub(crate) fn withhold(&mut self, missing: &[MissingBlock], withheld: bool) {
        for miss in missing.iter().filter(|miss| miss.reclaim) {
            for (_, leaves) in self.leaving(0, miss.block) {
                self.blocks.withhold(0, leaves.slot, withheld);
            }
        }
    }

    /// Reclaims a block that leaves the first tier. Its stores go on, as those that write ahead do.
    pub(crate) fn reclaim(&mut self, block: BlockId) {
        for (id, leaves) in self.leaving(0, block) {
            // It was withheld from grants, so nothing else has it.
            self.blocks.withhold(0, leaves.slot, false);
            self.blocks.undrain(0, leaves.slot);
            let flight = self.moves.get_mut(id).expect("in flight");
            (flight.from, flight.leaves) = (End::Here, None);
            self.make_resident(block, leaves);
        }
    }

    /// Makes a leaving copy resident again in its slot; the store still reads it.
    pub(crate) fn make_resident(&mut self, block: BlockId, leaves: Leaves) {
        let Leaves { tier, slot, held } = leaves;
        self.blocks.restore(tier, block, slot, held);
        self.residency_changed(tier, block);
    }
}
