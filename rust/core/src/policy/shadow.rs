//! Prints of blocks that have left, in the order of leaving: the ghost lists of policies.
//!
//! Invariant: a print is held at most once, with what was last noted of it. Cost: O(1); about 40 bytes
//! per print, in lines of memory that can be fetched ahead.

use crate::paged_slab::{PagedSlab, SlabIndex};
use crate::u32_map::U32Map;

/// Before the oldest and behind the youngest.
const NOBODY: SlabIndex = SlabIndex::MAX;

#[derive(Clone, Copy, Debug)]
struct Ghost<T> {
    tag: u64,
    note: T,
    /// Who left before it.
    before: SlabIndex,
    /// Who left after it.
    after: SlabIndex,
}

/// A directory of what is gone.
#[derive(Clone, Debug)]
pub(super) struct Shadow<T> {
    /// Seats by the lower half of a print.
    known: U32Map,
    seats: PagedSlab<Ghost<T>>,
    oldest: SlabIndex,
    youngest: SlabIndex,
}

impl<T: Copy + Default> Default for Shadow<T> {
    fn default() -> Self {
        let vacant = Ghost { tag: 0, note: T::default(), before: NOBODY, after: NOBODY };
        Self {
            known: U32Map::default(),
            seats: PagedSlab::new(vacant),
            oldest: NOBODY,
            youngest: NOBODY,
        }
    }
}

impl<T: Copy + Default> Shadow<T> {
    /// Notes a print as the youngest.
    pub(super) fn note(&mut self, tag: u64, note: T) {
        self.take(tag);
        let ghost = Ghost { tag, note, before: self.youngest, after: NOBODY };
        let seat = self.seats.take(ghost);
        self.known.insert(key(tag), seat);
        match self.youngest {
            NOBODY => self.oldest = seat,
            youngest => self.seats[youngest].after = seat,
        }
        self.youngest = seat;
    }

    /// Takes a print out.
    pub(super) fn take(&mut self, tag: u64) -> Option<T> {
        let Self { known, seats, .. } = self;
        let seat = known.remove(key(tag), |seat| seats[seat].tag == tag)?;
        let Ghost { note, before, after, .. } = self.seats[seat];
        match before {
            NOBODY => self.oldest = after,
            before => self.seats[before].after = after,
        }
        match after {
            NOBODY => self.youngest = before,
            after => self.seats[after].before = before,
        }
        self.seats.give(seat);
        Some(note)
    }

    /// Forgets the oldest ones until at most `most` are left.
    pub(super) fn keep(&mut self, most: usize) {
        while self.len() > most {
            self.take(self.seats[self.oldest].tag);
        }
    }

    /// How many prints it holds.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "whoever looks compares the whole print")]
fn key(tag: u64) -> u32 {
    tag as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Shadow;

    proptest! {
        /// Some prints differ in their upper halves alone.
        #[test]
        fn a_shadow_is_a_queue(ops in prop::collection::vec((0..4u8, 0..6u64, 0..3u64), 0..200)) {
            let (mut shadow, mut model) = (Shadow::default(), Vec::<(u64, u64)>::new());
            for (turn, (what, low, high)) in (0..).zip(ops) {
                let tag = low | high << 32;
                let known = model.iter().position(|&(other, _)| other == tag);
                match what {
                    0 | 1 => {
                        known.map(|at| model.remove(at));
                        model.push((tag, turn));
                        shadow.note(tag, turn);
                    }
                    2 => {
                        let note = known.map(|at| model.remove(at).1);
                        prop_assert_eq!(shadow.take(tag), note);
                    }
                    _ => {
                        let most = usize::try_from(low + 3).unwrap_or_default();
                        model.drain(..model.len().saturating_sub(most));
                        shadow.keep(most);
                    }
                }
                prop_assert_eq!(shadow.len(), model.len());
                prop_assert!(shadow.seats.bound() <= 18);
            }
            for (tag, note) in model {
                prop_assert_eq!(shadow.take(tag), Some(note));
            }
        }
    }

    #[test]
    fn the_oldest_are_forgotten_first() {
        let mut shadow = Shadow::default();
        for tag in [1, 2, 3, 1] {
            shadow.note(tag, tag * 10);
        }
        shadow.keep(2);
        assert_eq!((shadow.take(2), shadow.take(1), shadow.take(1)), (None, Some(10), None));
        assert_eq!((shadow.take(3), shadow.len()), (Some(30), 0));
    }
}
