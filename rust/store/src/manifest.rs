//! Manifest: an append-only log of frames, rewritten when dead frames outweigh live frames.
//!
//! ```text
//!   header | frame | frame | ... | frame |          file, good up to `len`
//!                                        | frame |  `pending`, in memory
//! ```
//!
//! Invariant: a partly written frame does not count, and the next frame overwrites it. A failed
//! sync leaves the file in doubt (`damaged`), and the next append rewrites it. Cost: a small write
//! per frame. A rewrite writes all live frames.

use std::io::IoSlice;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::claim::lock;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::file::{File, write_full};
use crate::frame::{self, Frame, Put};
use crate::quarantine;
use crate::scan::Window;
use crate::settings::{Durability, SPARE, Settings};
use crate::table::{Entry, Table};

/// File name of the manifest.
pub(crate) const NAME: &str = "manifest";

/// File name of the next manifest during a rewrite.
pub(crate) const NEXT: &str = "manifest.tmp";

/// Bytes buffered before a write under [`Durability::None`] and in a rewrite.
const GATHER: usize = 1 << 20;

/// Manifest of a store, with its pending frames.
#[derive(Debug)]
pub(crate) struct Manifest {
    device: Arc<dyn Device>,
    folder: PathBuf,
    settings: Arc<Settings>,
    /// `None` only in an empty read-only store, or before the first rewrite.
    pub(crate) file: Option<Arc<dyn File>>,
    /// End of the last good frame in the file.
    pub(crate) len: u64,
    pending: Vec<u8>,
    /// Total number of appended bytes.
    pub(crate) appended: u64,
    /// Whether the file may differ from the written bytes.
    pub(crate) damaged: bool,
    /// Frames dropped by a rewrite.
    pub(crate) reasons: Vec<String>,
}

impl Manifest {
    pub(crate) fn new(
        device: Arc<dyn Device>,
        folder: PathBuf,
        settings: Arc<Settings>,
        file: Option<Arc<dyn File>>,
        len: u64,
    ) -> Self {
        Self {
            device,
            folder,
            settings,
            file,
            len,
            pending: Vec::new(),
            appended: 0,
            damaged: false,
            reasons: Vec::new(),
        }
    }

    fn failed(&self, what: &str, name: &str, error: std::io::Error) -> Error {
        Error::io(format!("{what} {}", self.folder.join(name).display()), error)
    }

    /// Make room for `bytes` bytes. Rewrites a damaged manifest, or a manifest whose dead frames
    /// would outweigh the live frames.
    pub(crate) fn make_room(&mut self, bytes: usize, table: &Mutex<Table>) -> Result<()> {
        let end = self.len + (self.pending.len() + bytes) as u64;
        let head = self.settings.head_bytes() as u64;
        if self.damaged || end > head + 2 * lock(table).live() + SPARE {
            return self.rewrite(table, &mut |_, _| true);
        }
        Ok(())
    }

    /// Append frames of at most [`SPARE`] bytes in total, or a single frame. Returns their offset.
    pub(crate) fn append(&mut self, frame: &[u8], table: &Mutex<Table>) -> Result<u64> {
        let end = self.len + (self.pending.len() + frame.len()) as u64;
        let rewritten = self.make_room(frame.len(), table);
        // On a full disk, slots must still be freeable while the budget has room for a frame.
        let most = self.settings.manifest_bytes(self.settings.blocks);
        if self.damaged || end > most {
            rewritten?;
        }
        let at = self.len + self.pending.len() as u64;
        let before = self.pending.len();
        self.pending.extend(frame);
        let gather = self.settings.durability == Durability::None;
        let due = !gather || self.pending.len() >= GATHER;
        // On an error the frame does not count, and the next write starts at the same offset.
        if due && let Err(error) = self.flush() {
            self.pending.truncate(before);
            return Err(error);
        }
        self.appended += frame.len() as u64;
        Ok(at)
    }

