//! Blocks of a manager: one trie and, per tier, a residency table, a slot allocator and a count of
//! clean copies, all in private fields.
//!
//! Others read through `trie`, `table` and `space`; only the verbs here change where a block is
//! resident:
//!
//! ```text
//!            extend            begin_arrival             arrived
//!   no block ───────> absent ──────────────────> arriving ─────────> resident ──┐ begin_read,
//!                      ^  └─────────── put_new, put_in ────────────> ^  │   ^ └─┘ end_io
//!                      └─────────── vacate, evict_run ──────────────────┘   └─ restore
//! ```
//!
//! Invariants: a residency holds exactly the slots of its layers; a copy counts as clean exactly
//! while its layers are also resident below (on the last tier: above). Cost: O(1) per block for a
//! verb if the block is on one tier alone, else O(tiers²); with layer slots also O(layers).

mod arena;
mod changes;
mod clean;
mod groups;
mod space;
mod table;

use std::ops::Range;

use crate::arrival::{Arrival, MoveIds};
use crate::block::{BlockId, Layers, MoveId, NO_SLOT, Slot, TierId, Token};
use crate::tier::{Residency, ResidencyState, TierSpec};
use crate::trie::{RunId, Trie};

pub use arena::Arena;
pub use changes::Change;
pub use groups::GroupSlots;
pub use space::{Grant, Space};
pub use table::ResidencyTable;

/// Residency table, slots and clean count of one tier.
#[derive(Debug)]
struct TierBlocks {
    table: ResidencyTable,
    space: Space,
    layer_slots: bool,
    /// Number of clean copies.
    clean: u64,
}

/// Trie and residency tables of all blocks; the blocks of a run share a value `T`.
#[derive(Debug)]
pub struct Blocks<T> {
    all: Layers,
    trie: Trie<T>,
    tiers: Vec<TierBlocks>,
    /// The other groups of a model with several.
    groups: Option<Box<groups::GroupBlocks>>,
    /// Changes of valid layers, if they are kept.
    changes: Option<Vec<Change>>,
    /// Increments when a block is added, removed or changes its residency.
    generation: u64,
}

impl<T: Copy + PartialEq + Default> Blocks<T> {
    /// No blocks, on tiers of these specifications.
    #[must_use]
    pub fn new(block_tokens: usize, layers: u16, tiers: &[TierSpec]) -> Self {
        let all = Layers::new(0, layers);
        let held = |spec: &TierSpec| TierBlocks {
            table: ResidencyTable::new(all),
            space: Space::new(spec.blocks, layers, spec.layer_slots),
            layer_slots: spec.layer_slots,
            clean: 0,
        };
        let tiers = tiers.iter().map(held).collect();
        let trie = Trie::new(block_tokens);
        Self { all, trie, tiers, groups: None, changes: None, generation: 0 }
    }

    /// The trie, read-only.
    #[inline]
    #[must_use]
    pub fn trie(&self) -> &Trie<T> {
        &self.trie
    }

    /// A tier's residency table, read-only.
    #[inline]
    #[must_use]
    pub fn table(&self, tier: TierId) -> &ResidencyTable {
        &self.tiers[tier].table
    }

    /// A tier's slots, read-only.
    #[inline]
    #[must_use]
    pub fn space(&self, tier: TierId) -> &Space {
        &self.tiers[tier].space
    }

    /// A number that increments when a block is added, removed or changes its residency.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Continues after the generation of the blocks that these replace.
    pub fn follow(&mut self, generation: u64) {
        self.generation = generation + 1;
    }

    // Trie: a block that is added gets an entry in every table.

    /// Adds the root of a scope.
    pub fn add_root(&mut self) -> RunId {
        self.generation += 1;
        self.trie.add_root()
    }

    /// Removes the root of a scope that has no blocks.
    pub fn remove_root(&mut self, root: RunId) {
        self.generation += 1;
        self.trie.remove_root(root);
    }

    /// Inserts blocks of these tokens after `parent` (after the root, if none), absent on every
    /// tier, and appends them to `path`.
    pub fn extend(
        &mut self,
        root: RunId,
        parent: Option<BlockId>,
        tokens: &[Token],
        value: T,
        path: &mut Vec<BlockId>,
    ) {
        self.generation += 1;
        self.trie.extend(root, parent, tokens, value, path);
        let bound = self.trie.bound();
        for tier in &mut self.tiers {
            tier.table.reach(bound);
        }
        if let Some(groups) = &mut self.groups {
            groups.reach(bound);
        }
    }

    /// Changes the values of a path, run by run.
    pub fn change_values(&mut self, path: &[BlockId], change: impl FnMut(Range<BlockId>, &mut T)) {
        self.trie.change(path, change);
    }

    /// Frees the ids that are reserved after a block's run.
    pub fn trim(&mut self, block: BlockId) {
        self.trie.trim(block);
    }

    /// Removes the last `blocks` blocks of a run, which are absent on every tier.
    pub fn remove_tail(&mut self, block: BlockId, blocks: u32) {
        self.generation += 1;
        self.trie.remove_tail(block, blocks);
    }

