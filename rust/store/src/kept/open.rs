//! Opening of a kept file: lock, header and allocation.
//!
//! ```text
//!   open, lock -- held by another process --> Busy
//!     |- header of the same settings, whole file --> Kept, blocks found
//!     |- empty, damaged, cut or of another size  --> Kept, cold --make--> no blocks
//!     '- another model's, version's or no kept file --> refused, or Kept and cold with `replace`
//! ```
//!
//! Invariant: nothing is changed before the lock is held, and a refused file stays unchanged. A
//! cold file keeps its old bytes until `make`, before the first block. Closed earlier, it is
//! restored. The header is written last, so a process dying on the way leaves a file without
//! blocks. The lock belongs to a descriptor not shared by a mapping: a fork gives it up by closing
//! the descriptor. Cost: reading a word per slot, or the allocation of the file.

use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{
    AtFlags, FallocateFlags, OFlags, fallocate, fstatfs, fstatvfs, ftruncate, unlinkat,
};

use super::head::{self, Head, OWNER, Owner, Places, VERSION};
use super::map::Map;
use super::{Found, KeptFile};
use crate::claim::lock;
use crate::device::Access;
use crate::error::{Error, Result};
use crate::pages::SIZE;
use crate::regular;
use crate::settings::Settings;

/// Maximum length of a header.
const LONGEST: usize = 32 << 10;
/// File systems in memory: tmpfs, hugetlbfs, ramfs.
const MEMORY: [u64; 3] = [0x0102_1994, 0x9584_58f6, 0x8584_58f6];
/// Maximum number of file replacements while opening.
const TRIES: usize = 8;

/// Result of opening.
#[derive(Debug)]
pub enum Opened {
    /// The locked file.
    Kept(Box<KeptFile>),
    /// Locked by the process named in the header, if any.
    Busy(Option<Owner>),
}

/// A folder and a file name.
struct Place<'a> {
    path: &'a Path,
    folder: std::os::fd::OwnedFd,
    name: &'a OsStr,
}

impl<'a> Place<'a> {
    fn of(path: &'a Path) -> Result<Self> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::config(format!("{} names no file", path.display())));
        };
        if path.is_dir() {
            return Err(Error::config(format!(
                "{} is a folder: the path of a file in it is wanted",
                path.display()
            )));
        }
        let folder = regular::folder(parent)
            .map_err(|error| Error::config(format!("the folder of {}: {error}", path.display())))?;
        Ok(Self { path, folder, name })
    }

    fn fail(&self, what: &str, error: io::Error) -> Error {
        if regular::is_not_regular(&error) || regular::forbidden(&error) {
            return Error::config(format!("{}: {error}", self.path.display()));
        }
        Error::io(format!("{what} {}", self.path.display()), error)
    }

    fn open(&self, access: Access) -> Result<File> {
        regular::open(&self.folder, self.name, access, OFlags::empty())
            .map_err(|error| self.fail("opening", error))
    }

    /// Whether the name exists.
    fn taken(&self) -> bool {
        rustix::fs::statat(&self.folder, self.name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Whether the name leads to this open file.
    fn leads_to(&self, file: &File) -> bool {
        let found = rustix::fs::statat(&self.folder, self.name, AtFlags::SYMLINK_NOFOLLOW);
        match (found, file.metadata()) {
            (Ok(found), Ok(data)) => (found.st_dev, found.st_ino) == (data.dev(), data.ino()),
            _ => false,
        }
    }
}

/// Check for a memory file system.
fn check_memory(at: &Place<'_>) -> Result<()> {
    let found = fstatfs(&at.folder).map_err(|error| at.fail("looking at", error.into()))?;
    let kind = u64::try_from(found.f_type).unwrap_or(0) & 0xffff_ffff;
    if MEMORY.contains(&kind) {
        return Ok(());
    }
    Err(Error::config(format!(
        "{} is on a file system of type {kind:#x}, which is not memory: tmpfs (such as /dev/shm) or \
         hugetlbfs wanted",
        at.path.display()
    )))
}

/// Open a file for its only writer, and create it if missing.
///
/// # Errors
/// [`Error::Config`] for a path outside of a memory file system, a different owner, or different
/// content unless `replace`. [`Error::Full`] without room, or the system's errors.
pub(super) fn open(path: &Path, settings: Settings, replace: bool) -> Result<Opened> {
    settings.check()?;
    let at = Place::of(path)?;
    check_memory(&at)?;
    for _ in 0..TRIES {
        let new = !at.taken();
        let lock = at.open(Access::Write)?;
        check_owner(&at, &lock)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Ok(Opened::Busy(owner(&lock)));
            }
            Err(TryLockError::Error(error)) => return Err(at.fail("locking", error)),
        }
        // The file may have been replaced before it was locked.
        if at.leads_to(&lock) {
            let length = lock.metadata().map_err(|error| at.fail("looking at", error))?.len();
            let before = Before { length, new };
            let undo = lock.try_clone().map_err(|error| at.fail("opening", error))?;
            return match locked(&at, lock, settings, replace, before) {
                Ok(kept) => Ok(Opened::Kept(Box::new(kept))),
                Err(error) => {
                    restore(&at, &undo, before, None);
                    let _ = undo.unlock();
                    Err(error)
                }
            };
        }
    }
    Err(Error::config(format!("{} is replaced again and again", path.display())))
}

