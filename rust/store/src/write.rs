//! Writes: a new block into a slot, or further layers of its block.
//!
//! Layers of several blocks are in flight together. Checksums of the next layers are computed while
//! the device writes.
//!
//! ```text
//!   waiting ─begin─> layers, then header in flight ─> [fsync: segment sync] ─> PUT frame
//! ```
//!
//! Invariant: a block counts from its PUT frame on, written after its bytes and header. Durable
//! bytes are never overwritten: an extension uses the second header page. Cost: an operation per
//! megabyte, an operation for the header, a frame, and a hash of all bytes. A copy if direct I/O
//! needs full pages and the memory or the layers are not aligned. An extension reads the header
//! pages first.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use kvtrie_core::{BlockKey, Layers, Record};
use xxhash_rust::xxh3::xxh3_64;

use crate::claim::{Claim, lock};
use crate::error::{Error, Result};
use crate::frame::{self, Put};
use crate::meta::Meta;
use crate::page::{self, Contents};
use crate::pages::{Pages, paged};
use crate::read::piece;
use crate::settings::{Durability, hex};
use crate::store::Store;
use crate::table::Entry;
use crate::work::{Bytes, Op, Transferred, Work};

/// Number of blocks sharing a sync under `Fsync`.
const MOST_UNSYNCED: usize = 64;

/// Layers of a block to write.
#[derive(Clone, Copy, Debug)]
pub struct BlockWrite<'a> {
    /// Block key.
    pub key: &'a BlockKey,
    /// Slot.
    pub slot: u32,
    /// Layers.
    pub layers: Layers,
    /// Record, hashing to the key.
    pub record: &'a [u8],
    /// Metadata.
    pub meta: Meta,
    /// The layers' bytes, consecutively.
    pub bytes: &'a [u8],
}

/// A block being written.
struct Block<'s, 'a> {
    at: usize,
    given: BlockWrite<'a>,
    /// Layers in the slot before and after.
    before: Layers,
    all: Layers,
    /// Layers not submitted yet.
    left: [Layers; 2],
    sums: Vec<u64>,
    /// Offset and length of the header pages in the slot. `None` once submitted.
    header: Option<(usize, usize)>,
    sequence: u64,
    /// Number of failed syncs of the segment at the start.
    failures: u64,
    in_flight: usize,
    /// Whether the device works on it.
    active: bool,
    error: Option<Error>,
    _claim: Claim<'s>,
}

/// Several blocks being written.
struct Writes<'s, 'a> {
    store: &'s Store,
    wall_now: u64,
    waiting: VecDeque<(usize, BlockWrite<'a>)>,
    blocks: Vec<Option<Block<'s, 'a>>>,
    /// Written, but not durable.
    unsynced: Vec<Block<'s, 'a>>,
    held: usize,
    active: usize,
    depth: usize,
    retry: VecDeque<Op<'a>>,
    /// Operations prepared ahead, with their checksums.
    ready: VecDeque<Op<'a>>,
    results: Vec<Result<()>>,
}

impl Store {
    /// Write layers of a block into a slot. If the slot holds adjacent or overlapping layers of the
    /// same block, the block is extended: its layers are verified and stay. A different block in
    /// the slot is freed first.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Full`]: the slot of a new block is free then (or unchanged, if it
    /// could not be freed), and an extended block has its old layers. [`Error::Bad`] if the block
    /// to extend is damaged. It is removed then. [`Error::ReadOnly`]. [`Error::Config`] for wrong
    /// arguments, or a record too long or not hashing to the key.
    #[expect(clippy::too_many_arguments, reason = "a block, its place, its bytes and what is kept")]
    pub fn write(
        &self,
        key: &BlockKey,
        slot: u32,
        layers: Layers,
        record: &[u8],
        meta: Meta,
        bytes: &[u8],
        wall_now: u64,
    ) -> Result<()> {
        let given = vec![BlockWrite { key, slot, layers, record, meta, bytes }];
        self.write_many(given, wall_now, 1).pop().unwrap_or(Ok(()))
    }

