//! Allocator of block ids: hands out stretches of consecutive ids, and knows the run of each block.
//!
//! A `u32` per id with boundary tags, to coalesce neighbouring free stretches in O(1):
//!
//! ```text
//!   bit 31  bit 30  bits 0-29
//!     0       *     run of the block in bits 0-30; all ones (`RESERVED`): reserved or retired
//!     1       1     first id of a free stretch: its length
//!     1       0     last id of a free stretch: its length; 0 inside the stretch
//! ```
//!
//! Invariants: an id is in use or in exactly one free stretch. No stretch crosses the end of a page
//! of [`PAGE`] ids. Fit: a free stretch of sufficient length, else the end of the id space, else
//! (if more than a sixteenth would be wasted) a shorter stretch. Cost: O(1) amortised. 4 bytes per
//! id.

use std::ops::Range;

use crate::block::BlockId;
use crate::paged_vec::{PAGE, PagedVec};

use super::run::{NONE, RunId};

/// Number of ids always allowed to be wasted.
const SLACK: u32 = 1024;

/// Bit of a free id. The rest is a boundary tag.
const FREE: u32 = 1 << 31;

/// Word of a reserved or retired id.
const RESERVED: RunId = FREE - 1;

/// Bit of the first id of a free stretch.
const FIRST: u32 = 1 << 30;

/// Size classes of free stretches: logarithms of the length.
const CLASSES: usize = PAGE.ilog2() as usize + 1;

/// Maximum number of entries examined per size class in a search.
const PROBES: usize = 4;

/// Allocator of block ids.
#[derive(Clone, Debug)]
pub(super) struct Ids {
    words: PagedVec<RunId>,
    /// First ids of free stretches per size class. Entries may be stale: the tag decides.
    free: [Vec<BlockId>; CLASSES],
    bound: BlockId,
    used: u32,
}

impl Ids {
    pub(super) fn new() -> Self {
        let free = std::array::from_fn(|_| Vec::new());
        Self { words: PagedVec::new(FREE), free, bound: 0, used: 0 }
    }

    /// The largest id ever allocated, plus 1.
    pub(super) fn bound(&self) -> BlockId {
        self.bound
    }

    /// The run of a block, or [`NONE`] if the id is not a block.
    #[inline]
    pub(super) fn run_of(&self, id: BlockId) -> RunId {
        // Words of free and reserved ids are at least `RESERVED`.
        self.words.get(id).copied().filter(|&word| word < RESERVED).unwrap_or(NONE)
    }

    /// Prefetches the CPU cache line with a block's run id.
    pub(super) fn prefetch_line(&self, id: BlockId) {
        self.words.prefetch_line(id);
    }

    /// Assigns allocated ids to a run.
    pub(super) fn assign(&mut self, ids: Range<BlockId>, run: RunId) {
        self.words.fill(ids.start, ids.end, &run);
    }

    /// Excludes an allocated id from ever being reused.
    pub(super) fn retire(&mut self, id: BlockId) {
        self.words[id] = RESERVED;
    }

    /// Allocates a stretch of 1 to `wanted` ids.
    pub(super) fn take(&mut self, wanted: u32) -> (BlockId, u32) {
        let slack = self.used / 16 + SLACK;
        // A short stretch splits the caller's run, so it is used only to bound the wasted ids.
        let found = self.find(wanted).or_else(|| {
            let wasteful = self.bound - self.used + wanted > slack;
            if wasteful { self.longest() } else { None }
        });
        let Some((first, length)) = found else {
            let first = self.bound;
            return (first, self.grow(wanted));
        };
        let taken = wanted.min(length);
        self.take_front(first, length, taken);
        (first, taken)
    }

    /// Allocates up to `wanted` free ids from exactly `first` on. Returns the number.
    pub(super) fn extend(&mut self, first: BlockId, wanted: u32) -> u32 {
        // A stretch must not cross pages.
        if (first as usize).is_multiple_of(PAGE) {
            return 0;
        }
        // After the end of the id space there is no boundary tag.
        if first == self.bound {
            return self.grow(wanted);
        }
        let Some(length) = self.starts(first) else { return 0 };
        let taken = wanted.min(length);
        self.take_front(first, length, taken);
        taken
    }

    /// Frees ids.
    pub(super) fn give(&mut self, first: BlockId, length: u32) {
        if length == 0 {
            return;
        }
        self.used -= length;
        self.words.fill(first, first + length, &FREE);
        let (mut first, mut end) = (first, first + length);
        // Coalesce with the free stretches on both sides, and erase the tags between.
        if !(first as usize).is_multiple_of(PAGE)
            && let Some(before) = self.ends(first - 1)
        {
            self.words[first - 1] = FREE;
            first -= before;
            self.words[first] = FREE;
        }
        if !(end as usize).is_multiple_of(PAGE)
            && let Some(following) = self.starts(end)
        {
            self.words[end] = FREE;
            end += following;
            self.words[end - 1] = FREE;
        }
        self.mark(first, end - first);
    }

    /// Whether an id is free.
    pub(super) fn is_free(&self, id: BlockId) -> bool {
        self.words.get(id).is_some_and(|word| word & FREE != 0)
    }

