//! Exact victims: the minimum, at any time, over all entries that may leave a tier.
//!
//! Invariant: exactly the linked entries are held, each once, and [`Retention::victim`] is the
//! minimum by the policy's order. Within a class the order of leaving does not change with time,
//! so only the heads of the classes are compared. Cost: link and unlink O(log n); a victim takes
//! one comparison per class; 24 bytes per block beside the ordered lists.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::block::BlockId;
use crate::policy::{Entry, Key, Policy};
use crate::time::Nanos;

/// Marks a place without an entry; no block has this id.
const VACANT: Entry = Entry { class: 0, access: 0, tie: 0, id: BlockId::MAX };

/// The linked entries of one tier.
#[derive(Clone, Debug)]
pub struct Retention {
    policy: Arc<dyn Policy>,
    classes: BTreeMap<u64, BTreeSet<Key>>,
    places: Vec<Entry>,
    linked: usize,
}

impl Retention {
    /// No entries, under `policy`.
    #[must_use]
    pub fn new(policy: Arc<dyn Policy>) -> Self {
        Self { policy, classes: BTreeMap::new(), places: Vec::new(), linked: 0 }
    }

    /// Makes `entry` eligible. Its block must not be linked.
    pub fn link(&mut self, entry: Entry) {
        debug_assert!(self.get(entry.id).is_none(), "block {} is linked already", entry.id);
        let place = entry.id as usize;
        if self.places.len() <= place {
            self.places.resize(place + 1, VACANT);
        }
        self.places[place] = entry;
        self.classes.entry(entry.class).or_default().insert(entry.key());
        self.linked += 1;
    }

    /// Takes the block's entry out; `None` if it is not linked.
    pub fn unlink(&mut self, id: BlockId) -> Option<Entry> {
        let entry = self.get(id)?;
        self.places[id as usize] = VACANT;
        let list = self.classes.get_mut(&entry.class)?;
        list.remove(&entry.key());
        if list.is_empty() {
            self.classes.remove(&entry.class);
        }
        self.linked -= 1;
        Some(entry)
    }

    /// The block's entry, if it is linked.
    #[must_use]
    pub fn get(&self, id: BlockId) -> Option<Entry> {
        self.places.get(id as usize).filter(|entry| entry.id != VACANT.id).copied()
    }

    /// The entry that leaves first at `now`. It stays linked.
    #[must_use]
    pub fn victim(&self, now: Nanos) -> Option<Entry> {
        self.classes
            .iter()
            .filter_map(|(&class, list)| Some(self.policy.head(list, now)?.entry(class)))
            .min_by(|a, b| self.policy.compare(a, b, now))
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
        self.linked
    }

    /// Whether nothing is linked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.linked == 0
    }

    /// All entries, class by class.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        self.classes.iter().flat_map(|(&class, list)| list.iter().map(move |key| key.entry(class)))
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &Arc<dyn Policy> {
        &self.policy
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

#[cfg(test)]
mod tests {
    use std::cmp::{Ordering, Reverse};
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::Retention;
    use crate::policy::{Entry, NAMES, by_name};

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

    /// The order as the documentation words it, written without the policies' code.
    fn naive(name: &str, a: &Entry, b: &Entry, now: u64) -> Ordering {
        let idle = |entry: &Entry| now.saturating_sub(entry.access);
        if name == "checkerboard" {
            let key = |entry: &Entry| (Reverse(idle(entry).checked_ilog2()), entry.class, entry.id);
            return key(a).cmp(&key(b));
        }
        let value = match (idle(a), idle(b)) {
            (0, 0) => Ordering::Equal,
            (0, _) => Ordering::Greater,
            (_, 0) => Ordering::Less,
            (idle_a, idle_b) => fractions(a.class, idle_a, b.class, idle_b),
        };
        let rest = |entry: &Entry| (entry.class, entry.access, entry.tie, entry.id);
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
            .prop_map(|(class, access, tie, id)| Entry { class, access, tie, id });
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
                let policy = by_name(name, true).expect("it is one of the names");
                let mut retention = Retention::new(policy);
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

    #[test]
    fn the_order_turns_with_time() {
        let mut retention = Retention::new(by_name("retention", true).expect("a known name"));
        let (cheap, dear) = (
            Entry { class: 1, access: 90, tie: 0, id: 0 },
            Entry { class: 4, access: 0, tie: 0, id: 1 },
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
        let mut retention = Retention::new(by_name("lru", true).expect("a known name"));
        assert_eq!(
            (retention.victim(5), retention.unlink(3), retention.get(9)),
            (None, None, None)
        );
        let entry = Entry { class: 1, access: 5, tie: 0, id: 3 };
        retention.link(entry);
        assert_eq!(retention.victim(5), Some(entry));
        assert_eq!((retention.unlink(3), retention.len()), (Some(entry), 0));
        assert_eq!(retention.policy().name(), "lru");
    }
}
