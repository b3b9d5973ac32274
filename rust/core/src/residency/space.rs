//! Slots of one tier: which are free, and which a store still reads.
//!
//! A slot holds all layers of one block. With layer slots it holds one layer of one block, out of
//! blocks x layers slots, and a row names the slot of each layer. Invariant: a slot is free, draining
//! (a store still reads it) or held by exactly one residency, lease or move. Cost: O(1) per slot;
//! O(log n) for one that a store still reads.

use std::collections::BTreeSet;
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::block::{MoveId, NO_SLOT, Slot};

/// The slots of one tier.
#[derive(Clone, Debug)]
pub struct Space {
    capacity: u32,
    fresh: u32,
    free: Vec<Slot>,
    /// Slots that a store still reads, and which one.
    draining: FxHashMap<Slot, MoveId>,
    /// Those of them that nobody was promised.
    idle: BTreeSet<Slot>,
    layers: u16,
    rows: Vec<Slot>,
    free_rows: Vec<u32>,
}

/// A slot handed out, and the move that must have finished before it may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The slot.
    pub slot: Slot,
    /// The store that still reads it, or [`crate::block::NO_MOVE`].
    pub after: MoveId,
}

impl Space {
    /// Room for `blocks` blocks; with `layer_slots` that many times `layers` slots.
    #[must_use]
    pub fn new(blocks: u32, layers: u16, layer_slots: bool) -> Self {
        Self {
            capacity: if layer_slots { blocks * u32::from(layers) } else { blocks },
            fresh: 0,
            free: Vec::new(),
            draining: FxHashMap::default(),
            idle: BTreeSet::new(),
            layers: if layer_slots { layers } else { 0 },
            rows: Vec::new(),
            free_rows: Vec::new(),
        }
    }

