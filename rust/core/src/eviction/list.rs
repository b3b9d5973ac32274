//! Ordered list of a class's entries: a doubly linked chain, and a B-tree for stragglers.
//!
//! Entries mostly arrive in the order of leaving (uses), or as a run of neighbours in the reverse
//! order (blocks of a released path). The first kind is appended, the second kind is inserted next
//! to the latest entry. Stragglers, for example a block after the removal of its last child, go
//! into a B-tree. Invariant: the chain ascends, and each entry is in the chain or in the tree.
//! Cost: O(1) at both ends of the chain and next to the latest entry, otherwise O(log n). 24 bytes
//! per entry, 40 to 60 in the tree.

use std::collections::BTreeSet;
use std::collections::btree_set;

use crate::block::BlockId;
use crate::policy::Key;

use super::entries::Entries;
use super::link::{Link, NONE};
use super::tournament::Leaf;

/// Value of `before` of an entry in the tree.
const IN_TREE: BlockId = BlockId::MAX - 1;

/// The key of no entry.
const NO_KEY: Key = Key { place: u64::MAX, tie: u32::MAX, id: NONE };

/// The entries of a class.
#[derive(Clone, Debug)]
pub(super) struct List {
    /// The class.
    pub(super) class: u64,
    /// First and last entry of the chain, or [`NO_KEY`].
    first: Key,
    last: Key,
    /// The latest entry linked into the chain, or a neighbour of it if it has left.
    latest: BlockId,
    tree: BTreeSet<Key>,
}

impl List {
    /// An empty list.
    pub(super) fn new(class: u64) -> Self {
        Self { class, first: NO_KEY, last: NO_KEY, latest: NONE, tree: BTreeSet::new() }
    }

    /// Links an unlinked entry. `leaf` is the leaf of this class.
    pub(super) fn link(&mut self, entries: &mut Entries, key: Key, leaf: Leaf) {
        let link = Link::new(key, leaf);
        // A new use comes last. A block exposed late may come first.
        let (before, after) = if self.first == NO_KEY || self.last < key {
            (self.last.id, NONE)
        } else if key < self.first {
            (NONE, self.first.id)
        } else if let Some(gap) = self.gap_beside_latest(entries, key) {
            gap
        } else {
            // A straggler: the walk along the chain to its place could be long.
            entries.insert(key.id, Link { before: IN_TREE, ..link });
            self.tree.insert(key);
            return;
        };
        entries.insert(key.id, Link { before, after, ..link });
        self.join(entries, before, key);
        self.join_back(entries, after, key);
        self.latest = key.id;
    }

    /// The neighbours of the gap directly before or after the latest entry, if the key belongs
    /// there.
    fn gap_beside_latest(&self, entries: &Entries, key: Key) -> Option<(BlockId, BlockId)> {
        let latest = entries[self.latest];
        // The key is between the chain's ends, so the neighbour on its side exists.
        if key < latest.key(self.latest) {
            let before = latest.before;
            (entries[before].key(before) < key).then_some((before, self.latest))
        } else {
            let after = latest.after;
            (key < entries[after].key(after)).then_some((self.latest, after))
        }
    }

    /// Makes `key`, or the chain's end if it is [`NO_KEY`], the successor of `before`.
    fn join(&mut self, entries: &mut Entries, before: BlockId, key: Key) {
        match before {
            NONE => self.first = key,
            before => entries[before].after = key.id,
        }
    }

    /// Makes `key`, or the chain's end if it is [`NO_KEY`], the predecessor of `after`.
    fn join_back(&mut self, entries: &mut Entries, after: BlockId, key: Key) {
        match after {
            NONE => self.last = key,
            after => entries[after].before = key.id,
        }
    }

    /// Unlinks an entry that was just removed from `entries`.
    pub(super) fn unlink(&mut self, entries: &mut Entries, key: Key, link: Link) {
        let Link { before, after, .. } = link;
        if before == IN_TREE {
            self.tree.remove(&key);
            return;
        }
        let key_of = |entries: &Entries, id| if id == NONE { NO_KEY } else { entries[id].key(id) };
        // The neighbour's key is needed at the end of the chain only. Elsewhere its id is enough.
        let after_key = key_of(entries, after);
        let ahead =
            if after == NONE { key_of(entries, before) } else { Key { id: before, ..NO_KEY } };
        self.join(entries, before, after_key);
        self.join_back(entries, after, ahead);
        // Keep an entry nearby, so the search for the next gap starts here.
        if self.latest == key.id {
            self.latest = if after == NONE { before } else { after };
        }
    }

