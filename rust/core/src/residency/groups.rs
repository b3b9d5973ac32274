//! Residencies of the groups after the first, by tier, and the arena that all groups of a tier share.
//!
//! The first group has the tables and the spaces of a model with one group; its space on a tier is
//! stocked with slots out of the arena when room is made, and gives free ones back. A residency of
//! another group is held by resume points and, on the first tier, by leases. One that none holds is
//! released: it is found, and its slot is taken before any victim.
//!
//! ```text
//!            begin_group_arrival           end_group_arrival
//!   absent ──────────────────────> arriving ────────────────> resident ──┐ begin_group_read,
//!     ^ └──────────────── settle_group ──────────────────────> ^   │ ^ └─┘ end_group_read
//!     └── take_released, drop_groups; a move that reads the slot drains it
//! ```
//!
//! Invariant: a block that leaves the trie has no residency of any group. Cost: O(1) per verb; 6 bytes
//! per block, group and tier, 8 per stretch of released residencies.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::arrival::{Arrival, MoveIds};
use crate::block::{BlockId, Layers, MoveId, NO_SLOT, Slot, TierId};
use crate::paged_vec::PagedVec;
use crate::tier::{Residency, ResidencyState};

use super::{Arena, Blocks, ResidencyTable, Space};

/// Number of a group after the first: group `at + 1` of the model.
type At = usize;

/// Residencies of one group on one tier.
#[derive(Debug)]
struct GroupTable {
    table: ResidencyTable,
    /// Resume points and leases that hold a residency.
    holds: PagedVec<u16>,
    /// Residencies that are held.
    held: u64,
    /// Residencies in all, arriving ones included.
    resident: u64,
}

/// Released residencies of consecutive blocks.
#[derive(Clone, Copy, Debug)]
struct Released {
    first: BlockId,
    blocks: u16,
    at: u8,
}

/// One tier: its arena, and the residencies of all groups after the first.
#[derive(Debug)]
struct GroupTier {
    arena: Arena,
    tables: Vec<GroupTable>,
    /// Released residencies, the oldest first. One may be out of date: it is held again or has gone.
    released: VecDeque<Released>,
    /// Residencies in `released`.
    listed: u64,
    /// Moves that read a residency.
    readers: FxHashMap<(u8, BlockId), MoveIds>,
    /// Moves that read or write a slot which no block has.
    touched: FxHashMap<(u8, Slot), MoveIds>,
}

/// Residencies of all groups after the first.
#[derive(Debug)]
pub(super) struct GroupBlocks(Vec<GroupTier>);

/// Slots of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSlots {
    /// Slots of blocks that a resume point or a lease holds, and open slots of leases; of the first
    /// group, all that are not free.
    pub held: u64,
    /// Slots that stay matchable until they are taken.
    pub released: u64,
}

impl GroupTable {
    fn present(&self, block: BlockId) -> bool {
        self.table.get(block).slot != NO_SLOT
    }

    fn hold(&mut self, block: BlockId) {
        debug_assert!(self.present(block), "block {block} is absent");
        let holds = &mut self.holds[block];
        self.held += u64::from(*holds == 0);
        *holds += 1;
    }
}

impl GroupTier {
    fn new(arena: Arena, layers: &[u16]) -> Self {
        let table = |&layers: &u16| GroupTable {
            table: ResidencyTable::new(Layers::new(0, layers)),
            holds: PagedVec::new(0),
            held: 0,
            resident: 0,
        };
        Self {
            arena,
            tables: layers.iter().map(table).collect(),
            released: VecDeque::new(),
            listed: 0,
            readers: FxHashMap::default(),
            touched: FxHashMap::default(),
        }
    }

    /// Makes a residency that none holds absent; moves that read its slot drain it.
    fn drop_one(&mut self, at: At, block: BlockId) {
        let GroupTable { table, resident, .. } = &mut self.tables[at];
        let idle = table.all_idle(block..block + 1);
        let freed = if idle { table.clear(block..block + 1).next() } else { None };
        let slot = freed.unwrap_or_else(|| {
            let slot = table.get(block).slot;
            table.change(block, |here| *here = Residency::default());
            slot
        });
        *resident -= 1;
        let readers = if idle { None } else { self.readers.remove(&(number(at), block)) };
        match readers {
            Some(by) => self.arena.drain(at + 1, slot, &by),
            None => self.arena.give(at + 1, slot),
        }
    }

