//! Slot allocator of a tier: a free list, a bump pointer and the draining slots.
//!
//! A slot holds all layers of a block. With layer slots it holds a single layer of a block (blocks
//! × layers slots), and a row lists the slot of each layer.
//!
//! ```text
//!   slots 0 .. fresh       free (stack) | held | draining (a store reads it; unclaimed or granted)
//!   slots fresh .. capacity  free, never used
//! ```
//!
//! Invariant: a slot is free, draining, or held by exactly one residency, lease or move. Cost: O(1)
//! per slot. O(log n) for a draining slot.

use std::collections::BTreeSet;
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::block::{MoveId, NO_SLOT, Slot};

/// Rows of layer slots per page.
const PAGE: usize = 64;

/// Slot allocator of a tier.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    capacity: u32,
    fresh: u32,
    free: Vec<Slot>,
    /// Slots still being read, with the reading store.
    draining: FxHashMap<Slot, MoveId>,
    /// Draining slots not granted yet, lowest first.
    unclaimed: BTreeSet<Slot>,
    layers: u16,
    /// Rows of layer slots, in pages of [`PAGE`] rows.
    rows: Vec<Box<[Slot]>>,
    /// The highest row ever used, plus 1.
    bound: u32,
    free_rows: Vec<u32>,
}

/// An allocated slot, and the move to wait for before writing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    /// The slot.
    pub slot: Slot,
    /// The store still reading the slot, or [`crate::block::NO_MOVE`].
    pub after: MoveId,
}

impl Space {
    /// All slots free, for `blocks` blocks (times `layers` with `layer_slots`).
    #[must_use]
    pub(crate) fn new(blocks: u32, layers: u16, layer_slots: bool) -> Self {
        Self {
            capacity: if layer_slots { blocks * u32::from(layers) } else { blocks },
            fresh: 0,
            free: Vec::new(),
            draining: FxHashMap::default(),
            unclaimed: BTreeSet::new(),
            layers: if layer_slots { layers } else { 0 },
            rows: Vec::new(),
            bound: 0,
            free_rows: Vec::new(),
        }
    }

    /// Number of slots.
    #[must_use]
    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Number of free slots, writable at once.
    #[must_use]
    pub(crate) fn free(&self) -> u32 {
        self.capacity - self.fresh + u32::try_from(self.free.len()).unwrap_or(u32::MAX)
    }

    /// Number of draining slots not granted.
    #[must_use]
    pub(crate) fn coming(&self) -> u32 {
        u32::try_from(self.unclaimed.len()).unwrap_or(u32::MAX)
    }

    /// Number of slots [`Space::take`] can grant, at once or after a store.
    #[must_use]
    pub(crate) fn takeable(&self) -> u64 {
        u64::from(self.free()) + u64::from(self.coming())
    }

    /// Allocates a free slot, else a draining slot.
    pub(crate) fn take(&mut self) -> Option<Grant> {
        if let Some(slot) = self.free.pop() {
            return Some(Grant { slot, after: crate::block::NO_MOVE });
        }
        if self.fresh < self.capacity {
            self.fresh += 1;
            return Some(Grant { slot: self.fresh - 1, after: crate::block::NO_MOVE });
        }
        // The last resort: the caller must wait for the store.
        let slot = self.unclaimed.pop_first()?;
        Some(Grant { slot, after: self.draining[&slot] })
    }

