//! Pages: the room left by a set on a tier with pages shared by several groups.
//!
//! A page is free once its last live slot has left, for any victim. Unneeded slots leave before any
//! victim: spare slots of leases, then released residencies in the order of their release.
//! Invariant: `free` and `pages` equal the arena's counts after the set has left and before its
//! wanted slots are taken. Cost: O(1) per leaving slot, O(groups) per comparison with the wanted
//! slots.

use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::block::{BlockId, GroupId, LeaseId, NO_SLOT, Part, Place, Slot, TierId};
use crate::manager::Manager;
use crate::manager::evict::set::EvictionSet;
use crate::residency::{Arena, ReleasedAt};

/// Planned step for a part of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    tier: TierId,
    part: Part,
    what: Plan,
}

#[derive(Clone, Copy, Debug)]
enum Plan {
    Held,
    Unheld,
    Leaves,
}

/// Slots and pages of a tier that a set frees and takes.
#[derive(Debug, Default)]
pub(crate) struct PageView {
    /// Free slots of each group in pages with live slots.
    free: Vec<u64>,
    /// Free pages.
    pub(super) pages: u64,
    /// Remaining live slots of pages that lose slots.
    left: FxHashMap<(GroupId, u32), u16>,
    /// Wanted slots of each group.
    wanted: Vec<u64>,
    /// Next position in the list of released residencies.
    next: ReleasedAt,
    /// Parts brought by a store.
    pub(super) brought: FxHashSet<Part>,
}

impl PageView {
    /// Copies the current counts of the arena.
    pub(super) fn open(&mut self, arena: &Arena) {
        let groups = arena.groups();
        self.free.extend((0..groups).map(|group| arena.free(group)));
        self.wanted.resize(groups, 0);
        self.pages = arena.free_pages();
    }

    pub(super) fn clear(&mut self) {
        let Self { free, pages, left, wanted, next, brought } = self;
        free.clear();
        left.clear();
        wanted.clear();
        brought.clear();
        (*pages, *next) = Default::default();
    }

    /// Slots of each group taken by the set.
    pub(crate) fn wanted(&self) -> &[u64] {
        &self.wanted
    }

    /// Number of missing pages for the set's slots and `more` slots of the leading groups.
    fn lacking(&self, arena: &Arena, more: &[u64]) -> u64 {
        let pages =
            self.wanted.iter().zip(&self.free).enumerate().map(|(group, (&taken, &free))| {
                let wanted = taken + more.get(group).copied().unwrap_or(0);
                wanted.saturating_sub(free).div_ceil(u64::from(arena.per_page(group)))
            });
        pages.sum::<u64>().saturating_sub(self.pages)
    }

    /// Takes slots that have room.
    pub(super) fn take(&mut self, slots: &[u64]) {
        for (taken, &slots) in self.wanted.iter_mut().zip(slots) {
            *taken += slots;
        }
    }

    /// Frees a live slot of a group.
    pub(super) fn leave(&mut self, arena: &Arena, group: GroupId, slot: Slot) {
        if arena.per_page(group) == 1 {
            self.pages += 1;
            return;
        }
        let page = arena.page(group, slot);
        let left = self.left.entry((group, page)).or_insert_with(|| arena.live_in(group, page));
        *left -= 1;
        if *left == 0 {
            self.pages += 1;
            self.free[group] -= u64::from(arena.per_page(group)) - 1;
        } else {
            self.free[group] += 1;
        }
    }
}

impl Manager {
    /// Number of slots of the first group in the pages a tier is short of.
    pub(super) fn short_of_pages(&self, set: &EvictionSet, tier: TierId, wanted: &[u64]) -> u64 {
        let arena = self.blocks.arena(tier).expect("a tier of several groups");
        set.shared[tier].lacking(arena, wanted) * u64::from(arena.per_page(0))
    }

