//! Room for all groups of a model at once, in the arena of a tier.
//!
//! Room for a request is made or not at all. Room for victims on the tiers below is soft: without it a
//! victim is dropped instead of stored. A store keeps its block and the blocks before it from being
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

use crate::block::{BlockId, GroupId, MoveId, Part, Place, Slot, TierId};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::manager::request::life::lease::TailFrom;
use crate::manager::request::slots::placed_slots::PlacedSlots;
use crate::manager::request::slots::window_slots::{blocks_at, path_border};
use crate::residency::Arena;
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::transfer::{End, MoveKind};

/// Slots of a tier that no victim frees, by group.
#[derive(Default)]
struct Fixed {
    slots: FxHashSet<(GroupId, Slot)>,
    /// Blocks whose path to the root was seen.
    blocks: FxHashSet<BlockId>,
}

impl Manager {
    /// Makes room for this number of slots of each group on a tier: free slots, then released ones, then
    /// victims by value, or changes nothing.
    ///
    /// # Errors
    /// [`Error::NoSpace`] in pages, if leases and moves hold too many.
    pub(crate) fn make_group_room(
        &mut self,
        tier: TierId,
        wanted: &[u64],
        held: (&[BlockId], &[Vec<u32>]),
        now: Nanos,
    ) -> Result<()> {
        if !self.groups_fit(tier, wanted) {
            self.check_group_room(tier, wanted, held, 0)?;
        }
        let begun = self.moves.latest();
        while !self.groups_fit(tier, wanted) {
            let spare = tier == 0 && self.give_spare_slots();
            let freed = spare || self.free_some(tier, true, wanted, now);
            if !freed && !self.cancel_store(begun, now) {
                return Err(self.no_pages(tier, wanted, &self.fixed(tier, held.0, held.1), 0));
            }
        }
        Ok(())
    }

