//! Flush: copies of all resident blocks one tier down, so that a persistent tier holds full prefixes.
//!
//! Invariant: no block is evicted for an older one. Cost: O(n log n) in the blocks of the tiers.

use std::cmp::Reverse;

use crate::block::{BlockId, TierId};
use crate::error::Result;
use crate::manager::Manager;
use crate::time::Nanos;

impl Manager {
    /// Copies blocks that are resident on no lower tier one tier down, the youngest first and
    /// parents before their children, so that a persistent tier holds full prefixes. No younger
    /// block is evicted for it. Blocks in flight are skipped: flush again when they have arrived.
    /// Returns how many moves began, and how many stores to a shared tier wait by it.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::error::Error::Closed) or [`Error::Invariant`](crate::error::Error::Invariant).
    pub fn flush(&mut self, now: Nanos) -> Result<u64> {
        self.open()?;
        let now = self.tick(now);
        let (before, mut waiting) = (self.moves.latest(), 0);
        // From the lowest tier up, so that a block moves one tier per flush and room is made once.
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
        let mut blocks: Vec<BlockId> =
            all.filter(|(_, here)| !here.usable().is_empty()).map(|(block, _)| block).collect();
        blocks.sort_by_key(|&block| {
            (Reverse(self.node(block).access), self.trie().depth(block), block)
        });
        blocks
    }
}
