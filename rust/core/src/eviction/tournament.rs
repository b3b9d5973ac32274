//! Kinetic tournament: the minimum over the heads of all classes while time passes.
//!
//! A complete binary tree with the classes as leaves. Each node has the winner of its two sides and
//! `fail`, the first time at which the winner may change: the minimum over the `fail` of its sides
//! and the time at which its two winners swap, an integer. Invariant: `fail` of a node is at most
//! `fail` of its sides, and from the last query until `fail` the node is correct. Cost: a query
//! before every `fail` is O(1). A changed head costs O(log classes), as does each swap. 64 bytes
//! per class.

use crate::hint::{NORMAL, Priority};
use crate::policy::{Entry, Order};
use crate::time::Nanos;

/// Index of a class: its leaf of the tree, and its list.
pub(super) type Leaf = u32;

/// Index of an empty side.
const NONE: Leaf = Leaf::MAX;

/// Winner of a subtree. Two winners differ in priority or class, so ties between entries do not
/// matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Winner {
    fail: Nanos,
    class: u64,
    place: u64,
    leaf: Leaf,
    priority: Priority,
}

/// Two sides of a node, in one CPU cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Sides([Winner; 2]);

const EMPTY: Winner = Winner { fail: Nanos::MAX, class: 0, place: 0, leaf: NONE, priority: NORMAL };

/// Tournament over the heads of all classes.
#[derive(Clone, Debug)]
pub(super) struct Tournament {
    order: Order,
    /// Sides by node. Node 1 is the root, and the sides of `n` are `2n` and `2n + 1`. With `m`
    /// nodes the leaf of class `i` is `m + i`.
    sides: Vec<Sides>,
    /// The time of the last query.
    last: Nanos,
    /// Classes with a changed head since then. A head removed and restored costs nothing.
    changed: Vec<Leaf>,
}

impl Tournament {
    /// An empty tournament. `order` is by value or by rank.
    pub(super) fn new(order: Order) -> Self {
        Self { order, sides: vec![Sides([EMPTY; 2])], last: 0, changed: Vec::new() }
    }

    /// Sets the head of a class, or `None` if the class is empty.
    pub(super) fn set(&mut self, leaf: Leaf, head: Option<&Entry>, priority: Priority) {
        // The tree is complete: its size is a power of two.
        if leaf as usize >= self.sides.len() {
            self.grow(leaf as usize + 1);
        }
        let at = self.sides.len() + leaf as usize;
        *self.node_mut(at) = head.map_or(EMPTY, |head| Winner {
            fail: Nanos::MAX,
            class: head.class,
            place: head.place,
            leaf,
            priority,
        });
        // Replayed at the next query, because an unlinked and relinked head is often unchanged.
        if self.changed.last() != Some(&leaf) {
            self.changed.push(leaf);
        }
    }

    /// Plays the nodes above a changed head again.
    fn replay(&mut self, leaf: Leaf) {
        let mut at = self.sides.len() + leaf as usize;
        while at > 1 {
            at /= 2;
            let node = self.duel(at);
            let known = self.node_mut(at);
            // From here on upwards nothing changes.
            if node == *known {
                return;
            }
            *known = node;
        }
    }

    fn node(&self, at: usize) -> &Winner {
        &self.sides[at / 2].0[at % 2]
    }

    fn node_mut(&mut self, at: usize) -> &mut Winner {
        &mut self.sides[at / 2].0[at % 2]
    }

    /// Plays a node. Its sides must be correct.
    fn play(&mut self, at: usize) {
        *self.node_mut(at) = self.duel(at);
    }

    /// Leaf and class of the minimum of all heads.
    pub(super) fn winner(&mut self, now: Nanos) -> Option<(Leaf, u64)> {
        let back = now < self.last;
        self.last = now;
        // `fail` holds for later times only.
        if back {
            (1..self.sides.len()).rev().for_each(|at| self.play(at));
            self.changed.clear();
        }
        while let Some(leaf) = self.changed.pop() {
            self.replay(leaf);
        }
        self.repair(1);
        let Winner { leaf, class, .. } = *self.node(1);
        (leaf != NONE).then_some((leaf, class))
    }

    /// Repairs a failed node, after its failed sides.
    fn repair(&mut self, at: usize) {
        if self.node(at).fail <= self.last && at < self.sides.len() {
            self.repair(2 * at);
            self.repair(2 * at + 1);
            self.play(at);
        }
    }

    /// Winner of a node's two sides, as of the last query.
    fn duel(&self, at: usize) -> Winner {
        let Sides([left, right]) = &self.sides[at];
        // An empty side loses.
        if left.leaf == NONE || right.leaf == NONE {
            return if right.leaf == NONE { *left } else { *right };
        }
        // Priorities do not change with time, nor do places within a class.
        let ever = left.priority != right.priority || left.class == right.class;
        if ever || self.order != Order::Value {
            let rank = |node: &Winner| (node.priority, node.class, node.place);
            let winner = if rank(left) < rank(right) { left } else { right };
            return Winner { fail: left.fail.min(right.fail), ..*winner };
        }
        let (cheap, costly) = if left.class < right.class { (left, right) } else { (right, left) };
        let (first, until) = duel(cheap, costly, self.last);
        let winner = if first { cheap } else { costly };
        Winner { fail: left.fail.min(right.fail).min(until), ..*winner }
    }

    /// Grows to `classes` classes, and plays all nodes again.
    fn grow(&mut self, classes: usize) {
        let old = self.sides.len();
        let new = classes.next_power_of_two();
        let leaves: Vec<Winner> = (old..2 * old).map(|at| *self.node(at)).collect();
        self.sides = vec![Sides([EMPTY; 2]); new];
        for (at, leaf) in (new..).zip(leaves) {
            *self.node_mut(at) = leaf;
        }
        (1..new).rev().for_each(|at| self.play(at));
    }
}

