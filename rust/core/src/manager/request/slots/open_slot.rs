//! Open slots: the slots after a lease's path, which it writes next.
//!
//! Invariant: an open slot that only its lease refers to is a plain number, and becomes a private
//! slot once a second reference is made. Cost: O(1), with layer slots O(layers). Its life:
//!
//! ```text
//! Plain(n) --second reference--> Private(id) --last reference--> free
//!    |                               | commit: the block has no such residency
//!    +-- commit: full block ---------+--> residency of the block
//! ```

use crate::arrival::MoveIds;
use crate::block::{LeaseId, Slot};
use crate::private_slots::PrivateSlotId;
use crate::tier::Owner;

use crate::manager::Manager;

/// Slot after a lease's path, in the order of writing.
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
                self.private_slots.add(0, slot, layers)
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

    /// The stores that must end before an open slot may be written.
    pub(crate) fn open_slot_waits(&self, open: OpenSlot) -> MoveIds {
        match open {
            OpenSlot::Plain(slot) => self.blocks.waits(0, slot),
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
}