    // Residencies.

    /// Changes a block's residency on a tier; the caller allocates and frees the slots.
    pub fn alter(&mut self, tier: TierId, block: BlockId, change: impl FnOnce(&mut Residency)) {
        self.generation += 1;
        if self.changes.is_some() {
            self.alter_noted(tier, block, change);
        } else {
            self.alter_quietly(tier, block, change);
        }
    }

    fn alter_quietly(&mut self, tier: TierId, block: BlockId, change: impl FnOnce(&mut Residency)) {
        // On a single tier no copy is clean.
        if self.tiers.len() == 1 {
            self.tiers[tier].table.change(block, change);
            return;
        }
        let before = self.resident_layers(tier, block);
        self.tiers[tier].table.change(block, change);
        self.recount(tier, block, before);
    }

    /// Makes absent blocks fully resident on a tier. It must have as many free slots.
    pub fn put_new(&mut self, tier: TierId, blocks: &[BlockId]) {
        self.generation += 1;
        let TierBlocks { table, space, .. } = &mut self.tiers[tier];
        for &block in blocks {
            table.put(block, space.take().expect("room was made").slot);
        }
        self.note_all(tier, blocks.iter().copied(), Layers::NONE, self.all);
    }

    /// Makes absent blocks fully resident on the first tier in these slots, as far as both go;
    /// returns how many.
    pub fn put_in(&mut self, blocks: &[BlockId], slots: impl Iterator<Item = Slot>) -> usize {
        self.generation += 1;
        let table = &mut self.tiers[0].table;
        let pairs = blocks.iter().zip(slots);
        let settled = pairs.map(|(&block, slot)| table.put(block, slot)).count();
        self.note_all(0, blocks[..settled].iter().copied(), Layers::NONE, self.all);
        settled
    }

    /// Evicts consecutive blocks of one run that are fully resident and idle on a tier, and frees
    /// their slots, the last block's first.
    pub fn evict_run(&mut self, tier: TierId, blocks: Range<BlockId>) {
        self.generation += 1;
        let TierBlocks { table, space, .. } = &mut self.tiers[tier];
        // Last block first: the free list is a stack, so the first slot is taken first again.
        space.give_all(table.clear(blocks.clone()));
        self.recount_run(tier, &blocks, self.all, None);
        self.note_all(tier, blocks.rev(), self.all, Layers::NONE);
    }

    /// Makes `layers`, at an end of a block's resident range, absent; the caller frees their slots.
    /// Returns the layers that stay.
    pub fn vacate(&mut self, tier: TierId, block: BlockId, layers: Layers) -> Layers {
        let TierBlocks { table, space, layer_slots, .. } = &mut self.tiers[tier];
        let here = table.get(block);
        let rest =
            here.have.without(layers).expect("the vacated layers are at an end of the range");
        let row = *layer_slots && here.slot != NO_SLOT;
        if row {
            layers.iter().for_each(|layer| space.set(here.slot, layer, NO_SLOT));
        }
        // Layers in flight to this block still need the row.
        let ended = rest.is_empty() && table.arrival(block).is_none();
        if ended && row {
            space.end_row(here.slot);
        }
        self.alter(tier, block, |here| {
            here.have = rest;
            if ended {
                (here.state, here.slot) = (ResidencyState::Absent, NO_SLOT);
            }
        });
        rest
    }

    /// Makes layers resident again in the slot that they were leaving; a store still reads it.
    pub fn restore(&mut self, tier: TierId, block: BlockId, slot: Slot, held: Layers) {
        let TierBlocks { table, space, layer_slots, .. } = &mut self.tiers[tier];
        let here = table.get(block);
        let have = here.have.join(held).expect("it can return");
        // All layers of the row may have left since, which ended it.
        let row = match (*layer_slots, here.slot) {
            (false, _) => slot,
            (true, NO_SLOT) => space.new_row(),
            (true, row) => row,
        };
        if *layer_slots {
            space.set(row, held.lo, slot);
        }
        self.alter(tier, block, |here| {
            (here.slot, here.have, here.state) = (row, have, ResidencyState::Resident);
            // The store still reads the slot, as any other move would.
            here.busy += 1;
        });
    }

    // Moves: one begins to read a block or to bring it, and ends.

    /// Begins a read of a block that is fully resident and idle; returns its slot.
    pub fn begin_read(&mut self, tier: TierId, block: BlockId) -> Slot {
        self.tiers[tier].table.begin_read(block)
    }

    /// Begins the arrival of all layers of an absent block in a slot.
    pub fn begin_arrival(&mut self, tier: TierId, block: BlockId, slot: Slot, arrival: Arrival) {
        self.generation += 1;
        self.tiers[tier].table.begin_arrival(block, slot, arrival);
    }

    /// Ends the only moves that brought these blocks of one run from `src` to `dst`.
    pub fn arrived(&mut self, src: TierId, dst: TierId, blocks: Range<BlockId>) {
        self.generation += 1;
        self.note_all(dst, blocks.clone(), Layers::NONE, self.all);
        for block in blocks.clone() {
            self.tiers[src].table.end_io(block);
            self.tiers[dst].table.arrived(block);
        }
        // A source that was read is fully resident, so its tier needs no look.
        self.recount_run(dst, &blocks, Layers::NONE, Some(src));
    }

