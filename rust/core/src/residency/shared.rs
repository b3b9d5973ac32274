//! Pages shared by the groups of a tier, and the holds on residencies of groups after the first.
//!
//! Resume points hold these residencies, as do leases on the first tier. A residency without a hold
//! is released: it can still match, and its slot is taken before any victim. Invariant: every
//! released residency is listed. Cost: O(1) per verb. Per block, tier and group after the first, 2
//! bytes more than its residency, and 8 bytes per stretch of released residencies.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::arrival::MoveIds;
use crate::block::{BlockId, GroupId, Layers, MoveId, NO_SLOT, Part, Place, Slot, TierId};
use crate::tier::{Residency, ResidencyState};

use super::{Arena, Blocks, Residencies};

/// Released residencies of consecutive blocks.
#[derive(Clone, Copy, Debug)]
struct Released {
    first: BlockId,
    blocks: u16,
    group: u8,
}

/// Mark on the holds of a residency leaving in a plan.
const LEAVES: u16 = 1 << 15;

/// Place in the list of released residencies, from its front.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReleasedAt {
    stretch: usize,
    offset: u16,
}

/// Pages of a tier, and the use of their slots by residencies and moves.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) arena: Arena,
    /// Released residencies, oldest first. May contain stale entries: held again, or gone.
    released: VecDeque<Released>,
    /// Number of residencies in `released`.
    listed: u64,
    /// Moves reading a residency of a group after the first.
    readers: FxHashMap<Part, MoveIds>,
    /// Moves reading or writing a slot without a block.
    touched: FxHashMap<(GroupId, Slot), MoveIds>,
}

/// Slots of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSlots {
    /// Slots of blocks held by a resume point or a lease, and open slots of leases. For the first
    /// group, all slots not free.
    pub held: u64,
    /// Slots matchable until taken.
    pub released: u64,
}

impl Residencies {
    /// Whether a residency exists, and nothing holds or writes it.
    fn is_unheld(&self, block: BlockId) -> bool {
        let residency = self.table.get(block);
        residency.slot != NO_SLOT
            && residency.state != ResidencyState::Arriving
            && self.holds[block] == 0
    }

    /// Whether a residency can be taken: nothing holds or writes it and, above a shared tier,
    /// nothing reads it.
    fn is_released(&self, block: BlockId) -> bool {
        self.is_unheld(block) && !(self.reads_stay && self.table.get(block).busy > 0)
    }

    fn hold(&mut self, block: BlockId) {
        debug_assert!(self.table.get(block).slot != NO_SLOT, "block {block} is absent");
        let holds = &mut self.holds[block];
        self.held += u64::from(*holds == 0);
        *holds += 1;
    }

    /// Ends a hold. Returns whether it was the last.
    fn unhold(&mut self, block: BlockId) -> bool {
        let holds = &mut self.holds[block];
        *holds -= 1;
        self.held -= u64::from(*holds == 0);
        *holds == 0
    }
}

impl Shared {
    pub(super) fn new(arena: Arena) -> Self {
        Self {
            arena,
            released: VecDeque::new(),
            listed: 0,
            readers: FxHashMap::default(),
            touched: FxHashMap::default(),
        }
    }

    /// Frees a slot without a block. It drains while moves touch it.
    pub(super) fn give(&mut self, group: GroupId, slot: Slot) {
        match self.touched.remove(&(group, slot)) {
            Some(by) => self.arena.drain(group, slot, &by),
            None => self.arena.give(group, slot),
        }
    }

    fn list(&mut self, Part { group, block }: Part) {
        self.listed += 1;
        if let Some(last) = self.released.back_mut()
            && usize::from(last.group) == group
            && last.first + u32::from(last.blocks) == block
            && last.blocks < u16::MAX
        {
            last.blocks += 1;
            return;
        }
        let group = u8::try_from(group).expect("few groups");
        self.released.push_back(Released { first: block, blocks: 1, group });
    }

    /// Removes the oldest released residency from the list and returns it.
    fn next_released(&mut self) -> Option<Part> {
        let next = self.released.front_mut()?;
        let part = Part { group: next.group.into(), block: next.first };
        (next.first, next.blocks) = (next.first + 1, next.blocks - 1);
        if next.blocks == 0 {
            self.released.pop_front();
        }
        self.listed -= 1;
        Some(part)
    }
}

impl<T: Copy + PartialEq + Default> Blocks<T> {
    fn shared(&mut self, tier: TierId) -> &mut Shared {
        self.tiers[tier].shared.as_mut().expect("a tier of several groups")
    }

    fn others(&self, tier: TierId) -> impl Iterator<Item = (GroupId, &Residencies)> {
        let tiers = self.tiers.len();
        self.places.iter().skip(tier).step_by(tiers).enumerate().skip(1)
    }

    /// Whether a block is arriving on any tier in a group after the first.
    #[must_use]
    pub(crate) fn groups_arrive(&self, block: BlockId) -> bool {
        let others = &self.places[self.tiers.len()..];
        let mut moving = others.iter().filter(|place| place.table.arrivals() > 0);
        moving.any(|place| place.table.arrival(block).is_some())
    }

