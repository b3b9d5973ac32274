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
use crate::page::word;
use crate::store::Store;

/// One block of a store.
#[derive(Clone, Debug, Default)]
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
        self.rows_as(wall_now, |row| row)
    }

    /// The same as something else each, made while a row is at hand.
    ///
    /// # Errors
    /// What the device says.
    pub fn rows_as<T>(&self, wall_now: u64, make: impl FnMut(Row) -> T) -> Result<Vec<T>> {
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
        let (wrong, mut order) = beside(rows.len(), || unproved(&rows), || order(&rows));
        if !wrong.is_empty() {
            let mut at = 0;
            rows.retain(|row| {
                let proved = wrong.binary_search(&at).is_err();
                at += 1;
                if !proved {
                    self.note(format!("slot {}: its record does not give its key", row.slot));
                }
                proved
            });
            order = self::order(&rows);
        }
        let row = |(at, rooted)| Row { rooted, ..std::mem::take(&mut rows[at as usize]) };
        Ok(order.into_iter().map(row).map(make).collect())
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
    std::thread::scope(|scope| {
        let parts: Vec<_> = parts.map(|part| scope.spawn(move || find(part))).collect();
        parts.into_iter().flat_map(|part| part.join().expect("hashing does not fail")).collect()
    })
}

/// Two things about so many rows at once. The threads are of this call alone: a child made by
/// `fork` has none of its parent's.
fn beside<A: Send, B>(
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

/// A block, then all behind it: whoever takes rows in goes along paths instead of jumping between
/// them. Whole paths come before those that are broken; each row's place is told with whether its
/// path is whole.
fn order(rows: &[Row]) -> Vec<(u32, bool)> {
    // Two keys that begin alike, if ever, cost a path, not a wrong block.
    let mut known: FxHashMap<u64, u32> = FxHashMap::default();
    known.reserve(rows.len());
    known.extend(rows.iter().map(|row| word(&row.key, 0)).zip(0..));
    // Blocks by the place of their parent; those without one come last.
    let none = u32::try_from(rows.len()).expect("each has a slot");
    let mut behind: Vec<(u32, bool, u32, u32)> = Vec::with_capacity(rows.len());
    let mut starts = vec![0; rows.len() + 2];
    for (row, at) in rows.iter().zip(0..) {
        let (first, parent) = (row.record.scope.is_some(), &row.record.parent);
        let before = known.get(&word(parent, 0)).filter(|&&at| rows[at as usize].key == *parent);
        let parent = before.filter(|_| !first).map_or(none, |&at| at);
        starts[parent as usize + 1] += 1;
        behind.push((parent, !first, row.slot, at));
    }
    behind.sort_unstable();
    for parent in 0..=rows.len() {
        starts[parent + 1] += starts[parent];
    }
    // A key is a hash of its parent's, so paths have a beginning and every block is on one. Rows that
    // are not proved yet may stand in a circle; no path leads there, and the proof takes them out.
    let mut order = Vec::with_capacity(rows.len());
    let mut next = Vec::new();
    for &(_, broken, _, start) in &behind[starts[rows.len()]..] {
        next.push(start);
        while let Some(at) = next.pop() {
            order.push((at, !broken));
            let children = &behind[starts[at as usize]..starts[at as usize + 1]];
            next.extend(children.iter().rev().map(|&(.., child)| child));
        }
    }
    order
}
