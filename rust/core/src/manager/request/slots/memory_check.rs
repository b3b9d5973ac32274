//! Memory checks: estimates of the memory for new blocks and leases, before they are made.
//!
//! Invariant: a call that would exceed the available memory fails before any change. Cost: a few
//! integer operations.

use crate::error::Result;
use crate::memory;

use crate::manager::Manager;

/// Upper bound of the bytes per block, without its tokens and rows of layer slots.
const BLOCK: usize = 512;

impl Manager {
    /// Fails if there is no memory for `blocks` new blocks.
    pub(crate) fn check_memory(&self, blocks: usize) -> Result<()> {
        // Decoding within a block needs no new block.
        if blocks == 0 {
            return Ok(());
        }
        let rows = self.tiers.iter().any(|tier| tier.spec.layer_slots);
        // Two tables of slots: the tier's rows, and the space's rows.
        let layers =
            if rows { 2 * size_of::<u32>() * usize::from(self.settings.layers) } else { 0 };
        let text = self.trie().growth(blocks);
        let bytes = blocks.saturating_mul(BLOCK + layers).saturating_add(text);
        memory::check(bytes, || {
            format!("the records of {blocks} new blocks of {} tokens", self.block_tokens())
        })
    }

    /// Fails if there is no memory for `forks` forks of a lease.
    pub(crate) fn check_forks(&self, id: crate::block::LeaseId, forks: usize) -> Result<()> {
        let lease = &self.leases[&id];
        let parts = BLOCK + 16 * lease.path.len() + 4 * lease.tail.len();
        let spans = lease.plan.spans.len() * size_of::<crate::manager::Span>();
        memory::check(forks.saturating_mul(parts + spans), || format!("{forks} forks of a lease"))
    }
}