    /// Write several blocks, up to `depth` at once, each like [`Store::write`]. Returns their
    /// results in the given order. Under `Fsync` they share syncs.
    pub fn write_many(
        &self,
        given: Vec<BlockWrite<'_>>,
        wall_now: u64,
        depth: usize,
    ) -> Vec<Result<()>> {
        let mut writes = Writes {
            store: self,
            wall_now,
            results: given.iter().map(|_| Ok(())).collect(),
            waiting: given.into_iter().enumerate().collect(),
            blocks: Vec::new(),
            unsynced: Vec::new(),
            held: 0,
            active: 0,
            depth: depth.max(1),
            retry: VecDeque::new(),
            ready: VecDeque::new(),
        };
        while !writes.waiting.is_empty() {
            self.device.run(&mut writes);
            writes.make_durable();
        }
        writes.results
    }

    fn check_given(&self, given: &BlockWrite<'_>) -> Result<()> {
        self.writable()?;
        self.check(given.slot, given.layers, given.bytes.len())?;
        self.check_record(given.record.len())?;
        if Record::decode(given.record).is_none_or(|record| record.key() != *given.key) {
            let key = hex(&given.key[..8]);
            return Err(Error::config(format!("the record does not give the key {key}")));
        }
        Ok(())
    }

    /// Plan the write of a block with a claimed slot. `None` if all its layers are present.
    fn plan<'s, 'a>(
        &self,
        given: BlockWrite<'a>,
        claim: Claim<'s>,
    ) -> Result<Option<Block<'s, 'a>>> {
        let BlockWrite { key, slot, layers, .. } = given;
        let found = lock(&self.table).get(slot);
        let same = found
            .filter(|entry| entry.key == *key)
            .and_then(|entry| Some((entry, entry.layers.join(layers)?)));
        let Some((entry, all)) = same else {
            if found.is_some() {
                self.release(slot)?;
            }
            return self.fresh(given, claim).map(Some);
        };
        let extended = self
            .verify_layers(key, slot, entry.layers.meet(layers))
            .and_then(|()| self.extension(&given, &entry, all))
            .inspect_err(|error| self.discard(slot, error));
        match extended {
            // All given layers are present and were verified above.
            Ok((_, _)) if all == entry.layers => Ok(None),
            Ok((header, sums)) => {
                let left =
                    [Layers::new(all.lo, entry.layers.lo), Layers::new(entry.layers.hi, all.hi)];
                let failures = self.segments.failures(slot);
                Ok(Some(Block {
                    at: 0,
                    given,
                    before: entry.layers,
                    all,
                    left,
                    sums,
                    header: Some((header, self.settings.header_bytes())),
                    sequence: 0,
                    failures,
                    in_flight: 0,
                    active: false,
                    error: None,
                    _claim: claim,
                }))
            }
            // The damaged block was discarded. The given layers replace all of it.
            Err(Error::Bad { .. }) if layers.covers(entry.layers) => {
                self.fresh(given, claim).map(Some)
            }
            Err(error) => Err(error),
        }
    }

    fn fresh<'s, 'a>(&self, given: BlockWrite<'a>, claim: Claim<'s>) -> Result<Block<'s, 'a>> {
        if self.settings.durability == Durability::Fsync {
            // The old block's FREE frame must be durable first, or a crash could bring the old
            // block back over the new block's bytes.
            let upto = lock(&self.manifest).appended;
            self.commit(upto)?;
            // Both header pages are written, so no page of an earlier block survives.
        }
        Ok(Block {
            at: 0,
            given,
            before: Layers::NONE,
            all: given.layers,
            left: [given.layers, Layers::NONE],
            sums: vec![0; usize::from(self.settings.layers)],
            header: Some((0, 2 * self.settings.header_bytes())),
            sequence: 0,
            failures: self.segments.failures(given.slot),
            in_flight: 0,
            active: false,
            error: None,
            _claim: claim,
        })
    }

    /// Offset of the header page to write next, and checksums of the layers in the slot.
    fn extension(
        &self,
        given: &BlockWrite<'_>,
        entry: &Entry,
        all: Layers,
    ) -> Result<(usize, Vec<u64>)> {
        let slot = given.slot;
        let both = self.headers(slot)?;
        let sequence = Some(entry.sequence);
        let (which, page) = page::choose(&self.settings, slot, given.key, sequence, &both)
            .map_err(|reason| Error::bad(slot, reason))?;
        if !page.layers.covers(entry.layers) {
            let reason = format!("header of layers {}, not {}", page.layers, entry.layers);
            return Err(Error::bad(slot, reason));
        }
        debug_assert!(all.covers(entry.layers));
        Ok(((1 - which) * self.settings.header_bytes(), page.sums()))
    }

