//! Copies that leave a tier: chosen, and valid until the store that reads them has ended.
//!
//! Their block stands on the tier no more, and its slots may be promised to somebody, who awaits the
//! store. As long as nobody was promised them a request that finds the block takes them back.
//! Invariant: what leaves is on its way one tier down, by the store that still reads it. Cost: O(moves
//! of the block).

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, MoveId, Slot, TierId};
use crate::tier::State;

use crate::manager::Manager;
use crate::manager::kinds::End;
use crate::manager::moves::in_flight::Leaves;
use crate::manager::request::residency_scan::MissingBlock;

/// What leaves a tier, and by which stores; with layer slots one per layer.
type Leaving = SmallVec<[(MoveId, Leaves); 1]>;

impl Manager {
    /// What leaves a tier of a block, the lowest layers first.
    pub(in crate::manager) fn leaving(&self, tier: TierId, block: BlockId) -> Leaving {
        let mut leaving = Leaving::new();
        if tier == self.last() {
            return leaving;
        }
        for &id in self.arrival(tier + 1, block).map_or(&[][..], |arrival| &arrival.moves) {
            let Some(flight) = self.moves.get(id) else { continue };
            if let Some(leaves) =
                flight.leaves.filter(|leaves| leaves.tier == tier && !flight.failed)
            {
                leaving.push((id, leaves));
            }
        }
        leaving.sort_unstable_by_key(|(_, leaves)| leaves.held);
        leaving
    }

    /// What leaves a tier of a block, if it can be read with what stands there: the layers that are
    /// valid with it.
    pub(in crate::manager) fn valid_with(
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
    pub(in crate::manager) fn leaving_slot(leaving: &Leaving, layer: u16) -> Option<Slot> {
        let of = leaving.iter().find(|(_, leaves)| leaves.held.contains(layer));
        of.map(|(_, leaves)| leaves.slot)
    }

    /// Whether a block leaves the first tier, and can stand there whole again at once.
    pub(in crate::manager) fn can_stay(&self, block: BlockId) -> bool {
        let leaving = self.leaving(0, block);
        let unpromised = |(id, leaves): &(MoveId, Leaves)| {
            self.moves[*id].from == End::Leaving && self.blocks.space(0).is_idle(leaves.slot)
        };
        self.valid_with(0, block, &leaving) == Some(self.all_layers())
            && leaving.iter().all(unpromised)
    }

    /// Keeps the slots of what is to stay from being promised meanwhile, or lets go of them again.
    pub(in crate::manager) fn withhold(&mut self, missing: &[MissingBlock], withheld: bool) {
        for miss in missing.iter().filter(|miss| miss.stays) {
            for (_, leaves) in self.leaving(0, miss.block) {
                self.blocks.withhold(0, leaves.slot, withheld);
            }
        }
    }

    /// A block that leaves the first tier stands there again. The stores go on, as those of a copy
    /// that is written ahead do.
    pub(in crate::manager) fn stay(&mut self, block: BlockId) {
        for (id, leaves) in self.leaving(0, block) {
            self.blocks.undrain(0, leaves.slot);
            let flight = self.moves.get_mut(id).expect("under way");
            (flight.from, flight.leaves) = (End::Here, None);
            self.stand_again(block, leaves);
        }
    }

    /// A copy stands on its tier again in the slot that it was leaving; the store still reads it.
    pub(in crate::manager) fn stand_again(&mut self, block: BlockId, leaves: Leaves) {
        let Leaves { tier, slot, held } = leaves;
        self.blocks.restore(tier, block, slot, held);
        self.residency_changed(tier, block);
    }
}
