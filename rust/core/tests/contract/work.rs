//! Work of single calls on large caches: entries visited by each call, not their time.

use std::collections::BTreeMap;

use kvtrie_core::internals::visits_during;
use kvtrie_core::{Acquire, Kind, Manager, Scope, Settings};

use crate::rig::{settings, tier};

/// Blocks of a sequence.
const SEQUENCE: u32 = 32;

/// Maximum number of entries visited by a call: 40 µs at 20 ns each.
const MOST: u64 = 2_000;

/// A manager, and the maximum number of entries visited by each kind of call.
struct Counted {
    manager: Manager,
    most: BTreeMap<&'static str, u64>,
    now: u64,
}

impl Counted {
    fn during<R>(&mut self, kind: &'static str, call: impl FnOnce(&mut Manager, u64) -> R) -> R {
        let Self { manager, most, now } = self;
        let (given, visits) = visits_during(|| call(manager, *now));
        let known = most.entry(kind).or_default();
        *known = visits.max(*known);
        given
    }

    /// Serves a sequence of blocks of this number, and returns the number of blocks found.
    fn serve(&mut self, number: u32) -> usize {
        self.now += 1_000_000;
        let tokens: Vec<u32> = (0..4 * SEQUENCE).map(|at| number * 4 * SEQUENCE + at).collect();
        let scope = Scope::default();
        self.during("lookup", |m, now| m.lookup(&tokens, now, &scope, 0).map(drop)).unwrap();
        let id = self.during("acquire", |m, now| m.acquire(&all(&tokens), now)).unwrap();
        let matched = self.manager.lease(id).unwrap().matched();
        self.during("commit", |m, now| m.commit(id, &tokens[matched..], now).map(drop)).unwrap();
        self.during("release", |m, now| m.release(id, now).map(drop)).unwrap();
        matched / 4
    }
}

fn all(tokens: &[u32]) -> Acquire<'_> {
    Acquire { tokens, ..Acquire::default() }
}

/// Visits of calls while a cache of `blocks` fills, and while it evicts a sequence per request.
fn most_visits(blocks: u32, policy: &str) -> BTreeMap<&'static str, u64> {
    let settings =
        Settings { policy: policy.to_owned(), ..settings(vec![tier(Kind::Gpu, blocks)]) };
    let manager = Manager::new(settings).unwrap();
    let mut counted = Counted { manager, most: BTreeMap::new(), now: 0 };
    let room = blocks / SEQUENCE;
    for number in 0..room {
        counted.serve(number);
        // A fourth of the sequences returns.
        if number % 4 == 0 {
            assert_eq!(counted.serve(number), SEQUENCE as usize);
        }
    }
    // Lessons of `learned` are 128 requests apart.
    for number in room..room + 400 {
        assert_eq!(counted.serve(number), 0);
    }
    counted.most
}

#[test]
fn no_call_visits_more_than_two_thousand_entries_at_four_million_blocks() {
    for policy in ["lru", "retention", "weighted", "learned"] {
        let most = most_visits(4_000_000, policy);
        assert!(most["acquire"] >= 1, "an acquire evicts a sequence");
        assert!(most.values().all(|&visits| visits <= MOST), "{policy}: {most:?}");
    }
}
