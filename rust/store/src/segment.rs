//! Segments: the files that slots lie in.
//!
//! Invariant: slot `s` lies in segment `s / per_segment` and nowhere else; of two folders, slots and
//! segments go to one and the other in turn. A sync that fails fails
//! every write to its segment that was not synced yet, because the system tells only one caller.
//! Cost: bytes go straight between the device and the caller's memory.

use std::collections::BTreeSet;
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::aside::{ASIDE, set_aside};
use crate::claim::{self, Slots, lock};
use crate::device::{Access, Device, File, read_full, write_full};
use crate::error::{Error, Result};
use crate::regular::{forbidden, is_no_file};
use crate::settings::Settings;

/// As many segments stay open.
const MOST_OPEN: usize = 64;

/// Syncs of one segment come one after another; segments share this many locks.
const SYNCS: usize = 16;

/// All segments of a store.
#[derive(Debug)]
pub(crate) struct Segments {
    device: Arc<dyn Device>,
    folders: Vec<PathBuf>,
    per_segment: u32,
    slot_bytes: u64,
    access: Access,
    state: Mutex<State>,
    /// How many syncs have failed.
    failed: [Mutex<u64>; SYNCS],
}

#[derive(Debug, Default)]
struct State {
    /// Segments whose names are durable.
    known: BTreeSet<u32>,
    /// Those open, the last used one last.
    open: Vec<(u32, Arc<dyn File>)>,
    /// Those written since the last sync of all.
    dirty: BTreeSet<u32>,
}

/// The name of a segment's file.
pub(crate) fn name(segment: u32) -> String {
    format!("segment-{segment:05}")
}

/// The segment that a file of this name is.
pub(crate) fn number(file: &str) -> Option<u32> {
    let number = file.strip_prefix("segment-")?.parse().ok()?;
    (name(number) == file).then_some(number)
}

impl Segments {
    pub(crate) fn new(
        device: Arc<dyn Device>,
        folders: Vec<PathBuf>,
        settings: &Settings,
        access: Access,
    ) -> Self {
        Self {
            device,
            folders,
            per_segment: settings.per_segment(),
            slot_bytes: settings.slot_bytes(),
            access,
            state: Mutex::default(),
            failed: Default::default(),
        }
    }

    /// The segments that exist on the device.
    pub(crate) fn list(&self) -> Result<BTreeSet<u32>> {
        let mut found = BTreeSet::new();
        for (turn, folder) in (0..).zip(&self.folders) {
            let items = self
                .device
                .list(folder)
                .map_err(|error| Error::io(format!("listing {}", folder.display()), error))?;
            let numbers = items.iter().filter_map(|item| number(&item.name));
            found.extend(numbers.filter(|number| number % self.turns() == turn));
        }
        Ok(found)
    }

    /// Sets aside what has a segment's name and is no file, or none that may be read; returns why.
    pub(crate) fn settle(&self) -> Result<Vec<String>> {
        let mut reasons = Vec::new();
        for segment in self.list()? {
            let (path, name) = (self.path(segment), name(segment));
            let Err(error) = self.device.open(&path, Access::Write) else { continue };
            let unreadable = || forbidden(&error) && self.device.open(&path, Access::Read).is_err();
            if is_no_file(&error) || unreadable() {
                let aside = set_aside(&*self.device, self.folder(segment), &name, ASIDE).map_err(
                    |error| Error::io(format!("setting {} aside", path.display()), error),
                )?;
                reasons.push(format!("{name}: {error}; set aside as {aside}"));
            }
        }
        Ok(reasons)
    }

    /// Takes the segments on the device as known.
    pub(crate) fn know(&self, segments: BTreeSet<u32>) {
        lock(&self.state).known = segments;
    }

    fn turns(&self) -> u32 {
        u32::try_from(self.folders.len()).unwrap_or(1)
    }

    /// The segment that a slot lies in.
    pub(crate) fn of(&self, slot: u32) -> u32 {
        let turns = self.turns();
        slot / turns / self.per_segment * turns + slot % turns
    }

    /// The slots below `end` that lie in a segment, one behind another.
    pub(crate) fn slots(&self, segment: u32, end: u32) -> Slots {
        let (turns, per) = (u64::from(self.turns()), u64::from(self.per_segment));
        let first = u64::from(segment) / turns * per * turns + u64::from(segment) % turns;
        let bounded = |slot: u64| u32::try_from(slot).unwrap_or(u32::MAX).min(end);
        claim::slots(bounded(first), bounded(first + per * turns), self.turns())
    }

    /// Where a slot starts in its segment.
    pub(crate) fn start(&self, slot: u32) -> u64 {
        u64::from(slot / self.turns() % self.per_segment) * self.slot_bytes
    }

