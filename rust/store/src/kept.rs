//! Kept file: the pool of a host tier in a memory file system, with a slot table for reuse by the
//! next process.
//!
//! The caller writes the pool's bytes. This module has the table. States of a slot:
//!
//! ```text
//!   empty --begin--> writing --seal--> sealed --begin (another block, or more layers)--> writing
//!     ^                 |  died: torn     | found by the next process: unverified
//!     |                 |                 |   --verify_block--> good
//!     '--finish(failed)-'-----------------'--- bytes that do not give their checksum ------> empty
//! ```
//!
//! Invariant: a slot is `writing` before the first byte of a block is copied into it. It is
//! `sealed` only with the checksum of bytes not touched by a copy since its generation began. So a
//! sealed entry with a good checksum is its block, and anything else is a miss with a counted
//! reason. Only the process with the lock writes. Cost: a word per copy, a hash over the bytes per
//! seal and per first use of an earlier process's block, and about 1.2 KB of the file per slot.

mod entry;
mod head;
mod map;
mod open;
mod rows;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering, fence};

use kvtrie_core::{BlockKey, Layers, Record};
use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::claim::lock;
use crate::error::{Error, Result};
use crate::meta::Meta;
use crate::page::word;
use crate::settings::Settings;
use entry::{EMPTY, Entry, SEALED, WRITING, joined, split};
use head::{ENTRY_FIXED, Places};
use map::Map;

pub use head::Owner;
pub use open::Opened;

const UNVERIFIED: u8 = 1;
const BAD: u8 = 2;

/// Result of opening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// No file. A new file will be made.
    Nothing,
    /// File of an earlier process.
    Blocks,
    /// File without usable blocks, and the reason. It will be made again.
    Cold(String),
}

/// A slot being written.
#[derive(Debug)]
struct Pending {
    generation: u64,
    key: BlockKey,
    layers: Layers,
    writers: u32,
    failed: bool,
}

/// Slots being written, and slots with damaged blocks. A damaged slot has the looked-up key, if
/// any.
#[derive(Debug, Default)]
struct Slots {
    pending: FxHashMap<u32, Pending>,
    bad: FxHashMap<u32, Option<BlockKey>>,
}

/// Layers of a slot ready to seal, in a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsealed {
    /// Generation argument of `seal`.
    pub generation: u64,
    /// Layers covered by the checksum.
    pub layers: Layers,
}

/// Slot table of a kept file.
#[derive(Debug)]
pub struct KeptFile {
    path: PathBuf,
    settings: Settings,
    places: Places,
    file: File,
    lock: Option<File>,
    map: Map,
    found: Found,
    /// State of the file before its room was allocated, until it is made.
    before: Mutex<Option<open::Before>>,
    trust: Vec<AtomicU8>,
    slots: Mutex<Slots>,
    sealed: AtomicU32,
    unverified: AtomicU32,
    lost: Mutex<BTreeMap<&'static str, u64>>,
}

impl KeptFile {
    /// Open a file for its only writer. A new or unusable file is made before its first block is
    /// written. Closed earlier, it is restored.
    ///
    /// # Errors
    /// [`Error::Config`] for a path outside of a memory file system, a different owner, or
    /// different content unless `replace`. [`Error::Full`] without room, or the system's errors.
    /// The file stays unchanged.
    pub fn open(path: &Path, settings: Settings, replace: bool) -> Result<Opened> {
        open::open(&open::absolute(path), settings, replace)
    }

    /// Open a file without its lock, read-only.
    ///
    /// # Errors
    /// [`Error::Config`] for a damaged kept file or a different file, or the system's errors.
    pub fn inspect(path: &Path) -> Result<Self> {
        open::inspect(&open::absolute(path))
    }

    fn new(
        path: &Path,
        settings: Settings,
        places: Places,
        file: File,
        lock: Option<File>,
        map: Map,
        found: Found,
    ) -> Self {
        let mut trust = Vec::new();
        trust.resize_with(settings.blocks as usize, AtomicU8::default);
        let kept = Self {
            path: path.to_owned(),
            settings,
            places,
            file,
            lock,
            map,
            found,
            before: Mutex::default(),
            trust,
            slots: Mutex::default(),
            sealed: AtomicU32::new(0),
            unverified: AtomicU32::new(0),
            lost: Mutex::default(),
        };
        kept.count();
        kept
    }

