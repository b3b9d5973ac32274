//! Reads: layers of blocks into the caller's memory, verified there.
//!
//! Several blocks are in flight together. Checksums of arrived pieces are computed while the device
//! transfers the next pieces.
//!
//! ```text
//!   waiting ─begin─> header + pieces in flight ─done─> unverified ─between─> compare ─> result
//! ```
//!
//! Invariant: every read is verified against its key, over the bytes in the caller's memory. Cost:
//! an operation for the header pages, an operation per megabyte, and a hash of all bytes. A copy if
//! direct I/O needs full pages and the memory or the layers are not aligned.

use std::collections::VecDeque;
use std::io;

use kvtrie_core::{BlockKey, Layers};
use xxhash_rust::xxh3::xxh3_64;

use crate::claim::{Claim, lock};
use crate::error::{Error, Result};
use crate::page;
use crate::pages::{Pages, paged};
use crate::settings::{Settings, hex};
use crate::store::Store;
use crate::work::{Bytes, Op, Transferred, Work};

/// Target bytes of an operation. A larger layer is still a single operation.
pub(crate) const PIECE: usize = 1 << 20;

/// Layers of a block to read.
#[derive(Debug)]
pub struct BlockRead<'a> {
    /// Block key.
    pub key: &'a BlockKey,
    /// Slot.
    pub slot: u32,
    /// Layers.
    pub layers: Layers,
    /// Destination of the layers, consecutively.
    pub out: &'a mut [u8],
}

/// Prefix of `layers` for a single operation.
pub(crate) fn piece(settings: &Settings, layers: Layers) -> Layers {
    let most = u16::try_from(PIECE / settings.stride()).unwrap_or(u16::MAX).max(1);
    Layers::new(layers.lo, layers.hi.min(layers.lo.saturating_add(most)))
}

/// A block being read.
struct Block<'s, 'a> {
    at: usize,
    key: &'a BlockKey,
    slot: u32,
    layers: Layers,
    /// Layers not submitted yet, and their memory.
    left: Layers,
    out: &'a mut [u8],
    sums: Vec<u64>,
    header: Option<Pages>,
    in_flight: usize,
    /// Number of arrived, unverified operations.
    unverified: usize,
    /// Whether the device has transferred everything.
    moved: bool,
    error: Option<Error>,
    _claim: Claim<'s>,
}

/// Several blocks being read.
struct Reads<'s, 'a> {
    store: &'s Store,
    waiting: VecDeque<(usize, BlockRead<'a>)>,
    blocks: Vec<Option<Block<'s, 'a>>>,
    /// Number of blocks with a slot claim, and of blocks with device work.
    held: usize,
    active: usize,
    depth: usize,
    retry: VecDeque<Op<'a>>,
    /// Arrived, unverified operations.
    arrived: VecDeque<Op<'a>>,
    results: Vec<Result<()>>,
}

impl Store {
    /// Read layers of a block into `out` and verify them. On an error `out` is undefined.
    ///
    /// # Errors
    /// [`Error::Bad`] if the slot does not hold these layers of this block undamaged. A writer
    /// removes a damaged block. [`Error::Io`] if the device failed. [`Error::Config`] for wrong
    /// arguments.
    pub fn read(&self, key: &BlockKey, slot: u32, layers: Layers, out: &mut [u8]) -> Result<()> {
        let wanted = vec![BlockRead { key, slot, layers, out }];
        self.read_many(wanted, 1).pop().unwrap_or(Ok(()))
    }

    /// Read several blocks, up to `depth` at once, each like [`Store::read`]. Returns their results
    /// in the given order.
    pub fn read_many(&self, wanted: Vec<BlockRead<'_>>, depth: usize) -> Vec<Result<()>> {
        let mut reads = Reads {
            store: self,
            results: wanted.iter().map(|_| Ok(())).collect(),
            waiting: wanted.into_iter().enumerate().collect(),
            blocks: Vec::new(),
            held: 0,
            active: 0,
            depth: depth.max(1),
            retry: VecDeque::new(),
            arrived: VecDeque::new(),
        };
        self.device.run(&mut reads);
        reads.results
    }

    /// Check for the block's layers in the table.
    fn look(&self, wanted: &BlockRead<'_>) -> Result<()> {
        let BlockRead { key, slot, layers, .. } = *wanted;
        let found = lock(&self.table).get(slot);
        let Some(entry) = found.filter(|entry| entry.key == *key) else {
            let holds = found.map_or("nothing".into(), |entry| hex(&entry.key[..8]));
            return Err(Error::bad(slot, format!("holds {holds}, not {}", hex(&key[..8]))));
        };
        if !entry.layers.covers(layers) {
            return Err(Error::bad(slot, format!("holds layers {}, not {layers}", entry.layers)));
        }
        Ok(())
    }

