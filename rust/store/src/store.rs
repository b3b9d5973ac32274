//! The store: writes blocks into slots, reads and proves them, frees them.
//!
//! Invariant: a block counts from its PUT frame on, which is written after its bytes and its
//! header; what is read was proved against its key in the caller's memory, every time.
//! Cost: a write is two device writes and a frame; a read is one of the header and one of the
//! layers, or one per layer where a layer does not end on a page.

use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kvtrie_core::block::Layers;
use kvtrie_core::record::{Key, Record};
use xxhash_rust::xxh3::xxh3_64;

use crate::claim::{Claims, lock};
use crate::device::{Device, File};
use crate::error::{Error, Result};
use crate::frame::{self, Meta, Put};
use crate::manifest::Manifest;
use crate::page::{self, Claimed};
use crate::segment::Segments;
use crate::settings::{Durability, Settings, hex};
use crate::table::{Entry, Table};

/// What fills a layer up to the next page.
const ZEROS: [u8; 4096] = [0; 4096];

/// As many reasons are kept until they are asked for.
const MOST_REASONS: usize = 10_000;

/// One store: a folder with a manifest and segments.
#[derive(Debug)]
pub struct Store {
    pub(crate) settings: Arc<Settings>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) folder: PathBuf,
    /// Held while this is the writer.
    pub(crate) guard: Option<Arc<dyn File>>,
    /// Why this is not the writer.
    pub(crate) refusal: Option<String>,
    pub(crate) manifest: Mutex<Manifest>,
    pub(crate) table: Mutex<Table>,
    pub(crate) segments: Segments,
    pub(crate) claims: Claims,
    /// Bytes of the manifest that are durable. Taken before the manifest's lock.
    pub(crate) synced: Mutex<u64>,
    pub(crate) reasons: Mutex<Vec<String>>,
}

