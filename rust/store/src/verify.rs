//! Verification: reads every layer of every block and checks it.
//!
//! Invariant: a damaged block is removed as by a read; a device error is a finding, and the block
//! stays. Cost: all bytes once; memory for one layer.

use kvtrie_core::BlockKey;

use crate::claim::lock;
use crate::store::Store;

/// A block that failed verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its slot.
    pub slot: u32,
    /// Its key.
    pub key: BlockKey,
    /// The defect.
    pub reason: String,
}

/// Progress of a verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Blocks verified or found damaged.
    pub done: usize,
    /// All blocks.
    pub total: usize,
}

impl Store {
    /// Verifies all blocks, concurrently with reads and writes; calls `progress` after each.
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
        let error = self.prove(key, slot, entry.layers).err()?;
        self.discard(slot, &error);
        Some(error.to_string())
    }
}
