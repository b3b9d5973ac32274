//! `arc`: adaptive replacement. Blocks seen once and blocks seen again are kept in two lists, each
//! least recently used first; hits on what either list lost move the target between them.
//!
//! Invariant: the lists' lengths are those of the tier's blocks; a list and its ghosts hold at most
//! the capacity, all four twice that. The target moves between requests. Cost: O(1); one byte per
//! block and a ghost per block of capacity.

use std::cmp::Ordering;

use super::memory::Memory;
use super::shadow::Shadow;
use super::{Entry, Facts, Order, Policy, Seen, Terms};
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
    /// How long the list of blocks seen once should be, in units of 2^-16.
    target: usize,
    lists: Memory<u8>,
    lengths: [usize; 3],
    /// Of the blocks seen once, those chosen to leave.
    chosen: usize,
    ghosts: [Shadow<()>; 3],
}

impl Arc {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            target: 0,
            lists: Memory::default(),
            lengths: [0; 3],
            chosen: 0,
            ghosts: Default::default(),
        }
    }

    fn put(&mut self, id: BlockId, list: usize) {
        self.lists.set(id, if list == ONCE { 1 } else { 2 });
        self.lengths[list] += 1;
    }

    /// The list that gives up a block next.
    fn giving(&self) -> usize {
        if (self.lengths[ONCE] - self.chosen) * ONE > self.target { ONCE } else { AGAIN }
    }
}

impl Policy for Arc {
    fn name(&self) -> &'static str {
        "arc"
    }

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
        let giving = self.giving() as u64;
        (a.class != giving).cmp(&(b.class != giving)).then_with(|| a.cmp(b))
    }

    fn watches(&self) -> bool {
        true
    }

    fn arrived(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let [once, again] = [self.ghosts[ONCE].len(), self.ghosts[AGAIN].len()];
        let list = if self.ghosts[ONCE].take(seen.tag).is_some() {
            self.target = (self.target + (ONE * again / once).max(ONE)).min(ONE * self.capacity);
            AGAIN
        } else if self.ghosts[AGAIN].take(seen.tag).is_some() {
            self.target = self.target.saturating_sub((ONE * once / again).max(ONE));
            AGAIN
        } else {
            ONCE
        };
        self.put(seen.facts.id, list);
        Vec::new()
    }

    fn touched(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let list = usize::from(self.lists.take(seen.facts.id));
        self.lengths[list] -= 1;
        self.put(seen.facts.id, AGAIN);
        Vec::new()
    }

    fn chosen(&mut self, id: BlockId) {
        self.chosen += usize::from(usize::from(self.lists.get(id)) == ONCE);
    }

    fn settled(&mut self) {
        self.chosen = 0;
    }

    fn left(&mut self, id: BlockId, tag: u64) -> Vec<BlockId> {
        let list = usize::from(self.lists.take(id));
        self.lengths[list] -= 1;
        self.chosen = self.chosen.saturating_sub(usize::from(list == ONCE));
        self.ghosts[list].note(tag, ());
        self.ghosts[ONCE].keep(self.capacity.saturating_sub(self.lengths[ONCE]));
        let rest = (2 * self.capacity)
            .saturating_sub(self.lengths[ONCE] + self.lengths[AGAIN] + self.ghosts[ONCE].len());
        self.ghosts[AGAIN].keep(rest);
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::Shelf;

    #[test]
    fn what_was_seen_once_goes_before_what_was_seen_again() {
        let mut shelf = Shelf::new("arc", 3);
        for block in [1, 1, 2, 3] {
            shelf.request(&[block]);
        }
        assert_eq!(shelf.request(&[4]), [2]);
        assert_eq!(shelf.request(&[5]), [3]);
    }

    #[test]
    fn a_ghost_comes_back_as_seen_again_and_moves_the_target() {
        let mut shelf = Shelf::new("arc", 3);
        for block in [1, 1, 2, 3, 4] {
            shelf.request(&[block]);
        }
        // 2 left; back again, it makes room for one more block seen once.
        assert_eq!(shelf.request(&[2]), [3]);
        assert_eq!(shelf.request(&[5]), [1]);
    }
}
