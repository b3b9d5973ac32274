//! Block ids: given out in stretches, so that the blocks of a run are numbered one after the other.
//!
//! Invariant: an id is free in exactly one stretch or in use; neighbouring stretches are one. The
//! ids in use reach at most a quarter further than their number, where they do not have to: a
//! stretch that is long enough is preferred to the end, the end to pieces. Cost: O(log stretches).

use std::collections::{BTreeMap, BTreeSet};

use crate::block::BlockId;

/// Ids that may be wasted however few are in use.
const SLACK: u32 = 1024;

/// Which ids are free.
#[derive(Clone, Debug, Default)]
pub(super) struct Ids {
    /// Lengths by first id.
    free: BTreeMap<BlockId, u32>,
    /// The same by length.
    lengths: BTreeSet<(u32, BlockId)>,
    bound: BlockId,
    used: u32,
}

impl Ids {
    /// One behind the largest id ever given out.
    pub(super) fn bound(&self) -> BlockId {
        self.bound
    }

    /// A stretch of at most `wanted` ids, of one at least.
    pub(super) fn take(&mut self, wanted: u32) -> (BlockId, u32) {
        let fits = self.lengths.range((wanted, 0)..).next().copied();
        let slack = self.used / 4 + SLACK;
        let (length, first) = match fits {
            Some(fits) => fits,
            None if self.bound - self.used + wanted <= slack || self.lengths.is_empty() => {
                let first = self.bound;
                self.bound += wanted;
                self.used += wanted;
                return (first, wanted);
            }
            None => *self.lengths.last().expect("not empty"),
        };
        let taken = wanted.min(length);
        self.cut(first, length, taken);
        (first, taken)
    }

    /// The ids from `first` on that are free, at most `wanted`; they are taken.
    pub(super) fn extend(&mut self, first: BlockId, wanted: u32) -> u32 {
        if first == self.bound {
            self.bound += wanted;
            self.used += wanted;
            return wanted;
        }
        let Some(&length) = self.free.get(&first) else { return 0 };
        let taken = wanted.min(length);
        self.cut(first, length, taken);
        taken
    }

    /// Gives ids back.
    pub(super) fn give(&mut self, first: BlockId, length: u32) {
        if length == 0 {
            return;
        }
        self.used -= length;
        let (mut first, mut end) = (first, first + length);
        if let Some((&before, &other)) = self.free.range(..first).next_back()
            && before + other == first
        {
            self.forget(before, other);
            first = before;
        }
        if let Some(&other) = self.free.get(&end) {
            self.forget(end, other);
            end += other;
        }
        self.free.insert(first, end - first);
        self.lengths.insert((end - first, first));
    }

    /// Whether an id is free, in O(log stretches).
    pub(super) fn is_free(&self, id: BlockId) -> bool {
        let before = self.free.range(..=id).next_back();
        before.is_some_and(|(first, length)| id < first + length)
    }

    /// Takes the first `taken` ids of a free stretch.
    fn cut(&mut self, first: BlockId, length: u32, taken: u32) {
        self.forget(first, length);
        if taken < length {
            self.free.insert(first + taken, length - taken);
            self.lengths.insert((length - taken, first + taken));
        }
        self.used += taken;
    }

    fn forget(&mut self, first: BlockId, length: u32) {
        self.free.remove(&first);
        self.lengths.remove(&(length, first));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::Ids;

    proptest! {
        #[test]
        fn no_id_is_given_twice(ops in prop::collection::vec((0..3_u8, 1..40_u32, any::<usize>()), 1..200)) {
            let (mut ids, mut held) = (Ids::default(), Vec::<(u32, u32)>::new());
            let mut used = BTreeSet::new();
            for (kind, number, pick) in ops {
                match kind {
                    0 => {
                        let (first, length) = ids.take(number);
                        prop_assert!(0 < length && length <= number);
                        held.push((first, length));
                        prop_assert!((first..first + length).all(|id| used.insert(id)));
                    }
                    1 if !held.is_empty() => {
                        let at = pick % held.len();
                        let (first, length) = held[at];
                        let more = ids.extend(first + length, number);
                        held[at].1 += more;
                        let end = first + length;
                        prop_assert!((end..end + more).all(|id| used.insert(id)));
                    }
                    _ if !held.is_empty() => {
                        let (first, length) = held.swap_remove(pick % held.len());
                        // In two parts, the later one first.
                        let front = length / 2;
                        ids.give(first + front, length - front);
                        ids.give(first, front);
                        prop_assert!((first..first + length).all(|id| used.remove(&id)));
                    }
                    _ => {}
                }
                for id in 0..ids.bound() {
                    prop_assert_eq!(ids.is_free(id), !used.contains(&id));
                }
                let apart = ids.free.iter().zip(ids.free.keys().skip(1));
                prop_assert!(apart.clone().all(|((first, length), next)| first + length < *next));
                prop_assert_eq!(ids.lengths.len(), ids.free.len());
            }
        }
    }

    #[test]
    fn what_fits_is_preferred_to_the_end_and_the_end_to_pieces() {
        let mut ids = Ids::default();
        assert_eq!((ids.take(10), ids.take(5), ids.take(10)), ((0, 10), (10, 5), (15, 10)));
        ids.give(0, 10);
        assert_eq!(ids.take(4), (0, 4));
        assert_eq!(ids.take(7), (25, 7));
        assert_eq!((ids.extend(4, 9), ids.extend(4, 9), ids.extend(32, 2)), (6, 0, 2));
        assert_eq!(ids.bound(), 34);
    }

    #[test]
    fn where_too_much_is_wasted_pieces_are_used() {
        let mut ids = Ids::default();
        let (first, length) = ids.take(4000);
        for id in (first..first + length).step_by(2) {
            ids.give(id, 1);
        }
        assert_eq!(ids.take(2).1, 1);
    }
}