    /// All slots.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Slots that can be written at once.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.capacity - self.fresh + u32::try_from(self.free.len()).unwrap_or(u32::MAX)
    }

    /// Slots that nobody holds and a store still reads.
    #[must_use]
    pub fn coming(&self) -> u32 {
        u32::try_from(self.idle.len()).unwrap_or(u32::MAX)
    }

    /// Slots that can be taken, at once or when the store that reads them has ended.
    #[must_use]
    pub fn takeable(&self) -> u64 {
        u64::from(self.free()) + u64::from(self.coming())
    }

    /// Takes a free slot; if there is none, one that a store still reads.
    pub fn take(&mut self) -> Option<Grant> {
        if let Some(slot) = self.free.pop() {
            return Some(Grant { slot, after: crate::block::NO_MOVE });
        }
        if self.fresh < self.capacity {
            self.fresh += 1;
            return Some(Grant { slot: self.fresh - 1, after: crate::block::NO_MOVE });
        }
        let slot = self.idle.pop_first()?;
        Some(Grant { slot, after: self.draining[&slot] })
    }

    /// Takes free slots, as [`Space::take`] does, as long as there are any that were used before; at
    /// most so many.
    pub fn take_free(&mut self, most: usize) -> impl Iterator<Item = Slot> + '_ {
        let left = self.free.len().saturating_sub(most);
        self.free.drain(left..).rev()
    }

    /// Which of the slots below `bound` are free: to be claimed there, one by one. Nobody else
    /// takes one of them until [`Space::put_back`]. Cost: O(free slots + `bound`).
    pub fn choice(&mut self, bound: Slot) -> Vec<bool> {
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

    /// Takes back what nobody has claimed of a choice; the first slots are taken first again.
    pub fn put_back(&mut self, free: &[bool]) {
        let left = (0..).zip(free).filter(|(_, free)| **free).map(|(slot, _)| slot);
        let behind = self.free.len();
        self.free.extend(left);
        self.free[behind..].reverse();
    }

    /// Gives a slot back. One that a store still reads becomes free when the store ends.
    pub fn give(&mut self, slot: Slot) {
        if self.draining.contains_key(&slot) {
            self.idle.insert(slot);
        } else {
            self.free.push(slot);
        }
    }

    /// Gives slots back, as [`Space::give`] does one after the other.
    pub fn give_all(&mut self, slots: impl Iterator<Item = Slot>) {
        if self.quiet() {
            self.free.extend(slots);
        } else {
            slots.for_each(|slot| self.give(slot));
        }
    }

    /// A store begins to read a slot whose block leaves; nobody holds it any more.
    pub fn drain(&mut self, slot: Slot, by: MoveId) {
        self.draining.insert(slot, by);
        self.idle.insert(slot);
    }

    /// The store has read the slot. Returns whether somebody was promised it.
    pub fn drained(&mut self, slot: Slot) -> bool {
        let drained = self.draining.remove(&slot).is_some();
        let idle = self.idle.remove(&slot);
        if idle {
            self.free.push(slot);
        }
        drained && !idle
    }

    /// The store failed: the slot is its old holder's again. Returns whether it was promised.
    pub fn undrain(&mut self, slot: Slot) -> bool {
        self.draining.remove(&slot).is_some() && !self.idle.remove(&slot)
    }

    /// Whether a store still reads a slot that nobody was promised.
    #[must_use]
    pub fn is_idle(&self, slot: Slot) -> bool {
        self.idle.contains(&slot)
    }

    /// Keeps a slot that a store still reads from being promised, or lets it be again.
    pub fn withhold(&mut self, slot: Slot, withheld: bool) {
        debug_assert!(self.draining.contains_key(&slot), "a store reads it");
        if withheld {
            self.idle.remove(&slot);
        } else {
            self.idle.insert(slot);
        }
    }

    /// The move that still reads a slot, if any.
    #[must_use]
    pub fn drained_by(&self, slot: Slot) -> Option<MoveId> {
        self.draining.get(&slot).copied()
    }

    /// Whether no store reads a slot that its block has left.
    #[must_use]
    pub fn quiet(&self) -> bool {
        self.draining.is_empty()
    }

    /// A new row of layer slots, all empty.
    pub fn new_row(&mut self) -> u32 {
        let width = usize::from(self.layers);
        if let Some(row) = self.free_rows.pop() {
            return row;
        }
        let row = u32::try_from(self.rows.len() / width.max(1)).unwrap_or(u32::MAX);
        self.rows.resize(self.rows.len() + width, NO_SLOT);
        row
    }

    /// The slots of a row, one per layer.
    #[must_use]
    pub fn row(&self, row: u32) -> &[Slot] {
        let width = usize::from(self.layers);
        &self.rows[row as usize * width..(row as usize + 1) * width]
    }

    /// Sets one layer's slot.
    pub fn set(&mut self, row: u32, layer: u16, slot: Slot) {
        self.rows[row as usize * usize::from(self.layers) + usize::from(layer)] = slot;
    }

    /// Ends a row; its slots must have been taken out of it.
    pub fn end_row(&mut self, row: u32) {
        debug_assert!(self.row(row).iter().all(|&slot| slot == NO_SLOT));
        self.free_rows.push(row);
    }

    /// Every slot that is free or draining, as ranges in ascending order, none of which touch: a
    /// tier may have billions. A slot that stands there twice makes two ranges overlap.
    #[must_use]
    pub fn spare(&self) -> Vec<Range<Slot>> {
        let mut slots: Vec<Slot> = self.free.iter().chain(&self.idle).copied().collect();
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
    fn a_draining_slot_is_promised_with_its_move_and_freed_once() {
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
    fn what_is_not_claimed_of_a_choice_is_free_again() {
        let mut space = Space::new(6, 1, false);
        for _ in 0..4 {
            space.take();
        }
        space.give(3);
        space.give(1);
        let mut choice = space.choice(5);
        assert_eq!(choice, [false, true, false, true, true]);
        assert_eq!((space.free(), space.take().map(|grant| grant.slot)), (1, Some(5)));
        choice[3] = false;
        space.put_back(&choice);
        let taken: Vec<_> = (0..3).map(|_| space.take().map(|grant| grant.slot)).collect();
        assert_eq!(taken, [Some(1), Some(4), None]);
        assert_eq!(space.choice(9), [false; 6]);
    }

    #[test]
    fn spare_slots_are_ranges_however_they_came_to_be_free() {
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
