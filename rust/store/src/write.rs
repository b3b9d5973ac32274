//! Writing: a fresh block into a slot, or further layers of the block that is there.
//!
//! Invariant: a block counts from its PUT frame on, which is written after its bytes and its
//! header. What was durable is never written over: an extension uses other pages.
//! Cost: two device writes and a frame; an extension reads the header pages first.

use std::io::IoSlice;

use kvtrie_core::block::Layers;
use kvtrie_core::record::{Key, Record};
use xxhash_rust::xxh3::xxh3_64;

use crate::claim::lock;
use crate::error::{Error, Result};
use crate::frame::{self, Put};
use crate::meta::Meta;
use crate::page::{self, Claimed};
use crate::settings::{Durability, hex};
use crate::store::{Store, ZEROS};
use crate::table::Entry;

/// A block on its way into a slot.
#[derive(Clone, Copy)]
struct Writing<'a> {
    key: &'a Key,
    slot: u32,
    record: &'a [u8],
    meta: Meta,
    wall_now: u64,
}

impl Store {
    /// Writes layers of a block into a slot. Where the slot holds the same block and the ranges
    /// meet, the block is extended: layers that are there already are proved and stay. Any other
    /// block in the slot is freed first.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Full`]: a fresh block's slot is free then (or holds what it held,
    /// if that could not be freed), an extended block has the layers it had. [`Error::Bad`] if the
    /// block to extend is damaged; it is removed.
    /// [`Error::ReadOnly`]; [`Error::Config`] for wrong arguments, a record that is too long or
    /// does not give the key.
    #[expect(clippy::too_many_arguments, reason = "a block, its place, its bytes and what is kept")]
    pub fn write(
        &self,
        key: &Key,
        slot: u32,
        layers: Layers,
        record: &[u8],
        meta: Meta,
        bytes: &[u8],
        wall_now: u64,
    ) -> Result<()> {
        self.writable()?;
        self.check(slot, layers, bytes.len())?;
        let most = self.settings.record_bytes();
        if record.len() > most {
            let length = record.len();
            return Err(Error::config(format!("a record of {length} bytes, at most {most}")));
        }
        if Record::decode(record).is_none_or(|record| record.key() != *key) {
            let key = hex(&key[..8]);
            return Err(Error::config(format!("the record does not give the key {key}")));
        }
        let _claim = self.claims.one(slot);
        let found = lock(&self.table).get(slot);
        let same = found
            .filter(|entry| entry.key == *key)
            .and_then(|entry| Some((entry, entry.layers.join(layers)?)));
        let block = Writing { key, slot, record, meta, wall_now };
        let Some((entry, all)) = same else {
            if found.is_some() {
                self.release(slot)?;
            }
            return self.fresh(&block, layers, bytes);
        };
        let extended = self
            .prove(key, slot, entry.layers.meet(layers))
            .and_then(|()| self.extend(&block, &entry, all, layers, bytes))
            .inspect_err(|error| self.discard(slot, error));
        match extended {
            Err(Error::Bad { .. }) if layers.covers(entry.layers) => {
                self.fresh(&block, layers, bytes)
            }
            other => other,
        }
    }

    fn fresh(&self, block: &Writing<'_>, layers: Layers, bytes: &[u8]) -> Result<()> {
        if self.settings.durability == Durability::Fsync {
            // Whatever stood here is free for good, or a lost FREE frame would bring it back over
            // another block's bytes.
            let upto = lock(&self.manifest).appended;
            self.commit(upto)?;
        }
        let failures = self.segments.failures(block.slot);
        let mut sums = vec![0; usize::from(self.settings.layers)];
        self.put_layers(block.slot, layers, layers, bytes, &mut sums)?;
        let sequence = lock(&self.table).next();
        let mut pages = self.page(block, sequence, layers, &sums);
        pages.resize(2 * self.settings.header_bytes(), 0);
        self.segments.write(block.slot, 0, &mut [IoSlice::new(&pages)])?;
        self.publish(block, sequence, Layers::NONE, layers, failures)
    }

    fn extend(
        &self,
        block: &Writing<'_>,
        entry: &Entry,
        all: Layers,
        layers: Layers,
        bytes: &[u8],
    ) -> Result<()> {
        let slot = block.slot;
        let failures = self.segments.failures(slot);
        let both = self.headers(slot)?;
        let (which, page) =
            page::choose(&self.settings, slot, block.key, Some(entry.sequence), &both)
                .map_err(|reason| Error::bad(slot, reason))?;
        if !page.layers.covers(entry.layers) {
            let reason = format!("header of layers {}, not {}", page.layers, entry.layers);
            return Err(Error::bad(slot, reason));
        }
        if all == entry.layers {
            return Ok(());
        }
        let mut sums = page.sums();
        for part in [Layers::new(all.lo, entry.layers.lo), Layers::new(entry.layers.hi, all.hi)] {
            self.put_layers(slot, part, layers, bytes, &mut sums)?;
        }
        let sequence = lock(&self.table).next();
        let page = self.page(block, sequence, all, &sums);
        let other = (1 - which) * self.settings.header_bytes();
        self.segments.write(slot, other as u64, &mut [IoSlice::new(&page)])?;
        self.publish(block, sequence, entry.layers, all, failures)
    }

    /// Writes the layers `part` of `bytes`, which hold the layers `given`, and their checksums.
    fn put_layers(
        &self,
        slot: u32,
        part: Layers,
        given: Layers,
        bytes: &[u8],
        sums: &mut [u64],
    ) -> Result<()> {
        if part.is_empty() {
            return Ok(());
        }
        let each = self.settings.layer_bytes;
        let pad = &ZEROS[..self.settings.stride() - each];
        let skip = usize::from(part.lo - given.lo) * each;
        let mut buffers = Vec::with_capacity(2 * usize::from(part.len()));
        for (layer, bytes) in part.iter().zip(bytes[skip..].chunks_exact(each)) {
            sums[usize::from(layer)] = xxh3_64(bytes);
            buffers.push(IoSlice::new(bytes));
            if !pad.is_empty() {
                buffers.push(IoSlice::new(pad));
            }
        }
        self.segments.write(slot, self.settings.layer_at(part.lo), &mut buffers)
    }

    fn page(&self, block: &Writing<'_>, sequence: u64, layers: Layers, sums: &[u64]) -> Vec<u8> {
        let page = Claimed {
            sequence,
            key: block.key,
            slot: block.slot,
            layers,
            sums,
            record: block.record,
        };
        page::encode(&self.settings, &page)
    }

    /// Bytes and header are written; from the PUT frame on the block counts.
    fn publish(
        &self,
        block: &Writing<'_>,
        sequence: u64,
        before: Layers,
        layers: Layers,
        failures: u64,
    ) -> Result<()> {
        let durable = self.settings.durability == Durability::Fsync;
        if durable {
            self.segments.sync(block.slot, failures)?;
        }
        let Writing { key, slot, record, meta, wall_now } = *block;
        let put = Put { slot, sequence, layers, stamp: wall_now, meta, key: *key, record };
        let mut bytes = Vec::new();
        let length = frame::put(&mut bytes, self.settings.seed(), &put);
        let upto = {
            let mut manifest = lock(&self.manifest);
            let at = manifest.append(&bytes, &self.table)?;
            lock(&self.table).apply(slot, Entry { key: *key, sequence, at, length, layers });
            manifest.appended
        };
        if durable {
            self.commit(upto).inspect_err(|_| {
                let _manifest = lock(&self.manifest);
                lock(&self.table).shrink(slot, before);
            })?;
        }
        Ok(())
    }
}
