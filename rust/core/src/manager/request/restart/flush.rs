//! Flush: copies all resident blocks to the next tier, so that a persistent tier has full prefixes.
//!
//! Invariant: no block is evicted for an older block. Cost: O(n log n) in the blocks of the tiers.

use std::cmp::Reverse;

use crate::block::{BlockId, TierId};
use crate::error::Result;
use crate::manager::Manager;
use crate::time::Nanos;

impl Manager {
    /// Copies blocks missing on all lower tiers to the next tier.
    ///
    /// The youngest blocks come first and parents before their children, so that a persistent tier
    /// has full prefixes. No younger block is evicted for it. Blocks in flight are skipped: flush
    /// again after they have arrived. Returns the number of started moves and of newly waiting
    /// stores to a shared tier.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::error::Error::Closed) or
    /// [`Error::Invariant`](crate::error::Error::Invariant).
    pub fn flush(&mut self, now: Nanos) -> Result<u64> {
        self.open()?;
        let now = self.tick(now);
        let (before, mut waiting) = (self.moves.latest(), 0);
        // From the lowest tier up, so that a block moves a single tier per flush and room is made
        // once.
        for tier in (usize::from(self.tiers.engine_owned())..self.tiers.last()).rev() {
            if self.tiers.writes(tier) && self.points.several() {
                let known = self.shared_stores.len();
                self.flush_points(tier, now);
                waiting += self.shared_stores.len().saturating_sub(known) as u64;
            } else if self.tiers.writes(tier) {
                for block in self.youngest(tier) {
                    // Room for a younger block may have removed it.
                    if self.trie().alive(block) {
                        let age = self.node(block).access;
                        let writes = self.write_down(tier, block, None, age, now);
                        waiting += u64::from(writes && self.tiers.above_shared(tier));
                    }
                }
            }
        }
        Ok(self.moves.latest() - before + waiting)
    }

    /// The resident blocks of a tier, the youngest first and parents before their children.
    fn youngest(&self, tier: TierId) -> Vec<BlockId> {
        let all = self.blocks.table(tier).blocks(self.trie().bound());
        let usable = all.filter(|(_, residency)| !residency.usable().is_empty());
        let mut blocks: Vec<BlockId> = usable.map(|(block, _)| block).collect();
        blocks.sort_by_key(|&block| {
            (Reverse(self.node(block).access), self.trie().depth(block), block)
        });
        blocks
    }
}
