//! Residencies of the groups after the first, on the first tier, and the arena that all groups share.
//!
//! The first group has the table and the space of a model with one group; its space is stocked with
//! slots out of the arena when room is made, and gives free ones back. A residency of another group
//! is held by resume points and leases. One that none holds is released: it is found, and its slot
//! is taken before any victim.
//!
//! Invariant: a block has residencies of other groups only while it has one of the first. Cost: O(1)
//! per verb; 6 bytes per block and group, 8 per released residency.

use std::collections::VecDeque;

use crate::block::{BlockId, NO_SLOT, Slot};
use crate::paged_vec::PagedVec;

use super::{Arena, Blocks, Space};

/// Number of a group after the first: group `at + 1` of the model.
type At = usize;

/// Residencies of one group.
#[derive(Debug)]
struct GroupTable {
    slots: PagedVec<Slot>,
    /// Resume points and leases that hold a residency.
    holds: PagedVec<u16>,
    /// Residencies that are held.
    held: u64,
    /// Residencies in all.
    resident: u64,
}

/// Residencies of all groups after the first.
#[derive(Debug)]
pub(super) struct GroupBlocks {
    arena: Arena,
    tables: Vec<GroupTable>,
    /// Released residencies, the oldest first. A row may be out of date: its residency is held again
    /// or has gone.
    released: VecDeque<(u8, BlockId)>,
}

/// Slots of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSlots {
    /// Slots of blocks that a resume point or a lease holds, and open slots of leases; of the first
    /// group, all that are not free.
    pub held: u64,
    /// Slots that stay matchable until they are taken.
    pub released: u64,
}

impl GroupBlocks {
    /// Empty, over an arena.
    pub(super) fn new(arena: Arena, groups: usize) -> Self {
        let table = |_| GroupTable {
            slots: PagedVec::new(NO_SLOT),
            holds: PagedVec::new(0),
            held: 0,
            resident: 0,
        };
        Self { arena, tables: (1..groups).map(table).collect(), released: VecDeque::new() }
    }

    fn slot(&self, at: At, block: BlockId) -> Option<Slot> {
        self.tables[at].slots.get(block).copied().filter(|&slot| slot != NO_SLOT)
    }

    fn holds(&self, at: At, block: BlockId) -> u16 {
        self.tables[at].holds.get(block).copied().unwrap_or(0)
    }

    /// Makes a residency that none holds absent.
    fn drop_one(&mut self, at: At, block: BlockId) {
        let Some(slot) = self.slot(at, block) else { return };
        debug_assert_eq!(self.holds(at, block), 0, "block {block} of group {at} is held");
        self.tables[at].slots[block] = NO_SLOT;
        self.tables[at].resident -= 1;
        self.arena.give(at + 1, slot);
    }

    /// Makes all residencies of a block absent, which has none of the first group any more.
    pub(super) fn drop_block(&mut self, block: BlockId) {
        (0..self.tables.len()).for_each(|at| self.drop_one(at, block));
    }

    /// Notes a residency that none holds any more.
    fn release(&mut self, at: At, block: BlockId) {
        self.released.push_back((u8::try_from(at).expect("few groups"), block));
        let current: u64 = self.tables.iter().map(|table| table.resident - table.held).sum();
        // Rows out of date must not outnumber the others for long.
        if self.released.len() as u64 > 2 * current + 64 {
            let rows = std::mem::take(&mut self.released);
            let mut seen = rustc_hash::FxHashSet::default();
            let stays = |&(at, block): &(u8, BlockId)| {
                let at = usize::from(at);
                self.slot(at, block).is_some() && self.holds(at, block) == 0
            };
            self.released =
                rows.into_iter().filter(|row| stays(row) && seen.insert(*row)).collect();
        }
    }
}

impl<T: Copy + PartialEq + Default> Blocks<T> {
    /// Gives the first tier, on which nothing is yet, an arena for this number of groups.
    pub fn open_groups(&mut self, arena: Arena, groups: usize) {
        self.tiers[0].space = Space::new(0, self.all.hi, false);
        self.groups = Some(Box::new(GroupBlocks::new(arena, groups)));
    }

    fn group_blocks(&mut self) -> &mut GroupBlocks {
        self.groups.as_mut().expect("a manager of several groups")
    }

    /// The arena of the first tier, if the model has several groups.
    #[must_use]
    pub fn arena(&self) -> Option<&Arena> {
        self.groups.as_ref().map(|groups| &groups.arena)
    }

