//! Test suite of all policies: orders, ties, names, and requests served from a small cache.
//!
//! Invariant: every test but the tables of exact orders runs for every registered policy.

use std::cmp::Ordering;

use super::sample::{TestCache, facts, order};
use super::{Entry, Facts, NAMES, Needs, by_name};
use crate::cost::CostModel;
use crate::error::{Error, Result};

/// Four blocks, seen at 110: (context, block, session blocks, uses, access).
const TRACE: [(u64, u32, u32, u32, u64); 4] =
    [(0, 0, 4, 4, 100), (10_700, 3, 4, 1, 100), (0, 0, 1, 1, 40), (32_100, 3, 16, 1, 10)];

/// Registered policies missing in `known`.
fn missing<'a>(known: impl Iterator<Item = &'a str>) -> Vec<&'static str> {
    let known: Vec<_> = known.collect();
    NAMES.iter().copied().filter(|name| !known.contains(name)).collect()
}

#[test]
fn each_policy_has_its_order_on_a_small_trace() -> Result<()> {
    let expected = [
        ("lru", true, [3, 2, 0, 1]),
        ("fifo", true, [0, 1, 2, 3]),
        ("lfu", true, [3, 2, 1, 0]),
        ("flat", true, [2, 3, 0, 1]),
        ("retention", true, [2, 3, 1, 0]),
        ("retention", false, [2, 3, 0, 1]),
        ("weighted", true, [3, 2, 0, 1]),
        ("checkerboard", true, [2, 3, 0, 1]),
        ("restore", true, [3, 2, 0, 1]),
        // No use is known, so all weights are 0.
        ("learned", true, [0, 1, 2, 3]),
    ];
    assert_eq!(missing(expected.iter().map(|row| row.0)), [""; 0], "policies without a line");
    let cost = CostModel::default_curve(1.0)?;
    for (name, reuse, ids) in expected {
        let policy = by_name(name, reuse)?;
        let entries = TRACE.iter().zip(0..).map(|(row, id)| {
            let &(context, block, session_blocks, uses, access) = row;
            let facts = Facts { id, uses, access, ..facts(context, block, session_blocks) };
            let (class, place) = (policy.class(&facts, &cost), policy.place(&facts));
            Entry { class, place, tie: 0, id }
        });
        assert_eq!(order(&*policy, entries.collect(), 110), ids, "{name}, reuse {reuse}");
    }
    Ok(())
}

#[test]
fn each_policy_that_deepens_has_classes_that_never_fall_with_depth() -> Result<()> {
    let models = [
        CostModel::default_curve(1.0)?,
        CostModel::seed(1.0)?,
        CostModel::table(vec![(0, 2.0), (100, 2.0), (4096, 9.0)], 1.0)?,
    ];
    let mut deepening = 0;
    for (name, cost) in NAMES.iter().flat_map(|name| models.iter().map(move |cost| (name, cost))) {
        let policy = by_name(name, true)?;
        let class = |block: u32| policy.class(&facts(64 * u64::from(block), block, 200), cost);
        let falls = (1..200).any(|block| class(block) < class(block - 1));
        let deepens = policy.deepens();
        assert!(!deepens || !falls, "{name}");
        deepening += usize::from(deepens);
    }
    assert_eq!(deepening, 4 * models.len());
    Ok(())
}

#[test]
fn each_policy_keeps_the_latest_use_and_evicts_the_oldest() -> Result<()> {
    let cost = CostModel::default_curve(1.0)?;
    for name in NAMES {
        let policy = by_name(name, true)?;
        let class = policy.class(&facts(64, 4, 9), &cost);
        let entries = [(4, 90), (1, 100), (2, 0), (3, 120)].map(|(id, place)| Entry {
            class,
            place,
            tie: 0,
            id,
        });
        assert_eq!(order(&*policy, entries.to_vec(), 100), [2, 4, 1, 3], "{name}");
    }
    Ok(())
}

