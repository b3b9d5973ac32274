//! How much memory new blocks take, before they are made.
//!
//! Invariant: a call that asks for more than there is fails as it begins and has changed nothing.
//! Cost: a few integer operations.

use crate::error::Result;
use crate::memory;

use crate::manager::Manager;

/// At most so many bytes are kept of a block besides its tokens and rows of layer slots.
const BLOCK: usize = 512;

impl Manager {
    /// Refuses so many new blocks if there is no memory for what is kept of them.
    pub(in crate::manager) fn check_memory(&self, blocks: usize) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let rows = self.tiers.iter().any(|tier| tier.spec.layer_slots);
        let layers =
            if rows { 2 * size_of::<u32>() * usize::from(self.settings.layers) } else { 0 };
        let text = self.blocks.trie().growth(blocks);
        let bytes = blocks.saturating_mul(BLOCK + layers).saturating_add(text);
        memory::check(bytes, || {
            format!("what is kept of {blocks} new blocks of {} tokens", self.block_tokens())
        })
    }

    /// Refuses further leases like this one if there is no memory for them.
    pub(in crate::manager) fn check_forks(
        &self,
        id: crate::block::LeaseId,
        forks: usize,
    ) -> Result<()> {
        let lease = &self.leases[&id];
        let parts = BLOCK + 16 * lease.path.len() + 4 * lease.tail.len();
        let spans = lease.plan.spans.len() * size_of::<crate::manager::Span>();
        memory::check(forks.saturating_mul(parts + spans), || format!("{forks} forks of a lease"))
    }
}
