//! Ghost list of a policy: a FIFO queue of the tags of evicted blocks, with a value each.
//!
//! Invariant: a tag is in the queue at most once, with its latest value. Cost: O(1); about 40 bytes
//! per tag.

use crate::paged_slab::{PagedSlab, SlabIndex};
use crate::u32_map::U32Map;

/// No neighbour.
const NONE: SlabIndex = SlabIndex::MAX;

#[derive(Clone, Copy, Debug)]
struct Ghost<T> {
    tag: u64,
    value: T,
    /// Evicted before it.
    before: SlabIndex,
    /// Evicted after it.
    after: SlabIndex,
}

/// Doubly linked queue in a slab, and an index of it by tag.
#[derive(Clone, Debug)]
pub(super) struct GhostList<T> {
    /// Slab index by the lower half of a tag; [`GhostList::take`] compares the whole tag.
    by_tag: U32Map,
    ghosts: PagedSlab<Ghost<T>>,
    oldest: SlabIndex,
    youngest: SlabIndex,
}

impl<T: Copy + Default> Default for GhostList<T> {
    fn default() -> Self {
        let vacant = Ghost { tag: 0, value: T::default(), before: NONE, after: NONE };
        Self {
            by_tag: U32Map::default(),
            ghosts: PagedSlab::new(vacant),
            oldest: NONE,
            youngest: NONE,
        }
    }
}

impl<T: Copy + Default> GhostList<T> {
    /// Appends a tag as the youngest; an earlier entry of it goes.
    pub(super) fn push(&mut self, tag: u64, value: T) {
        // A tag that comes again is the youngest, whatever it was.
        self.take(tag);
        let ghost = Ghost { tag, value, before: self.youngest, after: NONE };
        let at = self.ghosts.insert(ghost);
        self.by_tag.insert(low(tag), at);
        match self.youngest {
            NONE => self.oldest = at,
            youngest => self.ghosts[youngest].after = at,
        }
        self.youngest = at;
    }

    /// Removes a tag and returns its value.
    pub(super) fn take(&mut self, tag: u64) -> Option<T> {
        let Self { by_tag, ghosts, .. } = self;
        let at = by_tag.remove(low(tag), |at| ghosts[at].tag == tag)?;
        let Ghost { value, before, after, .. } = self.ghosts[at];
        match before {
            NONE => self.oldest = after,
            before => self.ghosts[before].after = after,
        }
        match after {
            NONE => self.youngest = before,
            after => self.ghosts[after].before = before,
        }
        self.ghosts.remove(at);
        Some(value)
    }

    /// Removes the oldest until at most `most` are left.
    pub(super) fn truncate(&mut self, most: usize) {
        while self.len() > most {
            self.take(self.ghosts[self.oldest].tag);
        }
    }

    /// Number of tags.
    pub(super) fn len(&self) -> usize {
        self.by_tag.len()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
fn low(tag: u64) -> u32 {
    tag as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::GhostList;

    proptest! {
        /// Some tags differ in their upper halves alone.
        #[test]
        fn a_ghost_list_is_a_queue(ops in prop::collection::vec((0..4u8, 0..6u64, 0..3u64), 0..200)) {
            let (mut ghosts, mut model) = (GhostList::default(), Vec::<(u64, u64)>::new());
            for (turn, (what, low, high)) in (0..).zip(ops) {
                let tag = low | high << 32;
                let known = model.iter().position(|&(other, _)| other == tag);
                match what {
                    0 | 1 => {
                        known.map(|at| model.remove(at));
                        model.push((tag, turn));
                        ghosts.push(tag, turn);
                    }
                    2 => {
                        let value = known.map(|at| model.remove(at).1);
                        prop_assert_eq!(ghosts.take(tag), value);
                    }
                    _ => {
                        let most = usize::try_from(low + 3).unwrap_or_default();
                        model.drain(..model.len().saturating_sub(most));
                        ghosts.truncate(most);
                    }
                }
                prop_assert_eq!(ghosts.len(), model.len());
                prop_assert!(ghosts.ghosts.bound() <= 18);
            }
            for (tag, value) in model {
                prop_assert_eq!(ghosts.take(tag), Some(value));
            }
        }
    }

    #[test]
    fn the_oldest_go_first() {
        let mut ghosts = GhostList::default();
        for tag in [1, 2, 3, 1] {
            ghosts.push(tag, tag * 10);
        }
        ghosts.truncate(2);
        assert_eq!((ghosts.take(2), ghosts.take(1), ghosts.take(1)), (None, Some(10), None));
        assert_eq!((ghosts.take(3), ghosts.len()), (Some(30), 0));
    }
}
