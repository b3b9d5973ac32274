//! Private slots: slots of a lease or a transfer, not in the residency tables, for computation,
//! duplicates and transit.
//!
//! Invariant: a private slot exists while it has a reference or a move reads or writes it. The call
//! that drops the last use returns the private slot, and the caller returns its slot to the tier.
//! Cost: O(1). Life of a private slot:
//!
//! ```text
//! add --> {refs, busy} --refs = busy = 0--> returned by `unref` or `end_move`
//!             |
//!             +-- take: it becomes a residency of its block
//! ```

use std::ops::Index;

use slotmap::{SlotMap, new_key_type};

use crate::block::{Layers, NO_SLOT, Slot, TierId};

new_key_type! {
    /// Key of a private slot, never reused.
    pub(crate) struct PrivateSlotId;
}

/// A slot, or a row of layer slots, outside the trie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrivateSlot {
    pub(crate) tier: TierId,
    /// [`NO_SLOT`] until the engine that owns the tier names the slot.
    pub(crate) slot: Slot,
    pub(crate) layers: Layers,
    /// Number of references from leases and transfers.
    pub(crate) refs: u32,
    /// Number of moves reading or writing it.
    pub(crate) busy: u32,
}

/// Table of all private slots.
#[derive(Debug, Default)]
pub(crate) struct PrivateSlots {
    slots: SlotMap<PrivateSlotId, PrivateSlot>,
}

impl PrivateSlots {
    /// Adds a private slot with one reference.
    pub(crate) fn add(&mut self, tier: TierId, slot: Slot, layers: Layers) -> PrivateSlotId {
        self.slots.insert(PrivateSlot { tier, slot, layers, refs: 1, busy: 0 })
    }

    pub(crate) fn get(&self, id: PrivateSlotId) -> Option<&PrivateSlot> {
        self.slots.get(id)
    }

    /// Adds a reference.
    pub(crate) fn share(&mut self, id: PrivateSlotId) {
        self.slots.get_mut(id).expect("a private slot that exists").refs += 1;
    }

    /// Drops a reference. Returns the private slot if it is unused now.
    #[must_use]
    pub(crate) fn unref(&mut self, id: PrivateSlotId) -> Option<PrivateSlot> {
        self.slots.get_mut(id).expect("a private slot that exists").refs -= 1;
        self.remove_unused(id)
    }

    /// Counts a new move reading or writing it.
    pub(crate) fn begin_move(&mut self, id: PrivateSlotId) {
        self.slots.get_mut(id).expect("a private slot that exists").busy += 1;
    }

    /// Counts the end of a move. Returns the private slot if it is unused now.
    #[must_use]
    pub(crate) fn end_move(&mut self, id: PrivateSlotId) -> Option<PrivateSlot> {
        self.slots.get_mut(id).expect("a private slot that exists").busy -= 1;
        self.remove_unused(id)
    }

    /// Whether moves wait for an unreferenced slot to be named.
    pub(crate) fn waits_in_vain(&self, id: PrivateSlotId) -> bool {
        self.slots.get(id).is_some_and(|it| it.refs == 0 && it.busy > 0 && it.slot == NO_SLOT)
    }

    /// Replaces the slot of a private slot.
    pub(crate) fn set_slot(&mut self, id: PrivateSlotId, slot: Slot) {
        self.slots.get_mut(id).expect("a private slot that exists").slot = slot;
    }

    /// Removes a private slot. Its slot becomes a residency.
    pub(crate) fn take(&mut self, id: PrivateSlotId) -> PrivateSlot {
        self.slots.remove(id).expect("a private slot that exists")
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (PrivateSlotId, &PrivateSlot)> {
        self.slots.iter()
    }

    fn remove_unused(&mut self, id: PrivateSlotId) -> Option<PrivateSlot> {
        let unused = self.slots[id].refs == 0 && self.slots[id].busy == 0;
        unused.then(|| self.take(id))
    }
}

impl Index<PrivateSlotId> for PrivateSlots {
    type Output = PrivateSlot;

    fn index(&self, id: PrivateSlotId) -> &PrivateSlot {
        &self.slots[id]
    }
}

#[cfg(test)]
mod tests {
    use super::PrivateSlots;
    use crate::block::{Layers, NO_SLOT};

    #[test]
    fn the_last_user_gets_the_slot() {
        let mut table = PrivateSlots::default();
        let id = table.add(1, 7, Layers::new(0, 2));
        table.share(id);
        table.begin_move(id);
        assert!(table.unref(id).is_none() && table.unref(id).is_none());
        assert!(!table.waits_in_vain(id), "its slot is named");
        assert_eq!(table.end_move(id).map(|it| (it.tier, it.slot)), Some((1, 7)));
        assert!(table.get(id).is_none() && !table.waits_in_vain(id));
    }

    #[test]
    fn a_move_into_a_slot_without_a_name_waits_in_vain() {
        let mut table = PrivateSlots::default();
        let id = table.add(0, NO_SLOT, Layers::new(0, 1));
        table.begin_move(id);
        assert!(!table.waits_in_vain(id));
        assert!(table.unref(id).is_none() && table.waits_in_vain(id));
        table.set_slot(id, 3);
        assert!(!table.waits_in_vain(id));
        assert_eq!(table.take(id).slot, 3);
    }
}