    fn folder(&self, segment: u32) -> &Path {
        &self.folders[(segment % self.turns()) as usize]
    }

    fn path(&self, segment: u32) -> PathBuf {
        self.folder(segment).join(name(segment))
    }

    /// The open file; `None` if there is none and `create` is not set.
    pub(crate) fn file(&self, segment: u32, create: bool) -> io::Result<Option<Arc<dyn File>>> {
        let known = {
            let mut state = lock(&self.state);
            if let Some(at) = state.open.iter().position(|&(number, _)| number == segment) {
                let found = state.open.remove(at);
                state.open.push(found.clone());
                return Ok(Some(found.1));
            }
            state.known.contains(&segment)
        };
        if self.access != Access::Read && !known && !create {
            return Ok(None);
        }
        let file = match self.device.open_bulk(&self.path(segment), self.access) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if create && !known {
            self.device.sync_folder(self.folder(segment))?;
        }
        let mut state = lock(&self.state);
        state.known.insert(segment);
        // Somebody may have opened it meanwhile.
        if let Some((_, first)) = state.open.iter().find(|&&(number, _)| number == segment) {
            return Ok(Some(Arc::clone(first)));
        }
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

    /// A slot's file, for the operations of a queue.
    pub(crate) fn bulk(&self, slot: u32, create: bool) -> Result<Arc<dyn File>> {
        let segment = self.of(slot);
        if create {
            lock(&self.state).dirty.insert(segment);
        }
        match self.file(segment, create) {
            Ok(Some(file)) => Ok(file),
            Ok(None) => Err(Error::bad(slot, format!("{} is gone", name(segment)))),
            Err(error) => {
                Err(Error::io(format!("opening {}", self.path(segment).display()), error))
            }
        }
    }

    /// What an operation's failure to read `wanted` bytes at `at` means, that ended at `end`.
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

    /// What an operation's failure to write means.
    pub(crate) fn writing_failed(
        &self,
        slot: u32,
        at: u64,
        bytes: usize,
        error: io::Error,
    ) -> Error {
        Error::io(self.doing("writing", slot, bytes, at), error)
    }

    /// Fills `buffer` from a slot. A file that ends before is damaged, not slow.
    pub(crate) fn read(&self, slot: u32, within: u64, buffer: &mut [u8]) -> Result<()> {
        let at = self.start(slot) + within;
        let wanted = buffer.len();
        let failed = |error| Error::io(self.doing("reading", slot, wanted, at), error);
        let Some(file) = self.file(self.of(slot), false).map_err(failed)? else {
            return Err(Error::bad(slot, format!("{} is gone", name(self.of(slot)))));
        };
        let got = read_full(&*file, buffer, at).map_err(failed)?;
        if got < wanted {
            let ends = io::ErrorKind::UnexpectedEof.into();
            return Err(self.reading_failed(slot, at, at + got as u64, wanted, ends));
        }
        Ok(())
    }

    /// Writes the buffers one behind another into a slot.
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

    /// How many syncs of the slot's segment have failed.
    pub(crate) fn failures(&self, slot: u32) -> u64 {
        *lock(&self.failed[self.of(slot) as usize % SYNCS])
    }

    /// Makes a slot's segment durable, if no sync has failed since `failures` was asked; returns
    /// how many have failed.
    pub(crate) fn sync(&self, slot: u32, failures: u64) -> Result<u64> {
        let now = self.sync_segment(self.of(slot))?;
        self.unharmed(slot, failures, now).map(|()| now)
    }

    /// Whether as many syncs of a slot's segment have failed `now` as when `failures` was asked.
    pub(crate) fn unharmed(&self, slot: u32, failures: u64, now: u64) -> Result<()> {
        if now == failures {
            return Ok(());
        }
        let what = format!("syncing {}", self.path(self.of(slot)).display());
        Err(Error::io(what, io::Error::other("another sync of it failed meanwhile")))
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

    /// Makes all that was written durable.
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

    /// Removes a segment's file.
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
            second: None,
        };
        let device = Arc::clone(&faults) as Arc<dyn Device>;
        let segments = Segments::new(device, vec![folder.path().into()], &settings, Access::Write);
        let (one, two) = (segments.failures(1), segments.failures(2));
        segments.write(1, 0, &mut [IoSlice::new(b"one")]).unwrap();
        segments.write(2, 0, &mut [IoSlice::new(b"two")]).unwrap();
        faults.inject(Fault::Sync, Chance::After(0));
        assert!(segments.sync(1, one).is_err());
        assert!(segments.sync(2, two).unwrap_err().to_string().contains("meanwhile"));
        segments.write(2, 0, &mut [IoSlice::new(b"two")]).unwrap();
        segments.sync(2, segments.failures(2)).unwrap();
    }
}
