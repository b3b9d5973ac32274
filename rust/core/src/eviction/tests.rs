//! Compares each victim with a full scan, under every policy.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{EvictionIndex, rounded};
use crate::hint::{Band, Priority, Share};
use crate::policy::{EXPECTED, Entry, Lives, NAMES, Order, Policy, Sampling, by_name};

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
    by_name(name, true).expect("a known name")
}

/// The documented order, written without the policies' code.
fn naive(name: &str, order: Order, a: &Entry, b: &Entry, now: u64) -> Ordering {
    let idle = |entry: &Entry| now.saturating_sub(entry.place);
    if name == "checkerboard" {
        let key = |entry: &Entry| (Reverse(idle(entry).checked_ilog2()), entry.class, entry.id);
        return key(a).cmp(&key(b));
    }
    let rest = |entry: &Entry| (entry.class, entry.place, entry.tie, entry.id);
    if name == "learned" {
        // It has learned nothing, so the lighter entry leaves first at any age. The bits of the
        // weight are the lower half of a place. In the class of announced uses, the weight is per
        // request until the announced use.
        let weight = |entry: &Entry| {
            let weight = f32::from_bits(u32::try_from(entry.place & 0xFFFF_FFFF).expect("masked"));
            let weight = if weight.is_nan() { f64::INFINITY } else { f64::from(weight) };
            let wait = u32::try_from(entry.place >> 32).expect("the upper half").abs_diff(1 << 31);
            let announced = entry.class == u64::from(EXPECTED);
            if announced { weight / f64::from(wait.max(1)) } else { weight }
        };
        return weight(a)
            .total_cmp(&weight(b))
            .then_with(|| (a.place, rest(a)).cmp(&(b.place, rest(b))));
    }
    if order != Order::Value {
        return rest(a).cmp(&rest(b));
    }
    let value = match (idle(a), idle(b)) {
        (0, 0) => Ordering::Equal,
        (0, _) => Ordering::Greater,
        (_, 0) => Ordering::Less,
        (idle_a, idle_b) => fractions(a.class, idle_a, b.class, idle_b),
    };
    value.then_with(|| rest(a).cmp(&rest(b)))
}

/// Order of entries with their bands and the excess of their shares: the share furthest over quota
/// first, then priorities, then the policy.
fn ranked(
    name: &str,
    order: Order,
    a: (&Entry, Band, u64),
    b: (&Entry, Band, u64),
    now: u64,
) -> Ordering {
    let first = |(_, band, over): (&Entry, Band, u64)| {
        (Reverse(over), if over > 0 { band.share } else { 0 }, band.priority)
    };
    first(a).cmp(&first(b)).then_with(|| naive(name, order, a.0, b.0, now))
}

#[derive(Clone, Debug)]
enum Op {
    Link(Entry, Band),
    Unlink(u32),
    Evict(u64),
    Exceed(Share, u64),
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0..9u64, 3 => 0..2000u64, 1 => (1u64 << 62) - 9..=1 << 62]
}

fn time() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0..9u64, 3 => 0..2000u64, 1 => u64::MAX - 9..=u64::MAX]
}