    /// Counts the slots of blocks of a run that leave a tier with all layers, `slots` in total.
    #[inline]
    pub(super) fn free_slots(
        &self,
        set: &mut EvictionSet,
        tier: TierId,
        blocks: Range<BlockId>,
        slots: u64,
    ) {
        set.spare[tier] += slots;
        if !set.shared.is_empty() {
            let arena = self.blocks.arena(tier).expect("a tier of several groups");
            for block in blocks {
                set.shared[tier].leave(arena, 0, self.residency(tier, block).slot);
            }
        }
    }

    /// Adds unneeded slots until the wanted slots have room: spare slots of leases, the latest
    /// lease first, then released residencies.
    pub(super) fn leave_unneeded(&mut self, set: &mut EvictionSet, tier: TierId, wanted: &[u64]) {
        let Some(arena) = self.blocks.arena(tier) else { return };
        while tier == 0 && set.shared[0].lacking(arena, wanted) > 0 {
            let before = set.spared.last().copied().unwrap_or(LeaseId::MAX);
            let Some(lease) = self.spare_lease(before) else { break };
            set.spared.push(lease.id);
            for (group, open) in lease.spare_slots() {
                let slot = open.plain().expect("taken while room is free");
                set.shared[0].leave(arena, group, slot);
            }
        }
        let lacking = |manager: &Self, set: &EvictionSet| {
            set.shared[tier].lacking(manager.blocks.arena(tier).expect("seen above"), wanted)
        };
        while let pages @ 1.. = lacking(self, set) {
            // A part frees at most a page.
            for _ in 0..pages {
                let next = &mut set.shared[tier].next;
                let Some(part) = self.blocks.released_from(tier, next) else { return };
                let slot = self.blocks.plan_leave(Place::new(tier, part.group), part.block);
                self.part_leaves(set, tier, part, slot);
            }
        }
    }

    /// Counts the slot of a leaving part.
    fn part_leaves(&self, set: &mut EvictionSet, tier: TierId, part: Part, slot: Option<Slot>) {
        if let Some(slot) = slot {
            let arena = self.blocks.arena(tier).expect("a tier of several groups");
            set.shared[tier].leave(arena, part.group, slot);
            set.planned.push(Planned { tier, part, what: Plan::Leaves });
        }
    }

    /// Holds a part in the set's view.
    pub(super) fn plan_hold(&mut self, set: &mut EvictionSet, tier: TierId, part: Part) {
        self.blocks.plan_hold(Place::new(tier, part.group), part.block);
        set.planned.push(Planned { tier, part, what: Plan::Held });
    }

    /// Ends a hold on a part in the set's view. Without holds, its slot leaves.
    pub(super) fn plan_unhold(&mut self, set: &mut EvictionSet, tier: TierId, part: Part) {
        set.planned.push(Planned { tier, part, what: Plan::Unheld });
        let place = Place::new(tier, part.group);
        self.blocks.plan_unhold(place, part.block);
        let slot = self.blocks.plan_leave(place, part.block);
        self.part_leaves(set, tier, part, slot);
    }

    /// Undoes the planned steps for parts before the set is carried out or abandoned.
    pub(in crate::manager::evict) fn end_planning(&mut self, set: &EvictionSet) {
        for &Planned { tier, part, what } in set.planned.iter().rev() {
            let place = Place::new(tier, part.group);
            match what {
                Plan::Leaves => self.blocks.plan_stay(place, part.block),
                Plan::Unheld => self.blocks.plan_hold(place, part.block),
                Plan::Held => self.blocks.plan_unhold(place, part.block),
            }
        }
    }

    /// Whether a tier has or expects a part in the set's view.
    pub(super) fn part_in(&self, set: &EvictionSet, tier: TierId, part: Part) -> bool {
        let view = &set.shared[tier];
        let place = Place::new(tier, part.group);
        view.brought.contains(&part)
            || !self.blocks.leaves(place, part.block) && self.blocks.expects(place, part.block)
    }

    /// Whether a part has no slot on a tier in the set's view. Unreadable parts and parts that a
    /// failed move may still write have slots.
    pub(super) fn part_absent(&self, tier: TierId, part: Part) -> bool {
        let place = Place::new(tier, part.group);
        self.blocks.leaves(place, part.block) || self.residency(place, part.block).slot == NO_SLOT
    }
}
