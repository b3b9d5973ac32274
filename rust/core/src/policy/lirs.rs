//! `lirs`: low inter-reference recency set. Half of the tier is for hot blocks, whose last two uses
//! were close together; the rest passes through a FIFO queue.
//!
//! A block becomes hot if it was last used after the oldest hot block was; the oldest hot block
//! then joins the queue's end. Whether a block is in the stack of the original is a
//! comparison: it was used after the oldest hot one. Invariant: at most `capacity / 2` blocks are
//! hot; recency is the number of the request. Cost: O(log n) per use of a hot block; 24 bytes per
//! block, a ghost per block of capacity.

use super::block_map::BlockMap;
use super::ghost_list::GhostList;
use super::{Event, Facts, Needs, Order, Policy, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;
use std::collections::BTreeSet;

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
    /// Class, 0 for the queue and 1 for hot blocks, and place in it.
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
    states: BlockMap<LirsState>,
    hot: BTreeSet<(u64, u32, BlockId)>,
    ghosts: GhostList<u64>,
}

impl Lirs {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            states: BlockMap::default(),
            hot: BTreeSet::new(),
            ghosts: GhostList::default(),
        }
    }

    /// Whether a block last used at `then` is younger than the oldest hot one.
    fn recent(&self, then: u64) -> bool {
        self.hot.first().is_none_or(|oldest| then > oldest.0)
    }

    /// Most hot blocks.
    fn most_hot(&self) -> usize {
        (self.capacity * HOT_SHARE.0 / HOT_SHARE.1).max(1)
    }

    /// Records a use; returns the blocks that are no longer hot because of it.
    fn record(&mut self, event: &Event<'_>, hot: bool) -> Vec<BlockId> {
        let id = event.facts.id;
        let state =
            LirsState { hot, used: event.request, queued: event.request, depth: event.facts.block };
        self.states.set(id, state);
        if !hot {
            return Vec::new();
        }
        self.hot.insert(state.key(id));
        let mut cooled = Vec::new();
        // Deeper blocks of one request cool first: leaves can leave, inner blocks cannot.
        while self.hot.len() > self.most_hot() {
            let Some((_, _, oldest)) = self.hot.pop_first() else { break };
            let state = self.states.get(oldest);
            self.states.set(oldest, LirsState { hot: false, queued: event.request, ..state });
            cooled.push(oldest);
        }
        cooled
    }
}

impl Policy for Lirs {
    fn terms(&self, _facts: &Facts, _cost: &CostModel) -> Terms {
        Terms::NONE
    }

    fn order(&self) -> Order {
        Order::Rank
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        self.states.get(facts.id).rank().0
    }

    fn place(&self, facts: &Facts) -> u64 {
        self.states.get(facts.id).rank().1
    }

    fn needs(&self) -> Needs {
        Needs::EVENTS
    }

    fn on_resident(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        // Until there are enough hot blocks every new one is hot; later its ghost decides.
        let ghost = self.ghosts.take(event.tag);
        let hot = self.hot.len() < self.most_hot() || ghost.is_some_and(|then| self.recent(then));
        self.record(event, hot)
    }

    fn on_hit(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        let state = self.states.take(event.facts.id);
        let hot = state.hot || self.hot.len() < self.most_hot() || self.recent(state.used);
        // Its key has the old request.
        if state.hot {
            self.hot.remove(&state.key(event.facts.id));
        }
        self.record(event, hot)
    }

    fn on_evict(&mut self, id: BlockId, tag: u64) -> Vec<BlockId> {
        let state = self.states.take(id);
        if state.hot {
            self.hot.remove(&state.key(id));
        }
        self.ghosts.push(tag, state.used);
        self.ghosts.truncate(self.capacity);
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::TestCache;

    #[test]
    fn hot_blocks_outlive_a_flood() {
        let mut cache = TestCache::new("lirs", 4);
        for block in [1, 2, 3, 4] {
            cache.request(&[block]);
        }
        // 1 and 2 came while there was room for hot blocks.
        let victims: Vec<_> = (5..9).flat_map(|block| cache.request(&[block])).collect();
        assert_eq!(victims, [3, 4, 5, 6]);
    }

    #[test]
    fn a_block_that_is_used_again_soon_becomes_hot_and_cools_the_oldest() {
        let mut cache = TestCache::new("lirs", 4);
        for block in [1, 2, 3, 4, 4] {
            cache.request(&[block]);
        }
        // 4 took the place of 1, which joined the queue behind 3.
        let victims: Vec<_> = (5..8).flat_map(|block| cache.request(&[block])).collect();
        assert_eq!(victims, [3, 1, 5]);
    }
}
