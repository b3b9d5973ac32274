//! Listing of all blocks for a starting manager, and saving of their metadata: of a few blocks by a
//! running manager, of all blocks by a stopping manager.
//!
//! Invariant: ages grow by the wall clock between save and listing, or not at all if it went
//! backwards. Parents come before their children. Cost: a pass over the manifest, a hash per block
//! and a sort of integers to list, a hash and a frame per block to save a few.

use std::collections::BTreeMap;

use kvtrie_core::{BlockKey, Layers, Record};
use rustc_hash::FxHashMap;

use crate::claim::lock;
use crate::error::{Error, Result};
use crate::frame::{self, Put};
use crate::meta::Meta;
use crate::page::word;
use crate::settings::SPARE;
use crate::store::Store;
use crate::table::Entry;

/// A stored block.
#[derive(Clone, Debug, Default)]
pub struct StoredBlock {
    /// Its slot.
    pub slot: u32,
    /// Its key.
    pub key: BlockKey,
    /// Record. Its hash is the key.
    pub record: Record,
    /// The stored layers.
    pub layers: Layers,
    /// Current metadata.
    pub meta: Meta,
    /// Whether all preceding blocks are stored, up to the first of its scope.
    pub rooted: bool,
}

/// A block to keep, with its current metadata.
#[derive(Clone, Copy, Debug)]
pub struct KeptBlock {
    /// Its slot.
    pub slot: u32,
    /// Its metadata.
    pub meta: Meta,
}

/// A used block, with its current metadata.
#[derive(Clone, Copy, Debug)]
pub struct UsedBlock<'a> {
    /// Its slot.
    pub slot: u32,
    /// Record, as the block's name.
    pub record: &'a Record,
    /// Its metadata.
    pub meta: Meta,
}

/// Up to this number of rows a thread costs more than it saves.
const FEW: usize = 10_000;

impl Store {
    /// All blocks: blocks with a complete path first, parents before children.
    ///
    /// # Errors
    /// The device's errors.
    pub fn rows(&self, wall_now: u64) -> Result<Vec<StoredBlock>> {
        self.rows_as(wall_now, |row| row)
    }

    /// All blocks, each converted by `make` while it is in cache.
    ///
    /// # Errors
    /// The device's errors.
    pub fn rows_as<T>(&self, wall_now: u64, make: impl FnMut(StoredBlock) -> T) -> Result<Vec<T>> {
        let mut rows = Vec::new();
        {
            let manifest = lock(&self.manifest);
            let blocks = lock(&self.table).by_frame();
            rows.reserve(blocks.len());
            manifest.each(&blocks, |slot, entry, put| {
                let found = put.and_then(|put| Some((put, Record::decode(put.record)?)));
                let Some((put, record)) = found else {
                    self.note(format!("slot {slot}: its frame at {} is damaged", entry.at));
                    return Ok(());
                };
                rows.push(StoredBlock {
                    slot,
                    key: entry.key,
                    record,
                    layers: entry.layers,
                    meta: put.meta.later(wall_now.saturating_sub(put.stamp)),
                    rooted: false,
                });
                Ok(())
            })?;
        }
        let (wrong, mut order) = in_parallel(rows.len(), || unverified(&rows), || order(&rows));
        if !wrong.is_empty() {
            let mut at = 0;
            rows.retain(|row| {
                let sound = wrong.binary_search(&at).is_err();
                at += 1;
                if !sound {
                    self.note(format!("slot {}: its record does not give its key", row.slot));
                }
                sound
            });
            order = self::order(&rows);
        }
        let row = |(at, rooted)| StoredBlock { rooted, ..std::mem::take(&mut rows[at as usize]) };
        Ok(order.into_iter().map(row).map(make).collect())
    }

