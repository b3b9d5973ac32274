//! Value folder: a file per value in 256 subfolders, shared by processes and machines without
//! locks.
//!
//! A value is written under a staging name and linked under its final name when complete, so
//! readers find a whole file or none, and the first of two writers wins. Reads go through the
//! device directly into the caller's memory, several values at once. Invariant: a file is never
//! changed after it was linked, so a reader may keep using a removed file. Cost: an open and a size
//! call per read, and an operation per megabyte.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, IoSlice, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kvtrie_core::{BlockKey, Layers};
use rustix::fs::Stat;

use crate::device::{Access, Device};
use crate::error::Result;
use crate::pages::{Pages, paged};
use crate::read::PIECE;
use crate::regular::{forbidden, is_not_regular};
use crate::value_gc::{Removed, length, modified, sweep};
use crate::value_place::Places;
use crate::work::{Bytes, Op, Transferred, Work};

/// Maximum number of values read at once per call.
const DEPTH: usize = 16;

/// Result of an operation on a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done.
    Ok,
    /// No such value.
    Missing,
    /// Wrong length.
    Damaged(String),
    /// Deadline passed.
    Late,
    /// The device failed. A retry may succeed.
    Unreachable(String),
    /// No room on the device.
    Full(String),
    /// Forbidden by the device.
    Refused(String),
}

impl Outcome {
    fn of(error: &io::Error) -> Self {
        let text = error.to_string();
        match error.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            io::ErrorKind::UnexpectedEof => Self::Damaged("the file ends early".into()),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full(text),
            _ if forbidden(error) || is_not_regular(error) => Self::Refused(text),
            _ => Self::Unreachable(text),
        }
    }
}

/// A value to read.
#[derive(Debug)]
pub struct ValueRead<'a> {
    /// Value name.
    pub name: BlockKey,
    /// Destination of the first bytes.
    pub header: &'a mut [u8],
    /// Offset of the remaining bytes.
    pub at: u64,
    /// Destination of the remaining bytes.
    pub out: &'a mut [u8],
}

/// A value to write.
#[derive(Debug)]
pub struct ValueWrite<'a> {
    /// Value name.
    pub name: BlockKey,
    /// First bytes.
    pub header: &'a [u8],
    /// Remaining bytes.
    pub bytes: &'a [u8],
}

/// Folder of values of equal size.
#[derive(Debug)]
pub struct ValueFolder {
    device: Arc<dyn Device>,
    places: Places,
    value_bytes: u64,
    /// Half of the time to live. A hit refreshes an older file.
    refresh: Option<Duration>,
}

