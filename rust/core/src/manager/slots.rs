//! Slots of residencies and of private slots: finds the slot of a layer on a tier, and returns
//! unused slots.
//!
//! Invariant: an unused private slot returns to its tier at once. Cost: O(1), with layer slots
//! O(layers).

use smallvec::{SmallVec, smallvec};

use crate::arrival::MoveIds;
use crate::block::{BlockId, Layers, NO_SLOT, Slot, TierId};
use crate::private_slots::{PrivateSlot, PrivateSlotId};
use crate::tier::Owner;

use crate::manager::Manager;
use crate::manager::consequence::Consequence;
use crate::manager::kinds::Ahead;
use crate::manager::request::slots::lease_slots::OpenSlot;

impl Manager {
    /// Splits a range of layers into copies of a move each between two tiers: single layers if an
    /// end has layer slots.
    pub(super) fn pieces(
        &self,
        src: TierId,
        dst: TierId,
        transit: Option<TierId>,
        layers: Layers,
    ) -> SmallVec<[Layers; 1]> {
        let ends = [Some(src), Some(dst), transit];
        // Layer slots at either end require a move per layer.
        if ends.into_iter().flatten().any(|tier| self.tiers[tier].spec.layer_slots) {
            layers.iter().map(|layer| Layers::new(layer, layer + 1)).collect()
        } else {
            smallvec![layers]
        }
    }

    /// The slot of a layer of a residency. Tiers without layer slots have a single slot for all
    /// layers.
    pub(super) fn slot_of(&self, tier: TierId, block: BlockId, layer: u16) -> Slot {
        self.blocks.layer_slot(tier, self.residency(tier, block).slot, layer)
    }

    /// Takes a slot for `layers` of a block. The caller has made room.
    pub(super) fn new_private(&mut self, tier: TierId, layers: Layers) -> PrivateSlotId {
        // The engine names its slots later, by `bind`.
        let slot = if self.tiers[tier].spec.owner == Owner::Engine {
            NO_SLOT
        } else {
            self.blocks.take_slots(tier, NO_SLOT, layers)
        };
        self.private_slots.add(tier, slot, layers)
    }

    /// The slot of a layer of a private slot.
    pub(super) fn private_slot(&self, id: PrivateSlotId, layer: u16) -> Slot {
        let private = &self.private_slots[id];
        self.blocks.layer_slot(private.tier, private.slot, layer)
    }

    /// The slot of a layer of an open slot.
    pub(crate) fn open_slot(&self, open: OpenSlot, layer: u16) -> Slot {
        match open {
            OpenSlot::Plain(slot) => slot,
            OpenSlot::Private(private) => self.private_slot(private, layer),
        }
    }

    /// The stores to finish before a write to a private slot.
    pub(super) fn private_waits(&self, id: PrivateSlotId) -> MoveIds {
        let private = &self.private_slots[id];
        // An engine orders access to its slots itself, and an unnamed slot has no stores.
        if private.slot == NO_SLOT || self.tiers[private.tier].spec.owner == Owner::Engine {
            return MoveIds::new();
        }
        let space = &self.blocks.space(private.tier);
        if !self.tiers[private.tier].spec.layer_slots {
            return self.blocks.waits(private.tier, private.slot);
        }
        let mut waits: MoveIds =
            space.row(private.slot).iter().filter_map(|&slot| space.drained_by(slot)).collect();
        waits.sort_unstable();
        waits
    }

    /// Drops a lease's or a transfer's reference to a private slot. Its copy ahead and the moves
    /// waiting for its name become consequences.
    pub(super) fn unref_private(&mut self, id: PrivateSlotId) {
        if !self.ahead.is_empty()
            && self.private_slots[id].refs == 1
            && let Some(ahead) = self.remove_ahead(id)
        {
            self.consequences.push(Consequence::GiveBack(ahead));
        }
        let unused = self.private_slots.unref(id);
        self.free_private(unused);
        // No `bind` can name the slot any more, so its parked moves would wait for ever.
        if self.private_slots.waits_in_vain(id) {
            self.consequences.push(Consequence::Unnamed(id));
        }
    }

    /// Drops a reference to a private slot without consequences: a copy made ahead, or transit.
    pub(super) fn unref_copy(&mut self, id: PrivateSlotId) {
        let unused = self.private_slots.unref(id);
        self.free_private(unused);
    }

    /// Ends the read or write of a private slot by a move.
    pub(super) fn unbusy_private(&mut self, id: PrivateSlotId) {
        let unused = self.private_slots.end_move(id);
        self.free_private(unused);
    }

    /// Returns the slot of an unused private slot to its tier.
    fn free_private(&mut self, unused: Option<PrivateSlot>) {
        let Some(PrivateSlot { tier, slot, layers, .. }) = unused else { return };
        // The engine frees its slots itself.
        if self.tiers[tier].spec.owner != Owner::Engine && slot != NO_SLOT {
            self.blocks.give_slots(tier, slot, layers, true);
        }
    }

    /// Removes and returns the copy ahead of a private slot, if any.
    pub(super) fn remove_ahead(&mut self, source: PrivateSlotId) -> Option<Ahead> {
        let slot = self.private_slots[source].slot;
        self.ahead
            .get(&slot)
            .is_some_and(|row| row.source == source)
            .then(|| self.ahead.remove(&slot).expect("seen above"))
    }

    /// Whether `resident` is a part of a block with a single slot for all layers. Computed layers
    /// would go to a different slot, so the request needs the whole block there.
    pub(super) fn one_slot(&self, resident: Layers) -> bool {
        !self.tiers[0].spec.layer_slots && !resident.is_empty() && resident != self.all_layers()
    }
}
