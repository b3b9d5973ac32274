//! `arc`: adaptive replacement cache. Blocks used once and blocks used again are in two LRU lists;
//! hits on the ghosts of either list move the target length between them.
//!
//! Invariant: the two lists hold the tier's blocks; a list and its ghosts hold at most
//! the capacity, all four twice that. The target moves between requests. Cost: O(1); one byte per
//! block and a ghost per block of capacity.

use std::cmp::Ordering;

use super::block_map::BlockMap;
use super::ghost_list::GhostList;
use super::{Entry, Event, Facts, Needs, Order, Policy, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;

const ONCE: usize = 1;
const AGAIN: usize = 2;

/// One block in units of the target.
const ONE: usize = 1 << 16;

/// Adaptive replacement.
#[derive(Debug)]
pub(super) struct Arc {
    capacity: usize,
    /// Target length of the list of blocks used once, in units of 2^-16.
    target: usize,
    /// List of each block: 0 for none.
    lists: BlockMap<u8>,
    lengths: [usize; 3],
    /// Number of blocks of the first list that are selected to leave.
    selected: usize,
    ghosts: [GhostList<()>; 3],
}

impl Arc {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            target: 0,
            lists: BlockMap::default(),
            lengths: [0; 3],
            selected: 0,
            ghosts: Default::default(),
        }
    }

    fn put(&mut self, id: BlockId, list: usize) {
        self.lists.set(id, if list == ONCE { 1 } else { 2 });
        self.lengths[list] += 1;
    }

    /// List of the next victim; selected blocks count as gone already.
    fn victim_list(&self) -> usize {
        if (self.lengths[ONCE] - self.selected) * ONE > self.target { ONCE } else { AGAIN }
    }
}

impl Policy for Arc {
    fn terms(&self, _facts: &Facts, _cost: &CostModel) -> Terms {
        Terms::NONE
    }

    fn order(&self) -> Order {
        Order::Own
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        u64::from(self.lists.get(facts.id))
    }

    fn compare(&self, a: &Entry, b: &Entry, _now: Nanos) -> Ordering {
        // The list to shrink precedes the other one; within a list the last use decides.
        let first = self.victim_list() as u64;
        (a.class != first).cmp(&(b.class != first)).then_with(|| a.cmp(b))
    }

    fn needs(&self) -> Needs {
        Needs::EVENTS
    }

    fn on_resident(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        let [once, again] = [self.ghosts[ONCE].len(), self.ghosts[AGAIN].len()];
        // Evicted too early from the first list: it was too short.
        let list = if self.ghosts[ONCE].take(event.tag).is_some() {
            self.target = (self.target + (ONE * again / once).max(ONE)).min(ONE * self.capacity);
            AGAIN
        // Evicted too early from the second list: the first one was too long.
        } else if self.ghosts[AGAIN].take(event.tag).is_some() {
            self.target = self.target.saturating_sub((ONE * once / again).max(ONE));
            AGAIN
        } else {
            ONCE
        };
        self.put(event.facts.id, list);
        Vec::new()
    }

    fn on_hit(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        let list = usize::from(self.lists.take(event.facts.id));
        self.lengths[list] -= 1;
        // Any later use makes it a block used again, and the youngest of them.
        self.put(event.facts.id, AGAIN);
        Vec::new()
    }

    fn on_select(&mut self, id: BlockId) {
        self.selected += usize::from(usize::from(self.lists.get(id)) == ONCE);
    }

    fn end_selection(&mut self) {
        self.selected = 0;
    }

    fn on_evict(&mut self, id: BlockId, tag: u64) -> Vec<BlockId> {
        let list = usize::from(self.lists.take(id));
        self.lengths[list] -= 1;
        self.selected = self.selected.saturating_sub(usize::from(list == ONCE));
        self.ghosts[list].push(tag, ());
        // The first list and its ghosts hold at most the capacity, all four lists twice that.
        self.ghosts[ONCE].truncate(self.capacity.saturating_sub(self.lengths[ONCE]));
        let rest = (2 * self.capacity)
            .saturating_sub(self.lengths[ONCE] + self.lengths[AGAIN] + self.ghosts[ONCE].len());
        self.ghosts[AGAIN].truncate(rest);
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::TestCache;

    #[test]
    fn blocks_used_once_go_before_those_used_again() {
        let mut cache = TestCache::new("arc", 3);
        for block in [1, 1, 2, 3] {
            cache.request(&[block]);
        }
        assert_eq!(cache.request(&[4]), [2]);
        assert_eq!(cache.request(&[5]), [3]);
    }

    #[test]
    fn a_ghost_comes_back_as_used_again_and_moves_the_target() {
        let mut cache = TestCache::new("arc", 3);
        for block in [1, 1, 2, 3, 4] {
            cache.request(&[block]);
        }
        // 2 left; back again, it makes room for one more block used once.
        assert_eq!(cache.request(&[2]), [3]);
        assert_eq!(cache.request(&[5]), [1]);
    }
}
