//! The minimum over the heads of all classes, as time goes by: a kinetic tournament.
//!
//! Every node of a binary tree keeps the winner of its two sides and the first time at which that
//! may be another one, `fail`: the earlier of its sides' and the time at which the two winners
//! change places, an integer. Invariant: a node's `fail` is at most that of its sides, and from the
//! last query on until `fail` the node is right. Cost: a query that no `fail` lies before is O(1); a
//! head that changes costs O(log classes), and so does each change of places; 64 bytes per class.

use crate::hint::{NORMAL, Priority};
use crate::policy::{Entry, Order};
use crate::time::Nanos;

/// A class's place in the tree.
pub(super) type Leaf = u32;

/// Names no class: an empty side.
const NOBODY: Leaf = Leaf::MAX;

/// The winner of a part of the tree. Priorities or classes differ, so ties between entries do not matter
/// here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Winner {
    fail: Nanos,
    class: u64,
    place: u64,
    slot: Leaf,
    priority: Priority,
}

/// The two sides of a node, in one line of memory.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Sides([Winner; 2]);

const EMPTY: Winner =
    Winner { fail: Nanos::MAX, class: 0, place: 0, slot: NOBODY, priority: NORMAL };

/// The heads of all classes.
#[derive(Clone, Debug)]
pub(super) struct Tournament {
    order: Order,
    /// By node: its sides. Node 1 is the root, the sides of `n` are `2n` and `2n + 1`; those that
    /// have none themselves are the slots.
    sides: Vec<Sides>,
    /// The time of the last query.
    seen: Nanos,
    /// Classes whose heads changed since: what went and came back costs nothing.
    changed: Vec<Leaf>,
}

impl Tournament {
    /// Nobody yet; `order` is by value or by rank.
    pub(super) fn new(order: Order) -> Self {
        Self { order, sides: vec![Sides([EMPTY; 2])], seen: 0, changed: Vec::new() }
    }

    /// The head of a class is now this one; `None` if the class is empty.
    pub(super) fn set(&mut self, slot: Leaf, head: Option<&Entry>, priority: Priority) {
        if slot as usize >= self.sides.len() {
            self.grow(slot as usize + 1);
        }
        let at = self.sides.len() + slot as usize;
        *self.node_mut(at) = head.map_or(EMPTY, |head| Winner {
            fail: Nanos::MAX,
            class: head.class,
            place: head.place,
            slot,
            priority,
        });
        if self.changed.last() != Some(&slot) {
            self.changed.push(slot);
        }
    }

