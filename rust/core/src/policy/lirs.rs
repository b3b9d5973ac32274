//! `lirs`: low inter-reference recency. Half of the tier is for blocks that came back soon; the
//! rest passes through a queue.
//!
//! A block is hot if it came back while the oldest hot block was not used; the hot block that was
//! then the oldest joins the queue's end. Whether a block is in the stack of the original is a
//! comparison: it was used after the oldest hot one. Invariant: at most `capacity / 2` blocks are
//! hot; recency is the number of the request. Cost: O(log n) per use of a hot block; 24 bytes per
//! block, a ghost per block of capacity.

use std::collections::BTreeSet;
use std::ops::Range;

use super::memory::Memory;
use super::shadow::Shadow;
use super::{Facts, Order, Policy, Seen, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;

/// The share of the tier for hot blocks. With leaves only, inner blocks fill the rest anyway.
const HOT_SHARE: (usize, usize) = (1, 2);

#[derive(Clone, Copy, Debug, Default)]
struct LirsState {
    hot: bool,
    /// The request of its last use.
    used: u64,
    /// The request at which it entered the queue.
    queued: u64,
    /// Deeper blocks of one request are older.
    depth: u32,
}

impl LirsState {
    /// 0 for the queue, 1 for hot blocks; and the place there.
    fn rank(self) -> (u64, u64) {
        (u64::from(self.hot), if self.hot { self.used } else { self.queued })
    }

    fn key(self, id: BlockId) -> (u64, u32, BlockId) {
        (self.used, u32::MAX - self.depth, id)
    }
}

/// Low inter-reference recency set.
#[derive(Debug)]
pub(super) struct Lirs {
    capacity: usize,
    marks: Memory<LirsState>,
    hot: BTreeSet<(u64, u32, BlockId)>,
    ghosts: Shadow<u64>,
}

impl Lirs {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            marks: Memory::default(),
            hot: BTreeSet::new(),
            ghosts: Shadow::default(),
        }
    }

    /// Whether a block used at `then` is younger than the oldest hot one.
    fn soon(&self, then: u64) -> bool {
        self.hot.first().is_none_or(|oldest| then > oldest.0)
    }

    fn room(&self) -> usize {
        (self.capacity * HOT_SHARE.0 / HOT_SHARE.1).max(1)
    }

    /// Notes a use; returns the block that is hot no longer because of it.
    fn used(&mut self, seen: &Seen<'_>, hot: bool) -> Vec<BlockId> {
        let id = seen.facts.id;
        let mark =
            LirsState { hot, used: seen.request, queued: seen.request, depth: seen.facts.block };
        self.marks.set(id, mark);
        if !hot {
            return Vec::new();
        }
        self.hot.insert(mark.key(id));
        let mut cooled = Vec::new();
        while self.hot.len() > self.room() {
            let Some((_, _, oldest)) = self.hot.pop_first() else { break };
            let mark = self.marks.get(oldest);
            self.marks.set(oldest, LirsState { hot: false, queued: seen.request, ..mark });
            cooled.push(oldest);
        }
        cooled
    }
}

impl Policy for Lirs {
    fn name(&self) -> &'static str {
        "lirs"
    }

    fn terms(&self, _facts: &Facts, _cost: &CostModel) -> Terms {
        Terms::NONE
    }

    fn order(&self) -> Order {
        Order::Rank
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        self.marks.get(facts.id).rank().0
    }

    fn place(&self, facts: &Facts) -> u64 {
        self.marks.get(facts.id).rank().1
    }

    fn watches(&self) -> bool {
        true
    }

    fn deepens(&self, blocks: Range<BlockId>, alike: bool) -> bool {
        self.marks.ends_highest(blocks, alike, LirsState::rank)
    }

    fn arrived(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let ghost = self.ghosts.take(seen.tag);
        let hot = self.hot.len() < self.room() || ghost.is_some_and(|then| self.soon(then));
        self.used(seen, hot)
    }

    fn touched(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let mark = self.marks.take(seen.facts.id);
        let hot = mark.hot || self.hot.len() < self.room() || self.soon(mark.used);
        if mark.hot {
            self.hot.remove(&mark.key(seen.facts.id));
        }
        self.used(seen, hot)
    }

    fn left(&mut self, id: BlockId, tag: u64) -> Vec<BlockId> {
        let mark = self.marks.take(id);
        if mark.hot {
            self.hot.remove(&mark.key(id));
        }
        self.ghosts.note(tag, mark.used);
        self.ghosts.keep(self.capacity);
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::Shelf;

    #[test]
    fn hot_blocks_outlive_a_flood() {
        let mut shelf = Shelf::new("lirs", 4);
        for block in [1, 2, 3, 4] {
            shelf.request(&[block]);
        }
        // 1 and 2 came while there was room for hot blocks.
        let victims: Vec<_> = (5..9).flat_map(|block| shelf.request(&[block])).collect();
        assert_eq!(victims, [3, 4, 5, 6]);
    }

    #[test]
    fn who_comes_back_soon_becomes_hot_and_cools_the_oldest() {
        let mut shelf = Shelf::new("lirs", 4);
        for block in [1, 2, 3, 4, 4] {
            shelf.request(&[block]);
        }
        // 4 took the place of 1, which joined the queue behind 3.
        let victims: Vec<_> = (5..8).flat_map(|block| shelf.request(&[block])).collect();
        assert_eq!(victims, [3, 1, 5]);
    }
}
