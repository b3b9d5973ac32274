//! Where the linked entries are found: a table by block, in parts.
//!
//! Few blocks of a tier may leave at once, in leaf-only scopes the last ones of paths, so nothing
//! is kept for the others. Invariant: exactly the linked entries are here. Cost: O(1); no part gets
//! so large that its growth is felt.

use hashbrown::HashTable;
use rustc_hash::FxBuildHasher;
use std::hash::BuildHasher;

use crate::block::BlockId;

use super::list::Place;

const PARTS: usize = 64;

/// The entries of one tier.
#[derive(Clone, Debug)]
pub(super) struct Places {
    parts: Vec<HashTable<Place>>,
    len: usize,
}

impl Places {
    pub(super) fn new() -> Self {
        Self { parts: vec![HashTable::new(); PARTS], len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, id: BlockId) -> Option<&Place> {
        let key = hash(id);
        self.parts[part(key)].find(key, |place| place.entry.id == id)
    }

    fn get_mut(&mut self, id: BlockId) -> Option<&mut Place> {
        let key = hash(id);
        self.parts[part(key)].find_mut(key, |place| place.entry.id == id)
    }

    /// The place of a block that has one.
    pub(super) fn known(&mut self, id: BlockId) -> &mut Place {
        self.get_mut(id).expect("a linked neighbour")
    }

    /// Adds the place of a block that has none.
    pub(super) fn insert(&mut self, place: Place) {
        let key = hash(place.entry.id);
        self.parts[part(key)].insert_unique(key, place, |place| hash(place.entry.id));
        self.len += 1;
    }

    pub(super) fn remove(&mut self, id: BlockId) -> Option<Place> {
        let key = hash(id);
        let found = self.parts[part(key)].find_entry(key, |place| place.entry.id == id).ok()?;
        self.len -= 1;
        Some(found.remove().0)
    }
}

fn hash(id: BlockId) -> u64 {
    FxBuildHasher.hash_one(id)
}

fn part(key: u64) -> usize {
    (key >> 32) as usize % PARTS
}