    /// Count sealed slots and free the slots of a dead writer.
    fn count(&self) {
        if self.found != Found::Blocks {
            return;
        }
        let (mut sealed, mut torn) = (0, 0);
        for slot in 0..self.settings.blocks {
            match split(self.word(slot).load(Ordering::Acquire)) {
                (_, EMPTY) => {}
                (_, SEALED) => {
                    sealed += 1;
                    self.trust[slot as usize].store(UNVERIFIED, Ordering::Relaxed);
                }
                (generation, _) => {
                    torn += 1;
                    self.put(slot, generation, EMPTY);
                }
            }
        }
        self.sealed.store(sealed, Ordering::Relaxed);
        self.unverified.store(sealed, Ordering::Relaxed);
        self.lose("torn", torn);
    }

    /// Settings. `blocks` is the number of slots.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Result of opening.
    #[must_use]
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// Start of the pool in the file, and length of the file.
    #[must_use]
    pub fn pool(&self) -> (u64, u64) {
        (self.places.pool, self.places.length)
    }

    /// Descriptor to map.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Descriptor with the writer's lock, if any. A fork closes it to give up the lock.
    #[must_use]
    pub fn lock_descriptor(&self) -> Option<RawFd> {
        self.lock.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Number of slots usable by the next process.
    #[must_use]
    pub fn sealed(&self) -> u32 {
        self.sealed.load(Ordering::Relaxed)
    }

    /// Number of slots of earlier processes neither verified nor overwritten yet.
    #[must_use]
    pub fn unverified(&self) -> u32 {
        self.unverified.load(Ordering::Relaxed)
    }

    /// Number of lost blocks by reason: `torn`, `entry`, `key`, `checksum` or `record`.
    #[must_use]
    pub fn lost(&self) -> BTreeMap<&'static str, u64> {
        lock(&self.lost).clone()
    }

    fn lose(&self, reason: &'static str, count: u64) {
        if count > 0 {
            *lock(&self.lost).entry(reason).or_default() += count;
        }
    }

    fn at(&self, slot: u32) -> usize {
        self.places.table + slot as usize * self.places.entry
    }

    fn word(&self, slot: u32) -> &std::sync::atomic::AtomicU64 {
        self.map.word(self.at(slot))
    }

    fn put(&self, slot: u32, generation: u64, state: u64) {
        if self.lock.is_some() {
            self.word(slot).store(joined(generation, state), Ordering::Release);
        }
    }

    fn seed(&self, slot: u32, word_now: u64) -> u64 {
        word(&self.settings.identity, 0) ^ (u64::from(slot) << 32) ^ word_now.rotate_left(17)
    }

    fn check_slot(&self, slot: u32) -> Result<()> {
        if slot < self.settings.blocks {
            return Ok(());
        }
        Err(Error::config(format!("slot {slot}, 0 to {} wanted", self.settings.blocks - 1)))
    }

    fn writable(&self) -> Result<()> {
        if self.lock.is_some() {
            return Ok(());
        }
        Err(Error::ReadOnly(format!("{}: another process may write here", self.path.display())))
    }

    /// Good entry of a slot sealed with this word, if any.
    fn entry(&self, slot: u32, word_now: u64) -> Option<Entry> {
        let fixed = self.map.read(self.at(slot), ENTRY_FIXED);
        let length = entry::record_length(&fixed, self.settings.record_bytes())?;
        let record = self.map.read(self.at(slot) + ENTRY_FIXED, length);
        let found = entry::decode(&fixed, &record, self.seed(slot, word_now))?;
        let valid = !found.layers.is_empty() && found.layers.hi <= self.settings.layers;
        valid.then_some(found)
    }