impl ValueFolder {
    /// Open a folder. Creates it and checks write access.
    ///
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) if it is no folder, cannot be created or
    /// written, or has foreign files at the paths of values. Nothing was changed then.
    pub fn open(
        device: Arc<dyn Device>,
        folder: &Path,
        value_bytes: u64,
        ttl: Option<Duration>,
    ) -> Result<Self> {
        let places = Places::claim(folder)?;
        Ok(Self { device, places, value_bytes, refresh: ttl.map(|ttl| ttl / 2) })
    }

    /// Path of the folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.places.root()
    }

    /// Path of a value.
    #[must_use]
    pub fn path(&self, name: &BlockKey) -> PathBuf {
        self.places.path(name)
    }

    /// Remove staging files last changed before a time.
    pub fn sweep(&self, before: SystemTime) -> Removed {
        sweep(&self.places, before)
    }

    /// Check for values, by their files' lengths.
    #[must_use]
    pub fn exists_many(&self, names: &[BlockKey], left: Duration) -> Vec<Outcome> {
        let until = Instant::now() + left;
        let look = |name: &BlockKey| {
            if Instant::now() >= until {
                return Outcome::Late;
            }
            match self.places.find(name) {
                Ok(found) => self.check(length(&found)),
                Err(error) => self.failed(&error),
            }
        };
        names.iter().map(look).collect()
    }

    /// Read values.
    #[must_use]
    pub fn get_many(&self, wanted: Vec<ValueRead<'_>>, left: Duration) -> Vec<Outcome> {
        let mut gets = Gets {
            folder: self,
            until: Instant::now() + left,
            outcomes: vec![Outcome::Ok; wanted.len()],
            in_flight: vec![0; wanted.len()],
            held: 0,
            waiting: wanted.into_iter().enumerate().collect(),
            ready: VecDeque::new(),
        };
        self.device.run(&mut gets);
        gets.outcomes
    }

    /// Write missing values.
    #[must_use]
    pub fn put_many(&self, values: &[ValueWrite<'_>], left: Duration) -> Vec<Outcome> {
        let until = Instant::now() + left;
        let put = |value: &ValueWrite<'_>| match self.put(value, until) {
            Ok(outcome) => outcome,
            // All parent folders were created, so a folder was removed since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Outcome::Unreachable(error.to_string())
            }
            Err(error) => Outcome::of(&error),
        };
        values.iter().map(put).collect()
    }

    /// Remove values.
    #[must_use]
    pub fn remove_many(&self, names: &[BlockKey]) -> Vec<Outcome> {
        let remove = |name| match self.places.remove(name) {
            Ok(()) => Outcome::Ok,
            Err(error) => Outcome::of(&error),
        };
        names.iter().map(remove).collect()
    }

    fn check(&self, length: u64) -> Outcome {
        if length == self.value_bytes {
            return Outcome::Ok;
        }
        Outcome::Damaged(format!("file of {length} bytes, {} wanted", self.value_bytes))
    }

    /// Outcome of a failed operation on a value's file.
    fn failed(&self, error: &io::Error) -> Outcome {
        let outcome = Outcome::of(error);
        // Without the folder, a value is not known to be missing.
        if outcome == Outcome::Missing && !self.folder().is_dir() {
            return Outcome::Unreachable(format!("{} is no folder", self.folder().display()));
        }
        outcome
    }

    fn put(&self, value: &ValueWrite<'_>, until: Instant) -> io::Result<Outcome> {
        if Instant::now() >= until {
            return Ok(Outcome::Late);
        }
        match self.places.find(&value.name) {
            Ok(found) if length(&found) == self.value_bytes => {
                self.touch(&value.name, &found);
                return Ok(Outcome::Ok);
            }
            // No reader accepts it, and a link does not replace it.
            Ok(_) => self.places.remove(&value.name)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let (staged, file) = self.places.stage()?;
        if !write(file, value, until)? {
            return Ok(Outcome::Late);
        }
        self.places.link(&staged, &value.name).map(|()| Outcome::Ok)
    }

    /// Refresh a file's time to live, at most once per half of it. A failure only shortens the
    /// retention.
    fn touch(&self, name: &BlockKey, found: &Stat) {
        let Some(refresh) = self.refresh else { return };
        let age = modified(found).elapsed().ok();
        if age.is_some_and(|age| age >= refresh) {
            let _ = self.places.touch(name);
        }
    }
}

