//! Segments: large files of slots.
//!
//! ```text
//!   segment-00000: | slot 0 | slot 1 | ... | slot per_segment-1 |
//!   slot:          | header page | header page | layer 0 | layer 1 | ... each padded to pages |
//! ```
//!
//! Invariant: a slot has a fixed position. A failed sync fails every unsynced write to its segment,
//! because the kernel reports the loss to a single caller only. Cost: bytes go directly between the
//! device and the caller's memory.

use std::collections::BTreeSet;
use std::io::{self, IoSlice};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::claim::{Slots, lock};
use crate::device::{Access, Device};
use crate::error::{Error, Result};
use crate::file::{File, read_full, write_full};
use crate::quarantine::{UNUSABLE, quarantine};
use crate::regular::{forbidden, is_not_regular};
use crate::settings::Settings;

/// Limit of open files.
const MOST_OPEN: usize = 64;

/// Number of locks, each serializing the syncs of some segments.
const SYNCS: usize = 16;

/// Segments of a store.
#[derive(Debug)]
pub(crate) struct Segments {
    device: Arc<dyn Device>,
    folder: PathBuf,
    per_segment: u32,
    slot_bytes: u64,
    access: Access,
    state: Mutex<OpenSegments>,
    /// Numbers of failed syncs.
    failed: [Mutex<u64>; SYNCS],
}

#[derive(Debug, Default)]
struct OpenSegments {
    /// Segments with durable directory entries.
    known: BTreeSet<u32>,
    /// Open files, least recently used first.
    open: Vec<(u32, Arc<dyn File>)>,
    /// Segments written since the last full sync.
    dirty: BTreeSet<u32>,
}

/// File name of a segment.
pub(crate) fn name(segment: u32) -> String {
    format!("segment-{segment:05}")
}

/// Segment number of a file name.
pub(crate) fn number(file: &str) -> Option<u32> {
    let number = file.strip_prefix("segment-")?.parse().ok()?;
    (name(number) == file).then_some(number)
}

impl Segments {
    pub(crate) fn new(
        device: Arc<dyn Device>,
        folder: PathBuf,
        settings: &Settings,
        access: Access,
    ) -> Self {
        Self {
            device,
            folder,
            per_segment: settings.per_segment(),
            slot_bytes: settings.slot_bytes(),
            access,
            state: Mutex::default(),
            failed: Default::default(),
        }
    }

    /// Segments on the device.
    pub(crate) fn list(&self) -> Result<BTreeSet<u32>> {
        let failed = |error| Error::io(format!("listing {}", self.folder.display()), error);
        let items = self.device.list(&self.folder).map_err(failed)?;
        Ok(items.iter().filter_map(|item| number(&item.name)).collect())
    }

    /// Quarantine unusable files with a segment's name. Returns the reasons.
    pub(crate) fn quarantine_unusable(&self) -> Result<Vec<String>> {
        let mut reasons = Vec::new();
        for segment in self.list()? {
            let (path, name) = (self.path(segment), name(segment));
            let Err(error) = self.device.open(&path, Access::Write) else { continue };
            let unreadable = || forbidden(&error) && self.device.open(&path, Access::Read).is_err();
            if is_not_regular(&error) || unreadable() {
                let failed = |error| Error::io(format!("setting {} aside", path.display()), error);
                let renamed =
                    quarantine(&*self.device, &self.folder, &name, UNUSABLE).map_err(failed)?;
                reasons.push(format!("{name}: {error}; set aside as {renamed}"));
            }
        }
        Ok(reasons)
    }

    /// Set the existing segments.
    pub(crate) fn set_segments(&self, segments: BTreeSet<u32>) {
        lock(&self.state).known = segments;
    }

    /// Segment of a slot.
    pub(crate) fn of(&self, slot: u32) -> u32 {
        slot / self.per_segment
    }

    /// Slots below `end` in a segment.
    pub(crate) fn slots(&self, segment: u32, end: u32) -> Slots {
        let first = segment.saturating_mul(self.per_segment);
        first.min(end)..first.saturating_add(self.per_segment).min(end)
    }

    /// Offset of a slot in its segment.
    pub(crate) fn start(&self, slot: u32) -> u64 {
        u64::from(slot % self.per_segment) * self.slot_bytes
    }