    /// Mark a slot as being written, before the first byte of the block's layers is copied into it.
    ///
    /// # Errors
    /// [`Error::Bad`] for further layers of an unverified block of an earlier process.
    pub fn begin(&self, slot: u32, key: &BlockKey, layers: Layers) -> Result<()> {
        self.check_slot(slot)?;
        self.writable()?;
        self.initialize()?;
        let Slots { pending, bad } = &mut *lock(&self.slots);
        let (generation, state) = split(self.word(slot).load(Ordering::Relaxed));
        let whole = layers == Layers::new(0, self.settings.layers);
        // The caller may rely on the damaged layers.
        if !whole && bad.get(&slot).is_some_and(|bad| bad.is_none_or(|bad| bad == *key)) {
            return Err(Error::bad(slot, "its bytes were damaged, and only some layers come"));
        }
        let before = pending.remove(&slot).filter(|before| before.key == *key && !before.failed);
        let mut held = before.as_ref().map(|before| before.layers);
        let trust = &self.trust[slot as usize];
        if state == SEALED {
            let entry = self.entry(slot, joined(generation, state));
            held = entry.filter(|entry| entry.record.key() == *key).map(|entry| entry.layers);
            if held.is_some() && trust.load(Ordering::Relaxed) != 0 {
                return Err(Error::bad(slot, "it was not verified before more layers came"));
            }
        }
        let layers = held.and_then(|held| held.join(layers)).unwrap_or(layers);
        let generation = generation + 1;
        self.put(slot, generation, WRITING);
        // Other processes must see the word before the bytes.
        fence(Ordering::SeqCst);
        if state == SEALED {
            self.sealed.fetch_sub(1, Ordering::Relaxed);
        }
        if trust.swap(0, Ordering::Relaxed) == UNVERIFIED {
            self.unverified.fetch_sub(1, Ordering::Relaxed);
        }
        let writers = before.map_or(0, |before| before.writers) + 1;
        bad.remove(&slot);
        pending.insert(slot, Pending { generation, key: *key, layers, writers, failed: false });
        Ok(())
    }

    /// Record the end of a copy into a slot. Returns the layers to seal after the last copy. After
    /// a failed copy the slot is empty.
    pub fn finish(&self, slot: u32, key: &BlockKey, ok: bool) -> Option<Unsealed> {
        let pending = &mut lock(&self.slots).pending;
        let copying = pending.get_mut(&slot).filter(|copying| copying.key == *key)?;
        copying.writers = copying.writers.saturating_sub(1);
        copying.failed |= !ok;
        if copying.writers > 0 {
            return None;
        }
        let Pending { generation, layers, failed, .. } = *copying;
        if failed {
            pending.remove(&slot);
            self.put(slot, generation, EMPTY);
            return None;
        }
        Some(Unsealed { generation, layers })
    }

    /// Seal a slot after its last copy, with the bytes of its layers. Returns false if the slot is
    /// being written again or its record is too long.
    ///
    /// # Errors
    /// [`Error::Config`] for a wrong number of bytes or a record of a different block.
    pub fn seal(
        &self,
        slot: u32,
        unsealed: Unsealed,
        bytes: &[u8],
        record: &Record,
        meta: &Meta,
        wall: u64,
    ) -> Result<bool> {
        self.check_slot(slot)?;
        let Unsealed { generation, layers } = unsealed;
        self.check_bytes(layers, bytes)?;
        let (sum, key, record) = (xxh3_64(bytes), record.key(), record.encode());
        let mut slots = lock(&self.slots);
        let pending = &mut slots.pending;
        let current =
            |copying: &&mut Pending| copying.generation == generation && copying.writers == 0;
        let Some(copying) = pending.get_mut(&slot).filter(current) else { return Ok(false) };
        if copying.key != key {
            return Err(Error::config(format!(
                "the record is not that of the block in slot {slot}"
            )));
        }
        pending.remove(&slot);
        if record.len() > self.settings.record_bytes() {
            self.put(slot, generation, EMPTY);
            drop(slots);
            self.lose("record", 1);
            return Ok(false);
        }
        let seed = self.seed(slot, joined(generation, SEALED));
        self.map.write(self.at(slot) + 8, &entry::encode(seed, layers, sum, &record, meta, wall));
        self.put(slot, generation, SEALED);
        self.sealed.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }

