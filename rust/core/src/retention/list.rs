//! The entries of one class in the order of leaving.
//!
//! What comes in that order, as uses do, is appended to a chain in O(1); what comes late, as a
//! block whose last child left, goes into an ordered set. Invariant: the chain ascends, and an
//! entry is in one of the two. Cost: O(1) in order, O(log n) out of it; eight bytes per block for
//! the chain's links, which are the tier's.

use std::collections::BTreeSet;

use crate::block::BlockId;
use crate::policy::{Entry, Key};

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

impl Place {
    /// A place without an entry; no block has this id.
    pub(super) const VACANT: Self =
        Self { entry: Entry { class: 0, place: 0, tie: 0, id: END }, before: END, after: END };

    /// Whether there is an entry.
    pub(super) fn taken(&self) -> bool {
        self.entry.id != END
    }
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
    /// Links an entry; its place is vacant.
    pub(super) fn link(&mut self, places: &mut [Place], entry: Entry) {
        let (at, last) = (entry.id as usize, self.last);
        if last != END && places[last as usize].entry.key() > entry.key() {
            self.aside.insert(entry.key());
            places[at] = Place { entry, before: ASIDE, after: ASIDE };
            return;
        }
        places[at] = Place { entry, before: last, after: END };
        match places.get_mut(last as usize) {
            Some(place) => place.after = entry.id,
            None => self.first = entry.id,
        }
        self.last = entry.id;
    }

    /// Takes an entry out and leaves its place vacant.
    pub(super) fn unlink(&mut self, places: &mut [Place], id: BlockId) {
        let Place { entry, before, after } = places[id as usize];
        places[id as usize] = Place::VACANT;
        if before == ASIDE {
            self.aside.remove(&entry.key());
            return;
        }
        match places.get_mut(before as usize) {
            Some(place) => place.after = after,
            None => self.first = after,
        }
        match places.get_mut(after as usize) {
            Some(place) => place.before = before,
            None => self.last = before,
        }
    }

    /// The entry that leaves first.
    pub(super) fn head(&self, places: &[Place]) -> Option<Key> {
        let chain = places.get(self.first as usize).map(|place| place.entry.key());
        match (chain, self.aside.first().copied()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// All entries, ascending.
    pub(super) fn keys<'a>(&'a self, places: &'a [Place]) -> Keys<'a> {
        let (first, last) = (self.first, self.last);
        Keys { places, first, last, aside: self.aside.iter() }
    }
}

/// The entries of a class from both ends.
pub(super) struct Keys<'a> {
    places: &'a [Place],
    first: BlockId,
    last: BlockId,
    aside: std::collections::btree_set::Iter<'a, Key>,
}

impl Keys<'_> {
    fn chained(&self, id: BlockId) -> Option<Key> {
        self.places.get(id as usize).map(|place| place.entry.key())
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
            self.first = self.places[self.first as usize].after;
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
            self.last = self.places[self.last as usize].before;
        }
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::{List, Place};
    use crate::policy::{Entry, Key};

    proptest! {
        #[test]
        fn a_list_is_an_ordered_set(
            ops in prop::collection::vec((0..30u32, 0..12u64, 0..3u32), 0..100),
            cut in prop::collection::vec(any::<bool>(), 0..40),
        ) {
            let mut places = vec![Place::VACANT; 30];
            let (mut list, mut model) = (List::default(), BTreeSet::new());
            for (id, place, tie) in ops {
                if places[id as usize].taken() {
                    let key = places[id as usize].entry.key();
                    list.unlink(&mut places, id);
                    prop_assert!(model.remove(&key));
                } else {
                    let entry = Entry { class: 5, place, tie, id };
                    list.link(&mut places, entry);
                    model.insert(entry.key());
                }
                prop_assert_eq!(list.head(&places), model.first().copied());
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
        let mut places = vec![Place::VACANT; 9];
        let mut list = List::default();
        for id in 0..8 {
            list.link(&mut places, Entry { class: 0, place: u64::from(id), tie: 0, id });
        }
        assert!(list.aside.is_empty());
        list.link(&mut places, Entry { class: 0, place: 3, tie: 1, id: 8 });
        assert_eq!(list.aside.len(), 1);
        list.unlink(&mut places, 0);
        list.unlink(&mut places, 7);
        assert_eq!(list.keys(&places).map(|key| key.id).collect::<Vec<_>>(), [1, 2, 3, 8, 4, 5, 6]);
    }
}