    /// Write the pending frames.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let Some(file) = &self.file else { return Ok(()) };
        write_full(&**file, &mut [IoSlice::new(&self.pending)], self.len)
            .map_err(|error| self.failed("writing", NAME, error))?;
        self.len += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }

    /// Read the frames of `blocks`, sorted by offset. Damaged frames give `None`.
    pub(crate) fn each(
        &self,
        blocks: &[(u32, Entry)],
        mut take: impl FnMut(u32, Entry, Option<Put<'_>>) -> Result<()>,
    ) -> Result<()> {
        let mut window = Window::default();
        for &(slot, entry) in blocks {
            let bytes = match (&self.file, entry.at.checked_sub(self.len)) {
                (_, Some(at)) => {
                    let at = usize::try_from(at).unwrap_or(usize::MAX);
                    self.pending.get(at..).unwrap_or_default()
                }
                (Some(file), None) => window
                    .get(&**file, entry.at, entry.length as usize)
                    .map_err(|error| self.failed("reading", NAME, error))?,
                (None, None) => &[],
            };
            let put = match frame::decode(bytes, self.settings.seed()) {
                Some((Frame::Put(put), _)) if put.key == entry.key => Some(put),
                _ => None,
            };
            take(slot, entry, put)?;
        }
        Ok(())
    }

    /// Rewrite the manifest with the blocks accepted and possibly changed by `keep`. All remaining
    /// blocks are freed, including blocks with damaged frames.
    pub(crate) fn rewrite(
        &mut self,
        table: &Mutex<Table>,
        keep: &mut dyn FnMut(u32, &mut Put<'_>) -> bool,
    ) -> Result<()> {
        let (blocks, last) = {
            let table = lock(table);
            (table.by_frame(), table.last())
        };
        let seed = self.settings.seed();
        let next = self.folder.join(NEXT);
        let file = quarantine::create(&*self.device, &self.folder, NEXT)
            .map_err(|error| self.failed("opening", NEXT, error))?;
        // Later frames get higher sequences, even after dropped frames.
        let mut bytes = frame::head(&self.settings, last);
        let (mut start, mut kept, mut freed, mut reasons) = (0, vec![], vec![], vec![]);
        self.each(&blocks, |slot, entry, put| {
            let Some(mut put) = put else {
                reasons.push(format!("slot {slot}: its frame at {} is damaged", entry.at));
                freed.push(slot);
                return Ok(());
            };
            (put.layers, put.sequence) = (entry.layers, entry.sequence);
            if !keep(slot, &mut put) {
                freed.push(slot);
                return Ok(());
            }
            let at = start + bytes.len() as u64;
            kept.push((slot, at, frame::put(&mut bytes, seed, &put)));
            if bytes.len() >= GATHER {
                write_full(&*file, &mut [IoSlice::new(&bytes)], start)
                    .map_err(|error| self.failed("writing", NEXT, error))?;
                start += bytes.len() as u64;
                bytes.clear();
            }
            Ok(())
        })?;
        write_full(&*file, &mut [IoSlice::new(&bytes)], start)
            .map_err(|error| self.failed("writing", NEXT, error))?;
        // Before the rename, or a crash could leave an empty manifest under the final name.
        file.sync().map_err(|error| self.failed("syncing", NEXT, error))?;
        self.device
            .rename(&next, &self.folder.join(NAME))
            .map_err(|error| self.failed("renaming", NEXT, error))?;
        self.len = start + bytes.len() as u64;
        self.file = Some(file);
        self.pending.clear();
        self.reasons.append(&mut reasons);
        let mut table = lock(table);
        for (slot, at, length) in kept {
            table.moved(slot, at, length);
        }
        for slot in freed {
            table.forget(slot);
        }
        drop(table);
        // Until the rename is durable, a crash may bring back the old file.
        self.damaged = true;
        self.device
            .sync_folder(&self.folder)
            .map_err(|error| self.failed("syncing the folder of", NAME, error))?;
        self.damaged = false;
        Ok(())
    }
}