fn op() -> impl Strategy<Value = Op> {
    let entry = (number(), time(), 0..3u32, 0..40u32).prop_map(|(class, place, tie, id)| Entry {
        class,
        place,
        tie,
        id,
    });
    let priority = prop::sample::select(vec![35, 35, 35, 0, 20, 80, 100]);
    let band = (priority, prop::sample::select(vec![0, 0, 0, 1, 2]))
        .prop_map(|(priority, share)| Band { priority, share });
    prop_oneof![
        6 => (entry, band).prop_map(|(entry, band)| Op::Link(entry, band)),
        1 => (1..3u32, 0..3u64).prop_map(|(share, blocks)| Op::Exceed(share, blocks)),
        2 => (0..40u32).prop_map(Op::Unlink),
        2 => time().prop_map(Op::Evict),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Any list of operations, under every policy, against a scan of a map.
    #[test]
    fn the_victim_is_the_minimum(ops in prop::collection::vec(op(), 0..120), now in time()) {
        for name in NAMES {
            let mut index = EvictionIndex::new(policy(name), 0.0);
            let by = index.policy().order();
            let mut model: BTreeMap<u32, (Entry, Band)> = BTreeMap::new();
            // Excess of each share, and its number of selected blocks.
            let mut over = [(0, 0); 3];
            let sorted = |model: &BTreeMap<u32, (Entry, Band)>, over: &[(u64, u64); 3], now| {
                let mut all: Vec<(Entry, Band)> = model.values().copied().collect();
                let full = |band: Band| over[band.share as usize];
                let over = |band: Band| u64::saturating_sub(full(band).0, full(band).1);
                all.sort_by(|(a, left), (b, right)| {
                    ranked(name, by, (a, *left, over(*left)), (b, *right, over(*right)), now)
                });
                all
            };
            for op in &ops {
                match *op {
                    Op::Link(entry, band) => {
                        let known = model.insert(entry.id, (entry, band));
                        prop_assert_eq!(index.unlink(entry.id), known.map(|known| known.0));
                        index.link(entry, band);
                    }
                    Op::Unlink(id) => {
                        let known = model.remove(&id).map(|known| known.0);
                        prop_assert_eq!(index.unlink(id), known);
                    }
                    Op::Exceed(share, blocks) => {
                        index.exceed(share, blocks);
                        over[share as usize].0 = blocks;
                        if blocks == 0 {
                            over[share as usize].1 = 0;
                        }
                    }
                    Op::Evict(now) => {
                        let victim = index.victim(now);
                        prop_assert_eq!(victim, index.scan(now), "{} at {}", name, now);
                        let least = sorted(&model, &over, now).first().copied();
                        let first = least.map(|least| least.0);
                        prop_assert_eq!(victim, first, "{} at {}", name, now);
                        if let Some((entry, band)) = least {
                            prop_assert_eq!(index.band(entry.id), band);
                            prop_assert_eq!(index.unlink(entry.id), Some(entry));
                            model.remove(&entry.id);
                            index.select(band);
                            let (blocks, leaving) = &mut over[band.share as usize];
                            *leaving += u64::from(*blocks > 0);
                        }
                    }
                }
                prop_assert_eq!(index.len(), model.len());
                prop_assert_eq!(index.is_empty(), model.is_empty());
            }
            index.end_selection();
            for (_, leaving) in &mut over {
                *leaving = 0;
            }
            let all = sorted(&model, &over, now);
            let order: Vec<Entry> = all.iter().map(|known| known.0).collect();
            prop_assert_eq!(&index.order(now), &order);
            for (rank, entry) in order.iter().enumerate() {
                prop_assert_eq!(index.rank(entry.id, now, &BTreeMap::new()), Some(rank));
                prop_assert_eq!(index.get(entry.id), Some(*entry));
            }
            let mut listed: Vec<(Priority, Entry)> =
                model.values().map(|&(entry, band)| (band.priority, entry)).collect();
            listed.sort_unstable();
            let listed: Vec<Entry> = listed.into_iter().map(|known| known.1).collect();
            prop_assert_eq!(index.entries().collect::<Vec<_>>(), listed);
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
fn an_arrival_is_known_while_the_block_is_resident() {
    let mut index = EvictionIndex::new(policy("fifo"), 0.0);
    assert_eq!(index.arrival(3), None);
    index.set_arrival(3, Some(0));
    assert_eq!((index.arrival(3), index.arrival(2)), (Some(0), None));
    index.set_arrival(3, None);
    assert_eq!(index.arrival(3), None);
}

#[test]
fn the_order_turns_with_time() {
    let mut index = EvictionIndex::new(policy("retention"), 0.0);
    let (cheap, costly) =
        (Entry { class: 1, place: 90, tie: 0, id: 0 }, Entry { class: 4, place: 0, tie: 0, id: 1 });
    index.link(cheap, Band::NORMAL);
    index.link(costly, Band::NORMAL);
    // 1/10 against 4/100, then 1/110 against 4/200.
    assert_eq!(index.victim(100), Some(costly));
    assert_eq!(index.victim(200), Some(cheap));
    let rank = |id, now| index.rank(id, now, &BTreeMap::new());
    assert_eq!((rank(0, 100), rank(0, 200), rank(7, 100)), (Some(1), Some(0), None));
}

#[test]
fn nothing_leaves_an_empty_list() {
    let mut index = EvictionIndex::new(policy("lru"), 0.0);
    assert_eq!((index.victim(5), index.unlink(3), index.get(9)), (None, None, None));
    let entry = Entry { class: 1, place: 5, tie: 0, id: 3 };
    index.link(entry, Band::NORMAL);
    assert_eq!(index.victim(5), Some(entry));
    assert_eq!((index.unlink(3), index.len()), (Some(entry), 0));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Links a block with this id, class, number of requests since its last use, and weight.
    Link(u32, u64, u64, u8),
    Unlink(u32),
    /// Some requests pass. Then the policy may learn new rates for all classes.
    Pass(u64, bool),
    /// Asks whether a block with these values would be the victim.
    Ask(u32, u64, u64, u8),
}

fn step() -> impl Strategy<Value = Step> {
    let block = || (0..40u32, 0..6u64, prop_oneof![0..9u64, 0..400u64], 1..4u8);
    prop_oneof![
        6 => block().prop_map(|(id, class, ago, weight)| Step::Link(id, class, ago, weight)),
        2 => (0..40u32).prop_map(Step::Unlink),
        2 => (prop_oneof![0..3u64, 0..300u64], any::<bool>()).prop_map(|(n, all)| Step::Pass(n, all)),
        3 => block().prop_map(|(id, class, ago, weight)| Step::Ask(id, class, ago, weight)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// While ages grow and weights change, the victim is the minimum over the ends of all classes.
    /// An unlinked block leads if and only if it is the victim after it is linked.
    #[test]
    fn ends_are_up_to_date(
        steps in prop::collection::vec(step(), 0..120),
        first in prop_oneof![3 => Just(1000_u64), 1 => Just((1 << 32) - 60)],
    ) {
        let mut index = EvictionIndex::new(policy("learned"), 0.0);
        let (mut lives, mut request) = (Lives::new(Sampling::new(1, false), Sampling::new(1, false)), first);
        let entry = |request: u64, id: u32, class, ago: u64, weight: u8| {
            let at = (request - ago) & 0xFFFF_FFFF;
            let place = at << 32 | u64::from(f32::from(weight).to_bits());
            Entry { class, place, tie: id % 3, id }
        };
        index.on_request(request, None);
        for step in steps {
            match step {
                Step::Link(id, class, ago, weight) => {
                    index.unlink(id);
                    index.link(entry(request, id, class, ago, weight), Band::NORMAL);
                }
                Step::Unlink(id) => {
                    index.unlink(id);
                }
                Step::Pass(number, learn) => {
                    for _ in 0..number {
                        request += 1;
                        let class = u8::try_from(request % 6).expect("small");
                        let print = u32::try_from(request % (5 + u64::from(class))).expect("small");
                        lives.use_again(print << 20, class, request, true);
                        index.on_request(request, None);
                    }
                    let learned = lives.learn(request);
                    index.on_request(request, learned.as_ref().filter(|_| learn));
                }
                Step::Ask(id, class, ago, weight) => {
                    index.unlink(id);
                    let entry = entry(request, id, class, ago, weight);
                    let leads = index.leads(&entry, Band::NORMAL, 0).expect("no block has a band");
                    index.link(entry, Band::NORMAL);
                    prop_assert_eq!(leads, index.scan(0).map(|first| first.id) == Some(id));
                }
            }
            prop_assert_eq!(index.victim(0), index.scan(0));
        }
    }
}
