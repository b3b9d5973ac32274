//! What a store holds, for a manager that starts, and what a manager keeps when it stops.
//!
//! Invariant: ages grow by the wall clock between writing and reading, and by nothing if it went
//! backwards; parents come before their children. Cost: one pass over the manifest, a hash per block
//! and a sort of small numbers.

use std::collections::BTreeMap;

use kvtrie_core::block::Layers;
use kvtrie_core::record::{Key, Record};
use rustc_hash::FxHashMap;

use crate::claim::lock;
use crate::error::{Error, Result};
use crate::meta::Meta;
use crate::store::Store;

/// One block of a store.
#[derive(Clone, Debug)]
pub struct Row {
    /// Where it stands.
    pub slot: u32,
    /// Its name.
    pub key: Key,
    /// Its record; hashing it gave the key.
    pub record: Record,
    /// The layers that are there.
    pub layers: Layers,
    /// What was kept about it, as of now.
    pub meta: Meta,
    /// Whether all blocks before it are there too, up to the first of its scope.
    pub rooted: bool,
}

/// A block that stays, and what is known about it now.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Where it stands.
    pub slot: u32,
    /// What to keep about it.
    pub meta: Meta,
}

/// Fewer rows are not worth a thread.
const FEW: usize = 10_000;

impl Store {
    /// All blocks: those whose path is whole first, each behind its parent.
    ///
    /// # Errors
    /// What the device says.
    pub fn rows(&self, wall_now: u64) -> Result<Vec<Row>> {
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
                rows.push(Row {
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
        let wrong = unproved(&rows);
        let mut at = 0;
        rows.retain(|row| {
            let proved = wrong.binary_search(&at).is_err();
            at += 1;
            if !proved {
                self.note(format!("slot {}: its record does not give its key", row.slot));
            }
            proved
        });
        Ok(sorted(rows))
    }

    /// Rewrites the manifest: exactly these blocks stay, with what is known about them now; every
    /// other slot is free. A slot that is free already stays free.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Config`] for a slot that does not exist or is given twice;
    /// what the device says. Nothing that was to stay is lost then.
    pub fn save(&self, kept: &[Kept], wall_now: u64) -> Result<()> {
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

/// The rows whose record does not give their key, by their places; hashed on all cores.
fn unproved(rows: &[Row]) -> Vec<usize> {
    let find = |(first, rows): (usize, &[Row])| -> Vec<usize> {
        let wrong = |(_, row): &(usize, &Row)| row.record.key() != row.key;
        (first..).zip(rows).filter(wrong).map(|(at, _)| at).collect()
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let each = rows.len().div_ceil(cores).max(FEW);
    let parts = rows.chunks(each).enumerate().map(|(part, rows)| (part * each, rows));
    if rows.len() <= FEW {
        return parts.flat_map(find).collect();
    }
    // Threads of this call alone: a child made by `fork` has none of its parent's.
    std::thread::scope(|scope| {
        let parts: Vec<_> = parts.map(|part| scope.spawn(move || find(part))).collect();
        parts.into_iter().flat_map(|part| part.join().expect("hashing does not fail")).collect()
    })
}

/// A block, then all behind it: whoever takes rows in goes along paths instead of jumping between
/// them. Whole paths come before those that are broken.
fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    let mut known: FxHashMap<Key, usize> = FxHashMap::default();
    known.reserve(rows.len());
    known.extend(rows.iter().enumerate().map(|(at, row)| (row.key, at)));
    // Blocks by the place of their parent; those without one come last.
    let none = rows.len();
    let mut behind: Vec<(usize, bool, u32, usize)> = Vec::with_capacity(rows.len());
    let mut starts = vec![0; rows.len() + 2];
    for (at, row) in rows.iter().enumerate() {
        let first = row.record.scope.is_some();
        let parent = known.get(&row.record.parent).filter(|_| !first).map_or(none, |&at| at);
        starts[parent + 1] += 1;
        behind.push((parent, !first, row.slot, at));
    }
    behind.sort_unstable();
    for parent in 0..=none {
        starts[parent + 1] += starts[parent];
    }
    // A key is a hash of its parent's, so paths have a beginning and every block is on one.
    let mut order = Vec::with_capacity(rows.len());
    let mut next = Vec::new();
    for &(_, broken, _, start) in &behind[starts[none]..] {
        next.push(start);
        while let Some(at) = next.pop() {
            order.push(at);
            rows[at].rooted = !broken;
            let children = &behind[starts[at]..starts[at + 1]];
            next.extend(children.iter().rev().map(|&(.., child)| child));
        }
    }
    // In place: a second copy of all rows would cost as much as reading them.
    for start in 0..order.len() {
        let mut at = start;
        loop {
            let from = std::mem::replace(&mut order[at], at);
            if from == start || from == at {
                break;
            }
            rows.swap(at, from);
            at = from;
        }
    }
    rows
}
