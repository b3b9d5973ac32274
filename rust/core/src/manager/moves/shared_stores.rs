//! Stores to a shared tier: blocks that wait to be written to a tier that several machines share.
//!
//! A write to such a tier may take any time, so a store to it can be dropped until a worker begins to read its
//! source: the block waits here and has no move. Its copy is evicted like any other, which drops the
//! store. The executor asks for as many stores as it can begin; each is a move from then on, and
//! its source is busy until that move has ended.
//!
//! ```text
//! waiting --the executor asks for it--> move: its source is no victim --> ended, on the shared tier
//!    | its copy leaves the tier: dropped
//! ```
//!
//! Invariant: the copy of a waiting block is on the tier above the shared one; no slot that a move to a
//! shared tier reads is promised to a new holder. Cost: O(log n) per block that waits; that of a
//! write-back when its move begins.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::block::{BlockId, TierId};
use crate::manager::Manager;
use crate::tier::ResidencyState;
use crate::time::Stamp;

/// Store that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedStore {
    /// The tier that it is read from.
    pub(crate) tier: TierId,
    pub(crate) block: BlockId,
    /// No block used after this is evicted for it.
    pub(crate) younger: Stamp,
}

/// Stores that wait, in the order in which they begin.
#[derive(Debug, Default)]
pub(crate) struct SharedStores {
    waiting: BTreeMap<u64, SharedStore>,
    numbers: FxHashMap<(TierId, BlockId), u64>,
    /// Number of the next one.
    next: u64,
}

impl SharedStores {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether a copy waits.
    pub(crate) fn contains(&self, tier: TierId, block: BlockId) -> bool {
        self.numbers.contains_key(&(tier, block))
    }

    /// The stores, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &SharedStore> {
        self.waiting.values()
    }

    /// Adds a store. Returns whether the block did not wait yet.
    pub(crate) fn add(&mut self, store: SharedStore) -> bool {
        let SharedStore { tier, block, younger } = store;
        if let Some(number) = self.numbers.get(&(tier, block)) {
            let known = self.waiting.get_mut(number).expect("it has this number");
            known.younger = known.younger.max(younger);
            return false;
        }
        self.numbers.insert((tier, block), self.next);
        self.waiting.insert(self.next, store);
        self.next += 1;
        true
    }

    /// The oldest store.
    fn first(&self) -> Option<SharedStore> {
        self.iter().next().copied()
    }

    /// Removes the store of a copy.
    pub(crate) fn remove(&mut self, tier: TierId, block: BlockId) {
        if let Some(number) = self.numbers.remove(&(tier, block)) {
            self.waiting.remove(&number);
        }
    }
}

impl Manager {
    /// Number of blocks that wait to be written to a shared tier, and of those that eviction took before a
    /// worker began to read them.
    #[must_use]
    pub fn shared_stores(&self) -> (usize, u64) {
        let dropped = self.meter.tiers.iter().map(|tier| tier.stores_dropped).sum();
        (self.shared_stores.len(), dropped)
    }

    /// Begins the stores of up to this number of waiting blocks, the oldest first.
    pub(super) fn begin_shared_stores(&mut self, blocks: usize) {
        let (now, mut begun) = (self.clock.last(), 0);
        while begun < blocks
            && let Some(SharedStore { tier, block, younger }) = self.shared_stores.first()
        {
            let Some(dirty) = self.unwritten(tier, block, None) else {
                self.shared_stores.remove(tier, block);
                continue;
            };
            let Some(set) = self.room_below(tier, block, dirty, younger, now) else {
                // The end of a move may make room. A store of a flush does not wait for it.
                if younger == Stamp::MAX && !self.moves.is_empty() {
                    return;
                }
                self.shared_stores.remove(tier, block);
                continue;
            };
            self.shared_stores.remove(tier, block);
            self.apply(&set, now);
            self.copy_down(tier, block, dirty, None, now);
            begun += 1;
        }
    }

    /// Waiting blocks are on the tier that they are written from.
    pub(crate) fn audit_shared_stores(&self, broken: &mut Vec<String>) {
        for store in self.shared_stores.iter() {
            let SharedStore { tier, block, .. } = *store;
            if !self.trie().alive(block)
                || self.residency(tier, block).state == ResidencyState::Absent
                || !self.tiers.writes_shared(tier)
            {
                broken.push(format!("block {block} waits on tier {tier} and is not there"));
            }
        }
    }
}
