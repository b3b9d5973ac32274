//! Store: a folder with a manifest and segments, and the locks for their consistency.
//!
//! Invariant: table and manifest change together, and a freed slot is reusable at once. Lock order:
//! a claim, `synced`, `manifest`, then `table` or `reasons`. Cost: a frame per free. Concurrent
//! commits share a sync.

use std::io::IoSlice;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use kvtrie_core::Layers;

use crate::claim::{Claims, lock};
use crate::device::{Device, TransferPath};
use crate::error::{Error, Result};
use crate::file::File;
use crate::frame;
use crate::manifest::Manifest;
use crate::segment::Segments;
use crate::settings::{Durability, Settings};
use crate::table::Table;

/// Name of the writer's lock file.
pub(crate) const LOCK: &str = "lock";

/// Padding of a layer to a full page.
pub(crate) const ZEROS: [u8; 4096] = [0; 4096];

/// Maximum number of unread reasons.
const MOST_REASONS: usize = 10_000;

/// A store: a folder with a manifest and segments.
#[derive(Debug)]
pub struct Store {
    pub(crate) settings: Arc<Settings>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) folder: PathBuf,
    /// Writer's lock, or `None` in a reader.
    pub(crate) guard: Option<Arc<dyn File>>,
    /// Reason for being a reader.
    pub(crate) refusal: Option<String>,
    /// Reason for a stopped writer: its folder was removed or replaced.
    pub(crate) lost: OnceLock<String>,
    pub(crate) manifest: Mutex<Manifest>,
    pub(crate) table: Mutex<Table>,
    pub(crate) segments: Segments,
    pub(crate) claims: Claims,
    /// Durable bytes of the manifest. Locked before the manifest.
    pub(crate) synced: Mutex<u64>,
    pub(crate) reasons: Mutex<Vec<String>>,
}

impl Store {
    /// The settings.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Folder of the store.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.refusal().is_some()
    }

    /// Reason for refusing writes, if any. A writer also gets a reason once its folder is found
    /// removed or replaced.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref().or(self.lost.get().map(String::as_str))
    }

    /// Check the paths of a writer's folder and lock file. Notes the first failure as a reason.
    /// Without its lock file, a second process may write here.
    fn check_folder(&self) {
        let Some(guard) = self.guard.as_ref().filter(|_| !self.read_only()) else { return };
        let lock = self.folder.join(LOCK);
        let gone = if !self.device.leads_to(&self.folder) {
            &self.folder
        } else if !guard.is_at(&lock) {
            &lock
        } else {
            return;
        };
        let why = format!("{} was removed or replaced while open", gone.display());
        if self.lost.set(why.clone()).is_ok() {
            self.note(format!("{why}; nothing more is written"));
        }
    }

    /// Descriptor with the writer's lock, if any. A fork closes it to give up the lock.
    #[must_use]
    pub fn lock_descriptor(&self) -> Option<RawFd> {
        self.guard.as_ref()?.lock_descriptor()
    }

    /// Transfer path, with the reasons for fallbacks.
    #[must_use]
    pub fn travel(&self) -> TransferPath {
        self.device.travel()
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        lock(&self.table).blocks().count()
    }

    /// Take the reasons for everything skipped, repaired or removed since the last call.
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
        self.check_folder();
        match self.refusal() {
            None => Ok(()),
            Some(why) => {
                let folder = self.folder.display();
                Err(Error::ReadOnly(format!("{folder} is read-only: {why}")))
            }
        }
    }

    pub(crate) fn check_slot(&self, slot: u32) -> Result<()> {
        if slot < self.settings.blocks {
            return Ok(());
        }
        Err(Error::config(format!("slot {slot}, there are {}", self.settings.blocks)))
    }

    pub(crate) fn check_record(&self, length: usize) -> Result<()> {
        let most = self.settings.record_bytes();
        if length <= most {
            return Ok(());
        }
        Err(Error::config(format!("a record of {length} bytes, at most {most}")))
    }

    pub(crate) fn check(&self, slot: u32, layers: Layers, bytes: usize) -> Result<()> {
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

    /// Remove a damaged block, as far as the device permits. The slot is claimed.
    pub(crate) fn discard(&self, slot: u32, error: &Error) {
        // A device error says nothing about the block.
        let Error::Bad { reason, .. } = error else { return };
        if self.writable().is_err() {
            return;
        }
        self.note(format!("slot {slot}: {reason}; removed"));
        // Without a FREE frame, the old frame would bring the block back, so have the manifest
        // rewritten.
        if let Err(error) = self.release(slot) {
            self.note(format!("slot {slot}: {error}"));
            let mut manifest = lock(&self.manifest);
            manifest.damaged = true;
            lock(&self.table).forget(slot);
        }
        // If a crash loses the FREE frame, a read still fails at the headers.
        let pages = 2 * self.settings.header_bytes() / ZEROS.len();
        if self.segments.file(self.segments.of(slot), false).is_ok_and(|file| file.is_some()) {
            let mut zeros = vec![IoSlice::new(&ZEROS); pages];
            if let Err(error) = self.segments.write(slot, 0, &mut zeros) {
                self.note(format!("slot {slot}: {error}"));
            }
        }
    }

    /// Append a FREE frame and free the slot.
    pub(crate) fn release(&self, slot: u32) -> Result<u64> {
        let mut manifest = lock(&self.manifest);
        let sequence = lock(&self.table).next();
        let mut bytes = Vec::new();
        frame::free(&mut bytes, self.settings.seed(), slot, sequence);
        manifest.append(&bytes, &self.table)?;
        lock(&self.table).free(slot, sequence);
        Ok(manifest.appended)
    }

    /// Make the first `upto` appended bytes of the manifest durable. Concurrent calls share a sync.
    pub(crate) fn commit(&self, upto: u64) -> Result<()> {
        let mut synced = lock(&self.synced);
        let (file, appended, damaged) = {
            // A damaged file is rewritten even after a sync of these frames.
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
        // After a failed sync the page cache may have dropped dirty pages, so write everything
        // again.
        let mut manifest = lock(&self.manifest);
        manifest.damaged = true;
        manifest.rewrite(&self.table, &mut |_, _| true)?;
        *synced = manifest.appended;
        Ok(())
    }

    /// Free a slot. No effect if it is free.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Config`], or the device's errors. After an error, the block
    /// may return when the store is opened again.
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

    /// Make all writes durable, regardless of the durability setting. No effect in a reader.
    ///
    /// # Errors
    /// The device's errors.
    pub fn sync(&self) -> Result<()> {
        self.check_folder();
        if self.read_only() {
            return Ok(());
        }
        let upto = lock(&self.manifest).appended;
        self.segments.sync_all()?;
        self.commit(upto)
    }

    /// Write pending frames and release the lock.
    ///
    /// # Errors
    /// The device's errors. Blocks with pending frames are lost then.
    pub fn close(self) -> Result<()> {
        self.finish()
    }

    fn finish(&self) -> Result<()> {
        self.check_folder();
        if self.read_only() {
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
        // An error has no caller here. `close` returns it.
        let _ = self.finish();
    }
}