#[test]
fn each_policy_breaks_ties_the_same_way_every_time() -> Result<()> {
    for name in NAMES {
        let policy = by_name(name, true)?;
        let entry = |tie, id| Entry { class: 7, place: 3, tie, id };
        let ids = order(&*policy, vec![entry(1, 5), entry(0, 9), entry(0, 8), entry(1, 4)], 50);
        let expected = if *name == "checkerboard" { [4, 5, 8, 9] } else { [8, 9, 4, 5] };
        assert_eq!(ids, expected, "{name}");
    }
    Ok(())
}

#[test]
fn each_policy_orders_strictly() -> Result<()> {
    let times = [0, 1, 50, 99, 100, 101, u64::MAX];
    let classes = [0, 1, 2, 3, 1 << 40, (1 << 62) - 1, 1 << 62];
    let mut entries = Vec::new();
    for class in classes {
        for place in times {
            let id = u32::try_from(entries.len()).unwrap_or(0);
            entries.push(Entry { class, place, tie: id % 3, id });
        }
    }
    for name in NAMES {
        let policy = by_name(name, true)?;
        for now in [0, 1, 100, 12_345, u64::MAX] {
            let mut sorted = entries.clone();
            sorted.sort_by(|a, b| policy.compare(a, b, now));
            for (i, a) in sorted.iter().enumerate() {
                for (j, b) in sorted.iter().enumerate() {
                    assert_eq!(policy.compare(a, b, now), i.cmp(&j), "{name} {a:?} {b:?} {now}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn values_are_compared_exactly() -> Result<()> {
    let policy = by_name("retention", true)?;
    let entry = |class, idle: u64, id| Entry { class, place: u64::MAX - idle, tie: 0, id };
    let compare = |a: &Entry, b: &Entry| policy.compare(a, b, u64::MAX);
    // 2^62 / (2^63 + 1) is below 2^61 / 2^62, but equal in floating point.
    let (a, b) = (entry(1 << 62, (1 << 63) + 1, 9), entry(1 << 61, 1 << 62, 1));
    assert_eq!(compare(&a, &b), Ordering::Less);
    // Equal values: the lower class leaves first, then the smaller tie, then the smaller id.
    assert_eq!(compare(&entry(3, 30, 9), &entry(4, 40, 1)), Ordering::Less);
    assert_eq!(compare(&entry(4, 0, 1), &entry(3, 0, 9)), Ordering::Greater);
    assert!(policy.value(&facts(0, 0, 1), 2.0, 0).is_infinite());
    assert!((policy.value(&facts(0, 0, 1), 2.0, 500_000_000) - 4.0).abs() < 1e-12);
    Ok(())
}

#[test]
fn an_unknown_name_is_refused_with_the_known_ones() {
    let Err(Error::Config(message)) = by_name("random", true) else { panic!("not refused") };
    assert!(message.contains("'random'") && NAMES.iter().all(|name| message.contains(name)));
}

#[test]
fn each_policy_that_reads_the_length_of_sessions_needs_it() -> Result<()> {
    let cost = CostModel::default_curve(1.0)?;
    for name in NAMES {
        let policy = by_name(name, true)?;
        let class = |length| policy.class(&facts(64, 4, length), &cost);
        let reads = class(5) != class(50);
        assert_eq!(policy.needs().has(Needs::SESSION_BLOCKS), reads, "{name}");
    }
    Ok(())
}

/// Three chats with a common system prompt (1, 2), a flood of one-shot prompts, then the chats
/// again.
const REQUESTS: &[&[u32]] = &[
    &[1, 2, 10],
    &[1, 2, 20],
    &[1, 2, 10, 11],
    &[1, 2, 30],
    &[40, 41],
    &[1, 2, 30],
    &[1, 2, 10, 11, 12],
    &[50, 51, 52],
    &[1, 2, 20, 21],
    &[60],
    &[40, 41],
    &[1, 2, 30, 31],
    &[70, 71],
    &[1, 2, 10, 11, 12, 13],
    &[80],
    &[70, 71],
    &[81, 82],
];

#[test]
fn each_policy_has_its_victims_on_a_small_trace() {
    let expected: &[(&str, &[u32])] = &[
        ("lru", &[20, 41, 40, 30, 12, 11, 10, 52, 51, 50, 21, 20, 60, 41, 40, 31, 30, 13, 12]),
        ("fifo", &[20, 30, 41, 40, 12, 11, 10, 52, 51, 50, 21, 20, 60, 41, 40, 31, 30, 71, 70]),
        ("lfu", &[20, 41, 40, 12, 52, 51, 50, 21, 20, 60, 41, 40, 31, 71, 13, 12, 80]),
        (
            "retention",
            &[20, 41, 40, 30, 12, 52, 51, 50, 60, 21, 20, 41, 40, 71, 70, 80, 31, 30, 71],
        ),
        (
            "flat",
            &[20, 41, 40, 30, 12, 11, 10, 60, 52, 51, 50, 41, 40, 21, 20, 71, 70, 80, 31, 30, 71],
        ),
        ("weighted", &[41, 40, 20, 30, 52, 51, 50, 60, 41, 40, 21, 20, 71, 70, 80, 31, 30, 71]),
        (
            "checkerboard",
            &[20, 41, 40, 30, 12, 52, 11, 10, 51, 50, 21, 20, 60, 41, 40, 31, 71, 30, 80, 13],
        ),
        (
            "restore",
            &[41, 20, 40, 30, 12, 11, 10, 52, 51, 50, 41, 21, 20, 60, 40, 71, 31, 30, 13, 12],
        ),
        (
            "learned",
            &[20, 41, 40, 30, 52, 51, 50, 60, 12, 11, 10, 21, 20, 41, 40, 71, 70, 80, 31, 30, 71],
        ),
    ];
    assert_eq!(missing(expected.iter().map(|row| row.0)), [""; 0], "policies without a line");
    for &(name, victims) in expected {
        let mut cache = TestCache::new(name, 9);
        let seen: Vec<u32> = REQUESTS.iter().flat_map(|path| cache.request(path)).collect();
        assert_eq!(seen, victims, "{name}");
    }
}

/// The cache checks each victim: no block of lower priority could have left. Twelve blocks are
/// retained, and six more are always present.
#[test]
fn each_policy_ranks_within_priorities() {
    for name in NAMES {
        for leaves in [true, false] {
            let mut cache = TestCache::new(name, 18);
            cache.leaves = leaves;
            cache.priorities =
                (0..60).map(|id| (id, [35, 0, 35, 80, 20][id as usize % 5])).collect();
            let mut victims = Vec::new();
            let mut state = 7_u64;
            for _ in 0..3000 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let first = u32::try_from((state >> 33) % 20).expect("small");
                victims.extend(cache.request(&[first, first + 20, first + 40]));
            }
            let count = |rest: u32| victims.iter().filter(|&&id| id % 5 == rest).count();
            let counts = [0, 1, 2, 3, 4].map(count);
            assert_eq!(counts[3], 0, "{name}: {counts:?}");
            assert!([0, 1, 2, 4].iter().all(|&rest| counts[rest] > 100), "{name}: {counts:?}");
        }
    }
}

/// The cache itself checks each victim: not in use, and the minimum of a full sort.
#[test]
fn each_policy_serves_a_long_trace() {
    for name in NAMES {
        for leaves in [true, false] {
            let served = || {
                let mut cache = TestCache::new(name, 40);
                cache.leaves = leaves;
                let mut state = 1_u64;
                let mut below = |bound: u64| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    u32::try_from((state >> 33) % bound).expect("small")
                };
                let mut victims = Vec::new();
                for _ in 0..2000 {
                    let chat = below(9) * below(9);
                    let mut path: Vec<u32> = vec![0, 1 + chat % 3];
                    path.extend((0..=below(8)).map(|turn| 100 + 10 * chat + turn));
                    victims.extend(cache.request(&path));
                }
                (victims, cache.hits)
            };
            let (victims, hits) = served();
            assert!(victims.len() > 1000 && hits > 1000, "{name}: {} {hits}", victims.len());
            assert_eq!((victims, hits), served(), "{name}");
        }
    }
}