    /// Append the PUT frame of a block with written bytes and header. Returns the manifest length
    /// to make durable for it.
    fn publish(&self, block: &Block<'_, '_>, wall_now: u64) -> Result<u64> {
        let BlockWrite { key, slot, record, meta, .. } = block.given;
        let (sequence, layers) = (block.sequence, block.all);
        let put = Put { slot, sequence, layers, stamp: wall_now, meta, key: *key, record };
        let mut bytes = Vec::new();
        let length = frame::put(&mut bytes, self.settings.seed(), &put);
        let mut manifest = lock(&self.manifest);
        let at = manifest.append(&bytes, &self.table)?;
        lock(&self.table).apply(slot, Entry { key: *key, sequence, at, length, layers });
        Ok(manifest.appended)
    }
}

impl<'a> Work<'a> for Writes<'_, 'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        if let Some(op) = self.retry.pop_front() {
            return Some(op);
        }
        let op = self.ready.pop_front().or_else(|| self.prepare())?;
        let block = self.blocks[op.owner].as_mut().expect("its block is held until it ends");
        // A new block waits for the end of a block at the device.
        if !block.active && self.active == self.depth {
            self.ready.push_front(op);
            return None;
        }
        self.active += usize::from(!block.active);
        block.active = true;
        Some(op)
    }

    fn done(&mut self, op: Op<'a>, moved: io::Result<usize>) {
        let at = op.owner;
        match op.step(moved) {
            Transferred::Partial(op) => return self.retry.push_back(op),
            Transferred::Done(_) => {}
            Transferred::Failed(op, error) => {
                if let Some(block) = &mut self.blocks[at] {
                    let (slot, bytes) = (block.given.slot, op.all().len());
                    block.fail(self.store.segments.writing_failed(slot, op.at, bytes, error));
                }
            }
        }
        if let Some(block) = &mut self.blocks[at] {
            block.in_flight -= 1;
        }
        self.finish(at);
    }

    fn between(&mut self) -> bool {
        // Prepare as many operations as the device has in flight, so it never waits for a hash.
        let ahead = self.ready.len() < 4 * self.depth;
        let op = if ahead { self.prepare() } else { None };
        let more = op.is_some();
        self.ready.extend(op);
        more
    }
}

