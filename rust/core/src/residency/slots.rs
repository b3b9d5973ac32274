//! Slots of a tier: allocated, freed, and drained while a store still reads them.
//!
//! With a single group a tier has a space. Several groups share its pages. With layer slots a row
//! lists the slot of each layer. Invariant: an allocated slot has exactly one holder. Cost: O(1)
//! per slot.

use crate::arrival::MoveIds;
use crate::block::{GroupId, Layers, MoveId, NO_MOVE, NO_SLOT, Place, Slot, TierId};

use super::{Arena, Blocks, Grant, Space, TierBlocks};

impl TierBlocks {
    /// Allocates a slot of a group.
    #[inline]
    pub(super) fn take(&mut self, group: GroupId) -> Option<Grant> {
        match &mut self.shared {
            None => self.space.take(),
            Some(shared) => shared.arena.take(group).map(|slot| Grant { slot, after: NO_MOVE }),
        }
    }

    #[inline]
    fn give(&mut self, group: GroupId, slot: Slot) {
        match &mut self.shared {
            None => self.space.give(slot),
            Some(shared) => shared.give(group, slot),
        }
    }
}

impl<T: Copy + PartialEq + Default> Blocks<T> {
    /// A tier's slots, read-only. Empty for a model with several groups, which uses the arena.
    #[inline]
    #[must_use]
    pub(crate) fn space(&self, tier: TierId) -> &Space {
        &self.tiers[tier].space
    }

    /// The arena of a tier, if the model has several groups.
    #[must_use]
    pub(crate) fn arena(&self, tier: TierId) -> Option<&Arena> {
        self.tiers[tier].shared.as_ref().map(|shared| &shared.arena)
    }

    /// Number of slots of the first group available on a tier, at once or after a store.
    #[inline]
    #[must_use]
    pub(crate) fn takeable(&self, tier: TierId) -> u64 {
        self.arena(tier).map_or_else(|| self.space(tier).takeable(), |arena| arena.takeable(0))
    }

    /// Number of free slots of the first group on a tier.
    #[must_use]
    pub(crate) fn free(&self, tier: TierId) -> u64 {
        self.arena(tier).map_or_else(|| self.space(tier).free().into(), |arena| arena.takeable(0))
    }

    /// Allocates a slot of a group, if one is free.
    pub(crate) fn try_take(&mut self, place: Place) -> Option<Slot> {
        self.tiers[place.tier].take(place.group).map(|grant| grant.slot)
    }

    /// Allocates a slot. A slot must be free.
    pub(crate) fn take_slot(&mut self, place: impl Into<Place>) -> Grant {
        let place = place.into();
        self.tiers[place.tier].take(place.group).expect("room was made")
    }

    /// Allocates `count` slots of a group on the first tier, preferring slots not being read by a
    /// store. They must be free. `of` maps each slot to the result.
    pub(crate) fn take_open<O>(
        &mut self,
        group: GroupId,
        count: usize,
        of: impl Fn(Slot) -> O,
    ) -> Vec<O> {
        let first = &mut self.tiers[0];
        let mut known = Vec::with_capacity(count);
        if first.shared.is_none() {
            known.extend(first.space.take_free(count).map(&of));
        }
        let rest = known.len()..count;
        known.extend(rest.map(|_| of(first.take(group).expect("room was made").slot)));
        known
    }

    /// Allocates slots for `layers` and returns the slot or row. Reuses `into` if it exists.
    pub(crate) fn take_slots(&mut self, tier: TierId, into: u32, layers: Layers) -> u32 {
        if !self.tiers[tier].layer_slots {
            return if into == NO_SLOT { self.take_slot(tier).slot } else { into };
        }
        let space = &mut self.tiers[tier].space;
        let row = if into == NO_SLOT { space.new_row() } else { into };
        for layer in layers.iter() {
            let grant = space.take().expect("room was made");
            space.set(row, layer, grant.slot);
        }
        row
    }

    /// Frees a slot without a block. It drains while moves touch it.
    pub(crate) fn give_slot(&mut self, place: impl Into<Place>, slot: Slot) {
        let place = place.into();
        self.tiers[place.tier].give(place.group, slot);
    }

