//! Residency table of a tier, a packed `u32` per block.
//!
//! ```text
//!   bit 31  bit 30  bits 0-29
//!     0       0     slot of a fully resident, idle block
//!     0       1     slot of a fully resident block that one move reads
//!     1       *     bits 0-30 index the overflow slab: partial, arriving, bad, busier, slot ≥ 2^30
//!   all ones        absent (`NO_SLOT`)
//! ```
//!
//! Invariants: a residency is in the overflow slab if and only if a word cannot encode it. `copies`
//! counts the resident blocks, `present` the blocks with a slot. Cost: O(1). 4 bytes per block,
//! plus a slab entry per overflow.

use std::ops::Range;

use slab::Slab;

use crate::arrival::Arrival;
use crate::block::{BlockId, Layers, MoveId, NO_SLOT, Slot};
use crate::paged_vec::PagedVec;
use crate::tier::{Residency, ResidencyState};

/// Bit of a block being read by one move. A slot this high overflows.
const READING: Slot = 1 << 30;

/// Bit of an index into the overflow slab.
const OVERFLOW: Slot = 1 << 31;

/// Entry of the overflow slab.
#[derive(Clone, Debug)]
struct Overflow {
    residency: Residency,
    /// Moves in flight to it.
    arrival: Option<Arrival>,
}

/// Residency table of a tier.
#[derive(Debug)]
pub(crate) struct ResidencyTable {
    all: Layers,
    slots: PagedVec<Slot>,
    overflow: Slab<Overflow>,
    /// Number of blocks with an arrival.
    arrivals: usize,
    copies: u64,
    /// Number of blocks with a slot.
    present: u64,
}

impl ResidencyTable {
    /// Creates a table of absent blocks. `all` are the model's layers.
    #[must_use]
    pub(crate) fn new(all: Layers) -> Self {
        Self {
            all,
            slots: PagedVec::new(NO_SLOT),
            overflow: Slab::new(),
            arrivals: 0,
            copies: 0,
            present: 0,
        }
    }

    /// Extends the table to the blocks below `bound`.
    pub(crate) fn reach(&mut self, bound: BlockId) {
        self.slots.reach(bound);
    }

    /// Prefetches the CPU cache line of a block's residency.
    pub(crate) fn prefetch_line(&self, block: BlockId) {
        self.slots.prefetch_line(block);
    }

    /// A block's residency.
    #[inline]
    #[must_use]
    pub(crate) fn get(&self, block: BlockId) -> Residency {
        match self.slots[block] {
            NO_SLOT => Residency::default(),
            slot if slot < READING => self.idle(slot),
            read if read < OVERFLOW => Residency { busy: 1, ..self.idle(read - READING) },
            word => self.overflow[place(word)].residency,
        }
    }

    /// The word for a residency, or `None` if it needs the overflow slab.
    #[inline]
    fn packed(&self, entry: Residency) -> Option<Slot> {
        if entry == Residency::default() {
            return Some(NO_SLOT);
        }
        let word = match entry.busy {
            0 => entry.slot,
            1 => entry.slot | READING,
            // A single bit counts a single reader.
            _ => return None,
        };
        let full = entry.have == self.all && entry.state == ResidencyState::Resident;
        (full && entry.slot < READING).then_some(word)
    }

    /// Changes a block's residency. Moves it into or out of the overflow slab as needed.
    pub(crate) fn change(&mut self, block: BlockId, change: impl FnOnce(&mut Residency)) {
        let mut entry = self.get(block);
        let before = entry.state == ResidencyState::Resident;
        let had = entry.slot != NO_SLOT;
        change(&mut entry);
        let resident = entry.state == ResidencyState::Resident;
        self.copies = self.copies + u64::from(resident) - u64::from(before);
        self.present = self.present + u64::from(entry.slot != NO_SLOT) - u64::from(had);
        match (self.packed(entry), self.overflow_place(block)) {
            (Some(word), known) => {
                self.slots[block] = word;
                if let Some(at) = known {
                    self.end_overflow(at);
                }
            }
            // Keeps the arrival, if there is one.
            (None, Some(at)) => self.overflow[at].residency = entry,
            (None, None) => self.slots[block] = self.put_overflow(entry, None),
        }
    }