    /// Whether a residency can be taken: it is there, and nothing holds or writes it.
    fn is_released(&self, at: At, block: BlockId) -> bool {
        let table = &self.tables[at];
        let here = table.table.get(block);
        here.slot != NO_SLOT && here.state != ResidencyState::Arriving && table.holds[block] == 0
    }

    /// Lists a residency that none holds.
    fn release(&mut self, at: At, block: BlockId) {
        self.list(at, block);
        let current: u64 = self.tables.iter().map(|table| table.resident - table.held).sum();
        // Those out of date must not outnumber the others for long.
        if self.listed > 2 * current + 64 {
            self.listed = 0;
            let mut seen = FxHashSet::default();
            for Released { first, blocks, at } in std::mem::take(&mut self.released) {
                for block in first..first + u32::from(blocks) {
                    if self.is_released(usize::from(at), block) && seen.insert((at, block)) {
                        self.list(usize::from(at), block);
                    }
                }
            }
        }
    }

    fn list(&mut self, at: At, block: BlockId) {
        self.listed += 1;
        if let Some(last) = self.released.back_mut()
            && usize::from(last.at) == at
            && last.first + u32::from(last.blocks) == block
            && last.blocks < u16::MAX
        {
            last.blocks += 1;
            return;
        }
        self.released.push_back(Released { first: block, blocks: 1, at: number(at) });
    }

    /// The residency that was released first, off the list.
    fn next_released(&mut self) -> Option<(At, BlockId)> {
        let next = self.released.front_mut()?;
        let (at, block) = (usize::from(next.at), next.first);
        (next.first, next.blocks) = (block + 1, next.blocks - 1);
        if next.blocks == 0 {
            self.released.pop_front();
        }
        self.listed -= 1;
        Some((at, block))
    }
}

impl GroupBlocks {
    /// Extends the tables to the blocks below `bound`.
    pub(super) fn reach(&mut self, bound: BlockId) {
        for table in self.0.iter_mut().flat_map(|tier| &mut tier.tables) {
            table.table.reach(bound);
            table.holds.reach(bound);
        }
    }

    /// Gives a slot of the first group to the arena of a tier while a move reads it.
    pub(super) fn drain(&mut self, tier: TierId, slot: Slot, by: MoveId) {
        self.0[tier].arena.drain(0, slot, &[by]);
    }

    /// The moves that must end before a slot of the first group may be written.
    pub(super) fn waits(&self, tier: TierId, slot: Slot) -> MoveIds {
        self.0[tier].arena.waits(0, slot)
    }
}

impl<T: Copy + PartialEq + Default> Blocks<T> {
    /// Gives the tiers, on which nothing is yet, an arena each; `layers` are those of the groups after
    /// the first.
    pub fn open_groups(&mut self, arenas: Vec<Arena>, layers: &[u16]) {
        for tier in &mut self.tiers {
            tier.space = Space::new(0, self.all.hi, false);
        }
        let tiers = arenas.into_iter().map(|arena| GroupTier::new(arena, layers));
        self.groups = Some(Box::new(GroupBlocks(tiers.collect())));
    }

    /// Makes all residencies of a block in groups after the first absent, which leaves the trie. None
    /// may be arriving.
    pub fn drop_groups(&mut self, block: BlockId) {
        for tier in 0..self.groups.as_ref().map_or(0, |groups| groups.0.len()) {
            for at in 0..self.group_tier(tier).tables.len() {
                let here = self.group_tier(tier);
                if here.tables[at].present(block) {
                    debug_assert!(here.is_released(at, block), "block {block}, group {at}");
                    self.drop_group(tier, at, block);
                }
            }
        }
    }

    /// Makes a residency that none holds absent.
    pub fn drop_group(&mut self, tier: TierId, at: usize, block: BlockId) {
        let had = self.group_residency(tier, at, block).usable();
        self.group_tier(tier).drop_one(at, block);
        self.note((tier, number(at + 1)), block, had, Layers::NONE);
    }