    /// Slots of each group on a tier.
    #[must_use]
    pub(crate) fn group_slots(&self, tier: TierId) -> Vec<GroupSlots> {
        let Some(arena) = self.arena(tier) else { return Vec::new() };
        let first = GroupSlots { held: arena.live(0), released: 0 };
        let others = self.others(tier).map(|(group, place)| {
            let released = place.table.present() - place.held;
            GroupSlots { held: arena.live(group) - released, released }
        });
        std::iter::once(first).chain(others).collect()
    }

    /// Number of resume points and leases holding a block in a group after the first.
    #[must_use]
    pub(crate) fn holds(&self, place: Place, block: BlockId) -> u16 {
        self.places[self.number(place)].holds[block]
    }

    /// Holds a block in a plan, until [`Blocks::plan_unhold`].
    pub(crate) fn plan_hold(&mut self, place: Place, block: BlockId) {
        let number = self.number(place);
        self.places[number].holds[block] += 1;
    }

    /// Ends a hold in a plan, until [`Blocks::plan_hold`].
    pub(crate) fn plan_unhold(&mut self, place: Place, block: BlockId) {
        let number = self.number(place);
        self.places[number].holds[block] -= 1;
    }

    /// Marks a released residency as leaving in a plan, until [`Blocks::plan_stay`], and returns
    /// its slot. `None` if it is held or leaving already.
    pub(crate) fn plan_leave(&mut self, place: Place, block: BlockId) -> Option<Slot> {
        let number = self.number(place);
        let shared_place = &mut self.places[number];
        if !shared_place.is_released(block) {
            return None;
        }
        shared_place.holds[block] |= LEAVES;
        Some(shared_place.table.get(block).slot)
    }

    /// Undoes [`Blocks::plan_leave`].
    pub(crate) fn plan_stay(&mut self, place: Place, block: BlockId) {
        let number = self.number(place);
        self.places[number].holds[block] &= !LEAVES;
    }

    /// Whether a residency is leaving in a plan.
    #[must_use]
    pub(crate) fn leaves(&self, place: Place, block: BlockId) -> bool {
        let holds = self.places[self.number(place)].holds.get(block);
        holds.is_some_and(|holds| holds & LEAVES != 0)
    }

    /// Holds resident or expected blocks of a place.
    pub(crate) fn hold(&mut self, place: Place, blocks: impl IntoIterator<Item = BlockId>) {
        let number = self.number(place);
        let shared_place = &mut self.places[number];
        blocks.into_iter().for_each(|block| shared_place.hold(block));
    }

    /// Ends a hold of each of these blocks. Residencies without further holds are released.
    pub(crate) fn unhold(&mut self, place: Place, blocks: impl IntoIterator<Item = BlockId>) {
        let number = self.number(place);
        for block in blocks {
            if self.places[number].unhold(block) {
                self.list(place, block);
            }
        }
        self.limit_stale(place.tier);
    }

    /// Lists an unheld residency of a group after the first as released.
    pub(super) fn release(&mut self, place: Place, block: BlockId) {
        self.list(place, block);
        self.limit_stale(place.tier);
    }

    fn list(&mut self, Place { tier, group }: Place, block: BlockId) {
        if group > 0 {
            self.shared(tier).list(Part { group, block });
        }
    }

    /// Limits the stale entries of the released residencies of a tier.
    fn limit_stale(&mut self, tier: TierId) {
        let Some(shared) = &self.tiers[tier].shared else { return };
        let current = self.others(tier).map(|(_, place)| place.table.present() - place.held);
        if shared.listed > 2 * current.sum::<u64>() + 64 {
            self.relist(tier);
        }
    }

    /// Rebuilds the list of released residencies of a tier, in order.
    fn relist(&mut self, tier: TierId) {
        let before = std::mem::take(&mut self.shared(tier).released);
        self.shared(tier).listed = 0;
        let mut seen = FxHashSet::default();
        for Released { first, blocks, group } in before {
            let group = usize::from(group);
            let number = self.number(Place::new(tier, group));
            for block in first..first + u32::from(blocks) {
                if self.places[number].is_released(block) && seen.insert((group, block)) {
                    self.shared(tier).list(Part { group, block });
                }
            }
        }
    }

    /// The next released residency of a tier from a list position on. Advances the position past
    /// it.
    #[must_use]
    pub(crate) fn released_from(&self, tier: TierId, at: &mut ReleasedAt) -> Option<Part> {
        let list = &self.tiers[tier].shared.as_ref()?.released;
        while let Some(&Released { first, blocks, group }) = list.get(at.stretch) {
            let part = Part { group: group.into(), block: first + u32::from(at.offset) };
            at.offset += 1;
            if at.offset == blocks {
                *at = ReleasedAt { stretch: at.stretch + 1, offset: 0 };
            }
            if self.is_released(Place::new(tier, part.group), part.block) {
                return Some(part);
            }
        }
        None
    }

    /// Whether a residency of a group after the first can be taken. Nothing may hold or write it.
    #[must_use]
    pub(crate) fn is_released(&self, place: Place, block: BlockId) -> bool {
        self.places[self.number(place)].is_released(block)
    }