/// Open a file for a tool: without the lock, and read-only.
pub(super) fn inspect(path: &Path) -> Result<KeptFile> {
    let at = Place::of(path)?;
    let file = at.open(Access::Read)?;
    let length = file.metadata().map_err(|error| at.fail("looking at", error))?.len();
    let (settings, places) = match head::decode(&start_of(&at, &file)?) {
        Head::Good(good) => *good,
        Head::Version(version) => return Err(other_version(path, version)),
        Head::Empty | Head::Foreign => {
            return Err(Error::config(format!("{} is no kept file", path.display())));
        }
        Head::Damaged => {
            return Err(Error::config(format!("{}: its header is damaged", path.display())));
        }
    };
    if length < places.length {
        return Err(Error::config(cut(length, places.length)));
    }
    let map = map(&at, &file, &places, false)?;
    Ok(KeptFile::new(path, settings, places, file, None, map, Found::Blocks))
}

fn check_owner(at: &Place<'_>, file: &File) -> Result<()> {
    let data = file.metadata().map_err(|error| at.fail("looking at", error))?;
    let me = rustix::process::geteuid().as_raw();
    if data.uid() == me {
        return Ok(());
    }
    Err(Error::config(format!(
        "{} belongs to user {}, and this process runs as {me}",
        at.path.display(),
        data.uid()
    )))
}

/// Remove other users' access to an accepted file.
fn make_private(at: &Place<'_>, file: &File) -> Result<()> {
    let data = file.metadata().map_err(|error| at.fail("looking at", error))?;
    if data.permissions().mode() & 0o777 != 0o600 {
        let only_mine = std::fs::Permissions::from_mode(0o600);
        file.set_permissions(only_mine).map_err(|error| at.fail("changing", error))?;
    }
    Ok(())
}

fn owner(file: &File) -> Option<Owner> {
    let mut head = [0; 160];
    file.read_exact_at(&mut head, 0).ok()?;
    (head[..8] == head::MAGIC).then(|| Owner::decode(&head)).flatten()
}

fn start_of(at: &Place<'_>, file: &File) -> Result<Vec<u8>> {
    let mut head = vec![0; LONGEST];
    let mut filled = 0;
    while filled < head.len() {
        match file.read_at(&mut head[filled..], filled as u64) {
            Ok(0) => break,
            Ok(more) => filled += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(at.fail("reading", error)),
        }
    }
    head.truncate(filled);
    Ok(head)
}

fn other_version(path: &Path, version: u32) -> Error {
    Error::config(format!(
        "{} has format {version}, and this version reads {VERSION}",
        path.display()
    ))
}

fn cut(length: u64, wanted: u64) -> String {
    format!("the file has {length} bytes of {wanted}")
}

/// Take over a locked file, or allocate the room to make it again.
fn locked(
    at: &Place<'_>,
    lock: File,
    settings: Settings,
    replace: bool,
    before: Before,
) -> Result<KeptFile> {
    let page = fstatvfs(&lock).map_err(|error| at.fail("looking at", error.into()))?.f_bsize;
    let wanted = Places::of(&settings, page);
    let length = before.length;
    let reason = match head::decode(&start_of(at, &lock)?) {
        Head::Empty => None,
        Head::Damaged => Some("its header is damaged".to_owned()),
        Head::Good(good) if good.0.identity == settings.identity => {
            let (found, places) = *good;
            if found.blocks != settings.blocks || places != wanted {
                Some(format!("it was made for {} blocks, now {}", found.blocks, settings.blocks))
            } else if length < wanted.length {
                Some(cut(length, wanted.length))
            } else {
                let file = at.open(Access::Write)?;
                let map = map(at, &file, &wanted, true)?;
                make_private(at, &lock)?;
                map.write(OWNER, &Owner::this().encode());
                let lock = Some(lock);
                return Ok(KeptFile::new(at.path, found, wanted, file, lock, map, Found::Blocks));
            }
        }
        Head::Good(good) if !replace => {
            return Err(Error::config(format!(
                "{} keeps the blocks of {}, and those of {} are wanted: give another path, or \
                 keep_replace=True to lose them",
                at.path.display(),
                good.0.about,
                settings.about
            )));
        }
        Head::Version(version) if !replace => return Err(other_version(at.path, version)),
        Head::Foreign if !replace => {
            return Err(Error::config(format!(
                "{} is not a file that kvtrie made: give another path, or keep_replace=True to \
                 lose its {length} bytes",
                at.path.display()
            )));
        }
        Head::Good(_) | Head::Version(_) | Head::Foreign => Some("it was replaced".to_owned()),
    };
    take_room(at, lock, settings, wanted, reason, before)
}

