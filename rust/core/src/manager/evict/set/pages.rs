//! Pages: the room that a set would leave on a tier whose pages several groups share.
//!
//! A page is free once its last live slot has left, of whichever victim. Before any victim leave slots
//! that nothing needs: spare ones of leases, then released residencies, in the order of their release.
//! Invariant: `free` and `pages` are those of the arena after the set has left and before what it wants is
//! taken. Cost: O(1) per slot that leaves, O(groups) per comparison with what is wanted.

use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::block::{BlockId, GroupId, LeaseId, NO_SLOT, Part, Place, Slot, TierId};
use crate::manager::Manager;
use crate::manager::evict::set::EvictionSet;
use crate::residency::{Arena, ReleasedAt};
use crate::tier::ResidencyState;

/// Slots and pages of a tier that a set leaves and takes.
#[derive(Debug, Default)]
pub(crate) struct PageView {
    /// Free slots of each group in pages that have live ones.
    free: Vec<u64>,
    /// Free pages.
    pub(super) pages: u64,
    /// Live slots that stay in pages which lose some.
    left: FxHashMap<(GroupId, u32), u16>,
    /// Slots of each group that are wanted.
    wanted: Vec<u64>,
    /// Place in the list of released residencies at which the search goes on.
    next: ReleasedAt,
    /// Change of the holds on parts of blocks.
    holds: FxHashMap<Part, i32>,
    /// Parts whose slots leave.
    gone: FxHashSet<Part>,
    /// Parts that a store brings.
    pub(super) brought: FxHashSet<Part>,
}

impl PageView {
    /// The arena as it is.
    pub(super) fn open(&mut self, arena: &Arena) {
        let groups = arena.groups();
        self.free.extend((0..groups).map(|group| arena.free(group)));
        self.wanted.resize(groups, 0);
        self.pages = arena.free_pages();
    }

    pub(super) fn clear(&mut self) {
        let Self { free, pages, left, wanted, next, holds, gone, brought } = self;
        free.clear();
        left.clear();
        wanted.clear();
        holds.clear();
        gone.clear();
        brought.clear();
        (*pages, *next) = Default::default();
    }

    /// Slots of each group that the set takes.
    pub(crate) fn wanted(&self) -> &[u64] {
        &self.wanted
    }

    /// Pages that are missing for what the set takes and `more` slots of the first groups.
    fn lacking(&self, arena: &Arena, more: &[u64]) -> u64 {
        let pages =
            self.wanted.iter().zip(&self.free).enumerate().map(|(group, (&taken, &free))| {
                let wanted = taken + more.get(group).copied().unwrap_or(0);
                wanted.saturating_sub(free).div_ceil(u64::from(arena.per_page(group)))
            });
        pages.sum::<u64>().saturating_sub(self.pages)
    }

    /// Takes slots for which there is room.
    pub(super) fn take(&mut self, slots: &[u64]) {
        for (taken, &slots) in self.wanted.iter_mut().zip(slots) {
            *taken += slots;
        }
    }

    /// Frees a live slot of a group.
    pub(super) fn leave(&mut self, arena: &Arena, group: GroupId, slot: Slot) {
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
    /// Slots of the first group in the pages that a tier is short of.
    pub(super) fn short_of_pages(&self, set: &EvictionSet, tier: TierId, wanted: &[u64]) -> u64 {
        let arena = self.blocks.arena(tier).expect("a tier of several groups");
        set.shared[tier].lacking(arena, wanted) * u64::from(arena.per_page(0))
    }

    /// Counts the slots of blocks of a run that leave a tier with all layers, `slots` in all.
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

    /// Adds what nothing needs until the wanted slots have room: spare slots of leases, the latest
    /// lease first, and released residencies.
    pub(super) fn leave_unneeded(&self, set: &mut EvictionSet, tier: TierId, wanted: &[u64]) {
        let Some(arena) = self.blocks.arena(tier) else { return };
        while tier == 0 && set.shared[0].lacking(arena, wanted) > 0 {
            let before = set.spared.last().copied().unwrap_or(LeaseId::MAX);
            let Some(lease) = self.spare_lease(before) else { break };
            set.spared.push(lease.id);
            for (group, slot) in lease.spare_slots() {
                set.shared[0].leave(arena, group, slot);
            }
        }
        while set.shared[tier].lacking(arena, wanted) > 0
            && let Some(part) = self.blocks.released_from(tier, &mut set.shared[tier].next)
        {
            self.leave_unheld(set, tier, part);
        }
    }

    /// Frees the slot of a part that nothing holds in the set's view, unless a move still writes it.
    fn leave_unheld(&self, set: &mut EvictionSet, tier: TierId, part: Part) {
        let (place, view) = (Place::new(tier, part.group), &mut set.shared[tier]);
        let holds = i32::from(self.blocks.holds(place, part.block));
        let here = self.residency(place, part.block);
        if holds + view.holds.get(&part).copied().unwrap_or(0) == 0
            && here.slot != NO_SLOT
            && here.state != ResidencyState::Arriving
            && view.gone.insert(part)
        {
            let arena = self.blocks.arena(tier).expect("a tier of several groups");
            view.leave(arena, part.group, here.slot);
        }
    }

    /// Changes the holds on a part; without any its slot leaves.
    pub(super) fn change_holds(&self, set: &mut EvictionSet, tier: TierId, part: Part, by: i32) {
        *set.shared[tier].holds.entry(part).or_default() += by;
        if by < 0 {
            self.leave_unheld(set, tier, part);
        }
    }

    /// Whether a tier has a part, or expects it, in the set's view.
    pub(super) fn part_in(&self, set: &EvictionSet, tier: TierId, part: Part) -> bool {
        let view = &set.shared[tier];
        view.brought.contains(&part)
            || !view.gone.contains(&part)
                && self.blocks.expects(Place::new(tier, part.group), part.block)
    }

    /// Whether a part has no slot on a tier in the set's view: bytes that cannot be read have one, and
    /// those that a failed move may still write.
    pub(super) fn part_absent(&self, set: &EvictionSet, tier: TierId, part: Part) -> bool {
        set.shared[tier].gone.contains(&part)
            || self.residency(Place::new(tier, part.group), part.block).slot == NO_SLOT
    }
}