    /// Allocates up to `most` slots from the free list, in the order of [`Space::take`].
    pub(crate) fn take_free(&mut self, most: usize) -> impl Iterator<Item = Slot> + '_ {
        let left = self.free.len().saturating_sub(most);
        self.free.drain(left..).rev()
    }

    /// Reserves the free slots below `bound` as a bitmap, for individual claims. All stay reserved
    /// until [`Space::put_back`]. Cost: O(free slots + `bound`).
    pub(crate) fn reserve_below(&mut self, bound: Slot) -> Vec<bool> {
        let bound = bound.min(self.capacity);
        let mut free = vec![false; bound as usize];
        free[bound.min(self.fresh) as usize..].fill(true);
        self.fresh = self.fresh.max(bound);
        self.free.retain(|&slot| {
            let below = free.get_mut(slot as usize);
            below.map(|known| *known = true).is_none()
        });
        free
    }

    /// Frees the unclaimed slots of the bitmap. The lowest are taken first again.
    pub(crate) fn put_back(&mut self, free: &[bool]) {
        let unclaimed = (0..).zip(free).filter(|(_, free)| **free).map(|(slot, _)| slot);
        let before = self.free.len();
        self.free.extend(unclaimed);
        // The free list is a stack: reversed, the lowest slot is on top.
        self.free[before..].reverse();
    }

    /// Frees a slot. A draining slot becomes free when its store ends.
    pub(crate) fn give(&mut self, slot: Slot) {
        // Granted during a store's read, and freed before the end of the store.
        if self.draining.contains_key(&slot) {
            self.unclaimed.insert(slot);
        } else {
            self.free.push(slot);
        }
    }

    /// Frees slots in order.
    pub(crate) fn give_all(&mut self, slots: impl Iterator<Item = Slot>) {
        // Without draining slots no slot needs a lookup.
        if self.none_draining() {
            self.free.extend(slots);
        } else {
            slots.for_each(|slot| self.give(slot));
        }
    }

    /// Starts draining a slot: its block is evicted, and a store still reads it.
    pub(crate) fn drain(&mut self, slot: Slot, by: MoveId) {
        self.draining.insert(slot, by);
        self.unclaimed.insert(slot);
    }

    /// Ends draining. Returns whether the slot was granted in that time.
    pub(crate) fn drained(&mut self, slot: Slot) -> bool {
        let drained = self.draining.remove(&slot).is_some();
        let unclaimed = self.unclaimed.remove(&slot);
        // A granted slot stays with its new holder.
        if unclaimed {
            self.free.push(slot);
        }
        drained && !unclaimed
    }

    /// Returns a draining slot to its block, unless it was granted. Returns whether it did.
    pub(crate) fn undrain(&mut self, slot: Slot) -> bool {
        let unclaimed = self.unclaimed.remove(&slot);
        if unclaimed {
            self.draining.remove(&slot);
        }
        unclaimed
    }

    /// Whether a slot is draining and not granted.
    #[must_use]
    pub(crate) fn is_unclaimed(&self, slot: Slot) -> bool {
        self.unclaimed.contains(&slot)
    }

    /// Excludes a draining slot from grants, or admits it again.
    pub(crate) fn withhold(&mut self, slot: Slot, withheld: bool) {
        debug_assert!(self.draining.contains_key(&slot), "a store reads it");
        if withheld {
            self.unclaimed.remove(&slot);
        } else {
            self.unclaimed.insert(slot);
        }
    }

    /// The store that still reads a slot, if any.
    #[must_use]
    pub(crate) fn drained_by(&self, slot: Slot) -> Option<MoveId> {
        self.draining.get(&slot).copied()
    }

    /// Whether no slot is draining.
    #[must_use]
    pub(crate) fn none_draining(&self) -> bool {
        self.draining.is_empty()
    }

    /// Allocates a row of layer slots, all empty.
    pub(crate) fn new_row(&mut self) -> u32 {
        if let Some(row) = self.free_rows.pop() {
            return row;
        }
        // A doubling vector would take up to twice the memory, and copy all rows.
        if (self.bound as usize).is_multiple_of(PAGE) {
            self.rows.push(vec![NO_SLOT; PAGE * usize::from(self.layers)].into_boxed_slice());
        }
        self.bound += 1;
        self.bound - 1
    }

    /// The slots of a row, one per layer.
    #[must_use]
    pub(crate) fn row(&self, row: u32) -> &[Slot] {
        let (width, at) = (usize::from(self.layers), row as usize % PAGE);
        &self.rows[row as usize / PAGE][at * width..(at + 1) * width]
    }

    /// Sets the slot of a layer.
    pub(crate) fn set(&mut self, row: u32, layer: u16, slot: Slot) {
        let at = row as usize % PAGE * usize::from(self.layers) + usize::from(layer);
        self.rows[row as usize / PAGE][at] = slot;
    }

    /// Frees a row. It must be empty.
    pub(crate) fn end_row(&mut self, row: u32) {
        debug_assert!(self.row(row).iter().all(|&slot| slot == NO_SLOT));
        self.free_rows.push(row);
    }

    /// All free and unclaimed draining slots, as ascending ranges with gaps in between (a tier may
    /// have billions of slots). A slot listed twice makes two ranges overlap, which the audit
    /// detects.
    #[must_use]
    pub(crate) fn spare(&self) -> Vec<Range<Slot>> {
        let mut slots: Vec<Slot> = self.free.iter().chain(&self.unclaimed).copied().collect();
        slots.sort_unstable();
        let fresh = (self.fresh < self.capacity).then_some(self.fresh..self.capacity);
        let mut ranges: Vec<Range<Slot>> = Vec::new();
        for range in slots.into_iter().map(|slot| slot..slot + 1).chain(fresh) {
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::{Grant, Space};
    use crate::block::NO_MOVE;

    #[test]
    fn a_draining_slot_is_granted_with_its_move_and_freed_once() {
        let mut space = Space::new(1, 4, false);
        let grant = space.take().unwrap();
        assert_eq!(grant, Grant { slot: 0, after: NO_MOVE });
        assert_eq!(space.take(), None);
        space.drain(0, 9);
        assert_eq!((space.free(), space.coming()), (0, 1));
        assert_eq!(space.take(), Some(Grant { slot: 0, after: 9 }));
        assert_eq!((space.coming(), space.take()), (0, None));
        space.give(0);
        assert_eq!(space.coming(), 1);
        assert!(!space.drained(0));
        assert_eq!((space.free(), space.coming()), (1, 0));
    }

    #[test]
    fn reserved_slots_that_are_not_claimed_are_free_again() {
        let mut space = Space::new(6, 1, false);
        for _ in 0..4 {
            space.take();
        }
        space.give(3);
        space.give(1);
        let mut reserved = space.reserve_below(5);
        assert_eq!(reserved, [false, true, false, true, true]);
        assert_eq!((space.free(), space.take().map(|grant| grant.slot)), (1, Some(5)));
        reserved[3] = false;
        space.put_back(&reserved);
        let taken: Vec<_> = (0..3).map(|_| space.take().map(|grant| grant.slot)).collect();
        assert_eq!(taken, [Some(1), Some(4), None]);
        assert_eq!(space.reserve_below(9), [false; 6]);
    }

    #[test]
    fn spare_slots_are_merged_into_ranges() {
        let mut space = Space::new(u32::MAX - 1, 1, false);
        assert_eq!(space.spare(), std::slice::from_ref(&(0..u32::MAX - 1)));
        for _ in 0..6 {
            space.take();
        }
        space.give(4);
        space.give(1);
        space.drain(2, 9);
        assert_eq!(space.spare(), [1..3, 4..5, 6..u32::MAX - 1]);
        space.give(5);
        assert_eq!(space.spare(), [1..3, 4..u32::MAX - 1]);
        space.free.push(1);
        assert_eq!(space.spare(), [1..2, 1..3, 4..u32::MAX - 1]);
    }

    #[test]
    fn layer_slots_come_from_one_space_of_blocks_times_layers() {
        let mut space = Space::new(2, 3, true);
        assert_eq!(space.capacity(), 6);
        let row = space.new_row();
        space.set(row, 2, 5);
        assert_eq!(space.row(row)[2], 5);
        space.set(row, 2, crate::block::NO_SLOT);
        space.end_row(row);
        assert_eq!(space.new_row(), row);
    }
}
