//! Verification: reads and checks every layer of every block.
//!
//! Invariant: a damaged block is removed as by a read. After a device error the block stays, and
//! the error is a finding. Cost: all bytes once, with memory for a single layer.

use kvtrie_core::BlockKey;

use crate::claim::lock;
use crate::store::Store;

/// A block after failed verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Slot.
    pub slot: u32,
    /// Block key.
    pub key: BlockKey,
    /// Defect.
    pub reason: String,
}

/// Progress of a verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of checked blocks.
    pub done: usize,
    /// Number of all blocks.
    pub total: usize,
}

impl Store {
    /// Verify all blocks, concurrently with reads and writes. Calls `progress` after each.
    pub fn verify(&self, mut progress: impl FnMut(Progress)) -> Vec<Finding> {
        let blocks: Vec<_> =
            lock(&self.table).blocks().map(|(slot, entry)| (slot, entry.key)).collect();
        let total = blocks.len();
        let mut findings = Vec::new();
        for (done, (slot, key)) in (1..).zip(blocks) {
            if let Some(reason) = self.finding(slot, &key) {
                findings.push(Finding { slot, key, reason });
            }
            progress(Progress { done, total });
        }
        findings
    }

    fn finding(&self, slot: u32, key: &BlockKey) -> Option<String> {
        let _claim = self.claims.one(slot);
        let entry = lock(&self.table).get(slot).filter(|entry| entry.key == *key)?;
        let error = self.verify_layers(key, slot, entry.layers).err()?;
        self.discard(slot, &error);
        Some(error.to_string())
    }
}
