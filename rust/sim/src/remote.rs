//! Store shared by all machines as their last tier.
//!
//! The store holds block keys in one LRU pool and knows no prefixes. Writes and hits are uses.
//! Among blocks found together, the last block of the prompt is evicted first. A machine finds
//! blocks of different writers `latency_ns` after the write. Invariant: at most `room` blocks.
//! Cost: O(log blocks) per use.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvtrie_core::{BlockKey, Nanos};
use rustc_hash::FxHashMap;

use crate::event::MachineId;

/// Blocks of the shared store visible to a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lookup {
    /// All blocks.
    #[default]
    All,
    /// Blocks written by the machine.
    Local,
}

/// A stored block.
#[derive(Debug)]
struct Stored {
    /// Time of the first write.
    at: Nanos,
    /// Writers of the block.
    writers: Vec<MachineId>,
    /// Sequence number of the last use.
    used: u64,
}

/// Store of all machines.
#[derive(Debug)]
pub struct RemoteStore {
    room: usize,
    latency: Nanos,
    lookup: Lookup,
    blocks: FxHashMap<BlockKey, Stored>,
    /// Blocks by the sequence number of their last use.
    uses: BTreeMap<u64, BlockKey>,
    used: u64,
    evicted: u64,
}

impl RemoteStore {
    /// Create an empty store for `room` blocks.
    #[must_use]
    pub fn new(room: usize, latency: Nanos, lookup: Lookup) -> Self {
        let (blocks, uses) = (FxHashMap::default(), BTreeMap::new());
        Self { room, latency, lookup, blocks, uses, used: 0, evicted: 0 }
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the store is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Number of evicted blocks.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Whether a machine finds a block.
    #[must_use]
    pub fn finds(&self, key: &BlockKey, machine: MachineId, now: Nanos) -> bool {
        self.blocks.get(key).is_some_and(|block| {
            let seen = self.lookup == Lookup::All && block.at.saturating_add(self.latency) <= now;
            seen || block.writers.contains(&machine)
        })
    }

    /// Record a hit of the blocks of a prompt, in prompt order.
    pub fn touch(&mut self, keys: &[BlockKey]) {
        for key in keys.iter().rev() {
            if let Some(block) = self.blocks.get_mut(key) {
                self.uses.remove(&block.used);
                self.used += 1;
                block.used = self.used;
                self.uses.insert(self.used, *key);
            }
        }
    }

    /// Add a block written by a machine, and evict while the store is over its capacity.
    pub fn put(&mut self, key: BlockKey, machine: MachineId, now: Nanos) {
        let new = || Stored { at: now, writers: Vec::new(), used: 0 };
        let block = self.blocks.entry(key).or_insert_with(new);
        if !block.writers.contains(&machine) {
            block.writers.push(machine);
        }
        self.touch(&[key]);
        while self.blocks.len() > self.room
            && let Some((_, oldest)) = self.uses.pop_first()
        {
            self.blocks.remove(&oldest);
            self.evicted += 1;
        }
    }
}

/// Handle to a store shared by all machines.
#[derive(Clone, Debug)]
pub struct SharedStore(Arc<Mutex<RemoteStore>>);

impl SharedStore {
    /// Wrap a store for sharing.
    #[must_use]
    pub fn new(store: RemoteStore) -> Self {
        Self(Arc::new(Mutex::new(store)))
    }

    /// Lock the store.
    pub fn get(&self) -> MutexGuard<'_, RemoteStore> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{Lookup, RemoteStore};

    fn key(name: u8) -> [u8; 32] {
        [name; 32]
    }

    fn has(store: &RemoteStore, names: &[u8]) -> Vec<bool> {
        names.iter().map(|&name| store.finds(&key(name), 0, 100)).collect()
    }

    #[test]
    fn the_least_recently_used_block_leaves_first() {
        let mut store = RemoteStore::new(3, 0, Lookup::All);
        for name in [1, 2, 3] {
            store.put(key(name), 0, 0);
        }
        // Found together: 2 is used after 1's last use, and 3 leaves before it.
        store.touch(&[key(1), key(2)]);
        store.put(key(4), 0, 1);
        assert_eq!(has(&store, &[1, 2, 3, 4]), [true, true, false, true]);
        store.put(key(5), 0, 2);
        assert_eq!(has(&store, &[1, 2, 4, 5]), [true, false, true, true]);
        // A second write is a use.
        store.put(key(4), 0, 3);
        store.put(key(6), 0, 4);
        assert_eq!(has(&store, &[1, 4, 5, 6]), [false, true, true, true]);
        assert_eq!((store.len(), store.evicted(), store.is_empty()), (3, 3, false));
    }

    #[test]
    fn others_find_a_block_after_the_latency_and_its_writers_at_once() {
        let mut store = RemoteStore::new(3, 10, Lookup::All);
        store.put(key(1), 0, 5);
        let seen = |store: &RemoteStore, by, now| store.finds(&key(1), by, now);
        assert_eq!([5, 14, 15].map(|now| seen(&store, 0, now)), [true; 3]);
        assert_eq!([5, 14, 15].map(|now| seen(&store, 1, now)), [false, false, true]);
        // The time of the first write counts.
        store.put(key(1), 2, 12);
        assert_eq!([14, 15].map(|now| seen(&store, 1, now)), [false, true]);
        assert!(seen(&store, 2, 12));
    }

    #[test]
    fn local_finds_only_what_the_machine_wrote() {
        let mut store = RemoteStore::new(1, 0, Lookup::Local);
        store.put(key(1), 0, 0);
        let seen = |store: &RemoteStore| [0, 1].map(|by| store.finds(&key(1), by, 100));
        assert_eq!(seen(&store), [true, false]);
        store.put(key(1), 1, 0);
        assert_eq!(seen(&store), [true, true]);
        // After eviction and a second write, a block has new writers.
        store.put(key(2), 0, 0);
        store.put(key(1), 1, 0);
        assert_eq!(seen(&store), [false, true]);
    }
}