    /// Attaches an arrival to a block whose state is already arriving.
    pub fn attach_arrival(&mut self, tier: TierId, block: BlockId, arrival: Arrival) {
        self.generation += 1;
        self.tiers[tier].table.attach_arrival(block, arrival);
    }

    /// The arrival of a block, if it is arriving.
    pub fn arrival_mut(&mut self, tier: TierId, block: BlockId) -> Option<&mut Arrival> {
        self.generation += 1;
        self.tiers[tier].table.arrival_mut(block)
    }

    /// Detaches a block's arrival, which has landed or failed.
    pub fn take_arrival(&mut self, tier: TierId, block: BlockId) -> Option<Arrival> {
        self.generation += 1;
        self.tiers[tier].table.take_arrival(block)
    }

    // Slots.

    /// Allocates one slot. One must be free.
    pub fn take_slot(&mut self, tier: TierId) -> Grant {
        self.tiers[tier].space.take().expect("room was made")
    }

    /// Allocates `count` slots of the first tier, those that no store reads first. They must be
    /// free.
    pub fn take_open(&mut self, count: usize) -> impl Iterator<Item = Slot> + '_ {
        let space = &mut self.tiers[0].space;
        let mut known: Vec<Slot> = Vec::with_capacity(count);
        known.extend(space.take_free(count));
        let rest = known.len()..count;
        known.extend(rest.map(|_| space.take().expect("room was made").slot));
        known.into_iter()
    }

    /// Allocates slots for `layers` and returns the slot or row, which is `into` if that exists.
    pub fn take_slots(&mut self, tier: TierId, into: u32, layers: Layers) -> u32 {
        let TierBlocks { space, layer_slots, .. } = &mut self.tiers[tier];
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

    /// Frees one slot.
    pub fn give_slot(&mut self, tier: TierId, slot: Slot) {
        self.tiers[tier].space.give(slot);
    }

    /// Frees the slots of `layers`; `last` also ends the row.
    pub fn give_slots(&mut self, tier: TierId, slot: u32, layers: Layers, last: bool) {
        let TierBlocks { space, layer_slots, .. } = &mut self.tiers[tier];
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

    /// Moves `layers` of one row into another, and frees those that the other has (`known`).
    pub fn join_rows(&mut self, tier: TierId, from: u32, into: u32, layers: Layers, known: Layers) {
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

    /// A row that has one slot, of the layer, or the slot itself without layer slots.
    pub fn adopt(&mut self, tier: TierId, slot: Slot, layer: u16) -> u32 {
        let TierBlocks { space, layer_slots, .. } = &mut self.tiers[tier];
        if !*layer_slots {
            return slot;
        }
        let row = space.new_row();
        space.set(row, layer, slot);
        row
    }

    /// The slot of one layer of a slot or row.
    #[inline]
    #[must_use]
    pub fn layer_slot(&self, tier: TierId, slot: u32, layer: u16) -> Slot {
        let TierBlocks { space, layer_slots, .. } = &self.tiers[tier];
        if *layer_slots && slot != NO_SLOT { space.row(slot)[usize::from(layer)] } else { slot }
    }

    /// Frees a slot that a store still reads.
    pub fn drain(&mut self, tier: TierId, slot: Slot, by: MoveId) {
        let space = &mut self.tiers[tier].space;
        match &mut self.groups {
            // Groups share the slot's bytes: any of them may take its page.
            Some(groups) => {
                space.lend();
                groups.drain(tier, slot, by);
            }
            None => space.drain(slot, by),
        }
    }

    /// The moves that must end before a slot may be written.
    #[must_use]
    pub fn waits(&self, tier: TierId, slot: Slot) -> MoveIds {
        match &self.groups {
            Some(groups) => groups.waits(tier, slot),
            None => self.tiers[tier].space.drained_by(slot).into_iter().collect(),
        }
    }

    /// Ends the store's read of a slot.
    pub fn drained(&mut self, tier: TierId, slot: Slot) {
        self.tiers[tier].space.drained(slot);
    }

    /// Undoes [`Blocks::drain`], unless the slot was granted since; returns whether it did.
    pub fn undrain(&mut self, tier: TierId, slot: Slot) -> bool {
        self.tiers[tier].space.undrain(slot)
    }

    /// Excludes a draining slot from grants, or admits it again.
    pub fn withhold(&mut self, tier: TierId, slot: Slot, withheld: bool) {
        self.tiers[tier].space.withhold(slot, withheld);
    }

    /// Reserves the free slots below `bound` as a bitmap, to claim some until [`Blocks::put_back`].
    pub fn reserve_below(&mut self, tier: TierId, bound: Slot) -> Vec<bool> {
        self.tiers[tier].space.reserve_below(bound)
    }

    /// Frees the reserved slots that were not claimed.
    pub fn put_back(&mut self, tier: TierId, free: &[bool]) {
        self.tiers[tier].space.put_back(free);
    }
}
