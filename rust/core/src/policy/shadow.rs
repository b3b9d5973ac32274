//! Prints of blocks that have left, in the order of leaving: the ghost lists of policies.
//!
//! Invariant: a print is held at most once, with what was last noted of it. Cost: O(1) amortised;
//! about 60 bytes per print.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

/// A directory of what is gone.
#[derive(Clone, Debug, Default)]
pub(super) struct Shadow<T> {
    notes: FxHashMap<u64, (u64, T)>,
    /// Oldest first; a pair whose turn is not the print's any more is void.
    order: VecDeque<(u64, u64)>,
    turn: u64,
}

impl<T> Shadow<T> {
    /// Notes a print as the youngest.
    pub(super) fn note(&mut self, print: u64, note: T) {
        self.turn += 1;
        self.notes.insert(print, (self.turn, note));
        self.order.push_back((print, self.turn));
        if self.order.len() > 2 * self.notes.len() + 16 {
            let notes = &self.notes;
            self.order.retain(|(print, turn)| notes.get(print).is_some_and(|note| note.0 == *turn));
        }
    }

    /// Takes a print out.
    pub(super) fn take(&mut self, print: u64) -> Option<T> {
        self.notes.remove(&print).map(|(_, note)| note)
    }

    /// Forgets the oldest ones until at most `most` are left.
    pub(super) fn keep(&mut self, most: usize) {
        while self.notes.len() > most {
            let Some((print, turn)) = self.order.pop_front() else { return };
            if self.notes.get(&print).is_some_and(|note| note.0 == turn) {
                self.notes.remove(&print);
            }
        }
    }

    /// How many prints it holds.
    pub(super) fn len(&self) -> usize {
        self.notes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Shadow;

    #[test]
    fn the_oldest_are_forgotten_first() {
        let mut shadow = Shadow::default();
        for print in [1, 2, 3, 1] {
            shadow.note(print, print * 10);
        }
        shadow.keep(2);
        assert_eq!((shadow.take(2), shadow.take(1), shadow.take(1)), (None, Some(10), None));
        assert_eq!((shadow.take(3), shadow.len()), (Some(30), 0));
    }

    #[test]
    fn what_is_taken_leaves_no_litter() {
        let mut shadow = Shadow::default();
        for print in 0..10_000 {
            shadow.note(print % 7, ());
            shadow.take(print % 5);
        }
        assert!(shadow.order.len() <= 2 * shadow.len() + 16);
    }
}