/// Allocate the room of a file to be made again. Its old bytes stay.
fn take_room(
    at: &Place<'_>,
    lock: File,
    settings: Settings,
    places: Places,
    reason: Option<String>,
    before: Before,
) -> Result<KeptFile> {
    check_room(at, &lock, &places)?;
    fallocate(&lock, FallocateFlags::empty(), 0, places.length).map_err(|error| {
        let what = format!("allocating {} bytes of", places.length);
        at.fail(&what, error.into())
    })?;
    let file = at.open(Access::Write)?;
    let map = map(at, &file, &places, true)?;
    let found = reason.map_or(Found::Nothing, Found::Cold);
    let mut kept = KeptFile::new(at.path, settings, places, file, Some(lock), map, found);
    kept.before = Mutex::new(Some(before));
    Ok(kept)
}

/// State of a file before the allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Before {
    length: u64,
    /// Whether the file is new.
    new: bool,
}

/// Restore a file to its state before the allocation. A mapped file keeps its length, because an
/// access beyond the end would kill the process.
fn restore(at: &Place<'_>, lock: &File, before: Before, mapped: Option<u64>) {
    if before.new {
        if at.leads_to(lock) {
            let _ = unlinkat(&at.folder, at.name, AtFlags::empty());
        }
        return;
    }
    let _ = match mapped {
        None => ftruncate(lock, before.length),
        Some(length) if length > before.length => {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(lock, hole, before.length, length - before.length)
        }
        Some(_) => Ok(()),
    };
}

impl KeptFile {
    /// Make a new or cold file before its first block is written. Its old bytes are lost. No effect
    /// on a file with usable blocks or already made.
    pub(super) fn initialize(&self) -> Result<()> {
        let mut waiting = lock(&self.before);
        let (Some(before), Some(file)) = (*waiting, &self.lock) else { return Ok(()) };
        make_private(&Place::of(&self.path)?, file)?;
        *waiting = None;
        let head = head::encode(&self.settings, &self.places);
        let (sum, rest) = (head::SUM, head::SUM + 8);
        // Without its checksum the header is invalid, even if partly written.
        self.map.write(sum, &[0; 8]);
        if before.length > 0 {
            let (table, end) = (self.places.table, self.map.length());
            let zeros = [0; SIZE];
            for place in (table..end).step_by(SIZE) {
                self.map.write(place, &zeros[..SIZE.min(end - place)]);
            }
        }
        self.map.write(0, &head[..sum]);
        self.map.write(rest, &head[rest..]);
        self.map.write(OWNER, &Owner::this().encode());
        fence(Ordering::SeqCst);
        self.map.write(sum, &head[sum..rest]);
        // Bytes beyond the end only waste space.
        if before.length > self.places.length {
            let _ = ftruncate(file, self.places.length);
        }
        Ok(())
    }

    /// Whether the table still has the bytes of a different file.
    pub(super) fn uninitialized(&self) -> bool {
        lock(&self.before).is_some()
    }
}

impl Drop for KeptFile {
    fn drop(&mut self) {
        let before = lock(&self.before).take();
        if let (Some(before), Some(lock), Ok(at)) = (before, &self.lock, Place::of(&self.path)) {
            restore(&at, lock, before, Some(self.places.length));
        }
        if let Some(lock) = &self.lock {
            // Closing does not release a lock while a fork has the descriptor.
            let _ = lock.unlock();
        }
    }
}

fn check_room(at: &Place<'_>, file: &File, places: &Places) -> Result<()> {
    let found = fstatvfs(file).map_err(|error| at.fail("looking at", error.into()))?;
    let has = file.metadata().map_err(|error| at.fail("looking at", error))?.blocks() * 512;
    let (free, all) = (found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize);
    // An unlimited tmpfs reports 0 blocks.
    if all == 0 || places.length <= free + has {
        return Ok(());
    }
    Err(Error::Full(format!(
        "{} takes {} bytes, and its file system has {free} free of {all}: give the tier fewer \
         blocks, or make the file system larger (Docker's --shm-size)",
        at.path.display(),
        places.length
    )))
}

fn map(at: &Place<'_>, file: &File, places: &Places, write: bool) -> Result<Map> {
    let length = usize::try_from(places.pool)
        .map_err(|_| Error::config(format!("a table of {} bytes", places.pool)))?;
    Map::new(file, length, write).map_err(|error| at.fail("mapping", error))
}

/// Absolute form of the given path.
pub(super) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
