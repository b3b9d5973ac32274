//! The blocks of a manager: the trie that names them, and their residency on every tier.
//!
//! [`Blocks`] owns the trie, each tier's residency table and slots, and the counts of clean copies in
//! private fields, so that nothing else can change where a block is resident. Others read through
//! `trie`, `table` and `space` and change by the verbs here. Invariants: a residency has the slots of
//! its layers and no others; a copy is counted clean exactly while its layers are resident below too
//! (on the last tier: above). Cost: a verb is O(1) per block where the block is on one tier alone,
//! O(tiers²) otherwise; with layer slots also O(layers).

mod clean;
mod space;
mod table;

use std::ops::Range;

use crate::arrival::Arrival;
use crate::block::{BlockId, Layers, MoveId, NO_SLOT, Slot, TierId, Token};
use crate::tier::{Residency, State, TierSpec};
use crate::trie::{RunId, Trie};

pub use space::{Grant, Space};
pub use table::ResidencyTable;

/// The part of one tier.
#[derive(Debug)]
struct Held {
    table: ResidencyTable,
    space: Space,
    layer_slots: bool,
    /// Clean copies.
    clean: u64,
}

/// All blocks, each with a value `T` that neighbours of a run share.
#[derive(Debug)]
pub struct Blocks<T> {
    all: Layers,
    trie: Trie<T>,
    tiers: Vec<Held>,
}

impl<T: Copy + PartialEq + Default> Blocks<T> {
    /// No block, on tiers of these specifications.
    #[must_use]
    pub fn new(block_tokens: usize, layers: u16, tiers: &[TierSpec]) -> Self {
        let all = Layers::new(0, layers);
        let held = |spec: &TierSpec| Held {
            table: ResidencyTable::new(all),
            space: Space::new(spec.blocks, layers, spec.layer_slots),
            layer_slots: spec.layer_slots,
            clean: 0,
        };
        Self { all, trie: Trie::new(block_tokens), tiers: tiers.iter().map(held).collect() }
    }

    /// The trie, to read.
    #[inline]
    #[must_use]
    pub fn trie(&self) -> &Trie<T> {
        &self.trie
    }

    /// A tier's residency table, to read.
    #[inline]
    #[must_use]
    pub fn table(&self, tier: TierId) -> &ResidencyTable {
        &self.tiers[tier].table
    }

    /// A tier's slots, to read.
    #[inline]
    #[must_use]
    pub fn space(&self, tier: TierId) -> &Space {
        &self.tiers[tier].space
    }

    // The trie: its blocks come and go, and with them room in every table.

    /// Adds the root of a scope.
    pub fn add_root(&mut self) -> RunId {
        self.trie.add_root()
    }

    /// Removes the root of a scope without blocks.
    pub fn remove_root(&mut self, root: RunId) {
        self.trie.remove_root(root);
    }

    /// Adds blocks of new tokens behind `parent`, or behind the root; `path` gets them. They are
    /// resident nowhere.
    pub fn extend(
        &mut self,
        root: RunId,
        parent: Option<BlockId>,
        tokens: &[Token],
        value: T,
        path: &mut Vec<BlockId>,
    ) {
        self.trie.extend(root, parent, tokens, value, path);
        let bound = self.trie.bound();
        for tier in &mut self.tiers {
            tier.table.reach(bound);
        }
    }

    /// Changes the values of a path, run by run.
    pub fn change_values(&mut self, path: &[BlockId], change: impl FnMut(Range<BlockId>, &mut T)) {
        self.trie.change(path, change);
    }

    /// Gives back the ids that are kept for a run that will not grow.
    pub fn trim(&mut self, block: BlockId) {
        self.trie.trim(block);
    }

    /// Removes the last `blocks` blocks of a run, which are resident nowhere.
    pub fn remove_tail(&mut self, block: BlockId, blocks: u32) {
        self.trie.remove_tail(block, blocks);
    }

    // Residencies.

    /// Changes a block's residency on a tier; its slots are the caller's.
    pub fn alter(&mut self, tier: TierId, block: BlockId, change: impl FnOnce(&mut Residency)) {
        if self.tiers.len() == 1 {
            self.tiers[tier].table.change(block, change);
            return;
        }
        let before = self.resident_layers(tier, block);
        self.tiers[tier].table.change(block, change);
        self.recount(tier, block, before);
    }

