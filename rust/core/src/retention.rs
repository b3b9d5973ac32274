//! Exact victims: the minimum, at any time, over all entries that may leave a tier.
//!
//! Invariant: exactly the linked entries are held, each once, and [`Retention::victim`] is the
//! minimum by the policy's order. Within a class the order of leaving does not change with time,
//! so only the heads of the classes compete: in a tournament where the order is by value or by rank,
//! one after the other where it is the policy's own. Costs are rounded down to classes that differ
//! by the factor `1 + epsilon`, so a victim's value is at most that factor above the smallest one;
//! with 0 none are rounded. Cost: link O(1) in order of time, O(log n) otherwise; victim O(log
//! classes) amortised; about 50 bytes per entry.

mod gone;
mod list;
mod places;
mod tournament;

use rustc_hash::FxHashMap;

use crate::block::BlockId;
use crate::cost::CostModel;
use crate::policy::{Entry, Facts, Key, Order, Policy, Seen};
use crate::time::Nanos;

pub use gone::Gone;

use list::List;
use places::Places;
use tournament::{Slot, Tournament};

/// The linked entries of one tier, and its policy.
#[derive(Debug)]
pub struct Retention {
    policy: Box<dyn Policy>,
    /// Significant bits of a class number behind its first one.
    bits: u32,
    slots: FxHashMap<u64, Slot>,
    lists: Vec<List>,
    free: Vec<Slot>,
    places: Places,
    heads: Tournament,
    /// For a policy that watches, by block id: one more than the request for which the block came
    /// to stand here, 0 if it does not.
    since: Vec<u64>,
}