    /// Fails if a request would leave less than the first tier's growth reserve to running leases.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub(crate) fn check_growth(
        &self,
        wanted: &[u64],
        held: (&[BlockId], &[Vec<u32>]),
    ) -> Result<()> {
        let pages = self.blocks.arena(0).map_or(0, Arena::room);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share below one of a number below 2^32"
        )]
        let growth = (f64::from(pages) * self.tiers[0].spec.growth_reserve) as u64;
        // A request that takes no slot leaves the reserve as it is.
        let takes = wanted.iter().any(|&slots| slots > 0);
        if growth == 0 || !takes { Ok(()) } else { self.check_group_room(0, wanted, held, growth) }
    }

    /// Cancels the latest store after a move, none of which was handed out. Returns whether there is
    /// one.
    pub(crate) fn cancel_store(&mut self, begun: MoveId, now: Nanos) -> bool {
        let store = (begun + 1..=self.moves.latest())
            .rev()
            .find(|&id| self.moves.get(id).is_some_and(|known| known.kind == MoveKind::Store));
        let Some((known, _)) = store.and_then(|id| self.moves.fail(id)) else { return false };
        let block = known.block.and_then(|handle| self.trie().resolve(handle));
        if let (End::Here, Some(block)) = (known.to, block) {
            self.fail_arrival(known.target(), block);
        }
        self.end_move(known.id, now);
        true
    }

    /// Number of blocks of the first group that can leave a tier while those of `stay` and all before
    /// them remain.
    pub(crate) fn leavable(&self, tier: TierId, stay: &[BlockId]) -> u64 {
        let mut fixed = self.fixed(tier, &[], &[]);
        for &block in stay {
            self.fix_path(&mut fixed, tier, Some(block));
        }
        let resident =
            |&&block: &&BlockId| self.residency(tier, block).state == ResidencyState::Resident;
        self.blocks.table(tier).copies() - fixed.blocks.iter().filter(resident).count() as u64
    }

    /// Fails if the slots of a tier that stay in any case, and `spared` pages, leave too few pages.
    fn check_group_room(
        &self,
        tier: TierId,
        wanted: &[u64],
        (path, held): (&[BlockId], &[Vec<u32>]),
        spared: u64,
    ) -> Result<()> {
        let Some(arena) = self.blocks.arena(tier) else { return Ok(()) };
        let pages = (0..).zip(wanted).map(|(group, &wanted)| arena.whole_pages(group, wanted));
        let pages: u64 = pages.sum::<u64>() + spared;
        let most = self.most_fixed(tier, path, held);
        if most.is_some_and(|most| pages + most <= u64::from(arena.room())) {
            return Ok(());
        }
        let fixed = self.fixed(tier, path, held);
        let mut spare = vec![0_u64; wanted.len().max(arena.groups())];
        let mut pages: FxHashSet<(GroupId, u32)> = FxHashSet::default();
        for &(group, slot) in &fixed.slots {
            let per_page = arena.per_page(group);
            if pages.insert((group, slot / u32::from(per_page))) {
                spare[group] += u64::from(per_page);
            }
            spare[group] -= 1;
        }
        let lacking = wanted.iter().zip(&spare).enumerate().map(|(group, (wanted, spare))| {
            wanted.saturating_sub(*spare).div_ceil(u64::from(arena.per_page(group)))
        });
        if lacking.sum::<u64>() + pages.len() as u64 + spared <= u64::from(arena.room()) {
            return Ok(());
        }
        Err(self.no_pages(tier, wanted, &fixed, spared))
    }

    /// Bound of the slots of [`Manager::fixed`], without a look at each; `None` where moves or pins keep
    /// some, or on a tier below the first.
    fn most_fixed(&self, tier: TierId, path: &[BlockId], held: &[Vec<u32>]) -> Option<u64> {
        let points = self.points.as_ref()?;
        let kept = self.moves.is_empty() && self.pins.len() == 0 && self.marked.is_empty();
        if tier > 0 || !kept {
            return None;
        }
        let of_path = |path: &[BlockId], held: &[Vec<u32>]| {
            let held: usize = held.iter().map(Vec::len).sum();
            points.slots(path) + (path.len() + held) as u64
        };
        let leases = self.leases.values().map(|lease| {
            let windows = lease.windows.as_ref();
            let held = windows.map_or(&[][..], |windows| &windows.held);
            let open = windows.map_or(0, |windows| windows.open.iter().map(PlacedSlots::len).sum());
            // With the slot of its tail, which it may share.
            let slots: usize = open + lease.open.len() + lease.path.private_slots().count() + 1;
            of_path(lease.path.blocks(), held) + slots as u64
        });
        Some(of_path(path, held) + leases.sum::<u64>())
    }

    /// Slots of a tier that no victim frees: those of leases and of the request at hand, of blocks that
    /// moves in flight or pins keep, with the blocks before them, and of their points.
    fn fixed(&self, tier: TierId, path: &[BlockId], held: &[Vec<u32>]) -> Fixed {
        let mut fixed = Fixed::default();
        self.fix_held(&mut fixed, tier, path, held);
        for lease in self.leases.values() {
            let held = lease.windows.as_ref().filter(|_| tier == 0);
            let held = held.map_or(&[][..], |windows| &windows.held);
            self.fix_held(&mut fixed, tier, lease.path.blocks(), held);
        }
        self.fix_moving(&mut fixed, tier);
        let marked = self.marked.iter().map(|&(_, _, block)| block);
        for block in self.pins.copies().map(|(_, block)| block).chain(marked) {
            self.fix_path(&mut fixed, tier, Some(block));
        }
        if tier == 0 {
            self.fix_open(&mut fixed.slots);
        } else {
            let private = self.private_slots.iter().filter(|(_, private)| private.tier == tier);
            fixed.slots.extend(private.map(|(_, private)| (0, private.slot)));
        }
        fixed
    }

    /// Adds the blocks that moves in flight keep, with the blocks before them, and what they write.
    fn fix_moving(&self, fixed: &mut Fixed, tier: TierId) {
        let moving = self.moves.values().filter_map(|known| known.block);
        for block in moving.filter_map(|handle| self.trie().resolve(handle)) {
            self.fix_path(fixed, tier, Some(block));
            for group in self.other_groups() {
                let here = self.residency(Place::new(tier, group), block);
                if here.state == ResidencyState::Arriving {
                    fixed.slots.insert((group, here.slot));
                }
            }
        }
    }

    /// Adds the slots of the first tier that leases have without a block.
    fn fix_open(&self, slots: &mut FxHashSet<(GroupId, Slot)>) {
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
            slots
                .extend(open.flat_map(|(group, open)| open.slots().map(move |slot| (group, slot))));
        }
    }

    /// Adds what a path of a request and its windows have.
    fn fix_held(&self, fixed: &mut Fixed, tier: TierId, path: &[BlockId], held: &[Vec<u32>]) {
        for (group, held) in held.iter().enumerate() {
            let here = |block| self.residency(Place::new(tier, group), block);
            fixed.slots.extend(blocks_at(path, held).map(|block| (group, here(block).slot)));
        }
        self.fix_path(fixed, tier, path.last().copied());
    }

    /// Adds the blocks of a path that are on a tier, with their points there.
    fn fix_path(&self, fixed: &mut Fixed, tier: TierId, end: Option<BlockId>) {
        let mut next = end;
        while let Some(block) = next.filter(|&block| fixed.blocks.insert(block)) {
            next = self.trie().parent(block);
            let here = self.residency(tier, block);
            if here.state != ResidencyState::Absent {
                fixed.slots.insert((0, here.slot));
            }
            if self.has_point_on(tier, block) {
                let path = self.path_to(Some(block));
                for Part { group, block } in self.needs(&path, path_border(&path)) {
                    let slot = self.residency(Place::new(tier, group), block).slot;
                    fixed.slots.insert((group, slot));
                }
            }
        }
    }

    /// The error of a request without room in an arena, in pages: those of all slots that it wants, and
    /// those that neither what is `fixed` nor `spared` takes.
    fn no_pages(&self, tier: TierId, wanted: &[u64], fixed: &Fixed, spared: u64) -> Error {
        let arena = self.blocks.arena(tier).expect("a tier of several groups");
        let pages = |slots: &FxHashSet<(GroupId, Slot)>| {
            let page =
                |&(group, slot): &(GroupId, Slot)| (group, slot / u32::from(arena.per_page(group)));
            slots.iter().map(page).collect::<FxHashSet<_>>().len() as u64
        };
        let mut moving = Fixed::default();
        self.fix_moving(&mut moving, tier);
        let taken = pages(&fixed.slots);
        let whole = (0..).zip(wanted).map(|(group, &wanted)| arena.whole_pages(group, wanted));
        Error::NoSpace {
            tier: self.tiers[tier].spec.kind.name().to_owned(),
            unit: "pages",
            wanted: whole.sum(),
            free: u64::from(arena.room()).saturating_sub(taken + spared),
            coming: pages(&moving.slots),
            leased: taken,
        }
    }
}
