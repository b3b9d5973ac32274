//! `s3fifo`: three FIFO queues. New blocks enter a small queue, those used there move on to a main
//! queue, and ghosts of the small queue's victims come back into the main one.
//!
//! ```text
//! new block -> small queue --oldest, unused--> evicted, tag to the ghost list
//!                  | oldest, used                      |
//!                  v                                   | comes back
//!              main queue <----------------------------+
//!                  | oldest: uses > 0 -> one use less, to the end again
//!                  +-------- uses = 0 -> evicted
//! ```
//!
//! At most three uses count in the main queue. A block that may not leave and has no use keeps its
//! place. Invariant: the hands move when a block leaves, so that selecting one changes nothing. The
//! small queue has four fifths of the tier: prefixes come back later than objects of a web cache, and
//! with the usual tenth the policy is worse than `lru`. Cost: O(log n), amortised over uses; 32 bytes
//! per block and a ghost per block of capacity.

use super::block_map::BlockMap;
use super::ghost_list::GhostList;
use super::{Entry, Event, Facts, Needs, Order, Policy, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;
use std::cmp::Ordering;
use std::collections::{BTreeSet, VecDeque};

/// Most uses that count in the main queue.
const MOST_USES: u8 = 3;

/// The main queue has one part in so many of the tier.
const MAIN_SHARE: usize = 5;

/// Place in the main queue: `uses << 40 | turn in which the block entered`.
const USES: u32 = 40;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Fifo {
    #[default]
    None,
    Small,
    Main,
    /// Used in the small queue, whose hand has not passed it yet.
    Used,
}

#[derive(Clone, Copy, Debug, Default)]
struct S3State {
    queue: Fifo,
    uses: u8,
    /// The turn in which it entered its queue.
    turn: u64,
    /// The request that made it resident.
    request: u64,
}

/// Small, static, simple queues.
#[derive(Debug)]
pub(super) struct S3Fifo {
    capacity: usize,
    states: BlockMap<S3State>,
    /// The small queue, oldest first, with the turn in which each block entered. An entry is stale
    /// if its block has another turn by now.
    small: VecDeque<(BlockId, u64)>,
    /// Blocks of the main queue with uses left, by the turns in which they entered.
    used: BTreeSet<(u64, BlockId)>,
    /// Blocks of the main queue.
    length: usize,
    /// Number of these that are selected to leave.
    selected: usize,
    turn: u64,
    ghosts: GhostList<()>,
}

impl S3Fifo {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            states: BlockMap::default(),
            small: VecDeque::new(),
            used: BTreeSet::new(),
            length: 0,
            selected: 0,
            turn: 0,
            ghosts: GhostList::default(),
        }
    }

    /// Rank of a class among the queues: first the main queue if it is longer than its share,
    /// otherwise the small one; last the used blocks of the small queue.
    fn queue_rank(&self, class: u64) -> u8 {
        let long = self.length - self.selected > self.capacity / MAIN_SHARE;
        let first = if long { Fifo::Main } else { Fifo::Small };
        match class {
            _ if class == first as u64 => 0,
            _ if class == Fifo::Used as u64 => 2,
            _ => 1,
        }
    }

    /// Puts a block at the end of the main queue.
    fn enter_main(&mut self, id: BlockId, state: S3State) {
        self.turn += 1;
        self.states.set(id, S3State { queue: Fifo::Main, turn: self.turn, ..state });
        if state.uses > 0 {
            self.used.insert((self.turn, id));
        }
    }

    /// Moves the small queue's hand past used blocks, up to the oldest unused one; returns those that
    /// moved to the main queue.
    fn pass_small(&mut self) -> Vec<BlockId> {
        let mut passed = Vec::new();
        while let Some(&(id, turn)) = self.small.front() {
            let state = self.states.get(id);
            // The oldest unused block is the queue's next victim: the hand waits there.
            if state.turn == turn && state.queue == Fifo::Small {
                break;
            }
            // Used, or stale: it was evicted since.
            self.small.pop_front();
            if state.turn == turn && state.queue == Fifo::Used {
                self.length += 1;
                self.enter_main(id, state);
                passed.push(id);
            }
        }
        passed
    }

    /// Moves the main queue's hand to a block that leaves, round as often as it has uses; returns the
    /// blocks that lost a use.
    fn pass_main(&mut self, mut evicted: S3State) -> Vec<BlockId> {
        let mut passed = Vec::new();
        loop {
            while let Some(&(turn, id)) = self.used.first()
                && turn < evicted.turn
            {
                self.used.pop_first();
                let state = self.states.get(id);
                self.enter_main(id, S3State { uses: state.uses - 1, ..state });
                passed.push(id);
            }
            // With uses left, as a hint may evict it, the hand goes round once for each.
            if evicted.uses == 0 {
                return passed;
            }
            self.turn += 1;
            evicted = S3State { uses: evicted.uses - 1, turn: self.turn, ..evicted };
        }
    }
}