    /// Read both header pages of a slot.
    pub(crate) fn headers(&self, slot: u32) -> Result<Vec<u8>> {
        let mut both = vec![0; 2 * self.settings.header_bytes()];
        self.segments.read(slot, 0, &mut both)?;
        Ok(both)
    }

    /// Read layers individually and verify them. The slot is claimed.
    pub(crate) fn verify_layers(&self, key: &BlockKey, slot: u32, layers: Layers) -> Result<()> {
        if layers.is_empty() {
            return Ok(());
        }
        let settings = &*self.settings;
        let both = self.headers(slot)?;
        let mut bytes = vec![0; settings.layer_bytes];
        layers.iter().try_for_each(|layer| {
            self.segments.read(slot, settings.layer_at(layer), &mut bytes)?;
            let one = Layers::new(layer, layer + 1);
            self.compare(key, slot, one, &both, &[xxh3_64(&bytes)])
        })
    }

    /// Verify checksums of layers against a slot's header pages.
    fn compare(
        &self,
        key: &BlockKey,
        slot: u32,
        layers: Layers,
        both: &[u8],
        sums: &[u64],
    ) -> Result<()> {
        let (_, page) = page::choose(&self.settings, slot, key, None, both)
            .map_err(|reason| Error::bad(slot, reason))?;
        if !page.layers.covers(layers) {
            let reason = format!("header of layers {}, not {layers}", page.layers);
            return Err(Error::bad(slot, reason));
        }
        for (layer, &found) in layers.iter().zip(sums) {
            let stated = page.sum(layer);
            if stated != found {
                let reason =
                    format!("layer {layer} has checksum {found:#018x}, not {stated:#018x}");
                return Err(Error::bad(slot, reason));
            }
        }
        Ok(())
    }
}

impl<'a> Work<'a> for Reads<'_, 'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        if let Some(op) = self.retry.pop_front() {
            return Some(op);
        }
        loop {
            for at in 0..self.blocks.len() {
                let block = self.blocks[at].as_mut();
                if let Some(block) = block.filter(|block| !block.left.is_empty()) {
                    match block.piece(self.store, at) {
                        Ok(op) => return Some(op),
                        Err(error) => {
                            block.fail(error);
                            self.finish(at);
                        }
                    }
                }
            }
            // Blocks beyond `depth` only wait for verification. A limit of twice the depth bounds
            // the memory.
            if self.active == self.depth || self.held == 2 * self.depth {
                return None;
            }
            let (at, wanted) = self.waiting.pop_front()?;
            match self.begin(at, wanted) {
                Ok(Some(op)) => return Some(op),
                Ok(None) => return None,
                Err(error) => self.results[at] = Err(error),
            }
        }
    }

    fn done(&mut self, op: Op<'a>, moved: io::Result<usize>) {
        let at = op.owner;
        let settings = &self.store.settings;
        // The padding of the last layer may be missing at the end of a file.
        let fill = if op.layers.is_empty() { 0 } else { settings.stride() - settings.layer_bytes };
        let block = self.blocks[at].as_mut().expect("its block is held while it is under way");
        match op.step(moved) {
            Transferred::Partial(op) => return self.retry.push_back(op),
            Transferred::Done(op) => {
                block.unverified += 1;
                self.arrived.push_back(op);
            }
            Transferred::Failed(op, error)
                if error.kind() == io::ErrorKind::UnexpectedEof && op.rest().len() <= fill =>
            {
                block.unverified += 1;
                self.arrived.push_back(op);
            }
            Transferred::Failed(op, error) => {
                let (segments, wanted) = (&self.store.segments, op.all().len());
                let end = op.place();
                block.fail(segments.reading_failed(block.slot, op.at, end, wanted, error));
            }
        }
        block.in_flight -= 1;
        self.finish(at);
    }

    fn between(&mut self) -> bool {
        let Some(op) = self.arrived.pop_front() else { return false };
        let at = op.owner;
        let block = self.blocks[at].as_mut().expect("its block is held until all is seen");
        block.take(&self.store.settings, op);
        block.unverified -= 1;
        self.finish(at);
        true
    }
}

