//! `hazard`: learned reuse rates. Evicts the block whose expected reuse per unit of time, times its
//! cost, is least.
//!
//! For each class of touch a directory counts how many lifetimes, from one touch of a block to its
//! next, reached an age and how many ended there. That rate of ending, the hazard, gives the best rate
//! of reuse over all times to wait (a Gittins index); it is multiplied by the mean cost of the
//! unshared suffix that the block ends, as of its last use. Time is the number of requests. Invariant: a
//! class's candidates are its oldest and its youngest entry, so a victim is the least of these, not
//! of all in between. Cost: O(1) per touch, O(classes) per victim, a table of 84 x 28 rates per 128
//! requests; eight touches per block of capacity are held.

mod directory;
pub(super) mod rates;

use std::cmp::Ordering;

use super::block_map::BlockMap;
use super::{Entry, Event, Facts, Key, Needs, Order, Policy, Terms};
use crate::block::BlockId;
use crate::cost::CostModel;
use crate::time::Nanos;
use directory::Directory;
use rates::{CLASSES, Rates, bucket, learn};

/// Requests between two updates of the rates.
const PERIOD: u64 = 128;

/// Least number of touches that the directory holds.
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
    /// Updates so far.
    updates: u64,
    states: BlockMap<HazardState>,
}

impl Hazard {
    pub(super) fn new(capacity: u32) -> Self {
        let directory = Directory::new((8 * u64::from(capacity)).max(LEAST_WINDOW));
        let worth = learn(directory.counts());
        Self { clock: 0, directory, worth, updates: 0, states: BlockMap::default() }
    }

    fn touch(&mut self, event: &Event<'_>) {
        self.clock = event.request;
        // A second touch by one request is no reuse.
        let Some(class) = self.directory.touch(event) else { return };
        self.set_state(event, class, self.clock);
        if self.clock / PERIOD != self.updates {
            self.updates = self.clock / PERIOD;
            self.directory.count_ages(self.clock);
            self.worth = learn(self.directory.counts());
        }
    }

    fn set_state(&mut self, event: &Event<'_>, class: u8, at: u64) {
        let weight = self.terms(event.facts, event.cost).cost;
        self.states.set(event.facts.id, HazardState { class, at, weight });
    }

    /// Expected reuse per request, times cost.
    fn rate(&self, id: BlockId, class: u64, at: u64) -> f64 {
        let age = u16::try_from(self.clock.saturating_sub(at)).unwrap_or(u16::MAX);
        let class = usize::try_from(class).unwrap_or(CLASSES).min(CLASSES - 1);
        self.worth[class][bucket(age)] * self.states.get(id).weight
    }
}

impl Policy for Hazard {
    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms {
        let base = facts.price_or(cost.base(u64::midpoint(facts.start, facts.context)));
        Terms { base, cost: base, ..Terms::NONE }
    }

    fn weighs_cost(&self) -> bool {
        true
    }

    fn order(&self) -> Order {
        Order::Own
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        u64::from(self.states.get(facts.id).class)
    }

    fn place(&self, facts: &Facts) -> u64 {
        self.states.get(facts.id).at
    }

    fn compare(&self, a: &Entry, b: &Entry, _now: Nanos) -> Ordering {
        let rate = |entry: &Entry| self.rate(entry.id, entry.class, entry.place);
        rate(a).total_cmp(&rate(b)).then_with(|| (a.place, a).cmp(&(b.place, b)))
    }

    fn head(&self, keys: &mut dyn DoubleEndedIterator<Item = Key>, now: Nanos) -> Option<Key> {
        // A rate may rise or fall with age: both ends are candidates, all in between would cost O(n).
        let first = keys.next()?;
        let Some(last) = keys.next_back() else { return Some(first) };
        let entry = |key: Key| key.entry(u64::from(self.states.get(key.id).class));
        let younger = self.compare(&entry(last), &entry(first), now).is_lt();
        Some(if younger { last } else { first })
    }

    fn needs(&self) -> Needs {
        Needs::EVENTS.and(Needs::TURNS)
    }

    fn on_resident(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        match self.directory.latest(event.tag, event.request) {
            // It comes from another tier: its lifetime goes on.
            Some((class, age)) if !event.used => {
                self.set_state(event, class, event.request.saturating_sub(u64::from(age)));
            }
            _ => self.touch(event),
        }
        Vec::new()
    }

    fn on_hit(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        self.touch(event);
        Vec::new()
    }

    fn on_evict(&mut self, id: BlockId, _tag: u64) -> Vec<BlockId> {
        self.states.take(id);
        Vec::new()
    }

    /// Uses per request times cost.
    fn value(&self, facts: &Facts, _cost: f64, _idle: Nanos) -> f64 {
        let HazardState { class, at, .. } = self.states.get(facts.id);
        self.rate(facts.id, u64::from(class), at)
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::sample::TestCache;

    /// Chats that come back twenty requests later among prompts that never do.
    #[test]
    fn it_learns_which_blocks_come_back() {
        let served = |name| {
            let mut cache = TestCache::new(name, 60);
            let mut hits = 0;
            for round in 0..3000_u32 {
                if round == 2000 {
                    hits = cache.hits;
                }
                let chat = 1_000_000 + round % 20 / 4 * 10 + round / 200 * 1000;
                if round % 4 == 0 {
                    cache.request(&[chat, chat + 1, chat + 2]);
                } else {
                    let fresh = 10 * round;
                    cache.request(&[fresh, fresh + 1, fresh + 2, fresh + 3, fresh + 4]);
                }
            }
            cache.hits - hits
        };
        // 675 could be had.
        assert!(served("hazard") > 500, "{}", served("hazard"));
        assert!(served("lru") < 100, "{}", served("lru"));
    }
}
