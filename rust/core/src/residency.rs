//! Blocks of a manager, in private fields: a trie, a residency table per tier and group of layers,
//! and the slots and number of clean copies per tier.
//!
//! Other modules read through `trie`, `table`, `space` and `arena`. Only the verbs here change
//! residencies. They take a [`Place`], a tier and a group. A tier alone is its first group:
//!
//! ```text
//!            extend            begin_arrival         arrived, stored, end_arrival
//!   no block ───────> absent ──────────────────> arriving ─────────> resident ──┐ begin_read, end_io,
//!                      ^  └──────── put, put_new, put_in ──────────> ^  │   ^ └─┘ add_reader, end_reader
//!                      └──── vacate, evict_run, discard ────────────────┘   └─ restore
//! ```
//!
//! With a single group a tier has a [`Space`] of slots. Several groups share an [`Arena`], which
//! divides pages into slots of each group (`shared.rs`).
//!
//! Invariants: a residency holds exactly the slots of its layers. A copy counts as clean exactly
//! while its layers are also resident below (on the last tier: above). A block removed from the
//! trie has no residency in any group. Cost: O(1) per block and verb if the block is on a single
//! tier, else O(tiers²). With layer slots also O(layers).

mod arena;
mod changes;
mod clean;
mod shared;
mod slots;
mod space;
mod table;

use std::ops::Range;

use crate::arrival::Arrival;
use crate::block::{BlockId, Layers, NO_SLOT, Place, Slot, TierId, Token};
use crate::paged_vec::PagedVec;
use crate::tier::{Residency, ResidencyState, TierSpec};
use crate::trie::{RunId, Trie};

pub(crate) use arena::Arena;
pub(crate) use changes::Change;
pub use shared::GroupSlots;
pub(crate) use shared::ReleasedAt;
pub(crate) use space::{Grant, Space};
pub(crate) use table::ResidencyTable;

use shared::Shared;

/// Residencies of a group on a tier.
#[derive(Debug)]
struct Residencies {
    table: ResidencyTable,
    /// Number of resume points and leases holding a residency. Not counted for the first group.
    holds: PagedVec<u16>,
    /// Number of held residencies.
    held: u64,
    /// Whether residencies being read cannot be taken, because a store to a shared tier may take
    /// any time.
    reads_stay: bool,
}

/// Slots and clean count of a tier.
#[derive(Debug)]
struct TierBlocks {
    space: Space,
    /// Pages shared by several groups, in place of the space.
    shared: Option<Box<Shared>>,
    layer_slots: bool,
    /// Number of clean copies.
    clean: u64,
}

/// Trie and residency tables of all blocks. The blocks of a run share a value `T`.
#[derive(Debug)]
pub(crate) struct Blocks<T> {
    all: Layers,
    trie: Trie<T>,
    tiers: Vec<TierBlocks>,
    /// By group, then tier. The first group comes first.
    places: Vec<Residencies>,
    /// Changes of valid layers, if recorded.
    changes: Option<Vec<Change>>,
    /// Increments when a block is added, removed or changes its residency.
    generation: u64,
}

impl Residencies {
    fn new(layers: u16) -> Self {
        let table = ResidencyTable::new(Layers::new(0, layers));
        Self { table, holds: PagedVec::new(0), held: 0, reads_stay: false }
    }
}

impl<T: Copy + PartialEq + Default> Blocks<T> {
    /// Creates an empty table for tiers of these specifications.
    #[must_use]
    pub(crate) fn new(block_tokens: usize, layers: u16, tiers: &[TierSpec]) -> Self {
        let held = |spec: &TierSpec| TierBlocks {
            space: Space::new(spec.blocks, layers, spec.layer_slots),
            shared: None,
            layer_slots: spec.layer_slots,
            clean: 0,
        };
        Self {
            all: Layers::new(0, layers),
            trie: Trie::new(block_tokens),
            tiers: tiers.iter().map(held).collect(),
            places: tiers.iter().map(|_| Residencies::new(layers)).collect(),
            changes: None,
            generation: 0,
        }
    }