/// Whether `cheap` leaves first at `now`, and the first time at which this may change.
fn duel(cheap: &Winner, costly: &Winner, now: Nanos) -> (bool, Nanos) {
    let (new, old) = (now.saturating_sub(cheap.place), now.saturating_sub(costly.place));
    // At zero idle time a value is infinite, even at zero cost.
    if new == 0 && (old == 0 || cheap.class == 0) {
        return (old == 0, cheap.place.min(costly.place).max(now).saturating_add(1));
    }
    // The lines idle / class cross at most once more, where the expensive entry drops below.
    let (younger, older) = (wide(cheap.class, old), wide(costly.class, new));
    // A class may meet itself after changing its leaf, until both leaves are replayed.
    if younger <= older || cheap.class == costly.class {
        return (true, Nanos::MAX);
    }
    // The lead shrinks by the difference of classes per nanosecond.
    let (lead, gap) = (younger - older, u128::from(costly.class - cheap.class));
    let rest = Nanos::try_from(lead.div_ceil(gap)).unwrap_or(Nanos::MAX);
    (false, now.saturating_add(rest))
}

fn wide(a: u64, b: u64) -> u128 {
    u128::from(a) * u128::from(b)
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use proptest::prelude::*;

    use super::{EMPTY, Tournament, Winner, duel};
    use crate::policy::{Entry, Order, by_name};

    fn compare(a: &Entry, b: &Entry, now: u64) -> Ordering {
        let policy = by_name("flat", true).expect("a known name");
        policy.compare(a, b, now)
    }

    fn entry() -> impl Strategy<Value = Entry> {
        let class = prop_oneof![3 => 0..9u64, 2 => 0..5000u64, 1 => (1u64 << 62) - 29..=1 << 62];
        let place = prop_oneof![3 => 0..40u64, 2 => 0..5000u64, 1 => u64::MAX - 9..=u64::MAX];
        (class, place, 0..3u32, 0..50u32).prop_map(|(class, place, tie, id)| Entry {
            class,
            place,
            tie,
            id,
        })
    }

    fn time() -> impl Strategy<Value = u64> {
        let ends = u64::MAX - 9..=u64::MAX;
        prop_oneof![4 => 0..60u64, 3 => 0..20_000u64, 1 => any::<u64>(), 1 => ends]
    }

    fn node(entry: &Entry) -> Winner {
        Winner { class: entry.class, place: entry.place, leaf: entry.id, ..EMPTY }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// The winner matches the policy's comparison until `fail`. Then the order has changed
        /// unless an entry was at zero idle time.
        #[test]
        fn a_duel_is_right_until_it_fails(a in entry(), b in entry(), now in time()) {
            prop_assume!(a.class != b.class);
            let (cheap, costly) = if a.class < b.class { (a, b) } else { (b, a) };
            let (first, until) = duel(&node(&cheap), &node(&costly), now);
            prop_assert_eq!(first, compare(&cheap, &costly, now).is_lt());
            prop_assert!(until > now || until == u64::MAX);
            for later in [now, now + (until - now) / 2, until - 1] {
                prop_assert_eq!(first, compare(&cheap, &costly, later.max(now)).is_lt());
            }
            if until < u64::MAX && now > a.place && now > b.place {
                prop_assert_ne!(first, compare(&cheap, &costly, until).is_lt());
            }
        }

        /// Heads are set, changed and removed, while time stays, jumps and runs back.
        #[test]
        fn the_winner_is_the_minimum(
            ops in prop::collection::vec((0..20u32, prop::option::of(entry()), time()), 1..80),
            ascending: bool,
            priorities in prop::collection::vec(prop::sample::select(vec![0, 35, 35, 80]), 20),
        ) {
            let mut tournament = Tournament::new(Order::Value);
            let mut heads: Vec<Option<Entry>> = vec![None; 20];
            let mut times: Vec<u64> = ops.iter().map(|op| op.2).collect();
            if ascending {
                times.sort_unstable();
            }
            for ((leaf, head, _), now) in ops.into_iter().zip(times) {
                let class = |e: Entry| e.class / 20 * 20 + u64::from(leaf);
                let head = head.map(|e| Entry { class: class(e), ..e });
                tournament.set(leaf, head.as_ref(), priorities[leaf as usize]);
                heads[leaf as usize] = head;
                let some = (0..).zip(&heads).filter_map(|(leaf, head)| Some((leaf, head.as_ref()?)));
                let least = some.min_by(|a, b| {
                    let priority = |leaf: u32| priorities[leaf as usize];
                    priority(a.0).cmp(&priority(b.0)).then_with(|| compare(a.1, b.1, now))
                });
                let least = least.map(|(leaf, _)| leaf);
                let least = least.map(|leaf| (leaf, heads[leaf as usize].expect("it won").class));
                prop_assert_eq!(tournament.winner(now), least);
                prop_assert_eq!(tournament.winner(now), least);
            }
        }
    }

    #[test]
    fn places_change_at_the_crossing_and_not_before() {
        let cheap = Winner { class: 1, place: 90, leaf: 0, ..EMPTY };
        let costly = Winner { class: 4, place: 0, leaf: 1, ..EMPTY };
        // 1 / (t - 90) reaches 4 / t at 120.
        let at = |now| duel(&cheap, &costly, now);
        assert_eq!((at(100), at(119)), ((false, 120), (false, 120)));
        assert_eq!((at(120), at(0)), ((true, u64::MAX), (true, 1)));
    }
}
