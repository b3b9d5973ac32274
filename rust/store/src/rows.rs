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
        for at in unproved(&rows).into_iter().rev() {
            let slot = rows.remove(at).slot;
            self.note(format!("slot {slot}: its record does not give its key"));
        }
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

fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    let mut known: FxHashMap<Key, u32> = FxHashMap::default();
    known.reserve(rows.len());
    known.extend(rows.iter().zip(0..).map(|(row, at)| (row.key, at)));
    // Depth and whether the path is whole; a key is a hash of its parent's, so paths have an end.
    let mut places: Vec<Option<(bool, u32)>> = vec![None; rows.len()];
    let mut path = Vec::new();
    for start in 0..rows.len() {
        let mut at = start;
        let mut place = loop {
            if let Some(place) = places[at] {
                break place;
            }
            path.push(at);
            let record = &rows[at].record;
            if record.scope.is_some() {
                break (true, 0);
            }
            match known.get(&record.parent) {
                None => break (false, 0),
                Some(&parent) => at = parent as usize,
            }
        };
        for at in path.drain(..).rev() {
            place.1 += 1;
            places[at] = Some(place);
        }
    }
    let mut order: Vec<(bool, u32, u32, usize)> = Vec::with_capacity(rows.len());
    for (at, (row, place)) in rows.iter_mut().zip(places).enumerate() {
        let (rooted, depth) = place.unwrap_or_default();
        row.rooted = rooted;
        order.push((!rooted, depth, row.slot, at));
    }
    order.sort_unstable();
    // In place: a second copy of all rows would cost as much as reading them.
    for start in 0..order.len() {
        let mut at = start;
        loop {
            let from = std::mem::replace(&mut order[at].3, at);
            if from == start || from == at {
                break;
            }
            rows.swap(at, from);
            at = from;
        }
    }
    rows
}