impl<'a> Reads<'_, 'a> {
    /// First operation of a block. `None` if a different call has claimed its slot.
    fn begin(&mut self, at: usize, wanted: BlockRead<'a>) -> Result<Option<Op<'a>>> {
        let store = self.store;
        store.check(wanted.slot, wanted.layers, wanted.out.len())?;
        // A call waits for a slot only while it holds none, so two calls cannot deadlock.
        let claim = if self.held == 0 {
            store.claims.one(wanted.slot)
        } else if let Some(claim) = store.claims.now(wanted.slot) {
            claim
        } else {
            // Retried after the end of the held blocks.
            self.waiting.push_front((at, wanted));
            return Ok(None);
        };
        store.look(&wanted)?;
        let BlockRead { key, slot, layers, out } = wanted;
        let place = self.blocks.iter().position(Option::is_none).unwrap_or(self.blocks.len());
        let file =
            store.segments.bulk(slot, false).inspect_err(|error| store.discard(slot, error))?;
        let pages = Pages::new(2 * store.settings.header_bytes());
        let start = store.segments.start(slot);
        let op = Op::new(file, start, Bytes::IntoPages(pages, None), place, Layers::NONE);
        let block = Block {
            at,
            key,
            slot,
            layers,
            left: layers,
            out,
            sums: vec![0; usize::from(layers.len())],
            header: None,
            in_flight: 1,
            unverified: 0,
            moved: false,
            error: None,
            _claim: claim,
        };
        if place == self.blocks.len() {
            self.blocks.push(Some(block));
        } else {
            self.blocks[place] = Some(block);
        }
        self.held += 1;
        self.active += 1;
        Ok(Some(op))
    }

    /// Finish a block with nothing in flight, left or unverified.
    fn finish(&mut self, at: usize) {
        if let Some(block) = &mut self.blocks[at] {
            let moved = block.in_flight == 0 && block.left.is_empty();
            self.active -= usize::from(moved && !block.moved);
            block.moved = moved;
        }
        let ended = |block: &mut Block<'_, '_>| block.moved && block.unverified == 0;
        let Some(mut block) = self.blocks[at].take_if(ended) else { return };
        self.held -= 1;
        let result = match (block.error.take(), &block.header) {
            (None, Some(both)) => {
                self.store.compare(block.key, block.slot, block.layers, both, &block.sums)
            }
            (error, _) => error.map_or(Ok(()), Err),
        };
        self.results[block.at] = result.inspect_err(|error| self.store.discard(block.slot, error));
    }
}

impl<'a> Block<'_, 'a> {
    fn fail(&mut self, error: Error) {
        // Keep the first error, because later errors may follow from it.
        self.error.get_or_insert(error);
        self.left = Layers::NONE;
    }

    /// Next layers as an operation.
    fn piece(&mut self, store: &Store, owner: usize) -> Result<Op<'a>> {
        let settings = &store.settings;
        let (each, stride) = (settings.layer_bytes, settings.stride());
        let file = store.segments.bulk(self.slot, false)?;
        let layers = piece(settings, self.left);
        self.left.lo = layers.hi;
        let (out, rest) = std::mem::take(&mut self.out).split_at_mut(settings.bytes_of(layers));
        self.out = rest;
        let fits = stride == each && (!file.paged() || paged(out));
        let bytes = if fits {
            Bytes::Into(out)
        } else {
            Bytes::IntoPages(Pages::new(usize::from(layers.len()) * stride), Some(out))
        };
        self.in_flight += 1;
        let at = store.segments.start(self.slot) + settings.layer_at(layers.lo);
        Ok(Op::new(file, at, bytes, owner, layers))
    }

    /// Take the bytes of a finished operation.
    fn take(&mut self, settings: &Settings, op: Op<'a>) {
        let (each, stride) = (settings.layer_bytes, settings.stride());
        let first = usize::from(op.layers.lo.saturating_sub(self.layers.lo));
        match op.bytes {
            Bytes::IntoPages(pages, None) => self.header = Some(pages),
            Bytes::IntoPages(pages, Some(out)) => {
                let both = pages.chunks_exact(stride).zip(out.chunks_exact_mut(each));
                for ((from, to), sum) in both.zip(&mut self.sums[first..]) {
                    to.copy_from_slice(&from[..each]);
                    *sum = xxh3_64(to);
                }
            }
            Bytes::Into(out) => {
                for (layer, sum) in out.chunks_exact(each).zip(&mut self.sums[first..]) {
                    *sum = xxh3_64(layer);
                }
            }
            Bytes::From(_) | Bytes::FromPages(_) => {}
        }
    }
}
