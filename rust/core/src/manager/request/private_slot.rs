//! Private slots: slots of one lease or one transfer, outside the residency tables, for
//! computation, duplicates and transit.
//!
//! Invariant: a private slot lives while a lease refers to it or a move reads or writes it, and
//! then returns to its tier. An open slot that only its lease refers to is a plain number, and
//! becomes a private slot once a second reference is made. Cost: O(1), with layer slots O(layers).
//! Its life:
//!
//! ```text
//! Plain(n) --second reference--> PrivateSlot {refs, busy} --refs = busy = 0--> free
//!    |                               | commit: the block has no such residency
//!    +-- commit: full block ---------+--> residency of the block
//! ```

use crate::arrival::MoveIds;
use crate::block::{Layers, LeaseId, NO_SLOT, Slot, TierId};
use crate::tier::Owner;

use crate::manager::Manager;
use crate::manager::kinds::PrivateSlotId;

/// Private slot: a slot, or with layer slots a row of them, outside the trie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrivateSlot {
    pub(crate) tier: TierId,
    pub(crate) slot: u32,
    pub(crate) layers: Layers,
    pub(crate) refs: u32,
    pub(crate) busy: u32,
}

/// Slot behind a lease's path, in the order of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenSlot {
    /// A slot of the first tier for all layers of a block, to which only the lease refers.
    Plain(Slot),
    Private(PrivateSlotId),
}

impl OpenSlot {
    pub(crate) fn plain(self) -> Option<Slot> {
        match self {
            Self::Plain(slot) => Some(slot),
            Self::Private(_) => None,
        }
    }

    pub(crate) fn private(self) -> Option<PrivateSlotId> {
        match self {
            Self::Plain(_) => None,
            Self::Private(private) => Some(private),
        }
    }
}

impl Manager {
    /// Takes a slot for `layers` of a block, for which the caller has made room.
    pub(crate) fn new_private(&mut self, tier: TierId, layers: Layers) -> PrivateSlotId {
        // The engine names its slots later, by `bind`.
        let slot = if self.tiers[tier].spec.owner == Owner::Engine {
            NO_SLOT
        } else {
            self.blocks.take_slots(tier, NO_SLOT, layers)
        };
        self.private_slots.insert(PrivateSlot { tier, slot, layers, refs: 1, busy: 0 })
    }

    /// Takes slots on the first tier for `count` full blocks.
    pub(crate) fn new_open_slots(&mut self, count: usize) -> Vec<OpenSlot> {
        let spec = &self.tiers[0].spec;
        // A row, or a slot without a number yet, needs a private slot from the start.
        if spec.layer_slots || spec.owner == Owner::Engine {
            let layers = self.all_layers();
            return (0..count).map(|_| OpenSlot::Private(self.new_private(0, layers))).collect();
        }
        self.blocks.take_open(count).map(OpenSlot::Plain).collect()
    }

    /// The private slot of an open slot, made if it is plain.
    pub(crate) fn as_private(&mut self, open: OpenSlot) -> PrivateSlotId {
        match open {
            OpenSlot::Plain(slot) => {
                let layers = self.all_layers();
                self.private_slots.insert(PrivateSlot { tier: 0, slot, layers, refs: 1, busy: 0 })
            }
            OpenSlot::Private(private) => private,
        }
    }

    /// The same for an open slot of a lease, by its place, which stays open.
    pub(crate) fn share_open(&mut self, id: LeaseId, at: usize) -> PrivateSlotId {
        let private = self.as_private(self.leases[&id].open[at]);
        self.lease_mut(id).open[at] = OpenSlot::Private(private);
        private
    }

    /// The slot of one layer of an open slot.
    pub(crate) fn open_slot(&self, open: OpenSlot, layer: u16) -> Slot {
        match open {
            OpenSlot::Plain(slot) => slot,
            OpenSlot::Private(private) => self.private_slot(&self.private_slots[private], layer),
        }
    }

    /// The stores that must end before an open slot may be written.
    pub(crate) fn open_slot_waits(&self, open: OpenSlot) -> MoveIds {
        match open {
            OpenSlot::Plain(slot) => self.blocks.space(0).drained_by(slot).into_iter().collect(),
            OpenSlot::Private(private) => self.private_waits(private),
        }
    }

    /// Releases an open slot of a lease.
    pub(crate) fn close_open(&mut self, open: OpenSlot) {
        match open {
            OpenSlot::Plain(slot) => self.blocks.give_slot(0, slot),
            OpenSlot::Private(private) => self.unref_private(private),
        }
    }

    /// The slot of one layer of a private slot.
    pub(crate) fn private_slot(&self, private: &PrivateSlot, layer: u16) -> Slot {
        self.blocks.layer_slot(private.tier, private.slot, layer)
    }

    /// The stores that must end before a private slot may be written.
    pub(crate) fn private_waits(&self, id: PrivateSlotId) -> MoveIds {
        let private = &self.private_slots[id];
        // An engine orders its own slots, and an unnamed one has no stores.
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

    /// Drops a lease's reference to a private slot.
    pub(crate) fn unref_private(&mut self, id: PrivateSlotId) {
        if !self.ahead.is_empty() && self.private_slots[id].refs == 1 {
            self.take_back_from(id);
        }
        let private = self.private_slots.get_mut(id).expect("a living private slot");
        private.refs -= 1;
        // No `bind` can name it any more, so its parked moves would wait for ever.
        if private.refs == 0 && private.busy > 0 && private.slot == NO_SLOT {
            self.cancel_unnamed(id);
        } else {
            self.end_private(id);
        }
    }

    /// Ends the read or write of a private slot by a move.
    pub(crate) fn unbusy_private(&mut self, id: PrivateSlotId) {
        let private = self.private_slots.get_mut(id).expect("a living private slot");
        private.busy -= 1;
        self.end_private(id);
    }

    /// Returns a private slot without references and moves to its tier.
    fn end_private(&mut self, id: PrivateSlotId) {
        let private = self.private_slots[id];
        if private.refs > 0 || private.busy > 0 {
            return;
        }
        self.private_slots.remove(id);
        // The engine frees its own slots.
        if self.tiers[private.tier].spec.owner != Owner::Engine && private.slot != NO_SLOT {
            self.blocks.give_slots(private.tier, private.slot, private.layers, true);
        }
    }
}
