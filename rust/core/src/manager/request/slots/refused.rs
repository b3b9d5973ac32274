//! Refused blocks: a table of failed stores by block and tier, for deciding on retries.
//!
//! Invariant: a block is not written to a tier before the tier's next successful store after the
//! refusal, nor after [`MOST_STORES`] refusals between two uses. So a dead device is not tried for
//! every block, a recovered device serves all blocks again, and retries end. Cost: O(log n) in the
//! refused blocks.

use std::collections::BTreeMap;

use crate::block::{BlockId, TierId};

/// Maximum number of failed stores of a block between two uses.
const MOST_STORES: u32 = 3;

/// Refusals of a block by a tier.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    /// Number of successful stores of the tier at the latest refusal.
    taken: u64,
    times: u32,
}

/// Refusals by block and tier. Several tiers may refuse a block in turn, so each has its own count.
#[derive(Debug, Default)]
pub(crate) struct Refused {
    blocks: BTreeMap<(BlockId, TierId), Refusal>,
    /// Number of successful stores, by tier.
    taken: BTreeMap<TierId, u64>,
}

impl Refused {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether a store of a block to a tier is worth trying.
    pub(crate) fn may_write(&self, block: BlockId, tier: TierId) -> bool {
        self.blocks
            .get(&(block, tier))
            .is_none_or(|refusal| refusal.times < MOST_STORES && refusal.taken < self.taken(tier))
    }

    /// Counts a failed store.
    pub(crate) fn failed(&mut self, block: BlockId, tier: TierId) {
        let taken = self.taken(tier);
        let refusal = self.blocks.entry((block, tier)).or_insert(Refusal { taken, times: 0 });
        *refusal = Refusal { taken, times: refusal.times + 1 };
    }

    /// Counts successful stores. They allow retries on their tier.
    pub(crate) fn took(&mut self, tier: TierId, stores: u64) {
        *self.taken.entry(tier).or_default() += stores;
    }

    /// Resets the refusals of used blocks.
    pub(crate) fn used(&mut self, blocks: &[BlockId]) {
        // The usual case: no store has failed.
        if self.blocks.is_empty() {
            return;
        }
        for &block in blocks {
            for (_, refusal) in self.blocks.range_mut((block, 0)..=(block, TierId::MAX)) {
                refusal.times = 0;
            }
        }
    }

    /// Drops the rows of a block that left the trie.
    pub(crate) fn forget(&mut self, block: BlockId) {
        while let Some((&key, _)) = self.blocks.range((block, 0)..=(block, TierId::MAX)).next() {
            self.blocks.remove(&key);
        }
    }

    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.keys().map(|&(block, _)| block)
    }

    fn taken(&self, tier: TierId) -> u64 {
        self.taken.get(&tier).copied().unwrap_or(0)
    }
}