    /// Makes new blocks, resident nowhere, resident on a tier with all layers. Room was made.
    pub fn put_new(&mut self, tier: TierId, blocks: &[BlockId]) {
        let Held { table, space, .. } = &mut self.tiers[tier];
        for &block in blocks {
            table.put(block, space.take().expect("room was made").slot);
        }
    }

    /// Makes new blocks fully resident on the first tier in these slots, as far as both go. Returns
    /// how many.
    pub fn put_in(&mut self, blocks: &[BlockId], slots: impl Iterator<Item = Slot>) -> usize {
        let table = &mut self.tiers[0].table;
        let pairs = blocks.iter().zip(slots);
        pairs.map(|(&block, slot)| table.put(block, slot)).count()
    }

    /// Evicts consecutive blocks of one run that are fully resident and idle on a tier; their slots
    /// are given back, the last block's first.
    pub fn evict_run(&mut self, tier: TierId, blocks: Range<BlockId>) {
        let Held { table, space, .. } = &mut self.tiers[tier];
        space.give_all(table.clear(blocks.clone()));
        self.recount_run(tier, &blocks, self.all, None);
    }

    /// Makes `layers`, at an end of what a block has on a tier, absent; their slots are the caller's.
    /// Returns the layers that stay.
    pub fn vacate(&mut self, tier: TierId, block: BlockId, layers: Layers) -> Layers {
        let Held { table, space, layer_slots, .. } = &mut self.tiers[tier];
        let here = table.get(block);
        let rest = here.have.without(layers).expect("what leaves is at an end of the range");
        let row = *layer_slots && here.slot != NO_SLOT;
        if row {
            layers.iter().for_each(|layer| space.set(here.slot, layer, NO_SLOT));
        }
        // What is still to arrive needs the row.
        let ended = rest.is_empty() && table.arrival(block).is_none();
        if ended && row {
            space.end_row(here.slot);
        }
        self.alter(tier, block, |here| {
            here.have = rest;
            if ended {
                (here.state, here.slot) = (State::Absent, NO_SLOT);
            }
        });
        rest
    }

    /// Makes layers resident again in the slot that they were leaving, which a store still reads.
    pub fn restore(&mut self, tier: TierId, block: BlockId, slot: Slot, held: Layers) {
        let Held { table, space, layer_slots, .. } = &mut self.tiers[tier];
        let here = table.get(block);
        let have = here.have.join(held).expect("it can return");
        let row = match (*layer_slots, here.slot) {
            (false, _) => slot,
            (true, NO_SLOT) => space.new_row(),
            (true, row) => row,
        };
        if *layer_slots {
            space.set(row, held.lo, slot);
        }
        self.alter(tier, block, |here| {
            (here.slot, here.have, here.state) = (row, have, State::Resident);
            here.busy += 1;
        });
    }

    // Moves: one begins to read or to bring a block, and ends.

    /// A move begins to read a block that is fully resident and idle. Returns its slot.
    pub fn begin_read(&mut self, tier: TierId, block: BlockId) -> Slot {
        self.tiers[tier].table.begin_read(block)
    }

    /// A move begins to bring all of a block that is absent, into a slot.
    pub fn await_in(&mut self, tier: TierId, block: BlockId, slot: Slot, arrival: Arrival) {
        self.tiers[tier].table.await_in(block, slot, arrival);
    }

    /// The only moves that brought these blocks of one run from `src` to `dst` have ended.
    pub fn arrived(&mut self, src: TierId, dst: TierId, blocks: Range<BlockId>) {
        for block in blocks.clone() {
            self.tiers[src].table.end_io(block);
            self.tiers[dst].table.arrived(block);
        }
        self.recount_run(dst, &blocks, Layers::NONE, Some(src));
    }

    /// Moves are on their way to a block, whose residency is arriving already.
    pub fn expect(&mut self, tier: TierId, block: BlockId, arrival: Arrival) {
        self.tiers[tier].table.expect(block, arrival);
    }

