//! Garbage collection: rewrites the manifest, removes leftovers, punches holes for free slots.
//!
//! Invariant: only free, unclaimed slots are changed. Cost: a rewrite of the manifest, and a device
//! call per run of free slots.

use std::io;

use crate::claim::{Slots, lock};
use crate::error::{Error, Result};
use crate::manifest::NEXT;
use crate::regular::{forbidden, is_not_regular};
use crate::segment::name;
use crate::settings::Durability;
use crate::store::Store;

impl Store {
    /// Rewrite the manifest, remove leftovers and return the space of free slots to the device.
    /// Returns the number of freed bytes.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] or the device's errors. No block is lost.
    pub fn gc(&self) -> Result<u64> {
        self.writable()?;
        let before = self.disk_bytes()?;
        if self.settings.durability == Durability::Fsync {
            // Free slots must be durably free before their bytes are destroyed.
            let upto = lock(&self.manifest).appended;
            self.commit(upto)?;
        }
        self.trim()?;
        for segment in self.segments.list()? {
            self.sweep(segment)?;
        }
        // Last: on a full disk, the rewrite needs the space freed above.
        lock(&self.manifest).rewrite(&self.table, &mut |_, _| true)?;
        Ok(before.saturating_sub(self.disk_bytes()?))
    }

    /// Free a run of slots and return their space to the device.
    ///
    /// # Errors
    /// As [`Store::remove`].
    pub fn clear(&self, slots: Slots) -> Result<()> {
        self.writable()?;
        self.check_slot(slots.end.saturating_sub(1))?;
        let used: Vec<u32> = {
            let table = lock(&self.table);
            slots.clone().filter(|&slot| table.get(slot).is_some()).collect()
        };
        for &slot in &used {
            self.remove(slot)?;
        }
        // Slots free before this call need no hole.
        let (Some(&first), Some(&last)) = (used.first(), used.last()) else { return Ok(()) };
        for segment in self.segments.of(first)..=self.segments.of(last) {
            let inside = self.slots_of(segment);
            self.punch(segment, &(first.max(inside.start)..(last + 1).min(inside.end)))?;
        }
        Ok(())
    }

    /// Bytes allocated on the device for the store's files.
    ///
    /// # Errors
    /// The device's errors.
    pub fn disk_bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        let failed = |error| Error::io(format!("measuring {}", self.folder.display()), error);
        for item in self.device.list(&self.folder).map_err(failed)? {
            if item.folder {
                continue;
            }
            match self.device.open(&self.folder.join(item.name), crate::device::Access::Read) {
                Ok(file) => bytes += file.size().map_err(failed)?.allocated,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // Not a file of the store.
                Err(error) if is_not_regular(&error) || forbidden(&error) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(bytes)
    }

    /// Remove an unfinished manifest and everything beyond the last slot.
    pub(crate) fn trim(&self) -> Result<()> {
        let next = self.folder.join(NEXT);
        match self.device.remove(&next) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io(format!("removing {}", next.display()), error)),
        }
        for segment in self.segments.list()? {
            let slots = self.slots_of(segment);
            if slots.is_empty() {
                self.segments.remove(segment)?;
            } else if self.slots_of(segment + 1).is_empty() {
                self.cut(segment, slots.len())?;
            }
        }
        Ok(())
    }

    fn slots_of(&self, segment: u32) -> Slots {
        self.segments.slots(segment, self.settings.blocks)
    }

    /// Truncate a segment to `slots` slots.
    fn cut(&self, segment: u32, slots: usize) -> Result<()> {
        let len = slots as u64 * self.settings.slot_bytes();
        let failed = |error| Error::io(format!("cutting {} at {len}", name(segment)), error);
        let file = match self.segments.file(segment, false) {
            Ok(Some(file)) => file,
            Ok(None) => return Ok(()),
            Err(error) if forbidden(&error) => {
                self.note(failed(error).to_string());
                return Ok(());
            }
            Err(error) => return Err(failed(error)),
        };
        if file.size().map_err(failed)?.len > len {
            file.set_len(len).map_err(failed)?;
        }
        Ok(())
    }

    fn sweep(&self, segment: u32) -> Result<()> {
        let slots = self.slots_of(segment);
        let used: Vec<u32> = {
            let table = lock(&self.table);
            slots.clone().filter(|&slot| table.get(slot).is_some()).collect()
        };
        if slots.is_empty() {
            return Ok(());
        }
        let mut start = slots.start;
        for slot in used {
            self.punch(segment, &(start..slot))?;
            start = slot + 1;
        }
        let tail = start..slots.end;
        // A tail of free slots is truncated. This needs no support for holes.
        match self.claims.all(tail.clone()) {
            Some(_claim) if self.free(tail.clone()) => self.cut(segment, slots.len() - tail.len()),
            _ => self.punch(segment, &tail),
        }
    }

    fn free(&self, mut slots: Slots) -> bool {
        let table = lock(&self.table);
        slots.all(|slot| table.get(slot).is_none())
    }

    /// Punch a run of free, unclaimed slots. Splits a run with used or claimed slots.
    fn punch(&self, segment: u32, slots: &Slots) -> Result<()> {
        let Some(first) = slots.clone().next() else { return Ok(()) };
        let claim = self.claims.all(slots.clone()).filter(|_| self.free(slots.clone()));
        // A single slot in use must not keep the rest of the run: retry slot by slot.
        if claim.is_none() {
            return if slots.len() == 1 {
                Ok(())
            } else {
                slots.clone().try_for_each(|slot| self.punch(segment, &(slot..slot + 1)))
            };
        }
        let at = self.segments.start(first);
        let len = slots.len() as u64 * self.settings.slot_bytes();
        let failed =
            |error| Error::io(format!("freeing {len} bytes at {at} of {}", name(segment)), error);
        let Some(file) = self.segments.file(segment, false).map_err(failed)? else {
            return Ok(());
        };
        match file.punch(at, len) {
            // Without hole support, only later blocks reuse the space.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            other => other.map_err(failed),
        }
    }
}
