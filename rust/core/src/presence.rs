//! Presence: where each block stands on one tier.
//!
//! Nearly every copy is whole and quiet: it is told by its slot alone, four bytes per block. What is
//! part of a block, arriving, bad or busy stands in a table beside. Invariants: a residency is in the
//! table if and only if a slot does not tell it; `copies` counts what is resident. Cost: O(1).

use std::collections::hash_map::Entry;
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::block::{BlockId, Layers, NO_SLOT, Slot};
use crate::column::Column;
use crate::tier::{Residency, State};

/// Marks a block that is told in the table. No tier has so many slots.
const ASIDE: Slot = Slot::MAX - 1;

/// The residencies of one tier.
#[derive(Debug)]
pub struct Presence {
    all: Layers,
    slots: Column<Slot>,
    aside: FxHashMap<BlockId, Residency>,
    copies: u64,
}

impl Presence {
    /// Nothing is here; `all` are the model's layers.
    #[must_use]
    pub fn new(all: Layers) -> Self {
        Self { all, slots: Column::new(NO_SLOT), aside: FxHashMap::default(), copies: 0 }
    }

    /// Makes room for the blocks below `bound`.
    pub fn reach(&mut self, bound: BlockId) {
        self.slots.reach(bound);
    }

    /// A block's residency.
    #[inline]
    #[must_use]
    pub fn get(&self, block: BlockId) -> Residency {
        match self.slots[block] {
            NO_SLOT => Residency::default(),
            ASIDE => self.aside[&block],
            slot => self.quiet(slot),
        }
    }

    /// Changes a block's residency.
    pub fn change(&mut self, block: BlockId, what: impl FnOnce(&mut Residency)) {
        let mut here = self.get(block);
        let stood = here.state == State::Resident;
        what(&mut here);
        let stands = here.state == State::Resident;
        self.copies = self.copies + u64::from(stands) - u64::from(stood);
        let told = if here == Residency::default() {
            NO_SLOT
        } else if here == self.quiet(here.slot) && here.slot < ASIDE {
            here.slot
        } else {
            ASIDE
        };
        if self.slots[block] == ASIDE && told != ASIDE {
            self.aside.remove(&block);
        }
        if told == ASIDE {
            self.aside.insert(block, here);
        }
        self.slots[block] = told;
    }

    /// Puts a block that is not here whole and quiet into a slot.
    pub fn put(&mut self, block: BlockId, slot: Slot) {
        debug_assert!(self.slots[block] == NO_SLOT && slot < ASIDE);
        self.slots[block] = slot;
        self.copies += 1;
    }

    /// Takes away a block that is here whole and quiet. Returns its slot.
    pub fn clear(&mut self, block: BlockId) -> Slot {
        debug_assert!(self.slots[block] < ASIDE, "block {block} is not here, whole and quiet");
        self.copies -= 1;
        std::mem::replace(&mut self.slots[block], NO_SLOT)
    }

    /// A move begins to read a block that is here whole and quiet.
    pub fn lend(&mut self, block: BlockId) {
        let here = Residency { busy: 1, ..self.quiet(self.slots[block]) };
        self.aside.insert(block, here);
        self.slots[block] = ASIDE;
    }

    /// A move begins to bring all of a block that is not here into a slot.
    pub fn await_in(&mut self, block: BlockId, slot: Slot) {
        debug_assert!(self.slots[block] == NO_SLOT && slot < ASIDE);
        let here = Residency { slot, have: Layers::NONE, busy: 1, state: State::Arriving };
        self.aside.insert(block, here);
        self.slots[block] = ASIDE;
    }

    /// A move that read or wrote a block has ended, and the block is here whole.
    pub fn calm(&mut self, block: BlockId) {
        let Entry::Occupied(mut entry) = self.aside.entry(block) else { return };
        let here = entry.get_mut();
        self.copies += u64::from(here.state != State::Resident);
        *here = Residency { busy: here.busy - 1, have: self.all, state: State::Resident, ..*here };
        if here.busy == 0 && here.slot < ASIDE {
            self.slots[block] = here.slot;
            entry.remove();
        }
    }

    /// Whether all these blocks are here, whole and quiet.
    #[must_use]
    pub fn quietly(&self, blocks: Range<BlockId>) -> bool {
        self.all_of(blocks, |slot| slot < ASIDE)
    }

    /// Whether something of each of these blocks is here or coming.
    #[must_use]
    pub fn everywhere(&self, blocks: Range<BlockId>) -> bool {
        self.all_of(blocks, |slot| slot != NO_SLOT)
    }