/// Write a value until the deadline. Returns whether it is complete.
fn write(mut file: fs::File, value: &ValueWrite<'_>, until: Instant) -> io::Result<bool> {
    let mut rest = [IoSlice::new(value.header), IoSlice::new(value.bytes)];
    let mut rest = &mut rest[..];
    while !rest.is_empty() {
        if Instant::now() >= until {
            return Ok(false);
        }
        let first = rest[0].len().min(4 * PIECE);
        let count = if first < rest[0].len() {
            file.write(&rest[0][..first])
        } else {
            file.write_vectored(&rest[..1])
        };
        match count {
            Ok(0) if first > 0 => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut rest, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Values being read.
struct Gets<'f, 'a> {
    folder: &'f ValueFolder,
    until: Instant,
    outcomes: Vec<Outcome>,
    /// Number of unfinished operations per value.
    in_flight: Vec<usize>,
    /// Number of values with unfinished operations.
    held: usize,
    waiting: VecDeque<(usize, ValueRead<'a>)>,
    ready: VecDeque<Op<'a>>,
}

impl<'a> Gets<'_, 'a> {
    /// Open a value's file and queue its operations.
    fn begin(&mut self, at: usize, wanted: ValueRead<'a>) -> Outcome {
        let ValueRead { name, header, at: start, out } = wanted;
        if Instant::now() >= self.until {
            return Outcome::Late;
        }
        let path = self.folder.path(&name);
        let opened = self.folder.device.open_bulk(&path, Access::Read);
        let (file, size) = match opened.and_then(|file| file.size().map(|size| (file, size))) {
            Ok(found) => found,
            Err(error) => return self.folder.failed(&error),
        };
        let found = self.folder.check(size.len);
        if found != Outcome::Ok {
            return found;
        }
        if self.folder.refresh.is_some()
            && let Ok(found) = self.folder.places.find(&name)
        {
            self.folder.touch(&name, &found);
        }
        let before = self.ready.len();
        let pages = file.paged() && !paged(header);
        let header = if pages {
            Bytes::IntoPages(Pages::new(header.len()), Some(header))
        } else {
            Bytes::Into(header)
        };
        self.ready.push_back(Op::new(Arc::clone(&file), 0, header, at, Layers::NONE));
        let mut place = start;
        for piece in out.chunks_mut(PIECE) {
            let length = piece.len() as u64;
            self.ready.push_back(Op::new(
                Arc::clone(&file),
                place,
                Bytes::Into(piece),
                at,
                Layers::NONE,
            ));
            place += length;
        }
        self.in_flight[at] = self.ready.len() - before;
        self.held += 1;
        Outcome::Ok
    }
}

impl<'a> Work<'a> for Gets<'_, 'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        loop {
            if let Some(op) = self.ready.pop_front() {
                return Some(op);
            }
            if self.held == DEPTH {
                return None;
            }
            let (at, wanted) = self.waiting.pop_front()?;
            self.outcomes[at] = self.begin(at, wanted);
        }
    }

    fn done(&mut self, op: Op<'a>, moved: io::Result<usize>) {
        let at = op.owner;
        match op.step(moved) {
            Transferred::Partial(op) => return self.ready.push_back(op),
            Transferred::Done(op) => {
                if let Bytes::IntoPages(pages, Some(out)) = op.bytes {
                    out.copy_from_slice(&pages[..out.len()]);
                }
            }
            Transferred::Failed(_, error) => self.outcomes[at] = Outcome::of(&error),
        }
        self.in_flight[at] -= 1;
        self.held -= usize::from(self.in_flight[at] == 0);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use kvtrie_core::BlockKey;

    use super::{Outcome, ValueFolder, ValueRead, ValueWrite};
    use crate::system::{QueueKind, System};
    use crate::value_place::STAGING;

    const HEADER: usize = 4096;
    const BYTES: usize = 3 * 4096 + 100;
    const SOON: Duration = Duration::from_secs(30);

    fn open(folder: &Path, direct: bool, queue: QueueKind) -> ValueFolder {
        let device = Arc::new(System::new(direct, queue));
        ValueFolder::open(device, folder, (HEADER + BYTES) as u64, None).unwrap()
    }

    fn value(name: u8) -> (BlockKey, Vec<u8>, Vec<u8>) {
        (
            [name; 32],
            vec![name; HEADER],
            (0_u8..251).cycle().take(BYTES).map(|at| at ^ name).collect(),
        )
    }

    fn put(folder: &ValueFolder, name: u8, left: Duration) -> Outcome {
        let (name, header, bytes) = value(name);
        folder.put_many(&[ValueWrite { name, header: &header, bytes: &bytes }], left).remove(0)
    }

    /// Outcome, and whether the bytes are correct.
    fn get(folder: &ValueFolder, name: u8, from: usize, to: usize) -> (Outcome, bool) {
        let (name, first, bytes) = value(name);
        let (mut header, mut out) = (vec![0; HEADER], vec![0; to - from]);
        let at = (HEADER + from) as u64;
        let wanted = ValueRead { name, header: &mut header, at, out: &mut out };
        let outcome = folder.get_many(vec![wanted], SOON).remove(0);
        (outcome, header == first && out == bytes[from..to])
    }

    #[test]
    fn a_value_is_read_by_every_kind_of_device() {
        for (direct, queue) in [
            (true, QueueKind::Best),
            (false, QueueKind::Best),
            (true, QueueKind::Threads),
            (false, QueueKind::Threads),
        ] {
            let root = tempfile::tempdir().unwrap();
            let folder = open(root.path(), direct, queue);
            assert_eq!(get(&folder, 1, 0, BYTES).0, Outcome::Missing);
            assert_eq!(put(&folder, 1, SOON), Outcome::Ok);
            assert_eq!(put(&folder, 1, SOON), Outcome::Ok);
            assert_eq!(get(&folder, 1, 0, BYTES), (Outcome::Ok, true));
            assert_eq!(get(&folder, 1, 4096, 8192), (Outcome::Ok, true));
            assert_eq!(get(&folder, 1, 7, 5000), (Outcome::Ok, true));
            let names = [[1; 32], [2; 32]];
            assert_eq!(folder.exists_many(&names, SOON), [Outcome::Ok, Outcome::Missing]);
            assert_eq!(folder.remove_many(&names), [Outcome::Ok, Outcome::Missing]);
            assert_eq!(fs::read_dir(root.path().join(STAGING)).unwrap().count(), 0);
        }
    }

    #[test]
    fn many_values_are_read_in_one_call() {
        let root = tempfile::tempdir().unwrap();
        let folder = open(root.path(), true, QueueKind::Best);
        for name in 0..40 {
            assert_eq!(put(&folder, name, SOON), Outcome::Ok);
        }
        let mut memory: Vec<_> = (0..41).map(|_| (vec![0; HEADER], vec![0; BYTES])).collect();
        let wanted = memory.iter_mut().zip(0..).map(|((header, out), name)| ValueRead {
            name: [name; 32],
            header,
            at: HEADER as u64,
            out,
        });
        let found = folder.get_many(wanted.collect(), SOON);
        assert!(found[..40].iter().all(|outcome| *outcome == Outcome::Ok));
        assert_eq!(found[40], Outcome::Missing);
        for ((header, out), name) in memory[..40].iter().zip(0..) {
            let (_, first, bytes) = value(name);
            assert!(*header == first && *out == bytes);
        }
    }

    #[test]
    fn a_file_of_another_length_is_damaged_and_replaced() {
        let root = tempfile::tempdir().unwrap();
        let folder = open(root.path(), true, QueueKind::Best);
        put(&folder, 1, SOON);
        let file = fs::OpenOptions::new().write(true).open(folder.path(&[1; 32])).unwrap();
        file.set_len(10).unwrap();
        assert!(matches!(get(&folder, 1, 0, BYTES).0, Outcome::Damaged(_)));
        assert!(matches!(folder.exists_many(&[[1; 32]], SOON)[0], Outcome::Damaged(_)));
        assert_eq!(put(&folder, 1, SOON), Outcome::Ok);
        assert_eq!(get(&folder, 1, 0, BYTES), (Outcome::Ok, true));
    }

    #[test]
    fn after_the_deadline_nothing_is_begun_and_nothing_is_left() {
        let root = tempfile::tempdir().unwrap();
        let folder = open(root.path(), true, QueueKind::Best);
        assert_eq!(put(&folder, 1, Duration::ZERO), Outcome::Late);
        assert_eq!(folder.exists_many(&[[1; 32]], Duration::ZERO), [Outcome::Late]);
        put(&folder, 1, SOON);
        let (mut header, mut out) = (vec![0; HEADER], vec![0; BYTES]);
        let wanted = ValueRead { name: [1; 32], header: &mut header, at: 4096, out: &mut out };
        assert_eq!(folder.get_many(vec![wanted], Duration::ZERO), [Outcome::Late]);
        assert_eq!(fs::read_dir(root.path().join(STAGING)).unwrap().count(), 0);
    }

    #[test]
    fn without_its_folder_a_value_is_not_known_to_be_missing() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("shared");
        let folder = open(&path, true, QueueKind::Best);
        fs::remove_dir_all(&path).unwrap();
        assert!(matches!(get(&folder, 1, 0, BYTES).0, Outcome::Unreachable(_)));
        assert!(matches!(folder.exists_many(&[[1; 32]], SOON)[0], Outcome::Unreachable(_)));
        assert!(matches!(put(&folder, 1, SOON), Outcome::Unreachable(_)));
    }

    #[test]
    fn a_file_in_the_place_of_the_folder_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = Arc::new(System::default());
        let opened = ValueFolder::open(device, file.path(), 10, None);
        assert!(opened.unwrap_err().to_string().contains("cannot be written"));
    }

    #[test]
    fn a_hit_refreshes_the_time_to_live_once_per_half_of_it() {
        let root = tempfile::tempdir().unwrap();
        let device = Arc::new(System::default());
        let hour = Duration::from_secs(3600);
        let folder =
            ValueFolder::open(device, root.path(), (HEADER + BYTES) as u64, Some(hour)).unwrap();
        put(&folder, 1, SOON);
        let path = folder.path(&[1; 32]);
        let age = || fs::metadata(&path).unwrap().modified().unwrap().elapsed().unwrap();
        let set = |age: Duration| {
            let file = fs::File::open(&path).unwrap();
            file.set_modified(std::time::SystemTime::now() - age).unwrap();
        };
        for minutes in [20, 40] {
            set(Duration::from_secs(60 * minutes));
            assert_eq!(get(&folder, 1, 0, BYTES), (Outcome::Ok, true));
            assert_eq!(age() < Duration::from_secs(60), minutes > 30);
        }
    }
}