    /// Makes an absent block fully resident and idle in a slot.
    pub(crate) fn put(&mut self, block: BlockId, slot: Slot) {
        debug_assert!(self.slots[block] == NO_SLOT);
        let word = if slot < READING { slot } else { self.put_overflow(self.idle(slot), None) };
        self.slots[block] = word;
        self.copies += 1;
        self.present += 1;
    }

    /// Makes fully resident, idle blocks of a run absent. Returns their slots, the last block's
    /// first. Each block becomes absent as the iterator returns its slot.
    pub(crate) fn clear(&mut self, run: Range<BlockId>) -> impl Iterator<Item = Slot> + '_ {
        debug_assert!(self.all_idle(run.clone()), "blocks {run:?} are not fully resident and idle");
        self.copies -= u64::from(run.end - run.start);
        self.present -= u64::from(run.end - run.start);
        let slots = self.slots.stretch_mut(run.start, run.end);
        debug_assert_eq!(slots.len(), run.len(), "a run of one page");
        slots.iter_mut().rev().map(|slot| std::mem::replace(slot, NO_SLOT))
    }

    /// Begins a read of a fully resident, idle block. Returns its slot.
    pub(crate) fn begin_read(&mut self, block: BlockId) -> Slot {
        let slot = &mut self.slots[block];
        debug_assert!(*slot < READING);
        *slot |= READING;
        *slot - READING
    }

    /// Begins the arrival of all layers of an absent block in a slot.
    pub(crate) fn begin_arrival(&mut self, block: BlockId, slot: Slot, arrival: Arrival) {
        debug_assert!(self.slots[block] == NO_SLOT);
        let state = ResidencyState::Arriving;
        let entry = Residency { slot, have: Layers::NONE, busy: 1, state };
        self.arrivals += 1;
        self.present += 1;
        self.slots[block] = self.put_overflow(entry, Some(arrival));
    }

    /// Whether all layers of a block arrive by this move alone.
    #[must_use]
    pub(crate) fn arrives_by(&self, block: BlockId, by: MoveId) -> bool {
        self.arrival(block).is_some_and(|arrival| {
            let only = arrival.moves.len() == 1 && arrival.moves[0] == by;
            only && arrival.target == self.all && !arrival.failed
        })
    }

    /// Ends the only move of an arriving block, making it fully resident.
    pub(crate) fn arrived(&mut self, block: BlockId) {
        let at = place(self.slots[block]);
        let arrival = self.overflow[at].arrival.take();
        debug_assert!(arrival.is_some(), "block {block} has no arrival");
        self.arrivals -= 1;
        self.end_io_at(at, block);
    }

    /// Ends a read or write of a block, leaving it fully resident.
    pub(crate) fn end_io(&mut self, block: BlockId) {
        if let Some(at) = self.overflow_place(block) {
            self.end_io_at(at, block);
        } else {
            debug_assert!((READING..OVERFLOW).contains(&self.slots[block]), "no move reads it");
            self.slots[block] -= READING;
        }
    }

    #[inline]
    fn end_io_at(&mut self, at: usize, block: BlockId) {
        let entry = &mut self.overflow[at].residency;
        self.copies += u64::from(entry.state != ResidencyState::Resident);
        *entry = Residency {
            busy: entry.busy - 1,
            have: self.all,
            state: ResidencyState::Resident,
            ..*entry
        };
        let entry = *entry;
        if let Some(word) = self.packed(entry) {
            self.slots[block] = word;
            self.end_overflow(at);
        }
    }

    /// Whether all these blocks are fully resident and idle.
    #[must_use]
    pub(crate) fn all_idle(&self, blocks: Range<BlockId>) -> bool {
        self.all_of(blocks, |slot| slot < READING)
    }

    /// Whether a block is fully resident, idle or not.
    #[inline]
    #[must_use]
    pub(crate) fn fully_resident(&self, block: BlockId) -> bool {
        match self.overflow_place(block) {
            Some(at) => {
                let entry = &self.overflow[at].residency;
                entry.state == ResidencyState::Resident && entry.have == self.all
            }
            None => self.slots[block] != NO_SLOT,
        }
    }

    /// Whether all these blocks are fully resident and read by at most one move each.
    #[must_use]
    pub(crate) fn all_full(&self, blocks: Range<BlockId>) -> bool {
        self.all_of(blocks, |slot| slot < OVERFLOW)
    }

    /// The first block not fully resident or read by several moves, or the end of the range.
    #[must_use]
    pub(crate) fn first_not_full(&self, blocks: Range<BlockId>) -> BlockId {
        self.first_failing(blocks, |slot| slot < OVERFLOW)
    }

    /// The first block not fully resident and idle, or the end of the range.
    #[must_use]
    pub(crate) fn first_not_idle(&self, blocks: Range<BlockId>) -> BlockId {
        self.first_failing(blocks, |slot| slot < READING)
    }

    /// The first present block, or the end of the range.
    #[must_use]
    pub(crate) fn first_present(&self, blocks: Range<BlockId>) -> BlockId {
        self.first_failing(blocks, |slot| slot == NO_SLOT)
    }

    /// Whether no block is absent.
    #[must_use]
    pub(crate) fn all_present(&self, blocks: Range<BlockId>) -> bool {
        self.all_of(blocks, |slot| slot != NO_SLOT)
    }

    /// Whether all blocks are absent.
    #[must_use]
    pub(crate) fn none_present(&self, blocks: Range<BlockId>) -> bool {
        self.all_of(blocks, |slot| slot == NO_SLOT)
    }

    /// All present blocks below `bound`.
    pub(crate) fn blocks(&self, bound: BlockId) -> impl Iterator<Item = (BlockId, Residency)> + '_ {
        let present = (0..bound).filter(|&block| self.slots[block] != NO_SLOT);
        present.map(|block| (block, self.get(block)))
    }

    /// The arrival of a block, if any.
    #[must_use]
    pub(crate) fn arrival(&self, block: BlockId) -> Option<&Arrival> {
        self.overflow[self.overflow_place(block)?].arrival.as_ref()
    }

    /// Mutable [`ResidencyTable::arrival`].
    pub(crate) fn arrival_mut(&mut self, block: BlockId) -> Option<&mut Arrival> {
        let at = self.overflow_place(block)?;
        self.overflow[at].arrival.as_mut()
    }

    /// Attaches an arrival to a block in state arriving.
    pub(crate) fn attach_arrival(&mut self, block: BlockId, arrival: Arrival) {
        let entry = &mut self.overflow[place(self.slots[block])];
        debug_assert!(entry.arrival.is_none(), "block {block} has an arrival already");
        entry.arrival = Some(arrival);
        self.arrivals += 1;
    }

    /// Detaches a landed or failed arrival.
    pub(crate) fn take_arrival(&mut self, block: BlockId) -> Option<Arrival> {
        let at = self.overflow_place(block)?;
        let arrival = self.overflow[at].arrival.take()?;
        self.arrivals -= 1;
        Some(arrival)
    }

    /// Number of blocks with an arrival.
    #[must_use]
    pub(crate) fn arrivals(&self) -> usize {
        self.arrivals
    }

    /// Number of resident blocks, with all or some layers.
    #[must_use]
    pub(crate) fn copies(&self) -> u64 {
        self.copies
    }

    /// Number of blocks with a slot.
    #[must_use]
    pub(crate) fn present(&self) -> u64 {
        self.present
    }

    /// Number of blocks in the overflow slab.
    #[must_use]
    pub(crate) fn overflow(&self) -> usize {
        self.overflow.len()
    }

    /// Adds an overflow entry. Returns the word with its index.
    fn put_overflow(&mut self, residency: Residency, arrival: Option<Arrival>) -> Slot {
        OVERFLOW + number(self.overflow.insert(Overflow { residency, arrival }))
    }

    /// Index of a block's overflow entry, if any.
    #[inline]
    fn overflow_place(&self, block: BlockId) -> Option<usize> {
        let word = self.slots[block];
        (OVERFLOW..NO_SLOT).contains(&word).then(|| place(word))
    }

    /// Removes an overflow entry.
    fn end_overflow(&mut self, at: usize) {
        let ended = self.overflow.remove(at);
        debug_assert!(ended.arrival.is_none(), "an arrival would be lost");
    }

    fn idle(&self, slot: Slot) -> Residency {
        Residency { slot, have: self.all, busy: 0, state: ResidencyState::Resident }
    }

    #[inline]
    fn all_of(&self, blocks: Range<BlockId>, test: impl Fn(Slot) -> bool) -> bool {
        let mut from = blocks.start;
        // The words of a run are contiguous only within a page.
        while from < blocks.end {
            let words = self.slots.stretch(from, blocks.end);
            if !words.iter().all(|&word| test(word)) {
                return false;
            }
            from += number(words.len());
        }
        true
    }

    /// The first block failing a test of its word, or the end of the range.
    #[inline]
    fn first_failing(&self, blocks: Range<BlockId>, test: impl Fn(Slot) -> bool) -> BlockId {
        let mut from = blocks.start;
        while from < blocks.end {
            let words = self.slots.stretch(from, blocks.end);
            let passing = words.iter().take_while(|&&word| test(word)).count();
            from += number(passing);
            if passing < words.len() {
                break;
            }
        }
        from
    }
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("no more than blocks")
}

