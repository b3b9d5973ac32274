//! Room for all groups of a model at once, in the arena of a tier.
//!
//! Room on the first tier is made for a request or not at all. Room on the tier below is soft: without
//! it a victim is dropped instead of stored. A store keeps its block and the blocks before it from being
//! dropped; where they would have to be, the stores that the call has begun are cancelled.
//!
//! ```text
//!   free slots and pages -> released residencies -> lowest entry of the eviction index
//!                                                     | a resume point: stored below, or dropped
//!                                                     | blocks: written below, or dropped
//! ```
//!
//! Invariant: what leases hold, and what moves in flight keep from leaving, is never counted on. Cost:
//! O(log n) per victim; O(paths of leases and moves) where slots are not free.

use rustc_hash::FxHashSet;

use crate::block::{BlockId, Handle, MoveId, Slot};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::manager::request::lease::TailFrom;
use crate::manager::request::windows::path_border;
use crate::tier::ResidencyState;
use crate::time::{Nanos, stamp};
use crate::transfer::{End, MoveKind};

/// Slots of the first tier that no victim frees, by group.
#[derive(Default)]
struct Fixed {
    slots: FxHashSet<(usize, Slot)>,
    /// Blocks whose path to the root was seen.
    blocks: FxHashSet<BlockId>,
}

impl Manager {
    /// Makes room for this number of slots of each group on the first tier: free slots, then released
    /// ones, then victims by value, or changes nothing. The first group's are in its space then.
    ///
    /// # Errors
    /// [`Error::NoSpace`] in bytes of pages, if leases hold too many.
    pub(crate) fn make_group_room(
        &mut self,
        wanted: &[u64],
        held: (&[BlockId], &[Vec<u32>]),
        now: Nanos,
    ) -> Result<()> {
        self.blocks.unstock(0);
        if !self.groups_fit(0, wanted) {
            self.check_group_room(wanted, held)?;
        }
        let begun = self.moves.latest();
        while !self.groups_fit(0, wanted) {
            if !self.free_some(wanted, now) && !self.cancel_store(begun, now) {
                return Err(self.no_pages(wanted));
            }
        }
        self.blocks.stock(0, wanted[0]);
        Ok(())
    }

    /// Frees a released slot of the first tier, or stores or drops what has the lowest value there.
    /// Returns whether it did.
    fn free_some(&mut self, wanted: &[u64], now: Nanos) -> bool {
        if self.give_spare_slots() || self.blocks.take_released(0) {
            return true;
        }
        let victim = self.tiers[0].eviction.victim(stamp(now));
        let slots = victim.map_or(1, |victim| self.useless(0, victim.id, wanted));
        self.free_victim(slots, None, now)
    }

    /// Stores or drops what has the lowest value on the first tier: a point, or up to `slots` blocks,
    /// which are added to `left`. Returns whether it did.
    pub(crate) fn free_victim(
        &mut self,
        slots: u64,
        mut left: Option<&mut Vec<Handle>>,
        now: Nanos,
    ) -> bool {
        let Some(victim) = self.tiers[0].eviction.victim(stamp(now)) else { return false };
        if self.has_point_on(0, victim.id) {
            self.demote_point(victim.id, now);
            return true;
        }
        let stored = self.tiers.writes(0) && self.serves_points(0, victim.id);
        // Blocks below that are in no other place leave with those above if there is no other way.
        for (slots, dropping) in [(slots, false), (1, false), (1, true)] {
            if stored && !dropping && self.make_room_below(&[slots], now) {
                self.blocks.stock(1, slots);
            }
            if self.evict_lowest((0, slots), dropping, left.as_deref_mut(), now) {
                return true;
            }
        }
        let point = self.linked_point(0);
        point.inspect(|&block| self.demote_point(block, now)).is_some()
    }

    /// Cancels the latest store after a move, none of which was handed out. Returns whether there is
    /// one.
    pub(crate) fn cancel_store(&mut self, begun: MoveId, now: Nanos) -> bool {
        let store = (begun + 1..=self.moves.latest())
            .rev()
            .find(|&id| self.moves.get(id).is_some_and(|known| known.kind == MoveKind::Store));
        let Some((known, _)) = store.and_then(|id| self.moves.fail(id)) else { return false };
        let block = known.block.and_then(|handle| self.trie().resolve(handle));
        match (known.to, block) {
            (End::Group(group), Some(block)) => self.group_failed(&known, group, block, false),
            (_, Some(block)) => {
                if let Some(arrival) = self.arrival_mut(known.dst, block) {
                    arrival.failed = true;
                }
            }
            _ => {}
        }
        self.end_move(known.id, now);
        self.blocks.unstock(0);
        self.blocks.unstock(1);
        true
    }