impl Policy for S3Fifo {
    fn terms(&self, _facts: &Facts, _cost: &CostModel) -> Terms {
        Terms::NONE
    }

    fn order(&self) -> Order {
        Order::Own
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        self.states.get(facts.id).queue as u64
    }

    fn place(&self, facts: &Facts) -> u64 {
        let state = self.states.get(facts.id);
        match state.queue {
            Fifo::Main => u64::from(state.uses) << USES | state.turn,
            _ => state.request,
        }
    }

    fn compare(&self, a: &Entry, b: &Entry, _now: Nanos) -> Ordering {
        self.queue_rank(a.class).cmp(&self.queue_rank(b.class)).then_with(|| a.cmp(b))
    }

    fn needs(&self) -> Needs {
        Needs::EVENTS
    }

    fn on_resident(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        let (id, request) = (event.facts.id, event.request);
        if self.ghosts.take(event.tag).is_some() {
            self.length += 1;
            self.enter_main(id, S3State { request, ..S3State::default() });
        } else {
            self.turn += 1;
            self.small.push_back((id, self.turn));
            self.states.set(id, S3State { queue: Fifo::Small, uses: 0, turn: self.turn, request });
        }
        Vec::new()
    }

    fn on_hit(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        let state = self.states.get(event.facts.id);
        let state = match state.queue {
            Fifo::Main => {
                self.used.insert((state.turn, event.facts.id));
                S3State { uses: (state.uses + 1).min(MOST_USES), ..state }
            }
            // One use is enough to move on; it moves when the hand comes to it.
            _ => S3State { queue: Fifo::Used, ..state },
        };
        self.states.set(event.facts.id, state);
        Vec::new()
    }

    fn on_select(&mut self, id: BlockId) {
        self.selected += usize::from(self.states.get(id).queue == Fifo::Main);
    }

    fn end_selection(&mut self) {
        self.selected = 0;
    }

    fn on_evict(&mut self, id: BlockId, tag: u64) -> Vec<BlockId> {
        let state = self.states.take(id);
        if state.queue == Fifo::Main {
            self.length -= 1;
            self.used.remove(&(state.turn, id));
            self.selected = self.selected.saturating_sub(1);
            return self.pass_main(state);
        }
        // Only the small queue leaves ghosts: blocks of the main one had their second chance.
        self.ghosts.push(tag, ());
        self.ghosts.truncate(self.capacity);
        self.pass_small()
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::TestCache;

    #[test]
    fn a_flood_passes_through_the_small_queue() {
        let mut cache = TestCache::new("s3fifo", 10);
        for block in [1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10] {
            cache.request(&[block]);
        }
        let victims: Vec<_> = (11..14).flat_map(|block| cache.request(&[block])).collect();
        assert_eq!(victims, [3, 4, 5]);
    }

    /// The main queue holds 1, 2, 3 and 4, used there three, two, two times and once.
    #[test]
    fn a_use_is_a_pass_of_the_hand() {
        let mut cache = TestCache::new("s3fifo", 10);
        let new = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
        for block in new.into_iter().chain([1, 2, 3, 4]) {
            cache.request(&[block]);
        }
        // 5 leaves and the small hand passes the four.
        assert_eq!(cache.request(&[11]), [5]);
        for block in [1, 2, 3, 4, 1, 2, 3, 1, 1, 1] {
            cache.request(&[block]);
        }
        // The main queue is longer than two: 4 goes after one round, then 2 and 6, 7, ...
        let victims: Vec<_> = (12..17).flat_map(|block| cache.request(&[block])).collect();
        assert_eq!(victims, [4, 2, 6, 7, 8]);
        // 3 has none left, 1 has one.
        assert_eq!(cache.request(&[3, 1]), []);
        cache.request(&[6]);
        cache.request(&[7]);
        assert_eq!((cache.hits, cache.request(&[20]).len()), (16, 1));
    }
}