    /// Whether none of these blocks is here.
    #[must_use]
    pub fn nowhere(&self, blocks: Range<BlockId>) -> bool {
        self.all_of(blocks, |slot| slot == NO_SLOT)
    }

    /// The slot of a block that is here whole and quiet.
    #[must_use]
    pub fn slot(&self, block: BlockId) -> Option<Slot> {
        Some(self.slots[block]).filter(|&slot| slot < ASIDE)
    }

    /// Every block of which something is here or coming, below `bound`.
    pub fn blocks(&self, bound: BlockId) -> impl Iterator<Item = (BlockId, Residency)> + '_ {
        let here = (0..bound).filter(|&block| self.slots[block] != NO_SLOT);
        here.map(|block| (block, self.get(block)))
    }

    /// How many blocks are resident, with all or some of their layers.
    #[must_use]
    pub fn copies(&self) -> u64 {
        self.copies
    }

    /// How many blocks stand in the table.
    #[must_use]
    pub fn aside(&self) -> usize {
        self.aside.len()
    }

    fn quiet(&self, slot: Slot) -> Residency {
        Residency { slot, have: self.all, busy: 0, state: State::Resident }
    }

    #[inline]
    fn all_of(&self, blocks: Range<BlockId>, is: impl Fn(Slot) -> bool) -> bool {
        let mut from = blocks.start;
        while from < blocks.end {
            let piece = self.slots.stretch(from, blocks.end);
            if !piece.iter().all(|&slot| is(slot)) {
                return false;
            }
            from += u32::try_from(piece.len()).expect("less than the range");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::Presence;
    use crate::block::{Layers, NO_SLOT};
    use crate::tier::{Residency, State};

    type Step = (fn(&mut Residency), usize);

    #[test]
    fn a_residency_is_what_was_made_of_it() {
        let all = Layers::new(0, 3);
        let mut presence = Presence::new(all);
        presence.reach(9);
        assert_eq!((presence.get(4), presence.aside()), (Residency::default(), 0));
        let steps: [Step; 6] = [
            (|here| here.slot = 7, 1),
            (|here| (here.have, here.state) = (Layers::new(0, 3), State::Resident), 0),
            (|here| here.busy = 2, 1),
            (|here| (here.busy, here.have) = (0, Layers::new(0, 2)), 1),
            (|here| here.have = Layers::new(0, 3), 0),
            (|here| *here = Residency::default(), 0),
        ];
        let mut expected = Residency::default();
        for (what, aside) in steps {
            presence.change(4, what);
            what(&mut expected);
            assert_eq!((presence.get(4), presence.aside()), (expected, aside));
            let stands = u64::from(expected.state == State::Resident);
            assert_eq!(presence.copies(), stands);
            let whole = expected.state == State::Resident && aside == 0;
            assert_eq!(presence.quietly(4..5), whole);
            assert_eq!(presence.slot(4), whole.then_some(7));
            assert_eq!(presence.nowhere(4..5), expected.slot == NO_SLOT);
            assert_eq!(presence.everywhere(4..5), expected.slot != NO_SLOT);
        }
        presence.change(4, |here| {
            *here = Residency { slot: 1, have: all, busy: 0, state: State::Resident }
        });
        assert!(!presence.quietly(4..6) && !presence.nowhere(3..5) && presence.nowhere(5..9));
        assert_eq!(
            presence.blocks(9).map(|(block, here)| (block, here.slot)).collect::<Vec<_>>(),
            [(4, 1)]
        );
        presence.put(5, 2);
        presence.change(4, |here| here.state = State::Bad);
        assert_eq!((presence.copies(), presence.clear(5), presence.copies()), (1, 2, 0));
        presence.await_in(6, 8);
        let coming = Residency { slot: 8, have: Layers::NONE, busy: 1, state: State::Arriving };
        assert_eq!((presence.get(6), presence.copies()), (coming, 0));
        presence.change(6, |here| here.busy += 1);
        presence.calm(6);
        let read = Residency { slot: 8, have: all, busy: 1, state: State::Resident };
        assert_eq!((presence.get(6), presence.copies(), presence.quietly(6..7)), (read, 1, false));
        presence.calm(6);
        assert_eq!((presence.copies(), presence.slot(6), presence.aside()), (1, Some(8), 1));
        presence.lend(6);
        assert_eq!((presence.get(6), presence.copies()), (read, 1));
        presence.calm(6);
        assert!(presence.quietly(6..7));
    }
}