    /// Gives each empty tier an arena. `layers` are the layers of all groups after the first.
    /// Residencies being read on the tier `above_shared` cannot be taken.
    pub(crate) fn open_groups(
        &mut self,
        arenas: Vec<Arena>,
        layers: &[u16],
        above_shared: Option<TierId>,
    ) {
        for (tier, arena) in self.tiers.iter_mut().zip(arenas) {
            tier.space = Space::new(0, self.all.hi, false);
            tier.shared = Some(Box::new(Shared::new(arena)));
        }
        let tiers = self.tiers.len();
        let others = layers.iter().flat_map(|&layers| std::iter::repeat_n(layers, tiers));
        self.places.extend(others.map(Residencies::new));
        if let Some(tier) = above_shared {
            let places = self.places.iter_mut().skip(tier).step_by(tiers);
            places.for_each(|place| place.reads_stay = true);
        }
    }

    /// The trie, read-only.
    #[inline]
    #[must_use]
    pub(crate) fn trie(&self) -> &Trie<T> {
        &self.trie
    }

    /// A residency table, read-only.
    #[inline]
    #[must_use]
    pub(crate) fn table(&self, place: impl Into<Place>) -> &ResidencyTable {
        &self.places[self.number(place.into())].table
    }

    #[inline]
    fn table_mut(&mut self, place: Place) -> &mut ResidencyTable {
        let number = self.number(place);
        &mut self.places[number].table
    }

    #[inline]
    fn number(&self, place: Place) -> usize {
        place.group * self.tiers.len() + place.tier
    }

    /// Whether a block is resident at a place, or arriving by a move that has not failed.
    #[must_use]
    pub(crate) fn expects(&self, place: impl Into<Place>, block: BlockId) -> bool {
        let table = self.table(place);
        let coming = || table.arrival(block).is_some_and(|arrival| !arrival.failed);
        table.fully_resident(block)
            || match table.get(block).state {
                ResidencyState::Resident => true,
                ResidencyState::Arriving => coming(),
                ResidencyState::Absent | ResidencyState::Bad => false,
            }
    }

    /// Number incremented when a block is added, removed or changes its residency.
    #[inline]
    #[must_use]
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Continues after the generation of the replaced blocks.
    pub(crate) fn follow(&mut self, generation: u64) {
        self.generation = generation + 1;
    }

    // Trie: each added block gets an entry in every table.

    /// Adds the root of a scope.
    pub(crate) fn add_root(&mut self) -> RunId {
        self.generation += 1;
        self.trie.add_root()
    }

    /// Removes the root of a scope without blocks.
    pub(crate) fn remove_root(&mut self, root: RunId) {
        self.generation += 1;
        self.trie.remove_root(root);
    }

    /// Inserts blocks of these tokens after `parent`, or after the root if none, and appends them
    /// to `path`. They are absent on every tier.
    pub(crate) fn extend(
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
        for place in &mut self.places {
            place.table.reach(bound);
        }
        for place in &mut self.places[self.tiers.len()..] {
            place.holds.reach(bound);
        }
    }

    /// Changes the values of a path, run by run.
    pub(crate) fn change_values(
        &mut self,
        path: &[BlockId],
        change: impl FnMut(Range<BlockId>, &mut T),
    ) {
        self.trie.change(path, change);
    }

    /// Frees the ids reserved after a block's run.
    pub(crate) fn trim(&mut self, block: BlockId) {
        self.trie.trim(block);
    }

    /// Removes the last `blocks` blocks of a run. They are absent on every tier.
    pub(crate) fn remove_tail(&mut self, block: BlockId, blocks: u32) {
        self.generation += 1;
        self.trie.remove_tail(block, blocks);
    }

    // Residencies.

