//! The entries of one class in the order of leaving.
//!
//! What comes in that order, as uses do, is appended to a chain in O(1); what comes late, as a
//! block whose last child left, goes into an ordered set. Invariant: the chain ascends, and an
//! entry is in one of the two. Cost: O(1) in order and before the first, O(log n) otherwise; eight
//! bytes per entry for the chain's links, which are the tier's.

use std::collections::BTreeSet;

use crate::block::BlockId;
use crate::policy::{Entry, Key};

use super::places::Places;

/// No block: the end of a chain.
const END: BlockId = BlockId::MAX;

/// Marks an entry that is in the set, not in the chain.
const ASIDE: BlockId = BlockId::MAX - 1;

/// An entry and its neighbours in the chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) entry: Entry,
    before: BlockId,
    after: BlockId,
}

/// One class.
#[derive(Clone, Debug)]
pub(super) struct List {
    first: BlockId,
    last: BlockId,
    aside: BTreeSet<Key>,
}

impl Default for List {
    fn default() -> Self {
        Self { first: END, last: END, aside: BTreeSet::new() }
    }
}

impl List {
    /// Links an entry that is not linked.
    pub(super) fn link(&mut self, places: &mut Places, entry: Entry) {
        let (first, last) = (self.first, self.last);
        let key = entry.key();
        if places.get_mut(last).is_none_or(|place| place.entry.key() < key) {
            places.insert(Place { entry, before: last, after: END });
            match places.get_mut(last) {
                Some(place) => place.after = entry.id,
                None => self.first = entry.id,
            }
            self.last = entry.id;
        } else if let Some(place) = places.get_mut(first).filter(|place| key < place.entry.key()) {
            place.before = entry.id;
            places.insert(Place { entry, before: END, after: first });
            self.first = entry.id;
        } else {
            self.aside.insert(key);
            places.insert(Place { entry, before: ASIDE, after: ASIDE });
        }
    }

    /// Takes a place out that was just removed from `places`.
    pub(super) fn unlink(&mut self, places: &mut Places, place: Place) {
        let Place { entry, before, after } = place;
        if before == ASIDE {
            self.aside.remove(&entry.key());
            return;
        }
        match places.get_mut(before) {
            Some(place) => place.after = after,
            None => self.first = after,
        }
        match places.get_mut(after) {
            Some(place) => place.before = before,
            None => self.last = before,
        }
    }

    /// The entry that leaves first.
    pub(super) fn head(&self, places: &Places) -> Option<Key> {
        let chain = places.get(self.first).map(|place| place.entry.key());
        match (chain, self.aside.first().copied()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Whether a place that was just removed from `places` is that of the entry that leaves first.
    pub(super) fn heads(&self, places: &Places, place: &Place) -> bool {
        let (key, aside) = (place.entry.key(), self.aside.first());
        if place.before == ASIDE {
            let chain = places.get(self.first);
            return aside == Some(&key) && chain.is_none_or(|first| key < first.entry.key());
        }
        self.first == place.entry.id && aside.is_none_or(|aside| key < *aside)
    }

    /// All entries, ascending.
    pub(super) fn keys<'a>(&'a self, places: &'a Places) -> Keys<'a> {
        let (first, last) = (self.first, self.last);
        Keys { places, first, last, aside: self.aside.iter() }
    }
}

/// The entries of a class from both ends.
pub(super) struct Keys<'a> {
    places: &'a Places,
    first: BlockId,
    last: BlockId,
    aside: std::collections::btree_set::Iter<'a, Key>,
}

impl Keys<'_> {
    fn chained(&self, id: BlockId) -> Option<Key> {
        self.places.get(id).map(|place| place.entry.key())
    }

    /// The chain has been gone through from one end to the other.
    fn end(&mut self) {
        (self.first, self.last) = (END, END);
    }
}

impl Iterator for Keys<'_> {
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
            self.first = self.places.get(self.first).map_or(END, |place| place.after);
        }
        Some(key)
    }
}

impl DoubleEndedIterator for Keys<'_> {
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
            self.last = self.places.get(self.last).map_or(END, |place| place.before);
        }
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::List;
    use crate::policy::{Entry, Key};
    use crate::retention::places::Places;

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
                    list.link(&mut places, entry);
                    model.insert(entry.key());
                }
                prop_assert_eq!(list.head(&places), model.first().copied());
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
            list.link(&mut places, Entry { class: 0, place: u64::from(id), tie: 0, id });
        }
        list.link(&mut places, Entry { class: 0, place: 0, tie: 0, id: 0 });
        assert!(list.aside.is_empty());
        list.link(&mut places, Entry { class: 0, place: 3, tie: 1, id: 8 });
        assert_eq!(list.aside.len(), 1);
        for id in [0, 7] {
            let place = places.remove(id).expect("linked");
            list.unlink(&mut places, place);
        }
        assert_eq!(list.keys(&places).map(|key| key.id).collect::<Vec<_>>(), [1, 2, 3, 8, 4, 5, 6]);
    }
}
