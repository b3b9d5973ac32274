//! Blocks that a lower tier refused: their stores failed, and when they are worth another one.
//!
//! Invariant: a block is not written to a tier that has taken nothing since it refused the block,
//! nor after [`MOST_STORES`] refusals between two uses. So a dead device is not asked over and over,
//! one that came back serves all blocks again, and writing comes to an end. Cost: O(log n) in the blocks refused.

use std::collections::BTreeMap;

use crate::block::{BlockId, TierId};

/// Stores of one block that may fail until it is used again.
const MOST_STORES: u32 = 3;

#[derive(Clone, Copy, Debug)]
struct Refusal {
    /// Stores that this tier had taken then.
    taken: u64,
    times: u32,
}

/// What was refused, by block and tier. A block may be refused by several tiers in turn, so each
/// keeps its own count.
#[derive(Debug, Default)]
pub(in crate::manager) struct Refused {
    blocks: BTreeMap<(BlockId, TierId), Refusal>,
    /// Stores that went well, by tier.
    taken: BTreeMap<TierId, u64>,
}

impl Refused {
    pub(in crate::manager) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(in crate::manager) fn may_write(&self, block: BlockId, tier: TierId) -> bool {
        self.blocks
            .get(&(block, tier))
            .is_none_or(|refusal| refusal.times < MOST_STORES && refusal.taken < self.taken(tier))
    }

    pub(in crate::manager) fn failed(&mut self, block: BlockId, tier: TierId) {
        let taken = self.taken(tier);
        let refusal = self.blocks.entry((block, tier)).or_insert(Refusal { taken, times: 0 });
        *refusal = Refusal { taken, times: refusal.times + 1 };
    }

    /// So many stores to `tier` went well.
    pub(in crate::manager) fn took(&mut self, tier: TierId, stores: u64) {
        *self.taken.entry(tier).or_default() += stores;
    }

    /// The blocks were used, and so are worth as many stores again.
    pub(in crate::manager) fn used(&mut self, blocks: &[BlockId]) {
        if self.blocks.is_empty() {
            return;
        }
        for &block in blocks {
            for (_, refusal) in self.blocks.range_mut((block, 0)..=(block, TierId::MAX)) {
                refusal.times = 0;
            }
        }
    }

    pub(in crate::manager) fn forget(&mut self, block: BlockId) {
        while let Some((&key, _)) = self.blocks.range((block, 0)..=(block, TierId::MAX)).next() {
            self.blocks.remove(&key);
        }
    }

    pub(in crate::manager) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.keys().map(|&(block, _)| block)
    }

    fn taken(&self, tier: TierId) -> u64 {
        self.taken.get(&tier).copied().unwrap_or(0)
    }
}