impl Retention {
    /// No entries, under `policy`. Costs are rounded to classes `1 + epsilon` apart.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, epsilon: f64) -> Self {
        Self {
            heads: Tournament::new(policy.order()),
            bits: bits(epsilon),
            policy,
            slots: FxHashMap::default(),
            lists: Vec::new(),
            free: Vec::new(),
            places: Places::new(),
            since: Vec::new(),
        }
    }

    /// The entry of a block with these facts.
    #[must_use]
    pub fn entry(&self, facts: &Facts, tie: u32, cost: &CostModel) -> Entry {
        let (mut class, place) = (self.policy.class(facts, cost), self.policy.place(facts));
        if self.policy.order() == Order::Value {
            class = rounded(class, self.bits);
        }
        Entry { class, place, tie, id: facts.id }
    }

    /// Whether the policy knows that the block stands on the tier.
    #[must_use]
    pub fn holds(&self, id: BlockId) -> bool {
        self.since.get(id as usize).is_some_and(|&since| since > 0)
    }

    /// Tells a policy that watches of a block that came to stand on the tier. Returns the other
    /// blocks whose entries changed; so do the next two.
    pub fn arrived(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let at = seen.facts.id as usize;
        if self.since.len() <= at {
            self.since.resize(at + 1, 0);
        }
        self.since[at] = seen.request + 1;
        self.policy.arrived(seen)
    }

    /// Tells it that a block is used. The request that brought the block does not count again.
    pub fn touched(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let known = self.since.get(seen.facts.id as usize).copied().unwrap_or(0);
        if known == 0 || known > seen.request {
            return Vec::new();
        }
        self.policy.touched(seen)
    }

    /// Tells it that a block stands here no more.
    pub fn left(&mut self, id: BlockId, print: u64) -> Vec<BlockId> {
        self.since[id as usize] = 0;
        self.policy.left(id, print)
    }

    /// Makes `entry` eligible. Its block must not be linked.
    pub fn link(&mut self, entry: Entry) {
        debug_assert!(self.get(entry.id).is_none(), "block {} is linked already", entry.id);
        let slot = match self.slots.get(&entry.class) {
            Some(&slot) => slot,
            None => self.open(entry.class),
        };
        let list = &mut self.lists[slot as usize];
        let before = list.head(&self.places);
        list.link(&mut self.places, entry);
        if before.is_none_or(|head| entry.key() < head) {
            self.heads.set(slot, Some(&entry));
        }
    }

    /// Takes the block's entry out; `None` if it is not linked.
    pub fn unlink(&mut self, id: BlockId) -> Option<Entry> {
        let place = self.places.remove(id)?;
        let entry = place.entry;
        let slot = *self.slots.get(&entry.class)?;
        let list = &mut self.lists[slot as usize];
        let headed = list.heads(&self.places, &place);
        list.unlink(&mut self.places, place);
        if headed {
            let head = list.head(&self.places).map(|key| key.entry(entry.class));
            self.heads.set(slot, head.as_ref());
            if head.is_none() {
                self.slots.remove(&entry.class);
                self.free.push(slot);
            }
        }
        Some(entry)
    }

    /// A slot for a class that has none.
    fn open(&mut self, class: u64) -> Slot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.lists.push(List::default());
            Slot::try_from(self.lists.len() - 1).expect("fewer classes than blocks")
        });
        self.slots.insert(class, slot);
        slot
    }

    /// Tells the policy that a block is chosen to leave the tier.
    pub fn choose(&mut self, id: BlockId) {
        self.policy.chosen(id);
    }

    /// Tells it that all who were chosen have left, or stay.
    pub fn settle(&mut self) {
        self.policy.settled();
    }

    /// The block's entry, if it is linked.
    #[must_use]
    pub fn get(&self, id: BlockId) -> Option<Entry> {
        self.places.get(id).map(|place| place.entry)
    }

    /// The entry that leaves first at `now`. It stays linked.
    pub fn victim(&mut self, now: Nanos) -> Option<Entry> {
        match self.policy.order() {
            Order::Own => self.scan(now),
            Order::Value | Order::Rank => {
                let list = &self.lists[self.heads.winner(now)? as usize];
                let key = list.head(&self.places)?;
                self.get(key.id)
            }
        }
    }

    /// The same by comparing the heads of all classes: the simple twin of the tournament.
    #[must_use]
    pub fn scan(&self, now: Nanos) -> Option<Entry> {
        let head = |(&class, &slot): (&u64, &Slot)| {
            let list = &self.lists[slot as usize];
            let key = match self.policy.order() {
                Order::Own => self.policy.head(&mut list.keys(&self.places), now)?,
                Order::Value | Order::Rank => list.head(&self.places)?,
            };
            Some(key.entry(class))
        };
        self.slots.iter().filter_map(head).min_by(|a, b| self.policy.compare(a, b, now))
    }

    /// How many entries leave before this one at `now`, in O(n).
    #[must_use]
    pub fn rank(&self, id: BlockId, now: Nanos) -> Option<usize> {
        let entry = self.get(id)?;
        Some(self.entries().filter(|other| self.policy.compare(other, &entry, now).is_lt()).count())
    }

    /// How many entries are linked.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nothing is linked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.len() == 0
    }

    /// How many classes there are now.
    #[must_use]
    pub fn classes(&self) -> usize {
        self.slots.len()
    }

    /// All entries, class by class.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let mut classes: Vec<(u64, Slot)> =
            self.slots.iter().map(|(&c, &slot)| (c, slot)).collect();
        classes.sort_unstable();
        classes.into_iter().flat_map(|(class, slot)| {
            let keys = self.lists[slot as usize].keys(&self.places);
            keys.map(move |key: Key| key.entry(class))
        })
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// All entries in the order in which they would leave if time stood still at `now`: a full
    /// sort, the simple twin of [`Retention::victim`].
    #[must_use]
    pub fn order(&self, now: Nanos) -> Vec<Entry> {
        let mut entries: Vec<Entry> = self.entries().collect();
        entries.sort_unstable_by(|a, b| self.policy.compare(a, b, now));
        entries
    }
}

/// How many bits behind the first one keep the error of rounding down below `epsilon`.
fn bits(epsilon: f64) -> u32 {
    (0..u64::BITS - 1).find(|&bits| 0.5_f64.powi(bits.cast_signed()) <= epsilon).unwrap_or(63)
}

/// A class number rounded down to so many bits behind its first one.
fn rounded(class: u64, bits: u32) -> u64 {
    let low = (u64::BITS - class.leading_zeros()).saturating_sub(1 + bits);
    class >> low << low
}