    /// Changes a block's residency. The caller allocates and frees the slots.
    pub(crate) fn alter(
        &mut self,
        place: impl Into<Place>,
        block: BlockId,
        change: impl FnOnce(&mut Residency),
    ) {
        self.generation += 1;
        if self.changes.is_some() {
            self.alter_noted(place.into(), block, change);
        } else {
            self.alter_quietly(place.into(), block, change);
        }
    }

    fn alter_quietly(&mut self, place: Place, block: BlockId, change: impl FnOnce(&mut Residency)) {
        // On a single tier no copy is clean. Clean copies are counted for the first group only.
        if self.tiers.len() == 1 || place.group > 0 {
            self.table_mut(place).change(block, change);
            return;
        }
        let before = self.resident_layers(place.tier, block);
        self.places[place.tier].table.change(block, change);
        self.recount(place.tier, block, before);
    }

    /// Makes an absent block fully resident in an allocated slot. After the first group it is
    /// listed as released, because nothing holds it yet. Released residencies are taken in FIFO
    /// order.
    pub(crate) fn put(&mut self, place: Place, block: BlockId, slot: Slot) {
        self.generation += 1;
        let table = self.table_mut(place);
        table.put(block, slot);
        let all = table.get(block).have;
        self.release(place, block);
        self.note(place, block, Layers::NONE, all);
    }

    /// Makes absent blocks fully resident on a tier with enough free slots.
    pub(crate) fn put_new(&mut self, tier: TierId, blocks: &[BlockId]) {
        self.generation += 1;
        let (slots_of_tier, table) = (&mut self.tiers[tier], &mut self.places[tier].table);
        match &mut slots_of_tier.shared {
            None => {
                for &block in blocks {
                    table.put(block, slots_of_tier.space.take().expect("room was made").slot);
                }
            }
            Some(shared) => {
                for &block in blocks {
                    table.put(block, shared.arena.take(0).expect("room was made"));
                }
            }
        }
        self.note_all(tier, blocks.iter().copied(), Layers::NONE, self.all);
    }

    /// Makes absent blocks fully resident in these slots of the first tier, up to the shorter of
    /// both lists. Returns the number.
    pub(crate) fn put_in(
        &mut self,
        blocks: &[BlockId],
        slots: impl Iterator<Item = Slot>,
    ) -> usize {
        self.generation += 1;
        let table = &mut self.places[0].table;
        let pairs = blocks.iter().zip(slots);
        let settled = pairs.map(|(&block, slot)| table.put(block, slot)).count();
        self.note_all(0, blocks[..settled].iter().copied(), Layers::NONE, self.all);
        settled
    }

    /// Evicts consecutive blocks of a run, fully resident and idle on a tier. Frees their slots,
    /// the last block's first.
    pub(crate) fn evict_run(&mut self, tier: TierId, blocks: Range<BlockId>) {
        self.generation += 1;
        let TierBlocks { space, shared, .. } = &mut self.tiers[tier];
        // Last block first: the free list is a stack, so the first slot is taken first again.
        let slots = self.places[tier].table.clear(blocks.clone());
        match shared {
            None => space.give_all(slots),
            Some(shared) => slots.for_each(|slot| shared.give(0, slot)),
        }
        self.recount_run(tier, &blocks, self.all, None);
        self.note_all(tier, blocks.rev(), self.all, Layers::NONE);
    }

    /// Makes `layers`, at an end of a block's resident range, absent. The caller frees their slots.
    /// Returns the remaining layers.
    pub(crate) fn vacate(&mut self, tier: TierId, block: BlockId, layers: Layers) -> Layers {
        let TierBlocks { space, layer_slots, .. } = &mut self.tiers[tier];
        let table = &self.places[tier].table;
        let residency = table.get(block);
        let rest =
            residency.have.without(layers).expect("the vacated layers are at an end of the range");
        let row = *layer_slots && residency.slot != NO_SLOT;
        if row {
            layers.iter().for_each(|layer| space.set(residency.slot, layer, NO_SLOT));
        }
        // Layers in flight to this block still need the row.
        let ended = rest.is_empty() && table.arrival(block).is_none();
        if ended && row {
            space.end_row(residency.slot);
        }
        self.alter(tier, block, |residency| {
            residency.have = rest;
            if ended {
                (residency.state, residency.slot) = (ResidencyState::Absent, NO_SLOT);
            }
        });
        rest
    }