/// The overflow index in a word.
fn place(word: Slot) -> usize {
    (word - OVERFLOW) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{OVERFLOW, READING, ResidencyTable};
    use crate::arrival::{Arrival, MoveIds};
    use crate::block::{Layers, NO_SLOT};
    use crate::tier::{Residency, ResidencyState};

    type Change = (fn(&mut Residency), usize);

    /// Identified by its time.
    fn arrival(ready: u64) -> Arrival {
        Arrival::new(Layers::new(0, 3), MoveIds::new(), 0, ready)
    }

    /// Slot of a fully resident, idle block.
    fn slot_of(residency: &ResidencyTable, block: u32) -> Option<u32> {
        residency.all_idle(block..block + 1).then(|| residency.get(block).slot)
    }

    proptest! {
        #[test]
        fn the_table_equals_a_map(
            steps in prop::collection::vec((0u32..6, 0u32..8, 0u32..4), 1..200),
        ) {
            let all = Layers::new(0, 3);
            let (mut residency, mut model) = (ResidencyTable::new(all), BTreeMap::<u32, Residency>::new());
            let mut coming = BTreeMap::<u32, u64>::new();
            residency.reach(6);
            for (time, (block, what, number)) in (0..).zip(steps) {
                let slot = [7, 8, READING, OVERFLOW + 5][number as usize];
                let idle = Residency { slot, have: all, busy: 0, state: ResidencyState::Resident };
                let known = model.get(&block).copied();
                let whole = known.filter(|entry| entry.busy == 0 && entry.have == all);
                match (what, known, whole) {
                    (0, None, _) => {
                        residency.put(block, slot);
                        model.insert(block, idle);
                    }
                    (1, None, _) => {
                        residency.begin_arrival(block, slot, arrival(time));
                        coming.insert(block, time);
                        let state = ResidencyState::Arriving;
                        model.insert(block, Residency { slot, have: Layers::NONE, busy: 1, state });
                    }
                    (2, _, Some(entry)) if entry.slot < READING => {
                        prop_assert_eq!(residency.begin_read(block), entry.slot);
                        model.insert(block, Residency { busy: 1, ..entry });
                    }
                    (3, Some(entry), _) if entry.busy > 0 => {
                        let ready = coming.remove(&block);
                        if number == 0 && residency.arrival(block).is_some() {
                            residency.arrived(block);
                        } else {
                            let known = residency.take_arrival(block).map(|arrival| arrival.ready);
                            prop_assert_eq!(known, ready);
                            residency.end_io(block);
                        }
                        let busy = entry.busy - 1;
                        model.insert(block, Residency { busy, slot: entry.slot, ..idle });
                    }
                    (4, Some(entry), _) => {
                        let busy = entry.busy + 1;
                        residency.change(block, |entry| entry.busy = busy);
                        model.insert(block, Residency { busy, ..entry });
                    }
                    (5, _, _) => {
                        residency.take_arrival(block);
                        coming.remove(&block);
                        residency.change(block, |entry| *entry = Residency::default());
                        model.remove(&block);
                    }
                    (6, Some(entry), None) if !coming.contains_key(&block) => {
                        residency.change(block, |entry| entry.state = ResidencyState::Arriving);
                        residency.attach_arrival(block, arrival(time));
                        coming.insert(block, time);
                        model.insert(block, Residency { state: ResidencyState::Arriving, ..entry });
                    }
                    (7, _, _) => {
                        if let Some(arrival) = residency.arrival_mut(block) {
                            arrival.ready = time;
                            coming.insert(block, time);
                        }
                    }
                    _ => {}
                }
                let mut overflow = 0;
                for block in 0..6 {
                    let wanted = model.get(&block).copied();
                    prop_assert_eq!(residency.get(block), wanted.unwrap_or_default());
                    let ready = residency.arrival(block).map(|arrival| arrival.ready);
                    prop_assert_eq!(ready, coming.get(&block).copied());
                    let word = |entry: &Residency, most: u16| {
                        entry.slot < READING
                            && entry.busy <= most
                            && *entry == Residency { slot: entry.slot, busy: entry.busy, ..idle }
                    };
                    let only = block..block + 1;
                    let is_word = |most| wanted.is_some_and(|entry| word(&entry, most));
                    prop_assert_eq!(residency.all_idle(only.clone()), is_word(0));
                    prop_assert_eq!(residency.all_full(only), is_word(1));
                    let full = |entry: Residency| {
                        entry.state == ResidencyState::Resident && entry.have == all
                    };
                    prop_assert_eq!(residency.fully_resident(block), wanted.is_some_and(full));
                    overflow += usize::from(wanted.is_some() && !is_word(1));
                }
                let front = |is: &dyn Fn(u32) -> bool| (block..6).find(|&other| !is(other));
                let idle = front(&|other| residency.all_idle(other..other + 1));
                prop_assert_eq!(residency.first_not_idle(block..6), idle.unwrap_or(6));
                let whole = front(&|other| residency.all_full(other..other + 1));
                prop_assert_eq!(residency.first_not_full(block..6), whole.unwrap_or(6));
                let bare = front(&|other| !model.contains_key(&other));
                prop_assert_eq!(residency.first_present(block..6), bare.unwrap_or(6));
                prop_assert_eq!(residency.overflow(), overflow);
                prop_assert_eq!(residency.arrivals(), coming.len());
                let resident = |entry: &&Residency| entry.state == ResidencyState::Resident;
                prop_assert_eq!(residency.copies(), model.values().filter(resident).count() as u64);
                prop_assert_eq!(residency.present(), model.len() as u64);
            }
        }
    }

    #[test]
    fn a_block_arrives_by_one_move_or_several() {
        let all = Layers::new(0, 3);
        let mut residency = ResidencyTable::new(all);
        residency.reach(3);
        let cases: [(Layers, &[u64], bool); 3] =
            [(all, &[7], true), (Layers::new(0, 2), &[7], false), (all, &[7, 8], false)];
        for (block, (target, by, alone)) in (0..).zip(cases) {
            let arrival = Arrival::new(target, MoveIds::from_slice(by), 0, 0);
            residency.begin_arrival(block, block, arrival);
            assert_eq!(
                (residency.arrives_by(block, 7), residency.arrives_by(block, 8)),
                (alone, false)
            );
        }
        residency.arrival_mut(0).expect("arriving").failed = true;
        assert!(!residency.arrives_by(0, 7));
    }

    #[test]
    fn a_residency_reads_back_as_written() {
        let all = Layers::new(0, 3);
        let mut residency = ResidencyTable::new(all);
        residency.reach(9);
        assert_eq!((residency.get(4), residency.overflow()), (Residency::default(), 0));
        let steps: [Change; 6] = [
            (|entry| entry.slot = 7, 1),
            (|entry| (entry.have, entry.state) = (Layers::new(0, 3), ResidencyState::Resident), 0),
            (|entry| entry.busy = 2, 1),
            (|entry| (entry.busy, entry.have) = (0, Layers::new(0, 2)), 1),
            (|entry| entry.have = Layers::new(0, 3), 0),
            (|entry| *entry = Residency::default(), 0),
        ];
        let mut expected = Residency::default();
        for (what, overflow) in steps {
            residency.change(4, what);
            what(&mut expected);
            assert_eq!((residency.get(4), residency.overflow()), (expected, overflow));
            let copies = u64::from(expected.state == ResidencyState::Resident);
            assert_eq!(residency.copies(), copies);
            let whole = expected.state == ResidencyState::Resident && overflow == 0;
            assert_eq!(residency.all_idle(4..5), whole);
            assert_eq!(slot_of(&residency, 4), whole.then_some(7));
            assert_eq!(residency.none_present(4..5), expected.slot == NO_SLOT);
            assert_eq!(residency.all_present(4..5), expected.slot != NO_SLOT);
        }
        residency.change(4, |entry| {
            *entry = Residency { slot: 1, have: all, busy: 0, state: ResidencyState::Resident }
        });
        assert!(
            !residency.all_idle(4..6)
                && !residency.none_present(3..5)
                && residency.none_present(5..9)
        );
        assert_eq!(
            residency.blocks(9).map(|(block, entry)| (block, entry.slot)).collect::<Vec<_>>(),
            [(4, 1)]
        );
        residency.put(5, 2);
        residency.change(4, |entry| entry.state = ResidencyState::Bad);
        assert_eq!((residency.clear(5..6).collect::<Vec<_>>(), residency.copies()), (vec![2], 0));
        residency.begin_arrival(6, 8, arrival(0));
        let coming =
            Residency { slot: 8, have: Layers::NONE, busy: 1, state: ResidencyState::Arriving };
        assert_eq!((residency.get(6), residency.copies()), (coming, 0));
        residency.change(6, |entry| entry.busy += 1);
        assert_eq!(
            (residency.take_arrival(6).is_some(), residency.take_arrival(6).is_none()),
            (true, true)
        );
        residency.end_io(6);
        let read = Residency { slot: 8, have: all, busy: 1, state: ResidencyState::Resident };
        assert_eq!(
            (residency.get(6), residency.copies(), residency.all_idle(6..7)),
            (read, 1, false)
        );
        residency.end_io(6);
        assert_eq!(
            (residency.copies(), slot_of(&residency, 6), residency.overflow()),
            (1, Some(8), 1)
        );
        residency.begin_read(6);
        assert_eq!((residency.get(6), residency.copies(), residency.overflow()), (read, 1, 1));
        residency.end_io(6);
        assert!(residency.all_idle(6..7));
    }
}