    /// Frees the slots of `layers`. `last` also ends the row.
    pub(crate) fn give_slots(
        &mut self,
        place: impl Into<Place>,
        slot: u32,
        layers: Layers,
        last: bool,
    ) {
        let place = place.into();
        let tier = &mut self.tiers[place.tier];
        if !tier.layer_slots {
            if last {
                tier.give(place.group, slot);
            }
            return;
        }
        let space = &mut tier.space;
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

    /// Moves `layers` of the row `from` to the row `into`. Frees the slots of `known`, which `into`
    /// already has.
    pub(crate) fn join_rows(
        &mut self,
        tier: TierId,
        from: u32,
        into: u32,
        layers: Layers,
        known: Layers,
    ) {
        self.generation += 1;
        let space = &mut self.tiers[tier].space;
        for layer in layers.iter() {
            let moved = space.row(from)[usize::from(layer)];
            space.set(from, layer, NO_SLOT);
            if known.contains(layer) {
                space.give(moved);
            } else {
                space.set(into, layer, moved);
            }
        }
        space.end_row(from);
    }

    /// A row with a single slot, for this layer, or the slot itself without layer slots.
    pub(crate) fn adopt(&mut self, tier: TierId, slot: Slot, layer: u16) -> u32 {
        let TierBlocks { space, layer_slots, .. } = &mut self.tiers[tier];
        if !*layer_slots {
            return slot;
        }
        let row = space.new_row();
        space.set(row, layer, slot);
        row
    }

    /// The slot of a layer in a slot or row.
    #[inline]
    #[must_use]
    pub(crate) fn layer_slot(&self, tier: TierId, slot: u32, layer: u16) -> Slot {
        let TierBlocks { space, layer_slots, .. } = &self.tiers[tier];
        if *layer_slots && slot != NO_SLOT { space.row(slot)[usize::from(layer)] } else { slot }
    }

    /// Frees a slot of the first group still being read by a store.
    pub(crate) fn drain(&mut self, tier: TierId, slot: Slot, by: MoveId) {
        let TierBlocks { space, shared, .. } = &mut self.tiers[tier];
        match shared {
            // Any group may take its page.
            Some(shared) => shared.arena.drain(0, slot, &[by]),
            None => space.drain(slot, by),
        }
    }

    /// Moves to wait for before writing a slot.
    #[must_use]
    pub(crate) fn waits(&self, place: impl Into<Place>, slot: Slot) -> MoveIds {
        let Place { tier, group } = place.into();
        match self.arena(tier) {
            Some(arena) => arena.waits(group, slot),
            None => self.space(tier).drained_by(slot).into_iter().collect(),
        }
    }

    /// Whether no freed slot of a tier is being read.
    #[must_use]
    pub(crate) fn none_draining(&self, tier: TierId) -> bool {
        self.space(tier).none_draining()
            && self.arena(tier).is_none_or(|arena| arena.draining().next().is_none())
    }

    /// Ends a move's reads of freed slots in shared pages.
    pub(crate) fn end_drain(&mut self, tier: TierId, by: MoveId) {
        if let Some(shared) = &mut self.tiers[tier].shared {
            shared.arena.drained(by);
        }
    }

    /// Ends the store's read of a slot.
    pub(crate) fn drained(&mut self, tier: TierId, slot: Slot) {
        self.tiers[tier].space.drained(slot);
    }

    /// Undoes [`Blocks::drain`], unless the slot was granted since. Returns whether it was undone.
    pub(crate) fn undrain(&mut self, tier: TierId, slot: Slot) -> bool {
        self.tiers[tier].space.undrain(slot)
    }

    /// Excludes a draining slot from grants, or admits it again.
    pub(crate) fn withhold(&mut self, tier: TierId, slot: Slot, withheld: bool) {
        self.tiers[tier].space.withhold(slot, withheld);
    }

    /// Reserves the free slots below `bound` as a bitmap for claims, until [`Blocks::put_back`].
    pub(crate) fn reserve_below(&mut self, tier: TierId, bound: Slot) -> Vec<bool> {
        self.tiers[tier].space.reserve_below(bound)
    }

    /// Frees the unclaimed reserved slots.
    pub(crate) fn put_back(&mut self, tier: TierId, free: &[bool]) {
        self.tiers[tier].space.put_back(free);
    }
}
