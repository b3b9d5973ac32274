//! Slots that a lease holds for itself: room to compute into, duplicates, transit.
//!
//! Invariant: an own slot lives while a lease refers to it or a move reads or writes it, and then
//! goes back to its tier. Room that only its lease knows of is a plain number and becomes an own slot
//! when somebody else is to refer to it. Cost: O(1), with layer slots O(layers).

use slotmap::new_key_type;

use crate::arrival::MoveIds;
use crate::block::{Layers, LeaseId, NO_SLOT, Slot, TierId};
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

/// A slot behind a lease's path, to be written next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Open {
    /// A slot of the first tier for all layers of a block, which nobody else knows of.
    Plain(Slot),
    Own(OwnId),
}

impl Open {
    pub(super) fn plain(self) -> Option<Slot> {
        match self {
            Self::Plain(slot) => Some(slot),
            Self::Own(_) => None,
        }
    }

    pub(super) fn own(self) -> Option<OwnId> {
        match self {
            Self::Plain(_) => None,
            Self::Own(own) => Some(own),
        }
    }
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

    /// Takes room on the first tier for `count` whole blocks.
    pub(super) fn new_open(&mut self, count: usize) -> Vec<Open> {
        let Tier { spec, space, .. } = &mut self.tiers[0];
        if spec.layer_slots || spec.owner == Owner::Engine {
            let layers = self.all_layers();
            return (0..count).map(|_| Open::Own(self.new_own(0, layers))).collect();
        }
        let mut open = Vec::with_capacity(count);
        open.extend(space.take_free(count).map(Open::Plain));
        let rest = open.len()..count;
        open.extend(rest.map(|_| Open::Plain(space.take().expect("room was made").slot)));
        open
    }

    /// An open slot as one that others may refer to.
    pub(super) fn owned(&mut self, open: Open) -> OwnId {
        match open {
            Open::Plain(slot) => {
                let layers = self.all_layers();
                self.owns.insert(Own { tier: 0, slot, layers, refs: 1, busy: 0 })
            }
            Open::Own(own) => own,
        }
    }

    /// The same for one that stays the lease's, by its place among those.
    pub(super) fn own_open(&mut self, id: LeaseId, at: usize) -> OwnId {
        let own = self.owned(self.leases[&id].open[at]);
        self.lease_mut(id).open[at] = Open::Own(own);
        own
    }

    /// The slot of one layer of an open slot.
    pub(super) fn open_slot(&self, open: Open, layer: u16) -> Slot {
        match open {
            Open::Plain(slot) => slot,
            Open::Own(own) => self.own_slot(&self.owns[own], layer),
        }
    }

    /// The stores that must end before an open slot may be written.
    pub(super) fn open_waits(&self, open: Open) -> MoveIds {
        match open {
            Open::Plain(slot) => self.tiers[0].space.drained_by(slot).into_iter().collect(),
            Open::Own(own) => self.own_waits(own),
        }
    }

    /// A lease lets go of an open slot.
    pub(super) fn close_open(&mut self, open: Open) {
        match open {
            Open::Plain(slot) => self.tiers[0].space.give(slot),
            Open::Own(own) => self.unref_own(own),
        }
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