    /// Frees up to `count` slots of a tier's oldest released residencies. Returns false if there
    /// are none.
    pub(crate) fn take_released(&mut self, tier: TierId, count: u64) -> bool {
        self.generation += 1;
        let mut taken = 0;
        while taken < count
            && let Some(Part { group, block }) = self.shared(tier).next_released()
        {
            let place = Place::new(tier, group);
            if self.is_released(place, block) {
                self.discard(place, block);
                taken += 1;
            }
        }
        taken > 0
    }

    /// Makes an unheld residency of a group after the first absent, and frees its slot. The slot
    /// drains while moves read it. Nothing may write it.
    pub(crate) fn discard(&mut self, place: Place, block: BlockId) {
        let residency = self.table(place).get(block);
        self.table_mut(place).change(block, |residency| *residency = Residency::default());
        let Place { tier, group } = place;
        let shared = self.shared(tier);
        let readers =
            if residency.busy == 0 { None } else { shared.readers.remove(&Part { group, block }) };
        match readers {
            Some(by) => shared.arena.drain(group, residency.slot, &by),
            None => shared.arena.give(group, residency.slot),
        }
        self.note(place, block, residency.usable(), Layers::NONE);
    }

    /// [`Blocks::discard`] in all groups after the first, for a block leaving the trie. None may be
    /// arriving.
    pub(crate) fn discard_all(&mut self, block: BlockId) {
        for number in self.tiers.len()..self.places.len() {
            if self.places[number].table.get(block).slot != NO_SLOT {
                debug_assert!(self.places[number].is_unheld(block), "block {block}: {number}");
                let tiers = self.tiers.len();
                self.discard(Place::new(number % tiers, number / tiers), block);
            }
        }
    }

    /// Allocates a specific slot of a group for a future block. Returns whether it was free.
    pub(crate) fn claim_slot(&mut self, place: Place, slot: Slot) -> bool {
        self.shared(place.tier).arena.claim(place.group, slot)
    }

    // Moves.

    /// Begins a read or write of a slot without a block.
    pub(crate) fn begin_touch(&mut self, Place { tier, group }: Place, slot: Slot, by: MoveId) {
        self.shared(tier).touched.entry((group, slot)).or_default().push(by);
    }

    /// Ends a read or write of a slot without a block.
    pub(crate) fn end_touch(&mut self, Place { tier, group }: Place, slot: Slot, by: MoveId) {
        let shared = self.shared(tier);
        if let Some(moves) = shared.touched.get_mut(&(group, slot)) {
            moves.retain(|id| *id != by);
            if moves.is_empty() {
                shared.touched.remove(&(group, slot));
            }
        }
        shared.arena.drained(by);
    }

    /// Moves reading a block in a group after the first.
    #[must_use]
    pub(crate) fn readers(&self, Place { tier, group }: Place, block: BlockId) -> MoveIds {
        let shared = self.tiers[tier].shared.as_ref();
        let readers = shared.and_then(|shared| shared.readers.get(&Part { group, block }));
        readers.cloned().unwrap_or_default()
    }

    /// Begins a read of a block by a move.
    pub(crate) fn begin_use(&mut self, place: Place, block: BlockId, by: MoveId) {
        self.alter(place, block, |residency| residency.busy += 1);
        let Place { tier, group } = place;
        if group > 0 {
            self.shared(tier).readers.entry(Part { group, block }).or_default().push(by);
        }
    }

    /// Ends a read or a write of a block by a move.
    ///
    /// In a group after the first, it ends the draining of a slot freed during a read, and discards
    /// a bad residency without holds.
    pub(crate) fn end_use(&mut self, place: Place, block: BlockId, by: MoveId) {
        if place.group > 0 && !self.uses(place, block, by) {
            self.shared(place.tier).arena.drained(by);
            return;
        }
        self.alter(place, block, |residency| residency.busy -= 1);
        if place.group > 0 {
            let residency = self.table(place).get(block);
            let bad = residency.state == ResidencyState::Bad && residency.busy == 0;
            if bad && self.holds(place, block) == 0 {
                self.discard(place, block);
            } else if self.places[self.number(place)].reads_stay && residency.busy == 0 {
                // Its slot could not be taken during the read.
                self.list_released(place, block);
            }
        }
    }

    /// Whether a move still reads or writes a residency. Removes it from the readers.
    fn uses(&mut self, place: Place, block: BlockId, by: MoveId) -> bool {
        let part = Part { group: place.group, block };
        let shared = self.shared(place.tier);
        if let Some(readers) = shared.readers.get_mut(&part)
            && readers.contains(&by)
        {
            readers.retain(|id| *id != by);
            if readers.is_empty() {
                shared.readers.remove(&part);
            }
            return true;
        }
        self.table(place).arrival(block).is_some_and(|arrival| arrival.moves.contains(&by))
    }

    /// Lists an arrived residency as released, if nothing holds it.
    pub(crate) fn list_released(&mut self, place: Place, block: BlockId) {
        if self.is_released(place, block) {
            self.release(place, block);
        }
    }
}
