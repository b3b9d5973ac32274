//! `hazard`: learns how soon blocks of a kind are used again, and gives up the one whose expected
//! use per unit of time is least.
//!
//! For each class of touch a directory counts how many lives reached an age and how many ended
//! there by another touch. From that rate of ending, the hazard, follows the best rate of reuse
//! that waiting can have (a Gittins index), times the mean cost of the suffix that the block ends
//! and that it shares with nobody, as of its last use. Time is the number of requests. Invariant: a
//! class's candidates are its oldest and its youngest entry, so a victim is the least of these, not
//! of all in between. Cost: O(1) per touch, O(classes) per victim, a table of 84 x 28 rates per 128
//! requests; eight touches per block of capacity are held.

mod directory;
mod rates;

use std::cmp::Ordering;

use super::memory::Memory;
use super::{Entry, Facts, Key, Order, Policy, Seen, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;
use directory::Directory;
use rates::{CLASSES, Rates, bucket, learn};

/// Requests between two looks at the counts.
const PERIOD: u64 = 128;

/// The least number of touches that are held.
const LEAST_WINDOW: u64 = 65_536;

#[derive(Clone, Copy, Debug, Default)]
struct HazardState {
    class: u8,
    /// The request of its last use.
    at: u64,
    weight: f64,
}

/// Learned rates of reuse.
#[derive(Debug)]
pub(super) struct Hazard {
    clock: u64,
    directory: Directory,
    worth: Vec<Rates>,
    /// Looks so far.
    looks: u64,
    marks: Memory<HazardState>,
}

impl Hazard {
    pub(super) fn new(capacity: u32) -> Self {
        let directory = Directory::new((8 * u64::from(capacity)).max(LEAST_WINDOW));
        let worth = learn(directory.counts());
        Self { clock: 0, directory, worth, looks: 0, marks: Memory::default() }
    }

    fn touch(&mut self, seen: &Seen<'_>) {
        self.clock = seen.request;
        let Some(class) = self.directory.touch(seen) else { return };
        self.mark(seen, class, self.clock);
        if self.clock / PERIOD != self.looks {
            self.looks = self.clock / PERIOD;
            self.directory.look(self.clock);
            self.worth = learn(self.directory.counts());
        }
    }

    fn mark(&mut self, seen: &Seen<'_>, class: u8, at: u64) {
        let weight = self.terms(seen.facts, seen.cost).cost;
        self.marks.set(seen.facts.id, HazardState { class, at, weight });
    }

    /// Rate of reuse times cost.
    fn rate(&self, id: BlockId, class: u64, at: u64) -> f64 {
        let age = u16::try_from(self.clock.saturating_sub(at)).unwrap_or(u16::MAX);
        let class = usize::try_from(class).unwrap_or(CLASSES).min(CLASSES - 1);
        self.worth[class][bucket(age)] * self.marks.get(id).weight
    }
}

impl Policy for Hazard {
    fn name(&self) -> &'static str {
        "hazard"
    }

    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms {
        let base = facts.price_or(cost.base(u64::midpoint(facts.start, facts.context)));
        Terms { base, cost: base, ..Terms::NONE }
    }

    fn order(&self) -> Order {
        Order::Own
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        u64::from(self.marks.get(facts.id).class)
    }

    fn place(&self, facts: &Facts) -> u64 {
        self.marks.get(facts.id).at
    }

    fn compare(&self, a: &Entry, b: &Entry, _now: Nanos) -> Ordering {
        let rate = |entry: &Entry| self.rate(entry.id, entry.class, entry.place);
        rate(a).total_cmp(&rate(b)).then_with(|| (a.place, a).cmp(&(b.place, b)))
    }

    fn head(&self, keys: &mut dyn DoubleEndedIterator<Item = Key>, now: Nanos) -> Option<Key> {
        let first = keys.next()?;
        let Some(last) = keys.next_back() else { return Some(first) };
        let entry = |key: Key| key.entry(u64::from(self.marks.get(key.id).class));
        let younger = self.compare(&entry(last), &entry(first), now).is_lt();
        Some(if younger { last } else { first })
    }

    fn watches(&self) -> bool {
        true
    }

    fn turns(&self) -> bool {
        true
    }

    fn arrived(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        match self.directory.latest(seen.tag, seen.request) {
            // It comes from another tier: its life goes on.
            Some((class, age)) if !seen.used => {
                self.mark(seen, class, seen.request.saturating_sub(u64::from(age)));
            }
            _ => self.touch(seen),
        }
        Vec::new()
    }

    fn touched(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        self.touch(seen);
        Vec::new()
    }

    fn left(&mut self, id: BlockId, _print: u64) -> Vec<BlockId> {
        self.marks.take(id);
        Vec::new()
    }

    /// Uses per request times cost.
    fn value(&self, facts: &Facts, _cost: f64, _idle: Nanos) -> f64 {
        let HazardState { class, at, .. } = self.marks.get(facts.id);
        self.rate(facts.id, u64::from(class), at)
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::Shelf;

    /// Chats that come back twenty requests later among prompts that never do.
    #[test]
    fn it_learns_which_blocks_come_back() {
        let served = |name| {
            let mut shelf = Shelf::new(name, 60);
            let mut hits = 0;
            for round in 0..3000_u32 {
                if round == 2000 {
                    hits = shelf.hits;
                }
                let chat = 1_000_000 + round % 20 / 4 * 10 + round / 200 * 1000;
                if round % 4 == 0 {
                    shelf.request(&[chat, chat + 1, chat + 2]);
                } else {
                    let fresh = 10 * round;
                    shelf.request(&[fresh, fresh + 1, fresh + 2, fresh + 3, fresh + 4]);
                }
            }
            shelf.hits - hits
        };
        // 675 could be had.
        assert!(served("hazard") > 500, "{}", served("hazard"));
        assert!(served("lru") < 100, "{}", served("lru"));
    }
}