    /// The slot of a block in a group after the first.
    #[must_use]
    pub fn group_slot(&self, at: usize, block: BlockId) -> Option<Slot> {
        self.groups.as_ref()?.slot(at, block)
    }

    /// Number of resume points and leases that hold a block in a group after the first.
    #[must_use]
    pub fn group_holds(&self, at: usize, block: BlockId) -> u16 {
        self.groups.as_ref().map_or(0, |groups| groups.holds(at, block))
    }

    /// Slots of each group.
    #[must_use]
    pub fn group_slots(&self) -> Vec<GroupSlots> {
        let Some(groups) = &self.groups else { return Vec::new() };
        let free = u64::from(self.tiers[0].space.free());
        let first = GroupSlots { held: groups.arena.live(0) - free, released: 0 };
        let others = groups.tables.iter().enumerate().map(|(at, table)| {
            let released = table.resident - table.held;
            GroupSlots { held: groups.arena.live(at + 1) - released, released }
        });
        std::iter::once(first).chain(others).collect()
    }

    /// Takes a free slot of a group after the first.
    pub fn take_group_slot(&mut self, at: usize) -> Option<Slot> {
        self.group_blocks().arena.take(at + 1)
    }

    /// Gives a slot of a group after the first back, which no block has.
    pub fn give_group_slot(&mut self, at: usize, slot: Slot) {
        self.group_blocks().arena.give(at + 1, slot);
    }

    /// Makes a block resident in a group after the first, in a slot that was taken: released, until
    /// it is held.
    pub fn settle_group(&mut self, at: usize, block: BlockId, slot: Slot) {
        self.generation += 1;
        let groups = self.group_blocks();
        debug_assert!(groups.slot(at, block).is_none(), "block {block} has a slot of group {at}");
        groups.tables[at].slots.put(block, slot);
        groups.tables[at].resident += 1;
        groups.release(at, block);
    }

    /// Takes the slot of a block that one holder holds alone, which is absent then.
    pub fn unsettle_group(&mut self, at: usize, block: BlockId) -> Slot {
        self.generation += 1;
        let table = &mut self.group_blocks().tables[at];
        debug_assert_eq!(table.holds[block], 1, "block {block} has another holder");
        table.holds[block] = 0;
        (table.held, table.resident) = (table.held - 1, table.resident - 1);
        std::mem::replace(&mut table.slots[block], NO_SLOT)
    }

    /// Holds a block that is resident in a group after the first.
    pub fn hold_group(&mut self, at: usize, block: BlockId) {
        let table = &mut self.group_blocks().tables[at];
        debug_assert!(table.slots[block] != NO_SLOT, "block {block} is absent in group {at}");
        let holds = table.holds.get(block).copied().unwrap_or(0);
        table.holds.put(block, holds + 1);
        table.held += u64::from(holds == 0);
    }

    /// Ends one hold; without another one the residency is released.
    pub fn unhold_group(&mut self, at: usize, block: BlockId) {
        let groups = self.group_blocks();
        let table = &mut groups.tables[at];
        table.holds[block] -= 1;
        if table.holds[block] == 0 {
            table.held -= 1;
            groups.release(at, block);
        }
    }

    /// Frees the slot of the residency that was released first; `false` if there is none.
    pub fn take_released(&mut self) -> bool {
        self.generation += 1;
        let groups = self.group_blocks();
        while let Some((at, block)) = groups.released.pop_front() {
            let at = usize::from(at);
            if groups.slot(at, block).is_some() && groups.holds(at, block) == 0 {
                groups.drop_one(at, block);
                return true;
            }
        }
        false
    }

    /// Gives the free slots of the first group back to the arena.
    pub fn unstock(&mut self) {
        let Self { tiers, groups, .. } = self;
        let groups = groups.as_mut().expect("a manager of several groups");
        tiers[0].space.withdraw().into_iter().for_each(|slot| groups.arena.give(0, slot));
    }

    /// Takes slots of the first group out of the arena, which must have them, into its space.
    pub fn stock(&mut self, slots: u64) {
        let Self { tiers, groups, .. } = self;
        let groups = groups.as_mut().expect("a manager of several groups");
        let taken = (0..slots).map(|_| groups.arena.take(0).expect("room was made"));
        tiers[0].space.add(taken);
    }
}