impl Store {
    /// What the store is made for.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The store's own folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.refusal.is_some()
    }

    /// How many blocks there are.
    #[must_use]
    pub fn blocks(&self) -> usize {
        lock(&self.table).blocks().count()
    }

    /// What was skipped, mended or removed since the last call, and why.
    pub fn reasons(&self) -> Vec<String> {
        let mut all = std::mem::take(&mut *lock(&self.reasons));
        all.append(&mut lock(&self.manifest).reasons);
        all
    }

    pub(crate) fn note(&self, reason: String) {
        let mut reasons = lock(&self.reasons);
        if reasons.len() < MOST_REASONS {
            reasons.push(reason);
        }
    }

    pub(crate) fn writable(&self) -> Result<()> {
        match &self.refusal {
            None => Ok(()),
            Some(why) => Err(Error::ReadOnly(format!("{}: {why}", self.folder.display()))),
        }
    }

    pub(crate) fn check_slot(&self, slot: u32) -> Result<()> {
        if slot < self.settings.blocks {
            return Ok(());
        }
        Err(Error::config(format!("slot {slot}, there are {}", self.settings.blocks)))
    }

    fn check(&self, slot: u32, layers: Layers, bytes: usize) -> Result<()> {
        self.check_slot(slot)?;
        if layers.is_empty() || layers.hi > self.settings.layers {
            let all = self.settings.layers;
            return Err(Error::config(format!("layers {layers}, a block has 0..{all}")));
        }
        let wanted = self.settings.bytes_of(layers);
        if bytes != wanted {
            let each = self.settings.layer_bytes;
            return Err(Error::config(format!(
                "{bytes} bytes for layers {layers} of {each} bytes each, {wanted} wanted"
            )));
        }
        Ok(())
    }

    /// Reads layers of a block into `out` and proves them. On an error `out` holds anything.
    ///
    /// # Errors
    /// [`Error::Bad`] if the slot does not hold this block and these layers, whole and unchanged;
    /// what is damaged is removed if this is the writer. [`Error::Io`] if the device failed;
    /// [`Error::Config`] for wrong arguments.
    pub fn read(&self, key: &Key, slot: u32, layers: Layers, out: &mut [u8]) -> Result<()> {
        self.check(slot, layers, out.len())?;
        let _claim = self.claims.one(slot);
        let found = lock(&self.table).get(slot);
        let Some(entry) = found.filter(|entry| entry.key == *key) else {
            let holds = found.map_or("nothing".into(), |entry| hex(&entry.key[..8]));
            return Err(Error::bad(slot, format!("holds {holds}, not {}", hex(&key[..8]))));
        };
        if !entry.layers.covers(layers) {
            return Err(Error::bad(slot, format!("holds layers {}, not {layers}", entry.layers)));
        }
        self.fetch(key, slot, layers, out).inspect_err(|error| self.discard(slot, error))
    }

    /// Reads and proves; the slot is claimed.
    pub(crate) fn fetch(&self, key: &Key, slot: u32, layers: Layers, out: &mut [u8]) -> Result<()> {
        let settings = &*self.settings;
        let both = self.headers(slot)?;
        let (_, page) = page::choose(settings, slot, key, None, &both)
            .map_err(|reason| Error::bad(slot, reason))?;
        if !page.layers.covers(layers) {
            let reason = format!("header of layers {}, not {layers}", page.layers);
            return Err(Error::bad(slot, reason));
        }
        let each = settings.layer_bytes;
        if settings.stride() == each {
            self.segments.read(slot, settings.layer_at(layers.lo), out)?;
        } else {
            for (layer, bytes) in layers.iter().zip(out.chunks_exact_mut(each)) {
                self.segments.read(slot, settings.layer_at(layer), bytes)?;
            }
        }
        for (layer, bytes) in layers.iter().zip(out.chunks_exact(each)) {
            let (stated, found) = (page.sum(layer), xxh3_64(bytes));
            if stated != found {
                let reason =
                    format!("layer {layer} has checksum {found:#018x}, not {stated:#018x}");
                return Err(Error::bad(slot, reason));
            }
        }
        Ok(())
    }

    /// Both header pages of a slot.
    fn headers(&self, slot: u32) -> Result<Vec<u8>> {
        let mut both = vec![0; 2 * self.settings.header_bytes()];
        self.segments.read(slot, 0, &mut both)?;
        Ok(both)
    }

    /// Takes a damaged block out, as far as the device lets us; the slot is claimed.
    pub(crate) fn discard(&self, slot: u32, error: &Error) {
        let Error::Bad { reason, .. } = error else { return };
        if self.read_only() {
            return;
        }
        self.note(format!("slot {slot}: {reason}; removed"));
        if let Err(error) = self.release(slot) {
            self.note(format!("slot {slot}: {error}"));
            let mut manifest = lock(&self.manifest);
            manifest.damaged = true;
            lock(&self.table).forget(slot);
        }
        let pages = 2 * self.settings.header_bytes() / ZEROS.len();
        if self.segments.file(self.segments.of(slot), false).is_ok_and(|file| file.is_some()) {
            let mut zeros = vec![IoSlice::new(&ZEROS); pages];
            if let Err(error) = self.segments.write(slot, 0, &mut zeros) {
                self.note(format!("slot {slot}: {error}"));
            }
        }
    }

    /// Appends a FREE frame and frees the slot.
    fn release(&self, slot: u32) -> Result<u64> {
        let mut manifest = lock(&self.manifest);
        let sequence = lock(&self.table).next();
        let mut bytes = Vec::new();
        frame::free(&mut bytes, self.settings.seed(), slot, sequence);
        manifest.append(&bytes, &self.table)?;
        lock(&self.table).free(slot, sequence);
        Ok(manifest.appended)
    }

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

    /// Reads layers and proves them, one at a time.
    pub(crate) fn prove(&self, key: &Key, slot: u32, layers: Layers) -> Result<()> {
        if layers.is_empty() {
            return Ok(());
        }
        let mut bytes = vec![0; self.settings.layer_bytes];
        let mut each =
            layers.iter().map(|at| self.fetch(key, slot, Layers::new(at, at + 1), &mut bytes));
        each.try_for_each(|proved| proved)
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

    /// Makes the manifest durable up to `upto` bytes ever appended. Calls that wait for each other
    /// share one sync.
    pub(crate) fn commit(&self, upto: u64) -> Result<()> {
        let mut synced = lock(&self.synced);
        let (file, appended, damaged) = {
            let mut manifest = lock(&self.manifest);
            if !manifest.damaged {
                if *synced >= upto {
                    return Ok(());
                }
                manifest.flush()?;
            }
            (manifest.file.clone(), manifest.appended, manifest.damaged)
        };
        if !damaged {
            match file.map_or(Ok(()), |file| file.sync()) {
                Ok(()) => {
                    *synced = appended;
                    return Ok(());
                }
                Err(error) => self.note(format!("manifest: sync failed: {error}; rewriting it")),
            }
        }
        let mut manifest = lock(&self.manifest);
        manifest.damaged = true;
        manifest.rewrite(&self.table, &mut |_, _| true)?;
        *synced = manifest.appended;
        Ok(())
    }

    /// Frees a slot; nothing happens if it is free.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Config`], and what the device says; the block may come back then
    /// when the store is opened again.
    pub fn remove(&self, slot: u32) -> Result<()> {
        self.writable()?;
        self.check_slot(slot)?;
        let _claim = self.claims.one(slot);
        if lock(&self.table).get(slot).is_none() {
            return Ok(());
        }
        let upto = self.release(slot)?;
        if self.settings.durability == Durability::Fsync { self.commit(upto) } else { Ok(()) }
    }

    /// Makes everything that was written durable, whatever the durability.
    ///
    /// # Errors
    /// What the device says.
    pub fn sync(&self) -> Result<()> {
        if self.read_only() {
            return Ok(());
        }
        let upto = lock(&self.manifest).appended;
        self.segments.sync_all()?;
        self.commit(upto)
    }

    /// Writes what is still in memory and gives the lock back.
    ///
    /// # Errors
    /// What the device says; a block whose frame was still in memory is lost then.
    pub fn close(self) -> Result<()> {
        self.finish()
    }

    fn finish(&self) -> Result<()> {
        if self.guard.is_none() {
            return Ok(());
        }
        let mut manifest = lock(&self.manifest);
        if manifest.damaged {
            manifest.rewrite(&self.table, &mut |_, _| true)?;
        }
        manifest.flush()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Nobody is left to hear of an error; `close` tells it.
        let _ = self.finish();
    }
}

/// A block on its way into a slot.
#[derive(Clone, Copy)]
struct Writing<'a> {
    key: &'a Key,
    slot: u32,
    record: &'a [u8],
    meta: Meta,
    wall_now: u64,
}
