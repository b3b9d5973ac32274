//! Ends of lists for [`Order::Ends`](crate::policy::Order::Ends): the first end of each list to
//! leave, and its worth.
//!
//! The worth of a list is recomputed when one of its ends changes, and when the policy declares it
//! due. Invariant: ends and worth of a list are current unless it is stale. Cost: O(1) per changed
//! end. A victim costs a comparison of numbers per list.

use std::cmp::Ordering;

use crate::policy::{Entry, Key, Policy};
use crate::time::Nanos;
use crate::visits;

use super::list::List;
use super::tournament::Leaf;

/// Rank of a list without entries.
const EMPTY: i64 = i64::MAX;

/// An end of a list.
#[derive(Clone, Copy, Debug)]
struct End {
    key: Key,
    /// Rank of the worth, in the same order as the worth.
    rank: i64,
    /// First request at which the worth may differ.
    due: u64,
}

/// Cached state of a list.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// First and last entry, and the first of them to leave. `None` if the list is empty.
    ends: Option<([End; 2], Entry)>,
    /// Whether its ends changed.
    stale: bool,
}

/// First end to leave, for each list.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// By list: the minimum rank of its ends.
    ranks: Vec<i64>,
    known: Vec<Known>,
    /// By list: first request at which the worth of an end may differ.
    dues: Vec<u64>,
    /// Stale lists.
    stale: Vec<Leaf>,
    /// Number of the latest request.
    request: u64,
    /// First request at which any list is due.
    due: u64,
}

impl Ends {
    /// Assigns this number to an empty list of a new class.
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

    /// Marks a list as stale.
    fn change(&mut self, leaf: Leaf) {
        let at = leaf as usize;
        if !std::mem::replace(&mut self.known[at].stale, true) {
            self.stale.push(leaf);
        }
    }

    /// Handles the link of an entry into a list.
    pub(super) fn link(&mut self, leaf: Leaf, key: Key) {
        let ends = self.known[leaf as usize].ends;
        if ends.is_none_or(|([first, last], _)| key < first.key || key > last.key) {
            self.change(leaf);
        }
    }

    /// Handles the unlinking of an entry from a list.
    pub(super) fn unlink(&mut self, leaf: Leaf, key: Key) {
        let ends = self.known[leaf as usize].ends;
        if ends.is_some_and(|([first, last], _)| key == first.key || key == last.key) {
            self.change(leaf);
        }
    }

    /// Handles the start of a request. `all`: the worth of all entries may have changed.
    pub(super) fn begin_request(&mut self, request: u64, all: bool) {
        self.request = request;
        if all {
            visits::note(self.dues.len());
            self.due = 0;
            self.dues.fill(0);
            for (ends, _) in self.known.iter_mut().filter_map(|known| known.ends.as_mut()) {
                for end in ends {
                    end.due = 0;
                }
            }
        }
    }

    /// Updates all stale and due lists.
    fn update_stale(&mut self, lists: &[List], policy: &dyn Policy, now: Nanos) {
        if self.due <= self.request {
            self.due = u64::MAX;
            visits::note(self.dues.len());
            for (leaf, &due) in (0..).zip(&self.dues) {
                if due > self.request {
                    self.due = self.due.min(due);
                } else if !std::mem::replace(&mut self.known[leaf as usize].stale, true) {
                    self.stale.push(leaf);
                }
            }
        }
        while let Some(leaf) = self.stale.pop() {
            visits::note(1);
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

    /// An end of a list of this class, reused from `before` if it is there and not due.
    fn end(&self, key: Key, class: u64, before: Option<[End; 2]>, policy: &dyn Policy) -> End {
        let same = |end: &End| end.key == key && end.due > self.request;
        before.into_iter().flatten().find(same).unwrap_or_else(|| {
            let entry = key.entry(class);
            let (worth, lasts) = policy.worth(&entry);
            End { key, rank: rank(worth), due: self.request.saturating_add(lasts) }
        })
    }

    /// The first end to leave over all lists.
    pub(super) fn victim(
        &mut self,
        lists: &[List],
        policy: &dyn Policy,
        now: Nanos,
    ) -> Option<Entry> {
        self.update_stale(lists, policy, now);
        visits::note(self.ranks.len());
        let (mut least, mut first) = (EMPTY, None);
        for (&rank, known) in self.ranks.iter().zip(&self.known) {
            // Most lists lose by rank.
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

    /// Whether an unlinked entry would be the victim if it were linked. `leaf` is the list of its
    /// class, if any.
    pub(super) fn leads(
        &mut self,
        lists: &[List],
        leaf: Option<Leaf>,
        entry: &Entry,
        policy: &dyn Policy,
        now: Nanos,
    ) -> bool {
        self.update_stale(lists, policy, now);
        let own = (rank(policy.worth(entry).0), entry);
        if let Some(([first, last], _)) = leaf.and_then(|leaf| self.known[leaf as usize].ends) {
            let key = entry.key();
            // It would replace an end of its list. The opposite end stays.
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

/// Integer rank in the total order of worths, below [`EMPTY`].
fn rank(worth: f64) -> i64 {
    let bits = worth.to_bits().cast_signed();
    bits ^ ((bits >> 63).cast_unsigned() >> 1).cast_signed()
}

/// Whether `a` leaves before `b`: by rank, and for equal ranks by the policy.
fn precedes(a: (i64, &Entry), b: (i64, &Entry), policy: &dyn Policy, now: Nanos) -> bool {
    match a.0.cmp(&b.0) {
        Ordering::Less => true,
        Ordering::Equal => policy.compare(a.1, b.1, now).is_lt(),
        Ordering::Greater => false,
    }
}
