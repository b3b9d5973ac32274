//! Writing: a fresh block into a slot, or further layers of the block that is there.
//!
//! Layers of several blocks are under way together; the checksums of the next blocks are taken while
//! the device writes the last ones.
//! Invariant: a block counts from its PUT frame on, which is written after its bytes and its
//! header. What was durable is never written over: an extension uses other pages.
//! Cost: one operation per piece of about a megabyte and one for the header, a frame, a hash of all
//! of it; a copy where memory or layers are no whole pages and the device wants them; an extension
//! reads the header pages first.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use kvtrie_core::block::Layers;
use kvtrie_core::record::{Key, Record};
use xxhash_rust::xxh3::xxh3_64;

use crate::claim::{Claim, lock};
use crate::error::{Error, Result};
use crate::frame::{self, Put};
use crate::meta::Meta;
use crate::page::{self, Claimed};
use crate::pages::{Pages, paged};
use crate::read::piece;
use crate::settings::{Durability, hex};
use crate::store::Store;
use crate::table::Entry;
use crate::work::{Bytes, Op, Step, Work};

/// Under `Fsync`, as many blocks share a sync.
const MOST_UNSYNCED: usize = 64;

/// Layers of a block to write.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// Its name.
    pub key: &'a Key,
    /// Where it goes.
    pub slot: u32,
    /// The layers.
    pub layers: Layers,
    /// Its record; hashing it gives the key.
    pub record: &'a [u8],
    /// What to keep about it.
    pub meta: Meta,
    /// The layers' bytes, one behind another.
    pub bytes: &'a [u8],
}

/// A block on its way into a slot.
struct Block<'s, 'a> {
    at: usize,
    given: Given<'a>,
    /// The layers that the slot has already, and those that it will have.
    before: Layers,
    all: Layers,
    /// Layers that the device was not given yet.
    left: [Layers; 2],
    sums: Vec<u64>,
    /// Where the header pages go in the slot, and how many bytes; nothing once they went.
    header: Option<(usize, usize)>,
    sequence: u64,
    /// Failed syncs of the segment when it began.
    failures: u64,
    under_way: usize,
    /// Whether the device works for it.
    active: bool,
    error: Option<Error>,
    _claim: Claim<'s>,
}

/// Several blocks that are being written.
struct Writes<'s, 'a> {
    store: &'s Store,
    wall_now: u64,
    waiting: VecDeque<(usize, Given<'a>)>,
    blocks: Vec<Option<Block<'s, 'a>>>,
    /// Written, and not yet durable.
    unsynced: Vec<Block<'s, 'a>>,
    held: usize,
    active: usize,
    depth: usize,
    again: VecDeque<Op<'a>>,
    /// Operations whose checksums were taken ahead.
    ready: VecDeque<Op<'a>>,
    results: Vec<Result<()>>,
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
        let given = vec![Given { key, slot, layers, record, meta, bytes }];
        self.write_many(given, wall_now, 1).pop().unwrap_or(Ok(()))
    }

