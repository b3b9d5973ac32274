//! Exact victims: the minimum, at any time, over all entries that may leave a tier.
//!
//! Invariant: exactly the linked entries are held, each once, and [`Retention::victim`] is the
//! minimum by the policy's order. Within a class the order of leaving does not change with time,
//! so only the heads of the classes compete: in a tournament where the order is by value or by rank,
//! one after the other where it is the policy's own. Costs are rounded down to classes that differ
//! by the factor `1 + epsilon`, so a victim's value is at most that factor above the smallest one;
//! with 0 none are rounded. Bands come before the policy's order: a lower priority leaves first, and
//! before all others a share that holds more than it may. Cost: link O(1) in order of time, O(log n)
//! otherwise; victim O(log classes) amortised, O(classes) while a share holds too much; about 80
//! bytes per entry, and for one outside the normal band an entry of a hash map.

mod gone;
mod list;
mod places;
mod tournament;

use std::cmp::Ordering;

use rustc_hash::FxHashMap;

use crate::block::BlockId;
use crate::column::Column;
use crate::cost::CostModel;
use crate::hint::{Band, Share};
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
    slots: FxHashMap<(Band, u64), Slot>,
    lists: Vec<List>,
    free: Vec<Slot>,
    places: Places,
    heads: Tournament,
    /// The bands of linked entries that are not in the normal one.
    bands: FxHashMap<BlockId, Band>,
    /// By how many blocks a share holds too much, and how many of them are chosen to leave.
    over: FxHashMap<Share, (u64, u64)>,
    /// For a policy that watches, by block id: one more than the request for which the block came
    /// to stand here, 0 if it does not.
    since: Column<u64>,
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
            bands: FxHashMap::default(),
            over: FxHashMap::default(),
            since: Column::new(0),
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
        self.since.get(id).is_some_and(|&since| since > 0)
    }

    /// Tells a policy that watches of a block that came to stand on the tier. Returns the other
    /// blocks whose entries changed; so do the next two.
    pub fn arrived(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        self.since.put(seen.facts.id, seen.request + 1);
        self.policy.arrived(seen)
    }

    /// Tells it that a block is used. The request that brought the block does not count again.
    pub fn touched(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let known = self.since.get(seen.facts.id).copied().unwrap_or(0);
        if known == 0 || known > seen.request {
            return Vec::new();
        }
        self.policy.touched(seen)
    }

    /// Tells it that a block stands here no more.
    pub fn left(&mut self, id: BlockId, print: u64) -> Vec<BlockId> {
        self.since[id] = 0;
        self.policy.left(id, print)
    }

    /// Begins to fetch what a policy that watches knows of a block.
    pub fn warm_known(&self, id: BlockId) {
        self.since.warm(id);
        self.policy.warm(id);
    }

    /// Makes `entry` eligible, in a band. Its block must not be linked.
    pub fn link(&mut self, entry: Entry, band: Band) {
        debug_assert!(self.get(entry.id).is_none(), "block {} is linked already", entry.id);
        if band != Band::NORMAL {
            self.bands.insert(entry.id, band);
        }
        let slot = match self.slots.get(&(band, entry.class)) {
            Some(&slot) => slot,
            None => self.open((band, entry.class)),
        };
        let list = &mut self.lists[slot as usize];
        let before = list.head();
        list.link(&mut self.places, entry, slot);
        if before.is_none_or(|head| entry.key() < head) {
            self.heads.set(slot, Some(&entry), band);
        }
    }

    /// Takes the block's entry out; `None` if it is not linked.
    pub fn unlink(&mut self, id: BlockId) -> Option<Entry> {
        let place = self.places.remove(id)?;
        let (entry, slot) = (place.entry, place.slot);
        let band = self.band(id);
        let list = &mut self.lists[slot as usize];
        let headed = list.head() == Some(entry.key());
        list.unlink(&mut self.places, place);
        if headed {
            let head = list.warm_head(&self.places).map(|key| key.entry(entry.class));
            self.heads.set(slot, head.as_ref(), band);
            if head.is_none() {
                self.slots.remove(&(band, entry.class));
                self.free.push(slot);
            }
        }
        if band != Band::NORMAL {
            self.bands.remove(&id);
        }
        Some(entry)
    }

    /// A slot for a class that has none.
    fn open(&mut self, class: (Band, u64)) -> Slot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.lists.push(List::default());
            Slot::try_from(self.lists.len() - 1).expect("fewer classes than blocks")
        });
        self.slots.insert(class, slot);
        slot
    }

    /// Tells the policy that a block, of this band, is chosen to leave the tier.
    pub fn choose(&mut self, id: BlockId, band: Band) {
        self.policy.chosen(id);
        if let Some((_, leaving)) = self.over.get_mut(&band.share) {
            *leaving += 1;
        }
    }

    /// Tells it that all who were chosen have left, or stay.
    pub fn settle(&mut self) {
        self.policy.settled();
        self.over.values_mut().for_each(|(_, leaving)| *leaving = 0);
    }

    /// So many blocks of a share stand here beyond what it may hold: that many leave first.
    pub fn exceed(&mut self, share: Share, blocks: u64) {
        match self.over.get_mut(&share) {
            Some((over, _)) if blocks > 0 => *over = blocks,
            None if blocks > 0 => drop(self.over.insert(share, (blocks, 0))),
            _ => drop(self.over.remove(&share)),
        }
    }

    fn exceeds(&self, share: Share) -> bool {
        self.over.get(&share).is_some_and(|(over, leaving)| over > leaving)
    }

    /// The band of a linked entry.
    #[must_use]
    pub fn band(&self, id: BlockId) -> Band {
        if self.bands.is_empty() {
            return Band::NORMAL;
        }
        self.bands.get(&id).copied().unwrap_or(Band::NORMAL)
    }

    /// Whether an entry that is not linked, of no share, would leave before a linked one.
    #[must_use]
    pub fn precedes(&self, entry: &Entry, band: Band, linked: &Entry, now: Nanos) -> bool {
        let other = self.band(linked.id);
        let first = |band: Band| (!self.exceeds(band.share), band.priority);
        let by_band = first(band).cmp(&first(other));
        by_band.then_with(|| self.within(entry, band, linked, other, now)).is_lt()
    }

    /// Whether a linked entry of this band has the class and the place of one that is not linked and
    /// would be the first of its class.
    #[must_use]
    pub fn ties(&self, entry: &Entry, band: Band) -> bool {
        let slot = self.slots.get(&(band, entry.class));
        let head = slot.and_then(|&slot| self.lists[slot as usize].head());
        head.is_some_and(|head| head.place == entry.place)
    }

    /// `Less` if `a` leaves before `b`: by share, by priority, by the policy.
    fn compare(&self, a: &Entry, b: &Entry, now: Nanos) -> Ordering {
        if self.bands.is_empty() {
            return self.policy.compare(a, b, now);
        }
        let (left, right) = (self.band(a.id), self.band(b.id));
        let first = |band: Band| (!self.exceeds(band.share), band.priority);
        first(left).cmp(&first(right)).then_with(|| self.within(a, left, b, right, now))
    }

    /// The order of two entries of one priority: the policy's; of what that ranks alike but for ties,
    /// one share before the other.
    fn within(&self, a: &Entry, left: Band, b: &Entry, right: Band, now: Nanos) -> Ordering {
        let twins = (a.class, a.place) == (b.class, b.place);
        match self.policy.order() {
            Order::Value | Order::Rank if twins => left.share.cmp(&right.share),
            _ => Ordering::Equal,
        }
        .then_with(|| self.policy.compare(a, b, now))
    }

    /// The block's entry, if it is linked.
    #[must_use]
    pub fn get(&self, id: BlockId) -> Option<Entry> {
        self.places.get(id).map(|place| place.entry)
    }

    /// Begins to fetch what linking a block, or taking it out, will ask for first.
    pub fn warm(&self, id: BlockId) {
        self.places.warm(id);
    }

    /// The entry that leaves first at `now`. It stays linked.
    pub fn victim(&mut self, now: Nanos) -> Option<Entry> {
        match self.policy.order() {
            Order::Own => self.scan(now),
            // A few heads belong to the shares that hold too much; the tree cannot tell them.
            _ if self.over.keys().any(|&share| self.exceeds(share)) => self.scan(now),
            Order::Value | Order::Rank => {
                let (slot, class) = self.heads.winner(now)?;
                Some(self.lists[slot as usize].warm_head(&self.places)?.entry(class))
            }
        }
    }

    /// The same by comparing the heads of all classes: the simple twin of the tournament.
    #[must_use]
    pub fn scan(&self, now: Nanos) -> Option<Entry> {
        let head = |(&(_, class), &slot): (&(Band, u64), &Slot)| {
            let list = &self.lists[slot as usize];
            let key = match self.policy.order() {
                Order::Own => self.policy.head(&mut list.keys(&self.places), now)?,
                Order::Value | Order::Rank => list.head()?,
            };
            Some(key.entry(class))
        };
        self.slots.iter().filter_map(head).min_by(|a, b| self.compare(a, b, now))
    }

    /// How many entries leave before this one at `now`, in O(n).
    #[must_use]
    pub fn rank(&self, id: BlockId, now: Nanos) -> Option<usize> {
        let entry = self.get(id)?;
        Some(self.entries().filter(|other| self.compare(other, &entry, now).is_lt()).count())
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

    /// All entries, band by band and class by class.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let mut classes: Vec<((Band, u64), Slot)> =
            self.slots.iter().map(|(&class, &slot)| (class, slot)).collect();
        classes.sort_unstable();
        classes.into_iter().flat_map(|((_, class), slot)| {
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
        entries.sort_unstable_by(|a, b| self.compare(a, b, now));
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
    use crate::hint::Band;
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
    fn naive(name: &str, order: Order, a: &Entry, b: &Entry, now: u64) -> Ordering {
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
        if order != Order::Value {
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

    /// An entry, its band, and whether its share holds too much: shares first, then priorities, then
    /// the policy; of what that ranks alike, one share before the other.
    fn ranked(
        name: &str,
        order: Order,
        a: (&Entry, Band, bool),
        b: (&Entry, Band, bool),
        now: u64,
    ) -> Ordering {
        let first = |(_, band, over): (&Entry, Band, bool)| (!over, band.priority);
        let share = |(entry, band, _): (&Entry, Band, bool)| (entry.class, entry.place, band.share);
        let twins = order != Order::Own && (a.0.class, a.0.place) == (b.0.class, b.0.place);
        let twins = if twins { share(a).cmp(&share(b)) } else { Ordering::Equal };
        first(a).cmp(&first(b)).then(twins).then_with(|| naive(name, order, a.0, b.0, now))
    }

    #[derive(Clone, Debug)]
    enum Op {
        Link(Entry, Band),
        Unlink(u32),
        Evict(u64),
        Exceed(u16, u64),
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
        let priority = prop::sample::select(vec![35, 35, 35, 0, 20, 80, 100]);
        let band = (priority, prop::sample::select(vec![0, 0, 0, 1, 2]))
            .prop_map(|(priority, share)| Band { priority, share });
        prop_oneof![
            6 => (entry, band).prop_map(|(entry, band)| Op::Link(entry, band)),
            1 => (1..3u16, 0..3u64).prop_map(|(share, blocks)| Op::Exceed(share, blocks)),
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
                let by = retention.policy().order();
                let mut model: BTreeMap<u32, (Entry, Band)> = BTreeMap::new();
                // How much each share holds too much, and how much of that is chosen to leave.
                let mut over = [(0, 0); 3];
                let sorted = |model: &BTreeMap<u32, (Entry, Band)>, over: &[(u64, u64); 3], now| {
                    let mut all: Vec<(Entry, Band)> = model.values().copied().collect();
                    let full = |band: Band| over[usize::from(band.share)];
                    let over = |band: Band| full(band).0 > full(band).1;
                    all.sort_by(|(a, left), (b, right)| {
                        ranked(name, by, (a, *left, over(*left)), (b, *right, over(*right)), now)
                    });
                    all
                };
                for op in &ops {
                    match *op {
                        Op::Link(entry, band) => {
                            let known = model.insert(entry.id, (entry, band));
                            prop_assert_eq!(retention.unlink(entry.id), known.map(|known| known.0));
                            retention.link(entry, band);
                        }
                        Op::Unlink(id) => {
                            let known = model.remove(&id).map(|known| known.0);
                            prop_assert_eq!(retention.unlink(id), known);
                        }
                        Op::Exceed(share, blocks) => {
                            retention.exceed(share, blocks);
                            over[usize::from(share)].0 = blocks;
                            if blocks == 0 {
                                over[usize::from(share)].1 = 0;
                            }
                        }
                        Op::Evict(now) => {
                            let victim = retention.victim(now);
                            prop_assert_eq!(victim, retention.scan(now), "{} at {}", name, now);
                            let least = sorted(&model, &over, now).first().copied();
                            let first = least.map(|least| least.0);
                            prop_assert_eq!(victim, first, "{} at {}", name, now);
                            if let Some((entry, band)) = least {
                                prop_assert_eq!(retention.band(entry.id), band);
                                prop_assert_eq!(retention.unlink(entry.id), Some(entry));
                                model.remove(&entry.id);
                                retention.choose(entry.id, band);
                                let (blocks, leaving) = &mut over[usize::from(band.share)];
                                *leaving += u64::from(*blocks > 0);
                            }
                        }
                    }
                    prop_assert_eq!(retention.len(), model.len());
                    prop_assert_eq!(retention.is_empty(), model.is_empty());
                }
                retention.settle();
                for (_, leaving) in &mut over {
                    *leaving = 0;
                }
                let all = sorted(&model, &over, now);
                let order: Vec<Entry> = all.iter().map(|known| known.0).collect();
                prop_assert_eq!(&retention.order(now), &order);
                for (rank, entry) in order.iter().enumerate() {
                    prop_assert_eq!(retention.rank(entry.id, now), Some(rank));
                    prop_assert_eq!(retention.get(entry.id), Some(*entry));
                }
                let mut listed: Vec<(Band, Entry)> =
                    model.values().map(|&(entry, band)| (band, entry)).collect();
                listed.sort_unstable();
                let listed: Vec<Entry> = listed.into_iter().map(|known| known.1).collect();
                prop_assert_eq!(retention.entries().collect::<Vec<_>>(), listed);
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
        retention.link(cheap, Band::NORMAL);
        retention.link(dear, Band::NORMAL);
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
        retention.link(entry, Band::NORMAL);
        assert_eq!(retention.victim(5), Some(entry));
        assert_eq!((retention.unlink(3), retention.len()), (Some(entry), 0));
        assert_eq!(retention.policy().name(), "lru");
    }
}