    /// The moves that are on their way to a block, to be changed.
    pub fn arrival_mut(&mut self, tier: TierId, block: BlockId) -> Option<&mut Arrival> {
        self.tiers[tier].table.arrival_mut(block)
    }

    /// Forgets what was on its way to a block: it has landed, or never will.
    pub fn settle(&mut self, tier: TierId, block: BlockId) -> Option<Arrival> {
        self.tiers[tier].table.settle(block)
    }

    // Slots.

    /// Takes one slot. Room was made.
    pub fn take_slot(&mut self, tier: TierId) -> Grant {
        self.tiers[tier].space.take().expect("room was made")
    }

    /// Takes `count` slots of the first tier that no store reads, or that one did. Room was made.
    pub fn take_open(&mut self, count: usize) -> impl Iterator<Item = Slot> + '_ {
        let space = &mut self.tiers[0].space;
        let mut known: Vec<Slot> = Vec::with_capacity(count);
        known.extend(space.take_free(count));
        let rest = known.len()..count;
        known.extend(rest.map(|_| space.take().expect("room was made").slot));
        known.into_iter()
    }

    /// Takes slots for `layers` and returns the slot or the row, which is `into` if that exists.
    pub fn take_slots(&mut self, tier: TierId, into: u32, layers: Layers) -> u32 {
        let Held { space, layer_slots, .. } = &mut self.tiers[tier];
        if !*layer_slots {
            return if into == NO_SLOT { space.take().expect("room was made").slot } else { into };
        }
        let row = if into == NO_SLOT { space.new_row() } else { into };
        for layer in layers.iter() {
            let grant = space.take().expect("room was made");
            space.set(row, layer, grant.slot);
        }
        row
    }

    /// Gives one slot back.
    pub fn give_slot(&mut self, tier: TierId, slot: Slot) {
        self.tiers[tier].space.give(slot);
    }

    /// Gives the slots of `layers` back; `last` ends the row.
    pub fn give_slots(&mut self, tier: TierId, slot: u32, layers: Layers, last: bool) {
        let Held { space, layer_slots, .. } = &mut self.tiers[tier];
        if !*layer_slots {
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

    /// Moves `layers` of one row into another, which may have some of them: those are given back.
    pub fn join_rows(&mut self, tier: TierId, from: u32, into: u32, layers: Layers, known: Layers) {
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

    /// Puts another slot into a row.
    pub fn set_layer(&mut self, tier: TierId, row: u32, layer: u16, slot: Slot) {
        self.tiers[tier].space.set(row, layer, slot);
    }

    /// The slot of one layer of a slot or row.
    #[inline]
    #[must_use]
    pub fn layer_slot(&self, tier: TierId, slot: u32, layer: u16) -> Slot {
        let Held { space, layer_slots, .. } = &self.tiers[tier];
        if *layer_slots && slot != NO_SLOT { space.row(slot)[usize::from(layer)] } else { slot }
    }

    /// A store begins to read a slot that its block leaves.
    pub fn drain(&mut self, tier: TierId, slot: Slot, by: MoveId) {
        self.tiers[tier].space.drain(slot, by);
    }

    /// The store has read the slot.
    pub fn drained(&mut self, tier: TierId, slot: Slot) {
        self.tiers[tier].space.drained(slot);
    }

    /// The store failed: the slot is its block's again. Returns whether it was promised meanwhile.
    pub fn undrain(&mut self, tier: TierId, slot: Slot) -> bool {
        self.tiers[tier].space.undrain(slot)
    }

    /// Keeps a slot that a store still reads from being promised, or ends that.
    pub fn withhold(&mut self, tier: TierId, slot: Slot, withheld: bool) {
        self.tiers[tier].space.withhold(slot, withheld);
    }

    /// Which slots below `bound` are free, for the caller to claim until [`Blocks::put_back`].
    pub fn choice(&mut self, tier: TierId, bound: Slot) -> Vec<bool> {
        self.tiers[tier].space.choice(bound)
    }

    /// Takes back the slots of a choice that were not claimed.
    pub fn put_back(&mut self, tier: TierId, free: &[bool]) {
        self.tiers[tier].space.put_back(free);
    }
}
