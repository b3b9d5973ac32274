//! Ends of lists under a rule of the policy's own: which end of each list leaves first, and its worth.
//!
//! A list's worth is computed when an end of the list changes, and again when the policy says that it
//! is due. Invariant: of a list that is not stale the ends and the worth are those of now. Cost: O(1)
//! per change of an end; a victim costs a look at one number per list.

use std::cmp::Ordering;

use crate::policy::{Entry, Key, Policy};
use crate::time::Nanos;

use super::list::List;
use super::tournament::Leaf;

/// Rank of a list without entries.
const EMPTY: i64 = i64::MAX;

/// An end of a list.
#[derive(Clone, Copy, Debug)]
struct End {
    key: Key,
    /// Rank of its worth, which orders as worths do.
    rank: i64,
    /// The request from which on its worth may be another one.
    due: u64,
}

/// What is known of a list.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// First and last entry, and the one of these that leaves first; none if the list is empty.
    ends: Option<([End; 2], Entry)>,
    /// Whether its ends changed.
    stale: bool,
}

/// The end of each list that leaves first.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// By list: the smaller rank of its ends.
    ranks: Vec<i64>,
    known: Vec<Known>,
    /// By list: the request from which on the worth of an end may be another one.
    dues: Vec<u64>,
    /// Lists that are stale.
    stale: Vec<Leaf>,
    /// Number of the latest request.
    request: u64,
    /// The first request at which the worth of a list is due.
    due: u64,
}

impl Ends {
    /// An empty list of another class has this number.
    pub(super) fn add(&mut self, leaf: Leaf) {
        let at = leaf as usize;
        if at >= self.known.len() {
            self.known.resize(at + 1, Known::default());
            self.ranks.resize(at + 1, EMPTY);
            self.dues.resize(at + 1, u64::MAX);
        }
        self.known[at].ends = None;
        self.change(leaf);
    }

    /// The ends of a list changed.
    fn change(&mut self, leaf: Leaf) {
        let at = leaf as usize;
        if !std::mem::replace(&mut self.known[at].stale, true) {
            self.stale.push(leaf);
        }
    }

    /// An entry is linked into a list.
    pub(super) fn link(&mut self, leaf: Leaf, key: Key) {
        let ends = self.known[leaf as usize].ends;
        if ends.is_none_or(|([first, last], _)| key < first.key || key > last.key) {
            self.change(leaf);
        }
    }

    /// An entry is unlinked from a list.
    pub(super) fn unlink(&mut self, leaf: Leaf, key: Key) {
        let ends = self.known[leaf as usize].ends;
        if ends.is_some_and(|([first, last], _)| key == first.key || key == last.key) {
            self.change(leaf);
        }
    }

    /// A request has begun. `all`: the worth of all entries may have changed.
    pub(super) fn begin_request(&mut self, request: u64, all: bool) {
        self.request = request;
        if all {
            self.due = 0;
            self.dues.fill(0);
            for (ends, _) in self.known.iter_mut().filter_map(|known| known.ends.as_mut()) {
                for end in ends {
                    end.due = 0;
                }
            }
        }
    }

    /// Brings all that is known up to date.
    fn settle(&mut self, lists: &[List], policy: &dyn Policy, now: Nanos) {
        if self.due <= self.request {
            self.due = u64::MAX;
            for (leaf, &due) in (0..).zip(&self.dues) {
                if due > self.request {
                    self.due = self.due.min(due);
                } else if !std::mem::replace(&mut self.known[leaf as usize].stale, true) {
                    self.stale.push(leaf);
                }
            }
        }
        while let Some(leaf) = self.stale.pop() {
            let (at, list) = (leaf as usize, &lists[leaf as usize]);
            let before = self.known[at].ends.map(|(ends, _)| ends);
            let ends = list.ends().map(|(head, tail)| {
                let [a, b] = [head, tail].map(|key| self.end(key, list.class, before, policy));
                let [oldest, youngest] = [a, b].map(|end| end.key.entry(list.class));
                let later = precedes((b.rank, &youngest), (a.rank, &oldest), policy, now);
                ([a, b], if later { youngest } else { oldest })
            });
            self.ranks[at] = ends.map_or(EMPTY, |([a, b], _)| a.rank.min(b.rank));
            self.known[at] = Known { ends, stale: false };
            self.dues[at] = ends.map_or(u64::MAX, |([a, b], _)| a.due.min(b.due));
            self.due = self.due.min(self.dues[at]);
        }
    }

    /// An end of a list of this class, taken from those known before if it is one of them.
    fn end(&self, key: Key, class: u64, before: Option<[End; 2]>, policy: &dyn Policy) -> End {
        let same = |end: &End| end.key == key && end.due > self.request;
        before.into_iter().flatten().find(same).unwrap_or_else(|| {
            let entry = key.entry(class);
            let (worth, lasts) = policy.worth(&entry);
            End { key, rank: rank(worth), due: self.request.saturating_add(lasts) }
        })
    }

    /// The end that leaves first.
    pub(super) fn victim(
        &mut self,
        lists: &[List],
        policy: &dyn Policy,
        now: Nanos,
    ) -> Option<Entry> {
        self.settle(lists, policy, now);
        let (mut least, mut first) = (EMPTY, None);
        for (&rank, known) in self.ranks.iter().zip(&self.known) {
            // Most lists lose by their ranks.
            if rank > least {
                continue;
            }
            if let Some((_, entry)) = &known.ends
                && first.is_none_or(|first| precedes((rank, entry), (least, first), policy, now))
            {
                (least, first) = (rank, Some(entry));
            }
        }
        first.copied()
    }

    /// Whether an entry that is not linked would be the victim if it were, in the list `leaf` if its
    /// class has one.
    pub(super) fn leads(
        &mut self,
        lists: &[List],
        leaf: Option<Leaf>,
        entry: &Entry,
        policy: &dyn Policy,
        now: Nanos,
    ) -> bool {
        self.settle(lists, policy, now);
        let own = (rank(policy.worth(entry).0), entry);
        if let Some(([first, last], _)) = leaf.and_then(|leaf| self.known[leaf as usize].ends) {
            let key = entry.key();
            // It replaces one end of its list; the other one stays.
            let other = if key < first.key {
                last
            } else if key > last.key {
                first
            } else {
                return false;
            };
            if precedes((other.rank, &other.key.entry(entry.class)), own, policy, now) {
                return false;
            }
        }
        !(0..).zip(self.ranks.iter().zip(&self.known)).any(|(at, (&rank, known))| {
            rank <= own.0
                && Some(at) != leaf
                && known
                    .ends
                    .as_ref()
                    .is_some_and(|(.., end)| precedes((rank, end), own, policy, now))
        })
    }
}

/// A number that orders as worths do by their total order, below [`EMPTY`].
fn rank(worth: f64) -> i64 {
    let bits = worth.to_bits().cast_signed();
    bits ^ ((bits >> 63).cast_unsigned() >> 1).cast_signed()
}

/// Whether `a` leaves before `b`: ranks are compared first, and where they are equal the policy
/// decides.
fn precedes(a: (i64, &Entry), b: (i64, &Entry), policy: &dyn Policy, now: Nanos) -> bool {
    match a.0.cmp(&b.0) {
        Ordering::Less => true,
        Ordering::Equal => policy.compare(a.1, b.1, now).is_lt(),
        Ordering::Greater => false,
    }
}