    fn group_tier(&mut self, tier: TierId) -> &mut GroupTier {
        &mut self.groups.as_mut().expect("a manager of several groups").0[tier]
    }

    /// The arena of a tier, if the model has several groups.
    #[must_use]
    pub fn arena(&self, tier: TierId) -> Option<&Arena> {
        self.groups.as_ref().map(|groups| &groups.0[tier].arena)
    }

    /// The residency of a block in a group after the first.
    #[must_use]
    pub fn group_residency(&self, tier: TierId, at: usize, block: BlockId) -> Residency {
        let tier = self.groups.as_ref().map(|groups| &groups.0[tier]);
        tier.map_or_else(Residency::default, |tier| tier.tables[at].table.get(block))
    }

    /// The arrival of a block in a group after the first.
    #[must_use]
    pub fn group_arrival(&self, tier: TierId, at: usize, block: BlockId) -> Option<&Arrival> {
        self.groups.as_ref()?.0[tier].tables[at].table.arrival(block)
    }

    /// Whether a tier has a block in a group after the first.
    #[must_use]
    pub fn group_resident(&self, tier: TierId, at: usize, block: BlockId) -> bool {
        let tier = self.groups.as_ref().map(|groups| &groups.0[tier]);
        tier.is_some_and(|tier| tier.tables[at].table.fully_resident(block))
    }

    /// Whether a tier has a block in a group after the first, or expects it.
    #[must_use]
    pub fn group_here(&self, tier: TierId, at: usize, block: BlockId) -> bool {
        if self.group_resident(tier, at, block) {
            return true;
        }
        match self.group_residency(tier, at, block).state {
            ResidencyState::Resident => true,
            ResidencyState::Arriving => {
                self.group_arrival(tier, at, block).is_some_and(|arrival| !arrival.failed)
            }
            ResidencyState::Absent | ResidencyState::Bad => false,
        }
    }

    /// Whether moves bring any block to the first tier in a group after the first.
    #[must_use]
    pub fn group_arrives(&self, at: usize) -> bool {
        let tables = self.groups.as_ref().map(|groups| &groups.0[0].tables);
        tables.is_some_and(|tables| tables[at].table.arrivals() > 0)
    }

    /// Whether moves bring a block to a tier in any group after the first.
    #[must_use]
    pub fn groups_arrive(&self, block: BlockId) -> bool {
        let tables = self.groups.iter().flat_map(|groups| &groups.0).flat_map(|tier| &tier.tables);
        let mut moving = tables.filter(|table| table.table.arrivals() > 0);
        moving.any(|table| table.table.arrival(block).is_some())
    }

    /// Number of resume points and leases that hold a block in a group after the first.
    #[must_use]
    pub fn group_holds(&self, tier: TierId, at: usize, block: BlockId) -> u16 {
        self.groups.as_ref().map_or(0, |groups| groups.0[tier].tables[at].holds[block])
    }

    /// Moves that read a block in a group after the first.
    #[must_use]
    pub fn group_readers(&self, tier: TierId, at: usize, block: BlockId) -> MoveIds {
        let readers = self.groups.as_ref().map(|groups| &groups.0[tier].readers);
        readers.and_then(|readers| readers.get(&(number(at), block)).cloned()).unwrap_or_default()
    }

    /// Slots of each group on a tier.
    #[must_use]
    pub fn group_slots(&self, tier: TierId) -> Vec<GroupSlots> {
        let Some(groups) = &self.groups else { return Vec::new() };
        let GroupTier { arena, tables, .. } = &groups.0[tier];
        let free = u64::from(self.tiers[tier].space.free());
        let first = GroupSlots { held: arena.live(0) - free, released: 0 };
        let others = tables.iter().enumerate().map(|(at, table)| {
            let released = table.resident - table.held;
            GroupSlots { held: arena.live(at + 1) - released, released }
        });
        std::iter::once(first).chain(others).collect()
    }

    /// Takes a free slot of a group after the first.
    pub fn take_group_slot(&mut self, tier: TierId, at: usize) -> Option<Slot> {
        self.group_tier(tier).arena.take(at + 1)
    }

