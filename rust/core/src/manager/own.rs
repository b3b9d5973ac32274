//! Slots that a lease holds for itself: room to compute into, duplicates, transit.
//!
//! Invariant: an own slot lives while a lease refers to it or a move reads or writes it, and then
//! goes back to its tier. Cost: O(1), with layer slots O(layers).

use slotmap::new_key_type;

use crate::arrival::MoveIds;
use crate::block::{Layers, NO_SLOT, Slot, TierId};
use crate::tier::Owner;

use super::{Manager, Tier};

new_key_type! {
    /// An own slot, for as long as it lives.
    pub(super) struct OwnId;
}

/// A slot, or with layer slots a row of them, outside the trie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own {
    pub(super) tier: TierId,
    pub(super) slot: u32,
    pub(super) layers: Layers,
    pub(super) refs: u32,
    pub(super) busy: u32,
}

impl Manager {
    /// Takes room for `layers` of a block; the caller has made it.
    pub(super) fn new_own(&mut self, tier: TierId, layers: Layers) -> OwnId {
        let slot = if self.tiers[tier].spec.owner == Owner::Engine {
            NO_SLOT
        } else {
            self.take_slots(tier, NO_SLOT, layers)
        };
        self.owns.insert(Own { tier, slot, layers, refs: 1, busy: 0 })
    }

    /// Takes room for `count` whole blocks.
    pub(super) fn new_owns(&mut self, tier: TierId, count: usize) -> Vec<OwnId> {
        let layers = self.all_layers();
        let Tier { spec, space, .. } = &mut self.tiers[tier];
        if spec.layer_slots || spec.owner == Owner::Engine {
            return (0..count).map(|_| self.new_own(tier, layers)).collect();
        }
        self.owns.reserve(count);
        let mut new = |slot| self.owns.insert(Own { tier, slot, layers, refs: 1, busy: 0 });
        let mut owns = Vec::with_capacity(count);
        owns.extend(space.take_free(count).map(&mut new));
        let rest = owns.len()..count;
        owns.extend(rest.map(|_| new(space.take().expect("room was made").slot)));
        owns
    }

    /// Takes slots for `layers` and returns the slot or the row, `into` if that exists already.
    pub(super) fn take_slots(&mut self, tier: TierId, into: u32, layers: Layers) -> u32 {
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
    pub(super) fn own_slot(&self, own: &Own, layer: u16) -> Slot {
        if own.slot != NO_SLOT && self.tiers[own.tier].spec.layer_slots {
            self.tiers[own.tier].space.row(own.slot)[usize::from(layer)]
        } else {
            own.slot
        }
    }

    /// The stores that must end before an own slot may be written.
    pub(super) fn own_waits(&self, id: OwnId) -> MoveIds {
        let own = &self.owns[id];
        if own.slot == NO_SLOT || self.tiers[own.tier].spec.owner == Owner::Engine {
            return MoveIds::new();
        }
        let space = &self.tiers[own.tier].space;
        if !self.tiers[own.tier].spec.layer_slots {
            return space.drained_by(own.slot).into_iter().collect();
        }
        let mut waits: MoveIds =
            space.row(own.slot).iter().filter_map(|&slot| space.drained_by(slot)).collect();
        waits.sort_unstable();
        waits
    }

    /// A lease lets go of an own slot.
    pub(super) fn unref_own(&mut self, id: OwnId) {
        let own = self.owns.get_mut(id).expect("a living own slot");
        own.refs -= 1;
        if own.refs == 0 && own.busy > 0 && own.slot == NO_SLOT {
            self.cancel_unnamed(id);
        } else {
            self.end_own(id);
        }
    }

    /// A move that read or wrote an own slot has ended.
    pub(super) fn unbusy_own(&mut self, id: OwnId) {
        let own = self.owns.get_mut(id).expect("a living own slot");
        own.busy -= 1;
        self.end_own(id);
    }

    fn end_own(&mut self, id: OwnId) {
        let own = self.owns[id];
        if own.refs > 0 || own.busy > 0 {
            return;
        }
        self.owns.remove(id);
        if self.tiers[own.tier].spec.owner != Owner::Engine && own.slot != NO_SLOT {
            self.give_slots(own.tier, own.slot, own.layers, true);
        }
    }

    /// Gives the slots of `layers` back; `last` ends the row.
    pub(super) fn give_slots(&mut self, tier: TierId, slot: u32, layers: Layers, last: bool) {
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