    /// Key of the first entry to leave.
    pub(super) fn head(&self) -> Option<Key> {
        let chain = Some(self.first).filter(|_| self.first != NO_KEY);
        match (chain, self.tree.first().copied()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Keys of the first and the last entry.
    pub(super) fn ends(&self) -> Option<(Key, Key)> {
        let first = self.head()?;
        let chain = Some(self.last).filter(|_| self.last != NO_KEY);
        let last = chain.max(self.tree.last().copied())?;
        Some((first, last))
    }

    /// All keys, ascending.
    pub(super) fn keys<'a>(&'a self, entries: &'a Entries) -> Keys<'a> {
        Keys { entries, first: self.first.id, last: self.last.id, tree: self.tree.iter() }
    }
}

/// Iterator over a class's keys from both ends: a merge of chain and tree.
pub(super) struct Keys<'a> {
    entries: &'a Entries,
    first: BlockId,
    last: BlockId,
    tree: btree_set::Iter<'a, Key>,
}

impl Keys<'_> {
    fn chained(&self, id: BlockId) -> Option<Key> {
        (id != NONE).then(|| self.entries[id].key(id))
    }

    /// Marks the rest of the chain as empty.
    fn end_chain(&mut self) {
        (self.first, self.last) = (NONE, NONE);
    }
}

impl Iterator for Keys<'_> {
    type Item = Key;

    fn next(&mut self) -> Option<Key> {
        let chained = self.chained(self.first);
        if let (Some(chain), Some(&tree)) = (chained, self.tree.clone().next())
            && tree < chain
        {
            return self.tree.next().copied();
        }
        let Some(key) = chained else { return self.tree.next().copied() };
        if self.first == self.last {
            self.end_chain();
        } else {
            self.first = self.entries[self.first].after;
        }
        Some(key)
    }
}

impl DoubleEndedIterator for Keys<'_> {
    fn next_back(&mut self) -> Option<Key> {
        let chained = self.chained(self.last);
        if let (Some(chain), Some(&tree)) = (chained, self.tree.clone().next_back())
            && tree > chain
        {
            return self.tree.next_back().copied();
        }
        let Some(key) = chained else { return self.tree.next_back().copied() };
        if self.first == self.last {
            self.end_chain();
        } else {
            self.last = self.entries[self.last].before;
        }
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::List;
    use crate::block::BlockId;
    use crate::eviction::entries::Entries;
    use crate::policy::Key;

    /// Links a key, or unlinks the block's entry if it has one.
    fn toggle(list: &mut List, entries: &mut Entries, key: Key) -> Option<Key> {
        let Some(link) = entries.remove(key.id) else {
            list.link(entries, key, 0);
            return None;
        };
        let old = link.key(key.id);
        list.unlink(entries, old, link);
        Some(old)
    }

    proptest! {
        #[test]
        fn a_list_is_an_ordered_set(
            ops in prop::collection::vec((0..30u32, 0..12u64, 0..3u32), 0..100),
            ends in prop::collection::vec(any::<bool>(), 0..40),
        ) {
            let mut entries = Entries::new();
            let (mut list, mut model) = (List::new(5), BTreeSet::new());
            for (id, place, tie) in ops {
                let key = Key { place, tie, id };
                match toggle(&mut list, &mut entries, key) {
                    Some(old) => prop_assert!(model.remove(&old)),
                    None => prop_assert!(model.insert(key)),
                }
                prop_assert_eq!(list.head(), model.first().copied());
                prop_assert_eq!(entries.len(), model.len());
                let keys: Vec<Key> = list.keys(&entries).collect();
                prop_assert_eq!(keys, model.iter().copied().collect::<Vec<_>>());
            }
            let (mut keys, mut expected) = (list.keys(&entries), model.iter().copied());
            for front in ends {
                let (ours, theirs) = if front {
                    (keys.next(), expected.next())
                } else {
                    (keys.next_back(), expected.next_back())
                };
                prop_assert_eq!(ours, theirs);
            }
        }
    }

    fn ids(list: &List, entries: &Entries) -> Vec<BlockId> {
        list.keys(entries).map(|key| key.id).collect()
    }

    #[test]
    fn entries_in_order_and_runs_in_reverse_are_chained() {
        let mut entries = Entries::new();
        let mut list = List::new(0);
        let mut add = |list: &mut List, place, tie, id| {
            toggle(list, &mut entries, Key { place, tie, id });
        };
        for id in 1..8 {
            add(&mut list, u64::from(id), 0, id);
        }
        add(&mut list, 0, 0, 0);
        // Paths of blocks, the last block first.
        for (path, block) in [8, 9].into_iter().flat_map(|path| [(path, 3), (path, 2), (path, 1)]) {
            add(&mut list, path, block, u32::try_from(path).expect("small") * 10 + block);
        }
        assert!(list.tree.is_empty());
        add(&mut list, 3, 1, 99);
        assert_eq!(list.tree.len(), 1);
        for id in [0, 93, 82] {
            toggle(&mut list, &mut entries, Key { place: 0, tie: 0, id });
        }
        assert_eq!(ids(&list, &entries), [1, 2, 3, 99, 4, 5, 6, 7, 81, 83, 91, 92]);
    }
}