    /// Plays again what a changed head takes part in.
    fn replay(&mut self, slot: Leaf) {
        let mut at = self.sides.len() + slot as usize;
        while at > 1 {
            at /= 2;
            let node = self.duel(at);
            let known = self.node_mut(at);
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

    /// Plays a node, whose sides are right.
    fn play(&mut self, at: usize) {
        *self.node_mut(at) = self.duel(at);
    }

    /// The class whose head is the minimum of all, with its place in the tree.
    pub(super) fn winner(&mut self, now: Nanos) -> Option<(Leaf, u64)> {
        let back = now < self.seen;
        self.seen = now;
        if back {
            (1..self.sides.len()).rev().for_each(|at| self.play(at));
            self.changed.clear();
        }
        while let Some(slot) = self.changed.pop() {
            self.replay(slot);
        }
        self.mend(1);
        let Winner { slot, class, .. } = *self.node(1);
        (slot != NOBODY).then_some((slot, class))
    }

    /// Makes a node right that has failed; so have those of its sides that are to blame.
    fn mend(&mut self, at: usize) {
        if self.node(at).fail <= self.seen && at < self.sides.len() {
            self.mend(2 * at);
            self.mend(2 * at + 1);
            self.play(at);
        }
    }

    /// A node from its two sides, as of the last query.
    fn duel(&self, at: usize) -> Winner {
        let Sides([left, right]) = &self.sides[at];
        if left.slot == NOBODY || right.slot == NOBODY {
            return if right.slot == NOBODY { *left } else { *right };
        }
        // Neither priorities nor places in one class change with time.
        let ever = left.priority != right.priority || left.class == right.class;
        if ever || self.order != Order::Value {
            let standing = |node: &Winner| (node.priority, node.class, node.place);
            let winner = if standing(left) < standing(right) { left } else { right };
            return Winner { fail: left.fail.min(right.fail), ..*winner };
        }
        let (cheap, dear) = if left.class < right.class { (left, right) } else { (right, left) };
        let (first, until) = duel(cheap, dear, self.seen);
        let winner = if first { cheap } else { dear };
        Winner { fail: left.fail.min(right.fail).min(until), ..*winner }
    }

    /// Room for so many classes.
    fn grow(&mut self, classes: usize) {
        let old = self.sides.len();
        let new = classes.next_power_of_two();
        let slots: Vec<Winner> = (old..2 * old).map(|at| *self.node(at)).collect();
        self.sides = vec![Sides([EMPTY; 2]); new];
        for (at, slot) in (new..).zip(slots) {
            *self.node_mut(at) = slot;
        }
        (1..new).rev().for_each(|at| self.play(at));
    }
}

/// Whether the cheap one of two leaves first at `now`, and the first time at which that may change.
fn duel(cheap: &Winner, dear: &Winner, now: Nanos) -> (bool, Nanos) {
    let (new, old) = (now.saturating_sub(cheap.place), now.saturating_sub(dear.place));
    // At zero idle time a value is infinite, even that of no cost.
    if new == 0 && (old == 0 || cheap.class == 0) {
        return (old == 0, cheap.place.min(dear.place).max(now).saturating_add(1));
    }
    // The lines idle / class cross at most once more: where the dear one falls behind.
    let (ahead, behind) = (wide(cheap.class, old), wide(dear.class, new));
    // A class that changed its slot meets itself until both slots are played again.
    if ahead <= behind || cheap.class == dear.class {
        return (true, Nanos::MAX);
    }
    // The lead shrinks by the difference of classes per nanosecond.
    let (lead, gap) = (ahead - behind, u128::from(dear.class - cheap.class));
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
    use crate::policy::{Entry, Order, Setup, by_name};

    fn compare(a: &Entry, b: &Entry, now: u64) -> Ordering {
        let policy = by_name("flat", Setup { reuse: true, capacity: 1 }).expect("a known name");
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
        Winner { class: entry.class, place: entry.place, slot: entry.id, ..EMPTY }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// The winner is that of the policy's comparison, until the time that is told, where the
        /// order has changed unless somebody was fresh.
        #[test]
        fn a_duel_is_right_until_it_fails(a in entry(), b in entry(), now in time()) {
            prop_assume!(a.class != b.class);
            let (cheap, dear) = if a.class < b.class { (a, b) } else { (b, a) };
            let (first, until) = duel(&node(&cheap), &node(&dear), now);
            prop_assert_eq!(first, compare(&cheap, &dear, now).is_lt());
            prop_assert!(until > now || until == u64::MAX);
            for later in [now, now + (until - now) / 2, until - 1] {
                prop_assert_eq!(first, compare(&cheap, &dear, later.max(now)).is_lt());
            }
            if until < u64::MAX && now > a.place && now > b.place {
                prop_assert_ne!(first, compare(&cheap, &dear, until).is_lt());
            }
        }

        /// Heads that come, change and go, at times that stand, jump and run back.
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
            for ((slot, head, _), now) in ops.into_iter().zip(times) {
                let class = |e: Entry| e.class / 20 * 20 + u64::from(slot);
                let head = head.map(|e| Entry { class: class(e), ..e });
                tournament.set(slot, head.as_ref(), priorities[slot as usize]);
                heads[slot as usize] = head;
                let some = (0..).zip(&heads).filter_map(|(slot, head)| Some((slot, head.as_ref()?)));
                let least = some.min_by(|a, b| {
                    let priority = |slot: u32| priorities[slot as usize];
                    priority(a.0).cmp(&priority(b.0)).then_with(|| compare(a.1, b.1, now))
                });
                let least = least.map(|(slot, _)| slot);
                let least = least.map(|slot| (slot, heads[slot as usize].expect("it won").class));
                prop_assert_eq!(tournament.winner(now), least);
                prop_assert_eq!(tournament.winner(now), least);
            }
        }
    }

    #[test]
    fn places_change_at_the_crossing_and_not_before() {
        let cheap = Winner { class: 1, place: 90, slot: 0, ..EMPTY };
        let dear = Winner { class: 4, place: 0, slot: 1, ..EMPTY };
        // 1 / (t - 90) reaches 4 / t at 120.
        let at = |now| duel(&cheap, &dear, now);
        assert_eq!((at(100), at(119)), ((false, 120), (false, 120)));
        assert_eq!((at(120), at(0)), ((true, u64::MAX), (true, 1)));
    }
}