#[cfg(test)]
mod tests {
    use std::cmp::{Ordering, Reverse};
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{Retention, rounded};
    use crate::cost::CostModel;
    use crate::error::Result;
    use crate::policy::{Entry, Facts, NAMES, Order, Policy, Seen, Setup, by_name, facts};

    /// Compares `a / b` with `c / d` by quotients and remainders, for positive `b` and `d`.
    fn fractions(a: u64, b: u64, c: u64, d: u64) -> Ordering {
        match (a / b).cmp(&(c / d)) {
            Ordering::Equal => match (a % b, c % d) {
                (0, 0) => Ordering::Equal,
                (0, _) => Ordering::Less,
                (_, 0) => Ordering::Greater,
                (rest_a, rest_c) => fractions(d, rest_c, b, rest_a),
            },
            other => other,
        }
    }

    fn policy(name: &str) -> Box<dyn Policy> {
        by_name(name, Setup { reuse: true, capacity: 9 }).expect("a known name")
    }

    /// The order as the documentation words it, written without the policies' code.
    fn naive(name: &str, a: &Entry, b: &Entry, now: u64) -> Ordering {
        let idle = |entry: &Entry| now.saturating_sub(entry.place);
        if name == "checkerboard" {
            let key = |entry: &Entry| (Reverse(idle(entry).checked_ilog2()), entry.class, entry.id);
            return key(a).cmp(&key(b));
        }
        let rest = |entry: &Entry| (entry.class, entry.place, entry.tie, entry.id);
        if name == "hazard" {
            // It knows nothing: the oldest goes.
            return (a.place, rest(a)).cmp(&(b.place, rest(b)));
        }
        // Without a block `arc` gives up the list of class 2 first; `s3fifo` that of class 1, and
        // that of class 3 last.
        let list = match (name, a.class, b.class) {
            ("arc", a, b) => (a != 2).cmp(&(b != 2)),
            ("s3fifo", a, b) => ((a != 1), (a == 3)).cmp(&((b != 1), (b == 3))),
            _ => Ordering::Equal,
        };
        if policy(name).order() != Order::Value {
            return list.then_with(|| rest(a).cmp(&rest(b)));
        }
        let value = match (idle(a), idle(b)) {
            (0, 0) => Ordering::Equal,
            (0, _) => Ordering::Greater,
            (_, 0) => Ordering::Less,
            (idle_a, idle_b) => fractions(a.class, idle_a, b.class, idle_b),
        };
        value.then_with(|| rest(a).cmp(&rest(b)))
    }