    /// Save new metadata of some blocks. A slot without the block is skipped. Returns the number of
    /// saved blocks. Not synced: a crash may lose the new metadata, but never a block.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]. [`Error::Config`] for an invalid slot or a too long record, before
    /// anything is saved. The device's errors.
    pub fn note_uses(&self, used: &[UsedBlock<'_>], wall_now: u64) -> Result<usize> {
        self.writable()?;
        let mut records = Vec::with_capacity(used.len());
        for used in used {
            self.check_slot(used.slot)?;
            let record = used.record.encode();
            self.check_record(record.len())?;
            records.push(record);
        }
        // Each batch fits into the room left by a rewrite. Concurrent calls may append in between.
        let together = SPARE / 2 / self.settings.frame_bytes();
        let together = usize::try_from(together).unwrap_or(1).max(1);
        let mut noted = 0;
        for (used, records) in used.chunks(together).zip(records.chunks(together)) {
            let keys: Vec<BlockKey> = used.iter().map(|used| used.record.key()).collect();
            let (mut bytes, mut frames) = (Vec::new(), Vec::new());
            let mut manifest = lock(&self.manifest);
            for ((used, record), key) in used.iter().zip(records).zip(keys) {
                let found = lock(&self.table).get(used.slot).filter(|entry| entry.key == key);
                let Some(Entry { sequence, layers, .. }) = found else { continue };
                let (slot, meta, stamp, at) = (used.slot, used.meta, wall_now, bytes.len() as u64);
                let put = Put { slot, sequence, layers, stamp, meta, key, record };
                let length = frame::put(&mut bytes, self.settings.seed(), &put);
                frames.push((slot, Entry { key, sequence, at, length, layers }));
            }
            if frames.is_empty() {
                continue;
            }
            // On a full disk the remaining room is for FREE frames.
            manifest.make_room(bytes.len(), &self.table)?;
            let start = manifest.append(&bytes, &self.table)?;
            noted += frames.len();
            let mut table = lock(&self.table);
            for (slot, entry) in frames {
                table.apply(slot, Entry { at: start + entry.at, ..entry });
            }
        }
        Ok(noted)
    }

    /// Rewrite the manifest: keep exactly these blocks with their new metadata, and free every
    /// remaining slot. An already free slot stays free.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]. [`Error::Config`] for an invalid or repeated slot. The device's errors,
    /// without losing a block to keep.
    pub fn save(&self, kept: &[KeptBlock], wall_now: u64) -> Result<()> {
        self.writable()?;
        let mut by_slot = BTreeMap::new();
        for kept in kept {
            self.check_slot(kept.slot)?;
            if by_slot.insert(kept.slot, kept.meta).is_some() {
                return Err(Error::config(format!("slot {} is given twice", kept.slot)));
            }
        }
        lock(&self.manifest).rewrite(&self.table, &mut |slot, put| {
            let Some(&meta) = by_slot.get(&slot) else { return false };
            (put.meta, put.stamp) = (meta, wall_now);
            true
        })
    }
}

/// Indexes of rows with a record not hashing to their key. Uses all cores.
fn unverified(rows: &[StoredBlock]) -> Vec<usize> {
    let find = |(first, rows): (usize, &[StoredBlock])| -> Vec<usize> {
        let wrong = |(_, row): &(usize, &StoredBlock)| row.record.key() != row.key;
        (first..).zip(rows).filter(wrong).map(|(at, _)| at).collect()
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let each = rows.len().div_ceil(cores).max(FEW);
    let parts = rows.chunks(each).enumerate().map(|(part, rows)| (part * each, rows));
    if rows.len() <= FEW {
        return parts.flat_map(find).collect();
    }
    std::thread::scope(|scope| {
        let parts: Vec<_> = parts.map(|part| scope.spawn(move || find(part))).collect();
        parts.into_iter().flat_map(|part| part.join().expect("hashing does not fail")).collect()
    })
}

/// Run two functions in parallel, on a scoped thread: a child after `fork` has none of its parent's
/// threads.
fn in_parallel<A: Send, B>(
    rows: usize,
    one: impl FnOnce() -> A + Send,
    other: impl FnOnce() -> B,
) -> (A, B) {
    if rows <= FEW {
        return (one(), other());
    }
    std::thread::scope(|scope| {
        let one = scope.spawn(one);
        let other = other();
        (one.join().expect("proving does not fail"), other)
    })
}

/// Preorder of the rows, so readers follow paths instead of jumping between them. Complete paths
/// come before broken paths. Each index has a flag for a complete path.
pub(crate) fn order(rows: &[StoredBlock]) -> Vec<(u32, bool)> {
    // Keys with equal first 8 bytes, if ever, break a path but never confuse blocks.
    let mut known: FxHashMap<u64, u32> = FxHashMap::default();
    known.reserve(rows.len());
    known.extend(rows.iter().map(|row| word(&row.key, 0)).zip(0..));
    // Counting sort of the rows by parent. Rows without a parent come last.
    let none = u32::try_from(rows.len()).expect("each has a slot");
    let mut by_parent: Vec<(u32, bool, u32, u32)> = Vec::with_capacity(rows.len());
    let mut starts = vec![0; rows.len() + 2];
    for (row, at) in rows.iter().zip(0..) {
        let (first, parent) = (row.record.scope.is_some(), &row.record.parent);
        let before = known.get(&word(parent, 0)).filter(|&&at| rows[at as usize].key == *parent);
        let parent = before.filter(|_| !first).map_or(none, |&at| at);
        starts[parent as usize + 1] += 1;
        by_parent.push((parent, !first, row.slot, at));
    }
    by_parent.sort_unstable();
    for parent in 0..=rows.len() {
        starts[parent + 1] += starts[parent];
    }
    // A key hashes its parent's key, so verified rows form trees. Unverified rows may form a cycle:
    // no path reaches it, and the verification removes them.
    let mut order = Vec::with_capacity(rows.len());
    let mut next = Vec::new();
    for &(_, broken, _, start) in &by_parent[starts[rows.len()]..] {
        next.push(start);
        while let Some(at) = next.pop() {
            order.push((at, !broken));
            let children = &by_parent[starts[at as usize]..starts[at as usize + 1]];
            next.extend(children.iter().rev().map(|&(.., child)| child));
        }
    }
    order
}
