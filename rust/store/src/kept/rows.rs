//! Listing of a kept file's blocks for a starting process, and updates of their metadata.
//!
//! Invariant: only sealed, good entries are listed, parents before their children. Ages grow by the
//! wall clock since the last update. Cost: two hashes per block, over the entry and the record, on
//! all cores.

use std::sync::atomic::Ordering;

use kvtrie_core::Record;

use super::entry::{self, SEALED, USAGE, split};
use super::{KeptFile, UNVERIFIED};
use crate::claim::lock;
use crate::error::Result;
use crate::rows::{StoredBlock, UsedBlock, order};

/// Up to this number of slots a thread costs more than it saves.
const FEW: u32 = 10_000;

impl KeptFile {
    /// All blocks sealed by an earlier process, unverified.
    #[must_use]
    pub fn rows(&self, wall_now: u64) -> Vec<StoredBlock> {
        if self.uninitialized() {
            return Vec::new();
        }
        let slots = self.settings.blocks;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let each = slots.div_ceil(u32::try_from(cores).unwrap_or(1)).max(FEW);
        let part = |first: u32| -> Vec<StoredBlock> {
            let slots = first..slots.min(first.saturating_add(each));
            slots.filter_map(|slot| self.row(slot, wall_now)).collect()
        };
        let mut rows = Vec::with_capacity(self.sealed() as usize);
        if slots <= FEW {
            rows.extend(part(0));
        } else {
            // Scoped threads: a child after `fork` has none of its parent's threads.
            std::thread::scope(|scope| {
                let starts = (0..slots).step_by(each as usize);
                let parts: Vec<_> = starts.map(|first| scope.spawn(move || part(first))).collect();
                for part in parts {
                    rows.extend(part.join().expect("decoding does not fail"));
                }
            });
        }
        let sorted = order(&rows);
        let row = |(at, rooted)| StoredBlock { rooted, ..std::mem::take(&mut rows[at as usize]) };
        sorted.into_iter().map(row).collect()
    }

    fn row(&self, slot: u32, wall_now: u64) -> Option<StoredBlock> {
        let word_now = self.word(slot).load(Ordering::Acquire);
        if split(word_now).1 != SEALED {
            return None;
        }
        let Some(found) = self.entry(slot, word_now) else {
            if self.trust[slot as usize].load(Ordering::Relaxed) == UNVERIFIED {
                drop(self.discard(slot, word_now, None, "entry"));
            }
            return None;
        };
        Some(StoredBlock {
            slot,
            key: found.record.key(),
            layers: found.layers,
            meta: found.meta.later(wall_now.saturating_sub(found.stamp)),
            record: found.record,
            rooted: false,
        })
    }

    /// Update the metadata of blocks. A slot with a different block is skipped. Returns the number
    /// of updates.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], or an invalid slot.
    pub fn note_uses(&self, used: &[UsedBlock<'_>], wall_now: u64) -> Result<usize> {
        self.writable()?;
        if self.uninitialized() {
            return Ok(0);
        }
        let mut noted = 0;
        for used in used {
            self.check_slot(used.slot)?;
            let _slots = lock(&self.slots);
            let word_now = self.word(used.slot).load(Ordering::Relaxed);
            if split(word_now).1 != SEALED {
                continue;
            }
            let Some(found) = self.entry(used.slot, word_now) else { continue };
            if same_block(&found.record, used.record) {
                let usage = entry::usage(&used.meta, wall_now);
                self.map.write(self.at(used.slot) + USAGE, &usage);
                noted += 1;
            }
        }
        Ok(noted)
    }
}

/// Whether two records are of the same block. Tenants may have produced it since the write.
fn same_block(one: &Record, other: &Record) -> bool {
    let content = |record: &'_ Record| (record.parent, record.scope.is_some());
    content(one) == content(other) && one.tokens == other.tokens && one.digests == other.digests
}