    fn check_bytes(&self, layers: Layers, bytes: &[u8]) -> Result<()> {
        let wanted = usize::from(layers.len()) * self.settings.layer_bytes;
        if bytes.len() == wanted {
            return Ok(());
        }
        Err(Error::config(format!(
            "{} bytes of {} layers, {wanted} wanted",
            bytes.len(),
            layers.len()
        )))
    }

    /// Layers to verify in a slot of an earlier process before its first use. `None` if it needs no
    /// verification.
    ///
    /// # Errors
    /// [`Error::Bad`] for a damaged slot or entry.
    pub fn layers_to_verify(&self, slot: u32) -> Result<Option<Layers>> {
        self.check_slot(slot)?;
        match self.trust[slot as usize].load(Ordering::Acquire) {
            UNVERIFIED => {}
            BAD => return Err(Error::bad(slot, "its bytes were damaged")),
            _ => return Ok(None),
        }
        let word_now = self.word(slot).load(Ordering::Acquire);
        match self.entry(slot, word_now) {
            Some(entry) => Ok(Some(entry.layers)),
            None => Err(self.discard(slot, word_now, None, "entry")),
        }
    }

    /// Verify the block of an earlier process in a slot. `bytes` are the layers from
    /// `layers_to_verify`.
    ///
    /// # Errors
    /// [`Error::Bad`] for a different or damaged block. The slot is empty then.
    pub fn verify_block(&self, slot: u32, key: &BlockKey, bytes: &[u8]) -> Result<()> {
        let Some(layers) = self.layers_to_verify(slot)? else { return Ok(()) };
        self.check_bytes(layers, bytes)?;
        let word_now = self.word(slot).load(Ordering::Acquire);
        let Some(entry) = self.entry(slot, word_now) else {
            return Err(self.discard(slot, word_now, None, "entry"));
        };
        if entry.record.key() != *key {
            return Err(self.discard(slot, word_now, Some(*key), "key"));
        }
        if xxh3_64(bytes) != entry.sum {
            return Err(self.discard(slot, word_now, Some(*key), "checksum"));
        }
        let trust = &self.trust[slot as usize];
        let cleared = trust.compare_exchange(UNVERIFIED, 0, Ordering::AcqRel, Ordering::Relaxed);
        if cleared.is_ok() {
            self.unverified.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Empty a slot with an unusable block, and return the error.
    fn discard(
        &self,
        slot: u32,
        word_now: u64,
        key: Option<BlockKey>,
        reason: &'static str,
    ) -> Error {
        let mut slots = lock(&self.slots);
        let trust = &self.trust[slot as usize];
        let first = trust.compare_exchange(UNVERIFIED, BAD, Ordering::AcqRel, Ordering::Relaxed);
        if first.is_ok() {
            self.unverified.fetch_sub(1, Ordering::Relaxed);
            self.sealed.fetch_sub(1, Ordering::Relaxed);
            self.lose(reason, 1);
            slots.bad.insert(slot, key);
            if self.word(slot).load(Ordering::Relaxed) == word_now {
                self.put(slot, split(word_now).0, EMPTY);
            }
        }
        let why = match reason {
            "entry" => "its entry is damaged",
            "key" => "it holds another block",
            _ => "its bytes are damaged",
        };
        Error::bad(slot, why)
    }

    /// Read layers of a slot through the file, for a tool.
    ///
    /// # Errors
    /// The system's errors.
    pub fn read(&self, slot: u32, layers: Layers) -> Result<Vec<u8>> {
        self.check_slot(slot)?;
        let layer = self.settings.layer_bytes as u64;
        let block = u64::from(self.settings.layers) * layer;
        let at = self.places.pool + u64::from(slot) * block + u64::from(layers.lo) * layer;
        let mut bytes = vec![0; usize::from(layers.len()) * self.settings.layer_bytes];
        self.file
            .read_exact_at(&mut bytes, at)
            .map_err(|error| Error::io(format!("reading {}", self.path.display()), error))?;
        Ok(bytes)
    }
}