    #[derive(Clone, Debug)]
    enum Op {
        Link(Entry),
        Unlink(u32),
        Evict(u64),
    }

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![3 => 0..9u64, 3 => 0..2000u64, 1 => (1u64 << 62) - 9..=1 << 62]
    }

    fn time() -> impl Strategy<Value = u64> {
        prop_oneof![3 => 0..9u64, 3 => 0..2000u64, 1 => u64::MAX - 9..=u64::MAX]
    }

    fn op() -> impl Strategy<Value = Op> {
        let entry = (number(), time(), 0..3u32, 0..40u32)
            .prop_map(|(class, place, tie, id)| Entry { class, place, tie, id });
        prop_oneof![
            6 => entry.prop_map(Op::Link),
            2 => (0..40u32).prop_map(Op::Unlink),
            2 => time().prop_map(Op::Evict),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Any list of operations, under every policy, against a map that is scanned.
        #[test]
        fn the_victim_is_the_minimum(ops in prop::collection::vec(op(), 0..120), now in time()) {
            for name in NAMES {
                let mut retention = Retention::new(policy(name), 0.0);
                let mut model: BTreeMap<u32, Entry> = BTreeMap::new();
                let least = |model: &BTreeMap<u32, Entry>, now| {
                    model.values().min_by(|a, b| naive(name, a, b, now)).copied()
                };
                for op in &ops {
                    match *op {
                        Op::Link(entry) => {
                            prop_assert_eq!(retention.unlink(entry.id), model.remove(&entry.id));
                            retention.link(entry);
                            model.insert(entry.id, entry);
                        }
                        Op::Unlink(id) => prop_assert_eq!(retention.unlink(id), model.remove(&id)),
                        Op::Evict(now) => {
                            let victim = retention.victim(now);
                            prop_assert_eq!(victim, retention.scan(now), "{} at {}", name, now);
                            prop_assert_eq!(victim, least(&model, now), "{} at {}", name, now);
                            if let Some(entry) = victim {
                                prop_assert_eq!(retention.unlink(entry.id), Some(entry));
                                model.remove(&entry.id);
                            }
                        }
                    }
                    prop_assert_eq!(retention.len(), model.len());
                    prop_assert_eq!(retention.is_empty(), model.is_empty());
                }
                let mut order: Vec<Entry> = model.values().copied().collect();
                order.sort_by(|a, b| naive(name, a, b, now));
                prop_assert_eq!(&retention.order(now), &order);
                for (rank, entry) in order.iter().enumerate() {
                    prop_assert_eq!(retention.rank(entry.id, now), Some(rank));
                    prop_assert_eq!(retention.get(entry.id), Some(*entry));
                }
                order.sort_unstable();
                prop_assert_eq!(retention.entries().collect::<Vec<_>>(), order);
            }
        }
    }

    proptest! {
        #[test]
        fn rounding_costs_at_most_epsilon(class in number(), other in number(), bits in 0..20u32) {
            let down = rounded(class, bits);
            prop_assert!(down <= class && u128::from(class - down) << bits <= u128::from(class));
            prop_assert!(down.checked_ilog2() == class.checked_ilog2());
            prop_assert!(class > other || down <= rounded(other, bits));
            prop_assert_eq!(rounded(class, 63), class);
        }
    }

    #[test]
    fn epsilon_says_how_many_bits_count() {
        assert_eq!([1.0, 0.5, 0.4, 1.0 / 64.0, 0.0].map(super::bits), [0, 1, 2, 6, 63]);
        // 100 classes of one octave become 64 at 1/64.
        let classes: std::collections::BTreeSet<u64> =
            (1000..2000).map(|class| rounded(class, super::bits(1.0 / 64.0))).collect();
        assert_eq!(classes.len(), 64);
    }

    #[test]
    fn the_request_that_brought_a_block_does_not_use_it_again() -> Result<()> {
        let mut retention = Retention::new(policy("arc"), 0.0);
        let cost = CostModel::default_curve(1.0)?;
        let facts = Facts { id: 3, ..facts(0, 0, 1) };
        let seen = |request| {
            let (facts, cost) = (&facts, &cost);
            Seen { print: 9, request, used: true, turn: 0, added: 1, last: true, facts, cost }
        };
        let class = |retention: &Retention| retention.entry(&facts, 0, &cost).class;
        retention.touched(&seen(4));
        assert!(!retention.holds(3));
        retention.arrived(&seen(5));
        retention.touched(&seen(5));
        assert_eq!((retention.holds(3), class(&retention)), (true, 1));
        retention.touched(&seen(6));
        assert_eq!(class(&retention), 2);
        retention.left(3, 9);
        assert!(!retention.holds(3));
        Ok(())
    }

    #[test]
    fn the_order_turns_with_time() {
        let mut retention = Retention::new(policy("retention"), 0.0);
        let (cheap, dear) = (
            Entry { class: 1, place: 90, tie: 0, id: 0 },
            Entry { class: 4, place: 0, tie: 0, id: 1 },
        );
        retention.link(cheap);
        retention.link(dear);
        // 1/10 against 4/100, then 1/110 against 4/200.
        assert_eq!(retention.victim(100), Some(dear));
        assert_eq!(retention.victim(200), Some(cheap));
        assert_eq!((retention.rank(0, 100), retention.rank(0, 200)), (Some(1), Some(0)));
        assert_eq!(retention.rank(7, 100), None);
    }

    #[test]
    fn nothing_leaves_an_empty_list() {
        let mut retention = Retention::new(policy("lru"), 0.0);
        assert_eq!(
            (retention.victim(5), retention.unlink(3), retention.get(9)),
            (None, None, None)
        );
        let entry = Entry { class: 1, place: 5, tie: 0, id: 3 };
        retention.link(entry);
        assert_eq!(retention.victim(5), Some(entry));
        assert_eq!((retention.unlink(3), retention.len()), (Some(entry), 0));
        assert_eq!(retention.policy().name(), "lru");
    }
}