    /// Allocates ids at the end of the id space, up to the end of a page.
    fn grow(&mut self, wanted: u32) -> u32 {
        let page = u32::try_from(PAGE).expect("a few thousand");
        let taken = wanted.min(page - self.bound % page);
        self.bound += taken;
        self.used += taken;
        self.words.reach(self.bound);
        self.words.fill(self.bound - taken, self.bound, &RESERVED);
        taken
    }

    /// A free stretch of at least `wanted` ids.
    fn find(&mut self, wanted: u32) -> Option<(BlockId, u32)> {
        let least = wanted.ilog2() as usize;
        // Every stretch of a higher class is longer than `wanted`.
        (least..CLASSES).find_map(|class| self.search(class, wanted))
    }

    fn longest(&mut self) -> Option<(BlockId, u32)> {
        (0..CLASSES).rev().find_map(|class| self.search(class, 1))
    }

    /// A recent, sufficiently long stretch of a size class. Drops stale entries on the way.
    fn search(&mut self, class: usize, wanted: u32) -> Option<(BlockId, u32)> {
        let (mut at, mut probes) = (self.free[class].len(), 0);
        while at > 0 && probes < PROBES {
            at -= 1;
            let first = self.free[class][at];
            match self.starts(first).filter(|length| length.ilog2() as usize == class) {
                // Only valid but too short entries count as probes.
                Some(length) if length >= wanted => return Some((first, length)),
                Some(_) => probes += 1,
                None => {
                    self.free[class].swap_remove(at);
                }
            }
        }
        None
    }

    /// Allocates the first `taken` ids of a free stretch.
    fn take_front(&mut self, first: BlockId, length: u32, taken: u32) {
        self.words.fill(first, first + taken, &RESERVED);
        if taken < length {
            self.mark(first + taken, length - taken);
        }
        self.used += taken;
    }

    /// Writes a free stretch's boundary tags and adds it to its size class.
    fn mark(&mut self, first: BlockId, length: u32) {
        self.words[first + length - 1] = FREE | length;
        // The first id last: in a stretch of a single id its tag also serves as the end.
        self.words[first] = FREE | FIRST | length;
        let class = length.ilog2() as usize;
        let known = &mut self.free[class];
        known.push(first);
        // Stale and duplicate entries are dropped once they outnumber the possible stretches.
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

    /// Length of the free stretch starting with this id.
    fn starts(&self, first: BlockId) -> Option<u32> {
        let &word = self.words.get(first)?;
        (word & (FREE | FIRST) == FREE | FIRST).then_some(word & !(FREE | FIRST))
    }

    /// Length of the free stretch ending with this id.
    fn ends(&self, last: BlockId) -> Option<u32> {
        let &word = self.words.get(last)?;
        let length = word & !(FREE | FIRST);
        (word & FREE != 0 && length > 0).then_some(length)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::{FREE, Ids};

    /// All free stretches, read from their boundary tags.
    fn stretches(ids: &Ids) -> Vec<(u32, u32)> {
        let starts = (0..ids.bound()).filter_map(|id| Some((id, ids.starts(id)?)));
        starts.collect()
    }

    proptest! {
        #[test]
        fn no_id_is_allocated_twice(
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
                        // In two halves, the later half first: they coalesce.
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
                    let following = first + length;
                    let inside = following != ids.bound() && following % 4096 != 0;
                    prop_assert!(!inside || !ids.is_free(following));
                }
            }
        }
    }

    #[test]
    fn a_long_stretch_is_preferred_to_the_end_and_the_end_to_short_ones() {
        let mut ids = Ids::new();
        assert_eq!((ids.take(10), ids.take(5), ids.take(10)), ((0, 10), (10, 5), (15, 10)));
        ids.give(0, 10);
        assert_eq!(ids.take(4), (0, 4));
        assert_eq!(ids.take(7), (25, 7));
        assert_eq!((ids.extend(4, 9), ids.extend(4, 9), ids.extend(32, 2)), (6, 0, 2));
        assert_eq!(ids.bound(), 34);
    }

    #[test]
    fn short_stretches_are_used_if_too_much_is_wasted() {
        let mut ids = Ids::new();
        let (first, length) = ids.take(4000);
        for id in (first..first + length).step_by(2) {
            ids.give(id, 1);
        }
        assert_eq!(ids.take(2).1, 1);
    }

    #[test]
    fn no_stretch_reaches_over_the_end_of_a_page() {
        let mut ids = Ids::new();
        assert_eq!(
            (ids.take(4000), ids.take(200), ids.take(200)),
            ((0, 4000), (4000, 96), (4096, 200))
        );
        ids.give(4000, 96);
        ids.give(4096, 200);
        assert_eq!(stretches(&ids), [(4000, 96), (4096, 200)]);
        assert_eq!((ids.extend(4096, 3), ids.words[4096] & FREE), (0, FREE));
    }

    #[test]
    fn stale_entries_do_not_pile_up() {
        let mut ids = Ids::new();
        let (first, length) = ids.take(64);
        for _ in 0..10_000 {
            ids.give(first, length);
            assert_eq!(ids.take(64), (first, length));
        }
        assert!(ids.free.iter().all(|known| known.len() <= 257));
    }
}
