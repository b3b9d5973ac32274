//! The minimum over the heads of all classes, as time goes by: a kinetic tournament.
//!
//! Every node of a binary tree keeps the winner of its two sides and the first time at which that
//! may be another one, `fail`: the earlier of its sides' and the time at which the two winners
//! change places, an integer. Invariant: a node's `fail` is at most that of its sides, and before
//! it the node is right. Cost: a query that no `fail` lies before is O(1); a head that changes
//! costs O(log classes); each change of places once O(log classes).

use crate::policy::{Entry, Order};
use crate::time::Nanos;

/// A class's place in the tree.
pub(super) type Slot = u32;

/// Names no class: an empty side.
const NOBODY: Slot = Slot::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    winner: Slot,
    fail: Nanos,
}

/// Wrong from the beginning of time.
const STALE: Node = Node { winner: NOBODY, fail: 0 };

/// The heads of all classes.
#[derive(Clone, Debug)]
pub(super) struct Tournament {
    order: Order,
    heads: Vec<Option<Entry>>,
    /// Node 1 is the root; the sides of `n` are `2n` and `2n + 1`. Slot `s` would be node
    /// `nodes.len() + s`.
    nodes: Vec<Node>,
    /// The time of the last query.
    seen: Nanos,
}

impl Tournament {
    /// Nobody yet; `order` is by value or by rank.
    pub(super) fn new(order: Order) -> Self {
        Self { order, heads: Vec::new(), nodes: vec![STALE; 1], seen: 0 }
    }

    /// The head of a class is now this one.
    pub(super) fn set(&mut self, slot: Slot, head: Option<Entry>) {
        let at = slot as usize;
        if at >= self.heads.len() {
            self.heads.resize(at + 1, None);
            if at >= self.nodes.len() {
                self.nodes = vec![STALE; (at + 1).next_power_of_two()];
            }
        }
        self.heads[at] = head;
        // Where a node is stale, all above it are.
        let mut node = (self.nodes.len() + at) >> 1;
        while node > 0 && self.nodes[node].fail > 0 {
            self.nodes[node].fail = 0;
            node /= 2;
        }
    }

    /// The minimum of all heads.
    pub(super) fn winner(&mut self, now: Nanos) -> Option<Entry> {
        if now < self.seen {
            self.nodes.fill(STALE);
        }
        self.seen = now;
        let root = self.side(1, now);
        self.head(root.winner)
    }

    fn head(&self, slot: Slot) -> Option<Entry> {
        self.heads.get(slot as usize).copied().flatten()
    }

    /// A node as of `now`, put right if it failed.
    fn side(&mut self, node: usize, now: Nanos) -> Node {
        if node >= self.nodes.len() {
            let slot = Slot::try_from(node - self.nodes.len()).unwrap_or(NOBODY);
            let winner = if self.head(slot).is_some() { slot } else { NOBODY };
            return Node { winner, fail: Nanos::MAX };
        }
        if self.nodes[node].fail > now {
            return self.nodes[node];
        }
        let (left, right) = (self.side(2 * node, now), self.side(2 * node + 1, now));
        let mut fail = left.fail.min(right.fail);
        let winner = match (self.head(left.winner), self.head(right.winner)) {
            (_, None) => left.winner,
            (None, _) => right.winner,
            (Some(a), Some(b)) => {
                let (first, until) = duel(self.order, &a, &b, now);
                fail = fail.min(until);
                if first { left.winner } else { right.winner }
            }
        };
        self.nodes[node] = Node { winner, fail };
        self.nodes[node]
    }
}