    /// Gives a slot of a group after the first back, which no block has; moves that touch the slot
    /// drain it.
    pub fn give_group_slot(&mut self, tier: TierId, at: usize, slot: Slot) {
        let tier = self.group_tier(tier);
        match tier.touched.remove(&(number(at), slot)) {
            Some(by) => tier.arena.drain(at + 1, slot, &by),
            None => tier.arena.give(at + 1, slot),
        }
    }

    /// Notes that a move reads or writes slots of the first tier which no block has.
    pub fn touch_group_slots(&mut self, at: usize, slots: &[Slot], by: MoveId) {
        let touched = &mut self.group_tier(0).touched;
        for &slot in slots {
            touched.entry((number(at), slot)).or_default().push(by);
        }
    }

    /// Ends that.
    pub fn end_touch(&mut self, at: usize, slots: &[Slot], by: MoveId) {
        let tier = self.group_tier(0);
        for &slot in slots {
            if let Some(moves) = tier.touched.get_mut(&(number(at), slot)) {
                moves.retain(|id| *id != by);
                if moves.is_empty() {
                    tier.touched.remove(&(number(at), slot));
                }
            }
        }
        tier.arena.drained(by);
    }

    /// Takes this slot of a group, the first included, for a block that will be there. Returns whether
    /// it was free.
    pub fn claim_slot(&mut self, tier: TierId, group: usize, slot: Slot) -> bool {
        let claimed = self.group_tier(tier).arena.claim(group, slot);
        if claimed && group == 0 {
            self.tiers[tier].space.borrow();
        }
        claimed
    }

    /// Makes a block resident on a tier in a group after the first, in a slot that was taken: held by
    /// the caller, or released.
    pub fn settle_group(
        &mut self,
        tier: TierId,
        at: usize,
        (block, slot): (BlockId, Slot),
        held: bool,
    ) {
        self.generation += 1;
        let here = self.group_tier(tier);
        here.tables[at].table.put(block, slot);
        here.tables[at].resident += 1;
        // Listed in any case: released residencies are taken in the order in which they were settled.
        here.release(at, block);
        if held {
            here.tables[at].hold(block);
        }
        let all = self.group_residency(tier, at, block).have;
        self.note((tier, number(at + 1)), block, Layers::NONE, all);
    }

    /// Holds blocks that a tier has or expects in a group after the first.
    pub fn hold_group(
        &mut self,
        tier: TierId,
        at: usize,
        blocks: impl IntoIterator<Item = BlockId>,
    ) {
        let table = &mut self.group_tier(tier).tables[at];
        blocks.into_iter().for_each(|block| table.hold(block));
    }

    /// Ends one hold of each of these blocks; without another one its residency is released.
    pub fn unhold_group(
        &mut self,
        tier: TierId,
        at: usize,
        blocks: impl IntoIterator<Item = BlockId>,
    ) {
        let tier = self.group_tier(tier);
        for block in blocks {
            let table = &mut tier.tables[at];
            table.holds[block] -= 1;
            if table.holds[block] == 0 {
                table.held -= 1;
                tier.release(at, block);
            }
        }
    }

    /// Frees up to `count` slots of the residencies that a tier released first; `false` if there are none.
    pub fn take_released(&mut self, tier: TierId, count: u64) -> bool {
        self.generation += 1;
        let mut taken = 0;
        while taken < count
            && let Some((at, block)) = self.group_tier(tier).next_released()
        {
            if self.group_tier(tier).is_released(at, block) {
                self.drop_group(tier, at, block);
                taken += 1;
            }
        }
        taken > 0
    }

    // Moves.

    /// Begins the arrival of a block in a slot that was taken; the caller holds it.
    pub fn begin_group_arrival(
        &mut self,
        tier: TierId,
        at: usize,
        block: BlockId,
        slot: Slot,
        arrival: Arrival,
    ) {
        self.generation += 1;
        let table = &mut self.group_tier(tier).tables[at];
        table.table.begin_arrival(block, slot, arrival);
        table.resident += 1;
    }

