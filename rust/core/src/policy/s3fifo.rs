//! `s3fifo`: a small queue for what is new, a main queue for what was used there, and ghosts of
//! what the small queue lost, which come back into the main one.
//!
//! The small queue gives up its oldest block that was not used there; what was used enters the main
//! queue once it is the oldest. The main queue's hand gives up the first block without a use to its
//! credit; whom it passes loses one use (at most three count) and stands at the end again. What may
//! not leave and has no use keeps its place. Invariant: the hands move when a block leaves, so that
//! choosing one changes nothing. The small queue has four fifths of the tier: prefixes come back
//! later than objects of a web cache, and with the usual tenth the policy is worse than `lru`. Cost:
//! O(log n), amortised over uses; 32 bytes per block and a ghost per block of capacity.

use std::cmp::Ordering;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use super::memory::Memory;
use super::shadow::Shadow;
use super::{Entry, Facts, Order, Policy, Seen, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;

/// So many uses count in the main queue.
const MOST_USES: u8 = 3;

/// The main queue has the fifth part of the tier.
const MAIN_SHARE: usize = 5;

/// A place in the main queue is a number of uses, then the turn in which the block entered.
const USES: u32 = 40;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Fifo {
    #[default]
    None,
    Small,
    Main,
    /// Used in the small queue, which has not come to it yet.
    Used,
}

#[derive(Clone, Copy, Debug, Default)]
struct S3State {
    queue: Fifo,
    uses: u8,
    /// The turn in which it entered its queue.
    turn: u64,
    /// The request that brought it.
    request: u64,
}

/// Small, static, simple queues.
#[derive(Debug)]
pub(super) struct S3Fifo {
    capacity: usize,
    marks: Memory<S3State>,
    /// Oldest first, with the turns in which they entered: what has another turn now is void.
    small: VecDeque<(BlockId, u64)>,
    /// Blocks of the main queue with uses to their credit, by the turns in which they entered.
    used: BTreeSet<(u64, BlockId)>,
    /// Blocks of the main queue.
    length: usize,
    /// Of these, those chosen to leave.
    chosen: usize,
    turn: u64,
    ghosts: Shadow<()>,
}

impl S3Fifo {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            marks: Memory::default(),
            small: VecDeque::new(),
            used: BTreeSet::new(),
            length: 0,
            chosen: 0,
            turn: 0,
            ghosts: Shadow::default(),
        }
    }

    /// When a class gives up its blocks: first the main queue if it is longer than its share,
    /// otherwise the small one; last what was used.
    fn turn_of(&self, class: u64) -> u8 {
        let long = self.length - self.chosen > self.capacity / MAIN_SHARE;
        let giving = if long { Fifo::Main } else { Fifo::Small };
        match class {
            _ if class == giving as u64 => 0,
            _ if class == Fifo::Used as u64 => 2,
            _ => 1,
        }
    }

    /// Puts a block at the end of the main queue.
    fn enter_main(&mut self, id: BlockId, mark: S3State) {
        self.turn += 1;
        self.marks.set(id, S3State { queue: Fifo::Main, turn: self.turn, ..mark });
        if mark.uses > 0 {
            self.used.insert((self.turn, id));
        }
    }

    /// Moves the small queue's hand over what was used, up to the oldest that was not.
    fn pass_small(&mut self) -> Vec<BlockId> {
        let mut passed = Vec::new();
        while let Some(&(id, turn)) = self.small.front() {
            let mark = self.marks.get(id);
            if mark.turn == turn && mark.queue == Fifo::Small {
                break;
            }
            self.small.pop_front();
            if mark.turn == turn && mark.queue == Fifo::Used {
                self.length += 1;
                self.enter_main(id, mark);
                passed.push(id);
            }
        }
        passed
    }

    /// Moves the main queue's hand to a block that leaves, as often round as it has uses.
    fn pass_main(&mut self, mut left: S3State) -> Vec<BlockId> {
        let mut passed = Vec::new();
        loop {
            while let Some(&(turn, id)) = self.used.first()
                && turn < left.turn
            {
                self.used.pop_first();
                let mark = self.marks.get(id);
                self.enter_main(id, S3State { uses: mark.uses - 1, ..mark });
                passed.push(id);
            }
            if left.uses == 0 {
                return passed;
            }
            self.turn += 1;
            left = S3State { uses: left.uses - 1, turn: self.turn, ..left };
        }
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn terms(&self, _facts: &Facts, _cost: &CostModel) -> Terms {
        Terms::NONE
    }

    fn order(&self) -> Order {
        Order::Own
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        self.marks.get(facts.id).queue as u64
    }

    fn place(&self, facts: &Facts) -> u64 {
        let mark = self.marks.get(facts.id);
        match mark.queue {
            Fifo::Main => u64::from(mark.uses) << USES | mark.turn,
            _ => mark.request,
        }
    }

    fn compare(&self, a: &Entry, b: &Entry, _now: Nanos) -> Ordering {
        self.turn_of(a.class).cmp(&self.turn_of(b.class)).then_with(|| a.cmp(b))
    }

    fn watches(&self) -> bool {
        true
    }

    /// Only in the small queue does choosing one not change whose turn it is.
    fn deepens(&self, blocks: Range<BlockId>, alike: bool) -> bool {
        let small = |mark: S3State| mark.queue == Fifo::Small;
        small(self.marks.get(blocks.end - 1))
            && self.marks.ends_highest(blocks, alike, |mark| (!small(mark), mark.request))
    }

    fn arrived(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let (id, request) = (seen.facts.id, seen.request);
        if self.ghosts.take(seen.tag).is_some() {
            self.length += 1;
            self.enter_main(id, S3State { request, ..S3State::default() });
        } else {
            self.turn += 1;
            self.small.push_back((id, self.turn));
            self.marks.set(id, S3State { queue: Fifo::Small, uses: 0, turn: self.turn, request });
        }
        Vec::new()
    }

    fn touched(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let mark = self.marks.get(seen.facts.id);
        let mark = match mark.queue {
            Fifo::Main => {
                self.used.insert((mark.turn, seen.facts.id));
                S3State { uses: (mark.uses + 1).min(MOST_USES), ..mark }
            }
            _ => S3State { queue: Fifo::Used, ..mark },
        };
        self.marks.set(seen.facts.id, mark);
        Vec::new()
    }

    fn chosen(&mut self, id: BlockId) {
        self.chosen += usize::from(self.marks.get(id).queue == Fifo::Main);
    }

    fn settled(&mut self) {
        self.chosen = 0;
    }

    fn left(&mut self, id: BlockId, tag: u64) -> Vec<BlockId> {
        let mark = self.marks.take(id);
        if mark.queue == Fifo::Main {
            self.length -= 1;
            self.used.remove(&(mark.turn, id));
            self.chosen = self.chosen.saturating_sub(1);
            return self.pass_main(mark);
        }
        self.ghosts.note(tag, ());
        self.ghosts.keep(self.capacity);
        self.pass_small()
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::Shelf;

    #[test]
    fn a_flood_passes_through_the_small_queue() {
        let mut shelf = Shelf::new("s3fifo", 10);
        for block in [1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10] {
            shelf.request(&[block]);
        }
        let victims: Vec<_> = (11..14).flat_map(|block| shelf.request(&[block])).collect();
        assert_eq!(victims, [3, 4, 5]);
    }

    /// The main queue holds 1, 2, 3 and 4, used there three, two, two times and once.
    #[test]
    fn a_use_is_a_pass_of_the_hand() {
        let mut shelf = Shelf::new("s3fifo", 10);
        let new = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
        for block in new.into_iter().chain([1, 2, 3, 4]) {
            shelf.request(&[block]);
        }
        // 5 leaves and the small hand passes the four.
        assert_eq!(shelf.request(&[11]), [5]);
        for block in [1, 2, 3, 4, 1, 2, 3, 1, 1, 1] {
            shelf.request(&[block]);
        }
        // The main queue is longer than two: 4 goes after one round, then 2 and 6, 7, ...
        let victims: Vec<_> = (12..17).flat_map(|block| shelf.request(&[block])).collect();
        assert_eq!(victims, [4, 2, 6, 7, 8]);
        // 3 has none left, 1 has one.
        assert_eq!(shelf.request(&[3, 1]), []);
        shelf.request(&[6]);
        shelf.request(&[7]);
        assert_eq!((shelf.hits, shelf.request(&[20]).len()), (16, 1));
    }
}