/// Whether `a` leaves before `b` at `now`, and the first time at which that may change.
fn duel(order: Order, a: &Entry, b: &Entry, now: Nanos) -> (bool, Nanos) {
    if order == Order::Rank || a.class == b.class {
        return (a < b, Nanos::MAX);
    }
    // At zero idle time a value is infinite.
    let fresh = |entry: &Entry| now <= entry.place;
    if fresh(a) || fresh(b) {
        let first = (fresh(a), a) < (fresh(b), b);
        let ends = [a, b].into_iter().filter(|entry| fresh(entry));
        let until = ends.map(|entry| entry.place.saturating_add(1)).min();
        return (first, until.unwrap_or(Nanos::MAX));
    }
    // The lines (t - place) / class cross once, where the dear one falls behind the cheap one.
    let (cheap, dear) = if a.class < b.class { (a, b) } else { (b, a) };
    let wide = |x: u64, y: u64| i128::from(x) * i128::from(y);
    let lead = wide(dear.class, cheap.place) - wide(cheap.class, dear.place);
    let gap = i128::from(dear.class - cheap.class);
    let ahead = i128::from(now) * gap < lead;
    // Less than 2^126 in all; rounded up.
    let until = if ahead { (lead + gap - 1) / gap } else { i128::from(Nanos::MAX) };
    (ahead == (dear == a), Nanos::try_from(until).unwrap_or(Nanos::MAX))
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use proptest::prelude::*;

    use super::{Tournament, duel};
    use crate::policy::{Entry, Order, Setup, by_name};

    fn compare(a: &Entry, b: &Entry, now: u64) -> Ordering {
        let policy = by_name("flat", Setup { reuse: true, capacity: 1 }).expect("a known name");
        policy.compare(a, b, now)
    }

    fn entry() -> impl Strategy<Value = Entry> {
        let class = prop_oneof![3 => 0..9u64, 2 => 0..5000u64, 1 => (1u64 << 62) - 9..=1 << 62];
        let place = prop_oneof![3 => 0..40u64, 2 => 0..5000u64, 1 => u64::MAX - 9..=u64::MAX];
        (class, place, 0..3u32, 0..50u32).prop_map(|(class, place, tie, id)| Entry {
            class,
            place,
            tie,
            id,
        })
    }

    fn time() -> impl Strategy<Value = u64> {
        prop_oneof![4 => 0..60u64, 3 => 0..20_000u64, 1 => any::<u64>(), 1 => u64::MAX - 9..=u64::MAX]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// The winner is that of the policy's comparison, until the time that is told, where the
        /// order has changed unless somebody was fresh.
        #[test]
        fn a_duel_is_right_until_it_fails(a in entry(), b in entry(), now in time()) {
            prop_assume!(a != b);
            let (first, until) = duel(Order::Value, &a, &b, now);
            prop_assert_eq!(first, compare(&a, &b, now).is_lt());
            prop_assert!(until > now || until == u64::MAX);
            for later in [now, now + (until - now) / 2, until - 1] {
                prop_assert_eq!(first, compare(&a, &b, later.max(now)).is_lt());
            }
            if until < u64::MAX && now > a.place && now > b.place {
                prop_assert_ne!(first, compare(&a, &b, until).is_lt());
            }
        }

        /// Heads that come, change and go, at times that stand, jump and run back.
        #[test]
        fn the_winner_is_the_minimum(
            ops in prop::collection::vec((0..20u32, prop::option::of(entry()), time()), 1..80),
            ascending: bool,
        ) {
            let mut tournament = Tournament::new(Order::Value);
            let mut heads: Vec<Option<Entry>> = vec![None; 20];
            let mut times: Vec<u64> = ops.iter().map(|op| op.2).collect();
            if ascending {
                times.sort_unstable();
            }
            for ((slot, head, _), now) in ops.into_iter().zip(times) {
                tournament.set(slot, head);
                heads[slot as usize] = head;
                let least = heads.iter().flatten().min_by(|a, b| compare(a, b, now)).copied();
                prop_assert_eq!(tournament.winner(now), least);
                prop_assert_eq!(tournament.winner(now), least);
            }
        }
    }

    #[test]
    fn places_change_at_the_crossing_and_not_before() {
        let (cheap, dear) = (
            Entry { class: 1, place: 90, tie: 0, id: 0 },
            Entry { class: 4, place: 0, tie: 0, id: 1 },
        );
        // 1 / (t - 90) reaches 4 / t at 120.
        assert_eq!(duel(Order::Value, &cheap, &dear, 100), (false, 120));
        assert_eq!(duel(Order::Value, &cheap, &dear, 119), (false, 120));
        assert_eq!(duel(Order::Value, &cheap, &dear, 120), (true, u64::MAX));
        assert_eq!(duel(Order::Value, &dear, &cheap, 90), (true, 91));
    }
}
