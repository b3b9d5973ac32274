//! Block ids: given out in stretches, so that the blocks of a run are numbered one after the other,
//! and the run that each block belongs to.
//!
//! A free stretch is told by its first and its last id, so that neighbours become one at once.
//! Invariant: an id is free in exactly one stretch or in use; no stretch reaches over the end of a
//! piece of [`PAGE`] ids. The ids in use reach at most a sixteenth further than their number, where
//! they do not have to: a stretch that is long enough is preferred to the end, the end to shorter
//! ones. Cost: O(1) amortised; four bytes per id.

use std::ops::Range;

use crate::block::BlockId;
use crate::paged_vec::{PAGE, PagedVec};

use super::run::{NONE, RunId};

/// Ids that may be wasted however few are in use.
const SLACK: u32 = 1024;

/// Marks an id that is free; at either end of a stretch its length stands beside.
const FREE: u32 = 1 << 31;

/// Marks an id that is neither free nor in a run: kept for one, or never given out again.
const NOBODY: RunId = FREE - 1;

/// Marks the first id of a free stretch.
const FIRST: u32 = 1 << 30;

/// Free stretches are kept by the logarithm of their length.
const CLASSES: usize = PAGE.ilog2() as usize + 1;

/// How many stretches of one class are looked at for one that is long enough.
const LOOKS: usize = 4;

/// Which ids are free, and whose the others are.
#[derive(Clone, Debug)]
pub(super) struct Ids {
    homes: PagedVec<RunId>,
    /// First ids of free stretches by class; what is not true any more is noticed when looked at.
    free: [Vec<BlockId>; CLASSES],
    bound: BlockId,
    used: u32,
}

impl Ids {
    pub(super) fn new() -> Self {
        let free = std::array::from_fn(|_| Vec::new());
        Self { homes: PagedVec::new(FREE), free, bound: 0, used: 0 }
    }

    /// One behind the largest id ever given out.
    pub(super) fn bound(&self) -> BlockId {
        self.bound
    }

    /// The run of a block; [`NONE`] if the id is in no run.
    #[inline]
    pub(super) fn home(&self, id: BlockId) -> RunId {
        self.homes.get(id).copied().filter(|&home| home < NOBODY).unwrap_or(NONE)
    }

    /// Prefetches the CPU cache line that holds a block's run.
    pub(super) fn prefetch_line(&self, id: BlockId) {
        self.homes.prefetch_line(id);
    }

    /// Says whose ids are that were taken.
    pub(super) fn settle(&mut self, ids: Range<BlockId>, home: RunId) {
        self.homes.fill(ids.start, ids.end, &home);
    }

    /// An id that was taken is never given out again.
    pub(super) fn retire(&mut self, id: BlockId) {
        self.homes[id] = NOBODY;
    }

    /// A stretch of at most `wanted` ids, of one at least.
    pub(super) fn take(&mut self, wanted: u32) -> (BlockId, u32) {
        let slack = self.used / 16 + SLACK;
        let found = self.find(wanted).or_else(|| {
            let wasteful = self.bound - self.used + wanted > slack;
            if wasteful { self.longest() } else { None }
        });
        let Some((first, length)) = found else {
            let first = self.bound;
            return (first, self.grow(wanted));
        };
        let taken = wanted.min(length);
        self.cut(first, length, taken);
        (first, taken)
    }

    /// The ids from `first` on that are free, at most `wanted`; they are taken.
    pub(super) fn extend(&mut self, first: BlockId, wanted: u32) -> u32 {
        if (first as usize).is_multiple_of(PAGE) {
            return 0;
        }
        if first == self.bound {
            return self.grow(wanted);
        }
        let Some(length) = self.starts(first) else { return 0 };
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
        self.homes.fill(first, first + length, &FREE);
        let (mut first, mut end) = (first, first + length);
        if !(first as usize).is_multiple_of(PAGE)
            && let Some(before) = self.ends(first - 1)
        {
            self.homes[first - 1] = FREE;
            first -= before;
            self.homes[first] = FREE;
        }
        if !(end as usize).is_multiple_of(PAGE)
            && let Some(behind) = self.starts(end)
        {
            self.homes[end] = FREE;
            end += behind;
            self.homes[end - 1] = FREE;
        }
        self.mark(first, end - first);
    }

    /// Whether an id is free.
    pub(super) fn is_free(&self, id: BlockId) -> bool {
        self.homes.get(id).is_some_and(|home| home & FREE != 0)
    }

    /// Takes ids at the end, at most up to the end of a piece.
    fn grow(&mut self, wanted: u32) -> u32 {
        let piece = u32::try_from(PAGE).expect("a few thousand");
        let taken = wanted.min(piece - self.bound % piece);
        self.bound += taken;
        self.used += taken;
        self.homes.reach(self.bound);
        self.homes.fill(self.bound - taken, self.bound, &NOBODY);
        taken
    }

    /// A stretch of `wanted` ids or more.
    fn find(&mut self, wanted: u32) -> Option<(BlockId, u32)> {
        let least = wanted.ilog2() as usize;
        (least..CLASSES).find_map(|class| self.look(class, wanted))
    }