    fn path(&self, segment: u32) -> PathBuf {
        self.folder.join(name(segment))
    }

    /// Open file of a segment. `None` if it does not exist, unless `create`.
    pub(crate) fn file(&self, segment: u32, create: bool) -> io::Result<Option<Arc<dyn File>>> {
        let known = {
            let mut state = lock(&self.state);
            // Move it to the most recently used end of the list.
            if let Some(at) = state.open.iter().position(|&(number, _)| number == segment) {
                let found = state.open.remove(at);
                state.open.push(found.clone());
                return Ok(Some(found.1));
            }
            state.known.contains(&segment)
        };
        // A writer knows all segments. A reader may find new segments.
        if self.access != Access::Read && !known && !create {
            return Ok(None);
        }
        let file = match self.device.open_bulk(&self.path(segment), self.access) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        // Before any write: a durable block in a file without a durable name would be lost.
        if create && !known {
            self.device.sync_folder(&self.folder)?;
        }
        let mut state = lock(&self.state);
        state.known.insert(segment);
        // A concurrent thread may have opened it.
        if let Some((_, first)) = state.open.iter().find(|&&(number, _)| number == segment) {
            return Ok(Some(Arc::clone(first)));
        }
        // Callers keep an evicted file open by their reference.
        if state.open.len() >= MOST_OPEN {
            state.open.remove(0);
        }
        state.open.push((segment, Arc::clone(&file)));
        Ok(Some(file))
    }

    fn doing(&self, what: &str, slot: u32, bytes: usize, at: u64) -> String {
        let path = self.path(self.of(slot));
        format!("{what} {bytes} bytes of slot {slot} at {at} of {}", path.display())
    }

    /// File of a slot, for queued operations.
    pub(crate) fn bulk(&self, slot: u32, create: bool) -> Result<Arc<dyn File>> {
        let segment = self.of(slot);
        if create {
            lock(&self.state).dirty.insert(segment);
        }
        match self.file(segment, create) {
            Ok(Some(file)) => Ok(file),
            Ok(None) => Err(Error::bad(slot, format!("{} is missing", name(segment)))),
            Err(error) => {
                Err(Error::io(format!("opening {}", self.path(segment).display()), error))
            }
        }
    }

