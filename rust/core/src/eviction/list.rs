//! The entries of one class in the order of leaving.
//!
//! What comes in that order, as uses do, is appended to a chain in O(1); what comes late, as a
//! block whose last child left, goes into an ordered set. Invariant: the chain ascends, and an
//! entry is in one of the two. Cost: O(1) in order and before the first, O(log n) otherwise; a line of
//! memory per entry.

use std::collections::BTreeSet;

use crate::paged_slab::SlabIndex;
use crate::policy::{Entry, Key};

use super::places::Places;
use super::tournament::Leaf;

/// Behind the end of a chain.
const NOBODY: Link =
    Link { key: Key { place: u64::MAX, tie: u32::MAX, id: u32::MAX }, seat: SlabIndex::MAX };

/// Marks an entry that is in the set, not in the chain.
const ASIDE: SlabIndex = SlabIndex::MAX - 1;

/// An entry of the chain, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    key: Key,
    seat: SlabIndex,
}

/// An entry and its neighbours in the chain.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Place {
    pub(super) entry: Entry,
    /// The slot of its class.
    pub(super) slot: Leaf,
    /// Out of date in the first one of a chain.
    before: SlabIndex,
    after: Link,
}

impl Place {
    /// Nobody's.
    pub(super) fn vacant() -> Self {
        Self { entry: NOBODY.key.entry(0), slot: Leaf::MAX, before: NOBODY.seat, after: NOBODY }
    }
}

/// One class.
#[derive(Clone, Debug)]
pub(super) struct List {
    first: Link,
    last: Link,
    aside: BTreeSet<Key>,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NOBODY, last: NOBODY, aside: BTreeSet::new() }
    }
}

impl List {
    /// Links an entry that is not linked; `slot` is that of this class.
    pub(super) fn link(&mut self, places: &mut Places, entry: Entry, slot: Leaf) {
        let key = entry.key();
        let mut add =
            |before, after| Link { key, seat: places.insert(Place { entry, slot, before, after }) };
        if self.first == NOBODY {
            self.first = add(NOBODY.seat, NOBODY);
            self.last = self.first;
        } else if self.last.key < key {
            let link = add(self.last.seat, NOBODY);
            places[self.last.seat].after = link;
            self.last = link;
        } else if key < self.first.key {
            let link = add(NOBODY.seat, self.first);
            places[self.first.seat].before = link.seat;
            self.first = link;
        } else {
            add(ASIDE, NOBODY);
            self.aside.insert(key);
        }
    }

    /// Takes a place out that was just removed from `places`. The first one's neighbour, which may
    /// not have been looked at for long, is left as it is.
    pub(super) fn unlink(&mut self, places: &mut Places, place: Place) {
        let Place { entry, before, after, .. } = place;
        if before == ASIDE {
            self.aside.remove(&entry.key());
        } else if entry.id == self.first.key.id {
            self.first = after;
            if after == NOBODY {
                self.last = NOBODY;
            }
        } else {
            let earlier = &mut places[before];
            earlier.after = after;
            if after == NOBODY {
                self.last = Link { key: earlier.entry.key(), seat: before };
            } else {
                places[after.seat].before = before;
            }
        }
    }

    /// The entry that leaves first.
    pub(super) fn head(&self) -> Option<Key> {
        let chain = Some(self.first.key).filter(|_| self.first != NOBODY);
        match (chain, self.aside.first().copied()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// All entries, ascending.
    pub(super) fn keys<'a>(&'a self, places: &'a Places) -> EntryKeys<'a> {
        let (first, last) = (self.first.seat, self.last.seat);
        EntryKeys { places, first, last, aside: self.aside.iter() }
    }
}

/// The entries of a class from both ends.
pub(super) struct EntryKeys<'a> {
    places: &'a Places,
    first: SlabIndex,
    last: SlabIndex,
    aside: std::collections::btree_set::Iter<'a, Key>,
}

impl EntryKeys<'_> {
    fn chained(&self, seat: SlabIndex) -> Option<Key> {
        (seat != NOBODY.seat).then(|| self.places[seat].entry.key())
    }

    /// The chain has been gone through from one end to the other.
    fn end(&mut self) {
        (self.first, self.last) = (NOBODY.seat, NOBODY.seat);
    }
}

impl Iterator for EntryKeys<'_> {
    type Item = Key;

    fn next(&mut self) -> Option<Key> {
        let chained = self.chained(self.first);
        if let (Some(chain), Some(&aside)) = (chained, self.aside.clone().next())
            && aside < chain
        {
            return self.aside.next().copied();
        }
        let Some(key) = chained else { return self.aside.next().copied() };
        if self.first == self.last {
            self.end();
        } else {
            self.first = self.places[self.first].after.seat;
        }
        Some(key)
    }
}

impl DoubleEndedIterator for EntryKeys<'_> {
    fn next_back(&mut self) -> Option<Key> {
        let chained = self.chained(self.last);
        if let (Some(chain), Some(&aside)) = (chained, self.aside.clone().next_back())
            && aside > chain
        {
            return self.aside.next_back().copied();
        }
        let Some(key) = chained else { return self.aside.next_back().copied() };
        if self.first == self.last {
            self.end();
        } else {
            self.last = self.places[self.last].before;
        }
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::List;
    use crate::eviction::places::Places;
    use crate::policy::{Entry, Key};

    proptest! {
        #[test]
        fn a_list_is_an_ordered_set(
            ops in prop::collection::vec((0..30u32, 0..12u64, 0..3u32), 0..100),
            cut in prop::collection::vec(any::<bool>(), 0..40),
        ) {
            let mut places = Places::new();
            let (mut list, mut model) = (List::default(), BTreeSet::new());
            for (id, place, tie) in ops {
                if let Some(place) = places.remove(id) {
                    list.unlink(&mut places, place);
                    prop_assert!(model.remove(&place.entry.key()));
                } else {
                    let entry = Entry { class: 5, place, tie, id };
                    list.link(&mut places, entry, 0);
                    model.insert(entry.key());
                }
                prop_assert_eq!(list.head(), model.first().copied());
                prop_assert_eq!(places.len(), model.len());
                let keys: Vec<Key> = list.keys(&places).collect();
                prop_assert_eq!(keys, model.iter().copied().collect::<Vec<_>>());
            }
            let (mut keys, mut expected) = (list.keys(&places), model.iter().copied());
            for front in cut {
                let (ours, theirs) = if front {
                    (keys.next(), expected.next())
                } else {
                    (keys.next_back(), expected.next_back())
                };
                prop_assert_eq!(ours, theirs);
            }
        }
    }

    #[test]
    fn what_comes_in_order_is_chained() {
        let mut places = Places::new();
        let mut list = List::default();
        for id in 1..8 {
            list.link(&mut places, Entry { class: 0, place: u64::from(id), tie: 0, id }, 0);
        }
        list.link(&mut places, Entry { class: 0, place: 0, tie: 0, id: 0 }, 0);
        assert!(list.aside.is_empty());
        list.link(&mut places, Entry { class: 0, place: 3, tie: 1, id: 8 }, 0);
        assert_eq!(list.aside.len(), 1);
        for id in [0, 7] {
            let place = places.remove(id).expect("linked");
            list.unlink(&mut places, place);
        }
        assert_eq!(list.keys(&places).map(|key| key.id).collect::<Vec<_>>(), [1, 2, 3, 8, 4, 5, 6]);
    }
}
