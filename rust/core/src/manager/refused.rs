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
    tier: TierId,
    /// Stores that this tier had taken then.
    taken: u64,
    times: u32,
}

/// What was refused and has not been written since.
#[derive(Debug, Default)]
pub(super) struct Refused {
    blocks: BTreeMap<BlockId, Refusal>,
    /// Stores that went well, by tier.
    taken: BTreeMap<TierId, u64>,
}

impl Refused {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn may_write(&self, block: BlockId, tier: TierId) -> bool {
        self.blocks.get(&block).is_none_or(|refusal| {
            refusal.tier != tier
                || (refusal.times < MOST_STORES && refusal.taken < self.taken(tier))
        })
    }

    pub(super) fn failed(&mut self, block: BlockId, tier: TierId) {
        let taken = self.taken(tier);
        let refusal = self.blocks.entry(block).or_insert(Refusal { tier, taken, times: 0 });
        let times = if refusal.tier == tier { refusal.times + 1 } else { 1 };
        *refusal = Refusal { tier, taken, times };
    }

    /// So many stores to `tier` went well.
    pub(super) fn took(&mut self, tier: TierId, stores: u64) {
        *self.taken.entry(tier).or_default() += stores;
    }

    /// The block was used, and so is worth as many stores again.
    pub(super) fn used(&mut self, block: BlockId) {
        if let Some(refusal) = self.blocks.get_mut(&block) {
            refusal.times = 0;
        }
    }

    pub(super) fn forget(&mut self, block: BlockId) {
        self.blocks.remove(&block);
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.keys().copied()
    }

    fn taken(&self, tier: TierId) -> u64 {
        self.taken.get(&tier).copied().unwrap_or(0)
    }
}