    /// Error of a read of `wanted` bytes at `at`, stopped at `end`.
    pub(crate) fn reading_failed(
        &self,
        slot: u32,
        at: u64,
        end: u64,
        wanted: usize,
        error: io::Error,
    ) -> Error {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            let name = name(self.of(slot));
            return Error::bad(
                slot,
                format!("{name} ends at {end}, {wanted} bytes wanted at {at}"),
            );
        }
        Error::io(self.doing("reading", slot, wanted, at), error)
    }

    /// Error of a write.
    pub(crate) fn writing_failed(
        &self,
        slot: u32,
        at: u64,
        bytes: usize,
        error: io::Error,
    ) -> Error {
        Error::io(self.doing("writing", slot, bytes, at), error)
    }

    /// Fill `buffer` from a slot. A file too short is damage, not an I/O error.
    pub(crate) fn read(&self, slot: u32, within: u64, buffer: &mut [u8]) -> Result<()> {
        let at = self.start(slot) + within;
        let wanted = buffer.len();
        let failed = |error| Error::io(self.doing("reading", slot, wanted, at), error);
        let Some(file) = self.file(self.of(slot), false).map_err(failed)? else {
            return Err(Error::bad(slot, format!("{} is missing", name(self.of(slot)))));
        };
        let got = read_full(&*file, buffer, at).map_err(failed)?;
        if got < wanted {
            let ends = io::ErrorKind::UnexpectedEof.into();
            return Err(self.reading_failed(slot, at, at + got as u64, wanted, ends));
        }
        Ok(())
    }

    /// Write buffers consecutively into a slot.
    pub(crate) fn write(&self, slot: u32, within: u64, buffers: &mut [IoSlice<'_>]) -> Result<()> {
        let at = self.start(slot) + within;
        let bytes = buffers.iter().map(|buffer| buffer.len()).sum();
        let failed = |error| self.writing_failed(slot, at, bytes, error);
        let segment = self.of(slot);
        lock(&self.state).dirty.insert(segment);
        let file = self.file(segment, true).map_err(failed)?;
        let file = file.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        write_full(&*file, buffers, at).map_err(failed)
    }

    /// Number of failed syncs of the slot's segment.
    pub(crate) fn failures(&self, slot: u32) -> u64 {
        *lock(&self.failed[self.of(slot) as usize % SYNCS])
    }

    /// Sync a slot's segment. Fails if any sync of it has failed since `failures` was read. Returns
    /// the number of failures.
    pub(crate) fn sync(&self, slot: u32, failures: u64) -> Result<u64> {
        let now = self.sync_segment(self.of(slot))?;
        self.check_failures(slot, failures, now).map(|()| now)
    }

    /// Fail if a sync of the slot's segment has failed since `failures` was read.
    pub(crate) fn check_failures(&self, slot: u32, failures: u64, now: u64) -> Result<()> {
        if now == failures {
            return Ok(());
        }
        let what = format!("syncing {}", self.path(self.of(slot)).display());
        Err(Error::io(what, io::Error::other("a concurrent sync of it failed")))
    }

    fn sync_segment(&self, segment: u32) -> Result<u64> {
        let failed = |error| Error::io(format!("syncing {}", self.path(segment).display()), error);
        let mut failures = lock(&self.failed[segment as usize % SYNCS]);
        let Some(file) = self.file(segment, false).map_err(failed)? else { return Ok(*failures) };
        file.sync().map_err(|error| {
            *failures += 1;
            failed(error)
        })?;
        Ok(*failures)
    }

    /// Sync all written segments.
    pub(crate) fn sync_all(&self) -> Result<()> {
        let mut dirty = std::mem::take(&mut lock(&self.state).dirty);
        while let Some(&segment) = dirty.first() {
            if let Err(error) = self.sync_segment(segment) {
                lock(&self.state).dirty.append(&mut dirty);
                return Err(error);
            }
            dirty.pop_first();
        }
        Ok(())
    }

    /// Remove a segment's file.
    pub(crate) fn remove(&self, segment: u32) -> Result<()> {
        let mut state = lock(&self.state);
        state.known.remove(&segment);
        state.open.retain(|&(number, _)| number != segment);
        drop(state);
        let path = self.path(segment);
        self.device
            .remove(&path)
            .map_err(|error| Error::io(format!("removing {}", path.display()), error))
    }
}

#[cfg(test)]
mod tests {
    use super::{Access, Segments, name, number};
    use crate::device::Device;
    use crate::faults::{Chance, Fault, Faults};
    use crate::settings::{Durability, Settings};
    use crate::system::System;
    use std::io::IoSlice;
    use std::sync::Arc;

    #[test]
    fn a_name_is_one_number() {
        assert_eq!(name(7), "segment-00007");
        assert_eq!(number("segment-00007"), Some(7));
        assert_eq!(number("segment-123456"), Some(123_456));
        for other in ["segment-7", "segment-", "segment-0000x", "manifest"] {
            assert_eq!(number(other), None);
        }
    }

    #[test]
    fn a_failed_sync_fails_all_that_were_waiting_for_one() {
        let folder = tempfile::tempdir().unwrap();
        let faults = Arc::new(Faults::new(Arc::new(System::default()), 0));
        let settings = Settings {
            identity: [0; 32],
            about: String::new(),
            layers: 1,
            layer_bytes: 1,
            block_tokens: 1,
            blocks: 9,
            durability: Durability::Fsync,
        };
        let device = Arc::clone(&faults) as Arc<dyn Device>;
        let segments = Segments::new(device, folder.path().into(), &settings, Access::Write);
        let (one, two) = (segments.failures(1), segments.failures(2));
        segments.write(1, 0, &mut [IoSlice::new(b"one")]).unwrap();
        segments.write(2, 0, &mut [IoSlice::new(b"two")]).unwrap();
        faults.inject(Fault::Sync, Chance::After(0));
        assert!(segments.sync(1, one).is_err());
        assert!(segments.sync(2, two).unwrap_err().to_string().contains("a concurrent sync"));
        segments.write(2, 0, &mut [IoSlice::new(b"two")]).unwrap();
        segments.sync(2, segments.failures(2)).unwrap();
    }
}
