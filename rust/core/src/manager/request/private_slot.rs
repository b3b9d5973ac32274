//! Slots that a lease holds for itself: room to compute into, duplicates, transit.
//!
//! Invariant: an own slot lives while a lease refers to it or a move reads or writes it, and then
//! goes back to its tier. Room that only its lease knows of is a plain number and becomes an own slot
//! when somebody else is to refer to it. Cost: O(1), with layer slots O(layers).

use crate::arrival::MoveIds;
use crate::block::{Layers, LeaseId, NO_SLOT, Slot, TierId};
use crate::tier::Owner;

use crate::manager::kinds::PrivateSlotId;
use crate::manager::{Manager, Tier};

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
            self.take_slots(tier, NO_SLOT, layers)
        };
        self.private_slots.insert(PrivateSlot { tier, slot, layers, refs: 1, busy: 0 })
    }

    /// Takes room on the first tier for `count` whole blocks.
    pub(in crate::manager) fn new_open_slots(&mut self, count: usize) -> Vec<OpenSlot> {
        let Tier { spec, space, .. } = &mut self.tiers[0];
        if spec.layer_slots || spec.owner == Owner::Engine {
            let layers = self.all_layers();
            return (0..count).map(|_| OpenSlot::Private(self.new_private(0, layers))).collect();
        }
        let mut open = Vec::with_capacity(count);
        open.extend(space.take_free(count).map(OpenSlot::Plain));
        let rest = open.len()..count;
        open.extend(rest.map(|_| OpenSlot::Plain(space.take().expect("room was made").slot)));
        open
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
            OpenSlot::Plain(slot) => self.tiers[0].space.drained_by(slot).into_iter().collect(),
            OpenSlot::Private(private) => self.private_waits(private),
        }
    }

    /// A lease lets go of an open slot.
    pub(in crate::manager) fn close_open(&mut self, open: OpenSlot) {
        match open {
            OpenSlot::Plain(slot) => self.tiers[0].space.give(slot),
            OpenSlot::Private(private) => self.unref_private(private),
        }
    }

    /// Takes slots for `layers` and returns the slot or the row, `into` if that exists already.
    pub(in crate::manager) fn take_slots(
        &mut self,
        tier: TierId,
        into: u32,
        layers: Layers,
    ) -> u32 {
        let layer_slots = self.tiers[tier].spec.layer_slots;
        let space = &mut self.tiers[tier].space;
        if !layer_slots {
            return if into == NO_SLOT { space.take().expect("room was made").slot } else { into };
        }
        let row = if into == NO_SLOT { space.new_row() } else { into };
        for layer in layers.iter() {
            let grant = space.take().expect("room was made");
            space.set(row, layer, grant.slot);
        }
        row
    }

    /// The slot of one layer of an own slot.
    pub(in crate::manager) fn private_slot(&self, private: &PrivateSlot, layer: u16) -> Slot {
        if private.slot != NO_SLOT && self.tiers[private.tier].spec.layer_slots {
            self.tiers[private.tier].space.row(private.slot)[usize::from(layer)]
        } else {
            private.slot
        }
    }

    /// The stores that must end before an own slot may be written.
    pub(in crate::manager) fn private_waits(&self, id: PrivateSlotId) -> MoveIds {
        let private = &self.private_slots[id];
        if private.slot == NO_SLOT || self.tiers[private.tier].spec.owner == Owner::Engine {
            return MoveIds::new();
        }
        let space = &self.tiers[private.tier].space;
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
            self.give_slots(private.tier, private.slot, private.layers, true);
        }
    }

    /// Gives the slots of `layers` back; `last` ends the row.
    pub(in crate::manager) fn give_slots(
        &mut self,
        tier: TierId,
        slot: u32,
        layers: Layers,
        last: bool,
    ) {
        let layer_slots = self.tiers[tier].spec.layer_slots;
        let space = &mut self.tiers[tier].space;
        if !layer_slots {
            if last {
                space.give(slot);
            }
            return;
        }
        for layer in layers.iter() {
            let one = space.row(slot)[usize::from(layer)];
            if one != NO_SLOT {
                space.set(slot, layer, NO_SLOT);
                space.give(one);
            }
        }
        if last {
            space.end_row(slot);
        }
    }
}
