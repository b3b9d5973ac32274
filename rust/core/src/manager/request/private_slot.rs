//! Slots that a lease holds for itself: room to compute into, duplicates, transit.
//!
//! Invariant: an own slot lives while a lease refers to it or a move reads or writes it, and then
//! goes back to its tier. Room that only its lease knows of is a plain number and becomes an own slot
//! when somebody else is to refer to it. Cost: O(1), with layer slots O(layers).

use crate::arrival::MoveIds;
use crate::block::{Layers, LeaseId, NO_SLOT, Slot, TierId};
use crate::tier::Owner;

use crate::manager::Manager;
use crate::manager::kinds::PrivateSlotId;

/// A slot, or with layer slots a row of them, outside the trie.
#[derive(Clone, Copy, Debug)]
pub(in crate::manager) struct PrivateSlot {
    pub(in crate::manager) tier: TierId,
    pub(in crate::manager) slot: u32,
    pub(in crate::manager) layers: Layers,
    pub(in crate::manager) refs: u32,
    pub(in crate::manager) busy: u32,
}

/// A slot behind a lease's path, to be written next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::manager) enum OpenSlot {
    /// A slot of the first tier for all layers of a block, which nobody else knows of.
    Plain(Slot),
    Private(PrivateSlotId),
}

impl OpenSlot {
    pub(in crate::manager) fn plain(self) -> Option<Slot> {
        match self {
            Self::Plain(slot) => Some(slot),
            Self::Private(_) => None,
        }
    }

    pub(in crate::manager) fn private(self) -> Option<PrivateSlotId> {
        match self {
            Self::Plain(_) => None,
            Self::Private(private) => Some(private),
        }
    }
}

impl Manager {
    /// Takes room for `layers` of a block; the caller has made it.
    pub(in crate::manager) fn new_private(
        &mut self,
        tier: TierId,
        layers: Layers,
    ) -> PrivateSlotId {
        let slot = if self.tiers[tier].spec.owner == Owner::Engine {
            NO_SLOT
        } else {
            self.blocks.take_slots(tier, NO_SLOT, layers)
        };
        self.private_slots.insert(PrivateSlot { tier, slot, layers, refs: 1, busy: 0 })
    }

    /// Takes room on the first tier for `count` whole blocks.
    pub(in crate::manager) fn new_open_slots(&mut self, count: usize) -> Vec<OpenSlot> {
        let spec = &self.tiers[0].spec;
        if spec.layer_slots || spec.owner == Owner::Engine {
            let layers = self.all_layers();
            return (0..count).map(|_| OpenSlot::Private(self.new_private(0, layers))).collect();
        }
        self.blocks.take_open(count).map(OpenSlot::Plain).collect()
    }

    /// An open slot as one that others may refer to.
    pub(in crate::manager) fn as_private(&mut self, open: OpenSlot) -> PrivateSlotId {
        match open {
            OpenSlot::Plain(slot) => {
                let layers = self.all_layers();
                self.private_slots.insert(PrivateSlot { tier: 0, slot, layers, refs: 1, busy: 0 })
            }
            OpenSlot::Private(private) => private,
        }
    }

    /// The same for one that stays the lease's, by its place among those.
    pub(in crate::manager) fn share_open(&mut self, id: LeaseId, at: usize) -> PrivateSlotId {
        let private = self.as_private(self.leases[&id].open[at]);
        self.lease_mut(id).open[at] = OpenSlot::Private(private);
        private
    }

    /// The slot of one layer of an open slot.
    pub(in crate::manager) fn open_slot(&self, open: OpenSlot, layer: u16) -> Slot {
        match open {
            OpenSlot::Plain(slot) => slot,
            OpenSlot::Private(private) => self.private_slot(&self.private_slots[private], layer),
        }
    }

    /// The stores that must end before an open slot may be written.
    pub(in crate::manager) fn open_slot_waits(&self, open: OpenSlot) -> MoveIds {
        match open {
            OpenSlot::Plain(slot) => self.blocks.space(0).drained_by(slot).into_iter().collect(),
            OpenSlot::Private(private) => self.private_waits(private),
        }
    }

    /// A lease lets go of an open slot.
    pub(in crate::manager) fn close_open(&mut self, open: OpenSlot) {
        match open {
            OpenSlot::Plain(slot) => self.blocks.give_slot(0, slot),
            OpenSlot::Private(private) => self.unref_private(private),
        }
    }

    /// The slot of one layer of an own slot.
    pub(in crate::manager) fn private_slot(&self, private: &PrivateSlot, layer: u16) -> Slot {
        self.blocks.layer_slot(private.tier, private.slot, layer)
    }

    /// The stores that must end before an own slot may be written.
    pub(in crate::manager) fn private_waits(&self, id: PrivateSlotId) -> MoveIds {
        let private = &self.private_slots[id];
        if private.slot == NO_SLOT || self.tiers[private.tier].spec.owner == Owner::Engine {
            return MoveIds::new();
        }
        let space = &self.blocks.space(private.tier);
        if !self.tiers[private.tier].spec.layer_slots {
            return space.drained_by(private.slot).into_iter().collect();
        }
        let mut waits: MoveIds =
            space.row(private.slot).iter().filter_map(|&slot| space.drained_by(slot)).collect();
        waits.sort_unstable();
        waits
    }

    /// A lease lets go of an own slot.
    pub(in crate::manager) fn unref_private(&mut self, id: PrivateSlotId) {
        let private = self.private_slots.get_mut(id).expect("a living own slot");
        private.refs -= 1;
        if private.refs == 0 && private.busy > 0 && private.slot == NO_SLOT {
            self.cancel_unnamed(id);
        } else {
            self.end_private(id);
        }
    }

    /// A move that read or wrote an own slot has ended.
    pub(in crate::manager) fn unbusy_private(&mut self, id: PrivateSlotId) {
        let private = self.private_slots.get_mut(id).expect("a living own slot");
        private.busy -= 1;
        self.end_private(id);
    }

    fn end_private(&mut self, id: PrivateSlotId) {
        let private = self.private_slots[id];
        if private.refs > 0 || private.busy > 0 {
            return;
        }
        self.private_slots.remove(id);
        if self.tiers[private.tier].spec.owner != Owner::Engine && private.slot != NO_SLOT {
            self.blocks.give_slots(private.tier, private.slot, private.layers, true);
        }
    }
}