    /// Ends the move that brought a block. One that failed leaves it absent; nothing holds it then.
    pub fn end_group_arrival(&mut self, tier: TierId, at: usize, block: BlockId, ok: bool) {
        self.generation += 1;
        let here = self.group_tier(tier);
        let table = &mut here.tables[at];
        if !ok {
            table.table.take_arrival(block);
            debug_assert_eq!(table.holds[block], 0, "block {block} of group {at} is held");
            here.drop_one(at, block);
            return;
        }
        table.table.arrived(block);
        if table.holds[block] == 0 {
            here.release(at, block);
        }
        let all = self.group_residency(tier, at, block).have;
        self.note((tier, number(at + 1)), block, Layers::NONE, all);
    }

    /// Marks the arrival of a block as failed: nothing expects it any more.
    pub fn fail_group_arrival(&mut self, tier: TierId, at: usize, block: BlockId) {
        self.generation += 1;
        if let Some(arrival) = self.group_tier(tier).tables[at].table.arrival_mut(block) {
            arrival.failed = true;
        }
    }

    /// Marks a residency as one whose bytes cannot be read.
    pub fn spoil_group(&mut self, tier: TierId, at: usize, block: BlockId) {
        self.generation += 1;
        let table = &mut self.group_tier(tier).tables[at].table;
        let here = table.get(block);
        if here.state == ResidencyState::Resident {
            table.change(block, |here| here.state = ResidencyState::Bad);
            self.note((tier, number(at + 1)), block, here.have, Layers::NONE);
        }
    }

    /// Begins a read of a block by a move.
    pub fn begin_group_read(&mut self, tier: TierId, at: usize, block: BlockId, by: MoveId) {
        let tier = self.group_tier(tier);
        tier.tables[at].table.change(block, |here| here.busy += 1);
        tier.readers.entry((number(at), block)).or_default().push(by);
    }

    /// Ends a read. Drains the slot if it was given back during the read, and drops a residency that
    /// cannot be read once nothing holds it.
    pub fn end_group_read(&mut self, tier: TierId, at: usize, block: Option<BlockId>, by: MoveId) {
        let tier = self.group_tier(tier);
        let key = block.map(|block| (number(at), block));
        let known = key.and_then(|key| tier.readers.get_mut(&key));
        let (Some(block), Some(moves)) = (block, known.filter(|moves| moves.contains(&by))) else {
            tier.arena.drained(by);
            return;
        };
        moves.retain(|id| *id != by);
        if moves.is_empty() {
            tier.readers.remove(&(number(at), block));
        }
        let table = &mut tier.tables[at];
        table.table.change(block, |here| here.busy -= 1);
        let here = table.table.get(block);
        if here.state == ResidencyState::Bad && here.busy == 0 && table.holds[block] == 0 {
            tier.drop_one(at, block);
        }
    }

    /// Ends the move that still read a slot of the first group that was given back.
    pub fn end_drain(&mut self, tier: TierId, by: MoveId) {
        if let Some(groups) = &mut self.groups {
            groups.0[tier].arena.drained(by);
        }
    }

    /// The moves that must end before a slot of a group after the first may be written.
    #[must_use]
    pub fn group_waits(&self, tier: TierId, at: usize, slot: Slot) -> MoveIds {
        self.arena(tier).map_or_else(MoveIds::new, |arena| arena.waits(at + 1, slot))
    }

    /// Whether no move reads a slot of a tier that was given back.
    #[must_use]
    pub fn none_draining(&self, tier: TierId) -> bool {
        self.tiers[tier].space.none_draining()
            && self.arena(tier).is_none_or(|arena| arena.draining().next().is_none())
    }

    /// Gives the free slots of the first group on a tier back to its arena.
    pub fn unstock(&mut self, tier: TierId) {
        let Self { tiers, groups, .. } = self;
        let arena = &mut groups.as_mut().expect("a manager of several groups").0[tier].arena;
        tiers[tier].space.withdraw().into_iter().for_each(|slot| arena.give(0, slot));
    }

    /// Takes slots of the first group out of a tier's arena, which must have them, into its space.
    pub fn stock(&mut self, tier: TierId, slots: u64) {
        let Self { tiers, groups, .. } = self;
        let arena = &mut groups.as_mut().expect("a manager of several groups").0[tier].arena;
        let taken = (0..slots).map(|_| arena.take(0).expect("room was made"));
        tiers[tier].space.add(taken);
    }
}

fn number(at: At) -> u8 {
    u8::try_from(at).expect("few groups")
}