    /// Makes layers resident again in the slot they were leaving. A store still reads the slot.
    pub(crate) fn restore(&mut self, tier: TierId, block: BlockId, slot: Slot, held: Layers) {
        let TierBlocks { space, layer_slots, .. } = &mut self.tiers[tier];
        let residency = self.places[tier].table.get(block);
        let have = residency.have.join(held).expect("it can return");
        // The row may have ended because all its layers have left.
        let row = match (*layer_slots, residency.slot) {
            (false, _) => slot,
            (true, NO_SLOT) => space.new_row(),
            (true, row) => row,
        };
        if *layer_slots {
            space.set(row, held.lo, slot);
        }
        self.alter(tier, block, |residency| {
            (residency.slot, residency.have) = (row, have);
            residency.state = ResidencyState::Resident;
            // The store still reads the slot, like any read.
            residency.busy += 1;
        });
    }

    // Moves: begin and end of reads and arrivals.

    /// Begins a read of a fully resident, idle block. Returns its slot.
    pub(crate) fn begin_read(&mut self, tier: TierId, block: BlockId) -> Slot {
        self.places[tier].table.begin_read(block)
    }

    /// Begins the arrival of all layers of an absent block in a slot.
    pub(crate) fn begin_arrival(
        &mut self,
        place: impl Into<Place>,
        block: BlockId,
        slot: Slot,
        arrival: Arrival,
    ) {
        self.generation += 1;
        self.table_mut(place.into()).begin_arrival(block, slot, arrival);
    }

    /// Ends the only moves of these blocks of a run from `src` to `dst`.
    pub(crate) fn arrived(&mut self, src: TierId, dst: TierId, blocks: Range<BlockId>) {
        self.generation += 1;
        self.note_all(dst, blocks.clone(), Layers::NONE, self.all);
        for block in blocks.clone() {
            self.places[src].table.end_io(block);
            self.places[dst].table.arrived(block);
        }
        // The source is fully resident, so its tier needs no recount.
        self.recount_run(dst, &blocks, Layers::NONE, Some(src));
    }

    /// Ends the only moves of these blocks of a run to `dst`, the last block first, out of slots
    /// without a residency.
    pub(crate) fn stored(&mut self, dst: TierId, blocks: Range<BlockId>) {
        self.generation += 1;
        self.note_all(dst, blocks.clone().rev(), Layers::NONE, self.all);
        for block in blocks.clone() {
            self.places[dst].table.arrived(block);
        }
        self.recount_run(dst, &blocks, Layers::NONE, None);
    }

    /// Attaches an arrival to a block in state arriving.
    pub(crate) fn attach_arrival(
        &mut self,
        place: impl Into<Place>,
        block: BlockId,
        arrival: Arrival,
    ) {
        self.generation += 1;
        self.table_mut(place.into()).attach_arrival(block, arrival);
    }

    /// The arrival of a block, if it is arriving.
    pub(crate) fn arrival_mut(
        &mut self,
        place: impl Into<Place>,
        block: BlockId,
    ) -> Option<&mut Arrival> {
        self.generation += 1;
        self.table_mut(place.into()).arrival_mut(block)
    }

    /// Detaches a landed or failed arrival.
    pub(crate) fn take_arrival(
        &mut self,
        place: impl Into<Place>,
        block: BlockId,
    ) -> Option<Arrival> {
        self.generation += 1;
        self.table_mut(place.into()).take_arrival(block)
    }
}