    /// Writes several blocks, up to `depth` of them at once, each as [`Store::write`] does; returns
    /// what came of each, in the order given. Under `Fsync` they share syncs.
    pub fn write_many(
        &self,
        given: Vec<Given<'_>>,
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
            again: VecDeque::new(),
            ready: VecDeque::new(),
        };
        while !writes.waiting.is_empty() {
            self.device.run(&mut writes);
            writes.make_durable();
        }
        writes.results
    }

    fn check_given(&self, given: &Given<'_>) -> Result<()> {
        self.writable()?;
        self.check(given.slot, given.layers, given.bytes.len())?;
        let most = self.settings.record_bytes();
        if given.record.len() > most {
            let length = given.record.len();
            return Err(Error::config(format!("a record of {length} bytes, at most {most}")));
        }
        if Record::decode(given.record).is_none_or(|record| record.key() != *given.key) {
            let key = hex(&given.key[..8]);
            return Err(Error::config(format!("the record does not give the key {key}")));
        }
        Ok(())
    }

    /// What is to be written of a block whose slot is claimed; `None` if all of it is there.
    fn plan<'s, 'a>(&self, given: Given<'a>, claim: Claim<'s>) -> Result<Option<Block<'s, 'a>>> {
        let Given { key, slot, layers, .. } = given;
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
            .prove(key, slot, entry.layers.meet(layers))
            .and_then(|()| self.extension(&given, &entry, all))
            .inspect_err(|error| self.discard(slot, error));
        match extended {
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
                    under_way: 0,
                    active: false,
                    error: None,
                    _claim: claim,
                }))
            }
            Err(Error::Bad { .. }) if layers.covers(entry.layers) => {
                self.fresh(given, claim).map(Some)
            }
            Err(error) => Err(error),
        }
    }

    fn fresh<'s, 'a>(&self, given: Given<'a>, claim: Claim<'s>) -> Result<Block<'s, 'a>> {
        if self.settings.durability == Durability::Fsync {
            // Whatever stood here is free for good, or a lost FREE frame would bring it back over
            // another block's bytes.
            let upto = lock(&self.manifest).appended;
            self.commit(upto)?;
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
            under_way: 0,
            active: false,
            error: None,
            _claim: claim,
        })
    }

    /// Where the next header page of a block goes, and the checksums of the layers it has.
    fn extension(
        &self,
        given: &Given<'_>,
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

    /// Bytes and header are written; from the PUT frame on the block counts. Returns up to where
    /// the manifest has to be durable for it.
    fn publish(&self, block: &Block<'_, '_>, wall_now: u64) -> Result<u64> {
        let Given { key, slot, record, meta, .. } = block.given;
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
        if let Some(op) = self.again.pop_front() {
            return Some(op);
        }
        let op = self.ready.pop_front().or_else(|| self.prepare())?;
        let block = self.blocks[op.whose].as_mut().expect("its block is held until it ends");
        if !block.active && self.active == self.depth {
            self.ready.push_front(op);
            return None;
        }
        self.active += usize::from(!block.active);
        block.active = true;
        Some(op)
    }

    fn done(&mut self, op: Op<'a>, moved: io::Result<usize>) {
        let at = op.whose;
        match op.step(moved) {
            Step::Again(op) => return self.again.push_back(op),
            Step::Whole(_) => {}
            Step::Failed(op, error) => {
                if let Some(block) = &mut self.blocks[at] {
                    let (slot, bytes) = (block.given.slot, op.all().len());
                    block.fail(self.store.segments.writing_failed(slot, op.at, bytes, error));
                }
            }
        }
        if let Some(block) = &mut self.blocks[at] {
            block.under_way -= 1;
        }
        self.settle(at);
    }

    fn between(&mut self) -> bool {
        // As much ahead as the device has, so that it never waits for a checksum.
        let ahead = self.ready.len() < 4 * self.depth;
        let op = if ahead { self.prepare() } else { None };
        let more = op.is_some();
        self.ready.extend(op);
        more
    }
}

impl<'a> Writes<'_, 'a> {
    /// The next operation, its checksums taken.
    fn prepare(&mut self) -> Option<Op<'a>> {
        loop {
            for at in 0..self.blocks.len() {
                let block = self.blocks[at].as_mut();
                if let Some(block) = block.filter(|block| block.header.is_some()) {
                    match block.operation(self.store, at) {
                        Ok(op) => return Some(op),
                        Err(error) => {
                            block.fail(error);
                            self.settle(at);
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

    /// Takes a block up; false if another call has its slot, or this one until it is durable.
    fn begin(&mut self, at: usize, given: Given<'a>) -> Result<bool> {
        let store = self.store;
        store.check_given(&given)?;
        // Whoever waits for a slot holds none, so that no two calls wait for each other.
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

    /// Ends a block of which nothing is under way and nothing is left.
    fn settle(&mut self, at: usize) {
        let ended = |block: &mut Block<'_, '_>| block.under_way == 0 && block.header.is_none();
        let Some(mut block) = self.blocks[at].take_if(ended) else { return };
        self.held -= 1;
        self.active -= usize::from(block.active);
        match block.error.take() {
            Some(error) => self.results[block.at] = Err(error),
            None if self.store.settings.durability == Durability::Fsync => {
                self.unsynced.push(block);
            }
            None => {
                self.results[block.at] = self.store.publish(&block, self.wall_now).map(drop);
            }
        }
    }

    /// Syncs the segments, publishes what was written, and syncs the manifest.
    fn make_durable(&mut self) {
        let store = self.store;
        let mut synced: BTreeMap<u32, u64> = BTreeMap::new();
        let mut published = Vec::new();
        for block in self.unsynced.drain(..) {
            let slot = block.given.slot;
            let segment = store.segments.of(slot);
            let known = synced.get(&segment).copied();
            let durable = match known {
                Some(failures) => store.segments.unharmed(slot, block.failures, failures),
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
                // Another call may have written it anew meanwhile, with this block's frame in it.
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

    /// The next layers, or at last the header pages, as an operation.
    fn operation(&mut self, store: &Store, whose: usize) -> Result<Op<'a>> {
        let file = store.segments.bulk(self.given.slot, true)?;
        let start = store.segments.start(self.given.slot);
        let settings = &store.settings;
        let left = self.left.iter_mut().find(|layers| !layers.is_empty());
        let Some(left) = left else {
            let (within, length) = self.header.take().unwrap_or_default();
            self.under_way += 1;
            self.sequence = lock(&store.table).next();
            let page = page::encode(
                settings,
                &Claimed {
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
            return Ok(Op::new(file, start + within as u64, bytes, whose, Layers::NONE));
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
        self.under_way += 1;
        let at = start + settings.layer_at(layers.lo);
        Ok(Op::new(file, at, bytes, whose, layers))
    }
}