    /// Number of blocks of the first group that can leave the first tier while those of `stay` and all
    /// before them remain.
    pub(crate) fn leavable(&self, stay: &[BlockId]) -> u64 {
        let mut fixed = self.fixed(&[], &[]);
        for &block in stay {
            self.fix_path(&mut fixed, Some(block));
        }
        let resident =
            |&&block: &&BlockId| self.residency(0, block).state == ResidencyState::Resident;
        self.blocks.table(0).copies() - fixed.blocks.iter().filter(resident).count() as u64
    }

    /// Fails if the slots of the first tier that stay in any case leave too few pages.
    fn check_group_room(
        &self,
        wanted: &[u64],
        (path, held): (&[BlockId], &[Vec<u32>]),
    ) -> Result<()> {
        let Some(arena) = self.blocks.arena(0) else { return Ok(()) };
        let fixed = self.fixed(path, held).slots;
        let mut spare = vec![0_u64; wanted.len().max(arena.groups())];
        let mut pages: FxHashSet<(usize, u32)> = FxHashSet::default();
        for &(group, slot) in &fixed {
            let per_page = arena.per_page(group);
            if pages.insert((group, slot / u32::from(per_page))) {
                spare[group] += u64::from(per_page);
            }
            spare[group] -= 1;
        }
        let lacking = wanted.iter().zip(&spare).enumerate().map(|(group, (wanted, spare))| {
            wanted.saturating_sub(*spare).div_ceil(u64::from(arena.per_page(group)))
        });
        if lacking.sum::<u64>() + pages.len() as u64 <= u64::from(arena.room()) {
            return Ok(());
        }
        Err(self.no_pages(wanted))
    }

    /// Slots of the first tier that no victim frees: those of leases and of the request at hand, of
    /// blocks that moves in flight or pins keep, with the blocks before them, and of their points.
    fn fixed(&self, path: &[BlockId], held: &[Vec<u32>]) -> Fixed {
        let mut fixed = Fixed::default();
        self.fix_held(&mut fixed, path, held);
        for lease in self.leases.values() {
            let held = lease.windows.as_ref().map_or(&[][..], |windows| &windows.held);
            self.fix_held(&mut fixed, lease.path.blocks(), held);
        }
        let moving = self.moves.values().filter_map(|known| known.block);
        for block in moving.filter_map(|handle| self.trie().resolve(handle)) {
            self.fix_path(&mut fixed, Some(block));
            for at in 0..held.len().max(self.blocks.arena(0).map_or(0, |arena| arena.groups() - 1))
            {
                let here = self.blocks.group_residency(0, at, block);
                if here.state == ResidencyState::Arriving {
                    fixed.slots.insert((at + 1, here.slot));
                }
            }
        }
        for (_, block) in self.pins.copies() {
            self.fix_path(&mut fixed, Some(block));
        }
        let slots = &mut fixed.slots;
        for lease in self.leases.values() {
            slots.extend(lease.open.iter().map(|&open| (0, self.open_slot(open, 0))));
            // Forks share the slot of their tail until they reserve.
            let tail = match lease.tail_from {
                TailFrom::Shared(private) => Some(private),
                TailFrom::OpenSlot | TailFrom::Block(_) => None,
            };
            let private = lease.path.private_slots().chain(tail);
            slots.extend(private.map(|id| (0, self.private_slot(id, 0))));
            // Spare slots are given back where room is wanted.
            let open = lease.windows.iter().flat_map(|windows| windows.open.iter().enumerate());
            let slot = |at| move |&slot: &Slot| (at + 1, slot);
            slots.extend(open.flat_map(|(at, open)| open.values().map(slot(at))));
        }
        fixed
    }

    /// Adds what a path of a request and its windows have.
    fn fix_held(&self, fixed: &mut Fixed, path: &[BlockId], held: &[Vec<u32>]) {
        for (at, held) in held.iter().enumerate() {
            let slot = |&place: &u32| self.blocks.group_residency(0, at, path[place as usize]).slot;
            fixed.slots.extend(held.iter().map(|place| (at + 1, slot(place))));
        }
        self.fix_path(fixed, path.last().copied());
    }

    /// Adds the blocks of a path that are on the first tier, with their points there.
    fn fix_path(&self, fixed: &mut Fixed, end: Option<BlockId>) {
        let mut next = end;
        while let Some(block) = next.filter(|&block| fixed.blocks.insert(block)) {
            next = self.trie().parent(block);
            let here = self.residency(0, block);
            if here.state != ResidencyState::Absent {
                fixed.slots.insert((0, here.slot));
            }
            if self.has_point_on(0, block) {
                let path = self.path_to(Some(block));
                for (at, block) in self.needs(&path, path_border(&path)) {
                    let slot = self.blocks.group_residency(0, at, block).slot;
                    fixed.slots.insert((at + 1, slot));
                }
            }
        }
    }

    fn no_pages(&self, wanted: &[u64]) -> Error {
        self.no_space(0, wanted[0], &self.eviction_set())
    }
}