    fn longest(&mut self) -> Option<(BlockId, u32)> {
        (0..CLASSES).rev().find_map(|class| self.look(class, 1))
    }

    /// One of the latest stretches of a class that is long enough; what is untrue goes.
    fn look(&mut self, class: usize, wanted: u32) -> Option<(BlockId, u32)> {
        let (mut at, mut looks) = (self.free[class].len(), 0);
        while at > 0 && looks < LOOKS {
            at -= 1;
            let first = self.free[class][at];
            match self.starts(first).filter(|length| length.ilog2() as usize == class) {
                Some(length) if length >= wanted => return Some((first, length)),
                Some(_) => looks += 1,
                None => {
                    self.free[class].swap_remove(at);
                }
            }
        }
        None
    }

    /// Takes the first `taken` ids of a free stretch.
    fn cut(&mut self, first: BlockId, length: u32, taken: u32) {
        self.homes.fill(first, first + taken, &NOBODY);
        if taken < length {
            self.mark(first + taken, length - taken);
        }
        self.used += taken;
    }

    /// Tells a free stretch by its ends.
    fn mark(&mut self, first: BlockId, length: u32) {
        self.homes[first + length - 1] = FREE | length;
        self.homes[first] = FREE | FIRST | length;
        let class = length.ilog2() as usize;
        let known = &mut self.free[class];
        known.push(first);
        // What was said twice or is over may not pile up.
        if known.len() > 256 && known.len() > self.bound as usize >> class {
            let mut known = std::mem::take(&mut self.free[class]);
            known.sort_unstable();
            known.dedup();
            known.retain(|&first| {
                self.starts(first).is_some_and(|length| length.ilog2() as usize == class)
            });
            self.free[class] = known;
        }
    }

    /// The length of the free stretch that starts with this id.
    fn starts(&self, first: BlockId) -> Option<u32> {
        let &home = self.homes.get(first)?;
        (home & (FREE | FIRST) == FREE | FIRST).then_some(home & !(FREE | FIRST))
    }

    /// The length of the free stretch that ends with this id.
    fn ends(&self, last: BlockId) -> Option<u32> {
        let &home = self.homes.get(last)?;
        let length = home & !(FREE | FIRST);
        (home & FREE != 0 && length > 0).then_some(length)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::{FREE, Ids};

    /// The free stretches, as their ends tell them.
    fn stretches(ids: &Ids) -> Vec<(u32, u32)> {
        let starts = (0..ids.bound()).filter_map(|id| Some((id, ids.starts(id)?)));
        starts.collect()
    }

    proptest! {
        #[test]
        fn no_id_is_given_twice(
            ops in prop::collection::vec((0..3_u8, 1..90_u32, any::<usize>()), 1..200),
        ) {
            let (mut ids, mut held) = (Ids::new(), Vec::<(u32, u32)>::new());
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
                let known = stretches(&ids);
                let free: u32 = known.iter().map(|(_, length)| length).sum();
                prop_assert_eq!(free as usize, ids.bound() as usize - used.len());
                for &(first, length) in &known {
                    prop_assert_eq!(ids.ends(first + length - 1), Some(length));
                    let behind = first + length;
                    prop_assert!(behind == ids.bound() || behind % 4096 == 0 || !ids.is_free(behind));
                }
            }
        }
    }

    #[test]
    fn what_fits_is_preferred_to_the_end_and_the_end_to_shorter_ones() {
        let mut ids = Ids::new();
        assert_eq!((ids.take(10), ids.take(5), ids.take(10)), ((0, 10), (10, 5), (15, 10)));
        ids.give(0, 10);
        assert_eq!(ids.take(4), (0, 4));
        assert_eq!(ids.take(7), (25, 7));
        assert_eq!((ids.extend(4, 9), ids.extend(4, 9), ids.extend(32, 2)), (6, 0, 2));
        assert_eq!(ids.bound(), 34);
    }

    #[test]
    fn where_too_much_is_wasted_shorter_ones_are_used() {
        let mut ids = Ids::new();
        let (first, length) = ids.take(4000);
        for id in (first..first + length).step_by(2) {
            ids.give(id, 1);
        }
        assert_eq!(ids.take(2).1, 1);
    }

    #[test]
    fn no_stretch_reaches_over_the_end_of_a_piece() {
        let mut ids = Ids::new();
        assert_eq!(
            (ids.take(4000), ids.take(200), ids.take(200)),
            ((0, 4000), (4000, 96), (4096, 200))
        );
        ids.give(4000, 96);
        ids.give(4096, 200);
        assert_eq!(stretches(&ids), [(4000, 96), (4096, 200)]);
        assert_eq!((ids.extend(4096, 3), ids.homes[4096] & FREE), (0, FREE));
    }

    #[test]
    fn what_is_over_does_not_pile_up() {
        let mut ids = Ids::new();
        let (first, length) = ids.take(64);
        for _ in 0..10_000 {
            ids.give(first, length);
            assert_eq!(ids.take(64), (first, length));
        }
        assert!(ids.free.iter().all(|known| known.len() <= 257));
    }
}