impl<'a> Writes<'_, 'a> {
    /// Next operation, with its checksums.
    fn prepare(&mut self) -> Option<Op<'a>> {
        loop {
            for at in 0..self.blocks.len() {
                let block = self.blocks[at].as_mut();
                if let Some(block) = block.filter(|block| block.header.is_some()) {
                    match block.operation(self.store, at) {
                        Ok(op) => return Some(op),
                        Err(error) => {
                            block.fail(error);
                            self.finish(at);
                        }
                    }
                }
            }
            if self.held >= 2 * self.depth || self.unsynced.len() >= MOST_UNSYNCED {
                return None;
            }
            let (at, given) = self.waiting.pop_front()?;
            match self.begin(at, given) {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => self.results[at] = Err(error),
            }
        }
    }

    /// Begin a block. False if its slot is claimed by a different call, or by an unsynced block of
    /// this call.
    fn begin(&mut self, at: usize, given: BlockWrite<'a>) -> Result<bool> {
        let store = self.store;
        store.check_given(&given)?;
        // A call waits for a slot only while it holds none, so two calls cannot deadlock.
        let claim = if self.held == 0 && self.unsynced.is_empty() {
            store.claims.one(given.slot)
        } else if let Some(claim) = store.claims.now(given.slot) {
            claim
        } else {
            self.waiting.push_front((at, given));
            return Ok(false);
        };
        let Some(block) = store.plan(given, claim)? else { return Ok(true) };
        let block = Block { at, ..block };
        self.held += 1;
        if let Some(place) = self.blocks.iter().position(Option::is_none) {
            self.blocks[place] = Some(block);
        } else {
            self.blocks.push(Some(block));
        }
        Ok(true)
    }

    /// Finish a block with nothing in flight or left.
    fn finish(&mut self, at: usize) {
        let ended = |block: &mut Block<'_, '_>| block.in_flight == 0 && block.header.is_none();
        let Some(mut block) = self.blocks[at].take_if(ended) else { return };
        self.held -= 1;
        self.active -= usize::from(block.active);
        match block.error.take() {
            Some(error) => self.results[block.at] = Err(error),
            // Its frame must not be durable before its bytes, so it waits for the shared sync.
            None if self.store.settings.durability == Durability::Fsync => {
                self.unsynced.push(block);
            }
            None => {
                self.results[block.at] = self.store.publish(&block, self.wall_now).map(drop);
            }
        }
    }

    /// Sync the segments, publish the written blocks, and sync the manifest.
    fn make_durable(&mut self) {
        let store = self.store;
        let mut synced: BTreeMap<u32, u64> = BTreeMap::new();
        let mut published = Vec::new();
        for block in self.unsynced.drain(..) {
            let slot = block.given.slot;
            let segment = store.segments.of(slot);
            // A single sync per segment serves all its blocks. Later blocks only compare failure
            // counts.
            let known = synced.get(&segment).copied();
            let durable = match known {
                Some(failures) => store.segments.check_failures(slot, block.failures, failures),
                None => store.segments.sync(slot, block.failures).map(|failures| {
                    synced.insert(segment, failures);
                }),
            };
            match durable.and_then(|()| store.publish(&block, self.wall_now)) {
                Ok(upto) => published.push((block, upto)),
                Err(error) => self.results[block.at] = Err(error),
            }
        }
        for (block, upto) in published {
            self.results[block.at] = store.commit(upto).inspect_err(|_| {
                let mut manifest = lock(&store.manifest);
                // A concurrent rewrite may have kept this block's frame, so rewrite again.
                manifest.damaged = true;
                lock(&store.table).shrink(block.given.slot, block.before);
            });
        }
    }
}

impl<'a> Block<'_, 'a> {
    fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
        (self.left, self.header) = ([Layers::NONE; 2], None);
    }

    /// Next layers, or finally the header pages, as an operation.
    fn operation(&mut self, store: &Store, owner: usize) -> Result<Op<'a>> {
        let file = store.segments.bulk(self.given.slot, true)?;
        let start = store.segments.start(self.given.slot);
        let settings = &store.settings;
        let left = self.left.iter_mut().find(|layers| !layers.is_empty());
        let Some(left) = left else {
            let (within, length) = self.header.take().unwrap_or_default();
            self.in_flight += 1;
            // The sequence is drawn when the header is written, after all layers.
            self.sequence = lock(&store.table).next();
            let page = page::encode(
                settings,
                &Contents {
                    sequence: self.sequence,
                    key: self.given.key,
                    slot: self.given.slot,
                    layers: self.all,
                    sums: &self.sums,
                    record: self.given.record,
                },
            );
            let mut pages = Pages::new(length);
            pages[..page.len()].copy_from_slice(&page);
            let bytes = Bytes::FromPages(pages);
            return Ok(Op::new(file, start + within as u64, bytes, owner, Layers::NONE));
        };
        let layers = piece(settings, *left);
        left.lo = layers.hi;
        let (each, stride) = (settings.layer_bytes, settings.stride());
        let skip = usize::from(layers.lo - self.given.layers.lo) * each;
        let all: &'a [u8] = self.given.bytes;
        let bytes = &all[skip..skip + settings.bytes_of(layers)];
        for (layer, bytes) in layers.iter().zip(bytes.chunks_exact(each)) {
            self.sums[usize::from(layer)] = xxh3_64(bytes);
        }
        let fits = stride == each && (!file.paged() || paged(bytes));
        let bytes = if fits {
            Bytes::From(bytes)
        } else {
            let mut pages = Pages::new(usize::from(layers.len()) * stride);
            for (to, from) in pages.chunks_exact_mut(stride).zip(bytes.chunks_exact(each)) {
                to[..each].copy_from_slice(from);
            }
            Bytes::FromPages(pages)
        };
        self.in_flight += 1;
        let at = start + settings.layer_at(layers.lo);
        Ok(Op::new(file, at, bytes, owner, layers))
    }
}
