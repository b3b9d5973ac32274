//! Files of the operating system.
//!
//! Segments are opened twice: for direct I/O if the file system permits, and through the page cache
//! for unaligned transfers (the rest after a short transfer). The kernel keeps both coherent. A
//! held folder is a handle: its files are opened, renamed and removed relative to it, so changes of
//! the working directory or of the folder's name have no effect. Invariant: whenever direct I/O or
//! the kernel's queue refuses, a fallback is used and the reason is kept. Cost: the system calls,
//! and a handle per held folder.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::{self, TryLockError};
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rayon::ThreadPool;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, statat};
use rustix::io::Errno;

use crate::claim::lock;
use crate::device::{Access, Device, Item, TransferPath};
use crate::file::{File, Size};
use crate::pages::paged;
use crate::regular;
use crate::settings::PAGE;
use crate::threads;
use crate::work::{Op, Work};

/// Buffer limit of a call.
const MOST_BUFFERS: usize = 1024;

/// I/O queue to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueKind {
    /// The kernel's queue if available, threads otherwise.
    #[default]
    Best,
    /// Threads.
    Threads,
}

/// Device for files of the operating system.
#[derive(Clone, Debug)]
pub struct System {
    parts: Arc<Parts>,
    /// Handles of held folders, by path.
    held: Vec<(PathBuf, Arc<OwnedFd>)>,
}

/// State shared by all views of a device.
#[derive(Debug)]
struct Parts {
    asked: bool,
    refused: Arc<DirectRefusal>,
    #[cfg(target_os = "linux")]
    rings: Option<crate::ring::Rings>,
    no_ring: Option<String>,
    pool: OnceLock<ThreadPool>,
}

/// First refusal of direct I/O.
#[derive(Debug, Default)]
struct DirectRefusal {
    once: AtomicBool,
    why: Mutex<Option<String>>,
}

#[derive(Debug)]
struct SystemFile {
    plain: fs::File,
    direct: Option<fs::File>,
    refused: Arc<DirectRefusal>,
    locked: AtomicBool,
}

impl DirectRefusal {
    fn note(&self, what: &str, error: &io::Error) {
        lock(&self.why).get_or_insert_with(|| format!("direct I/O: {what}: {error}"));
        self.once.store(true, Ordering::Release);
    }
}

impl Default for System {
    fn default() -> Self {
        Self::new(true, QueueKind::Best)
    }
}

impl System {
    /// Create a device with this queue, and with direct I/O for segments if `direct`.
    #[must_use]
    pub fn new(direct: bool, queue: QueueKind) -> Self {
        let mut parts = Parts {
            asked: direct,
            refused: Arc::default(),
            #[cfg(target_os = "linux")]
            rings: None,
            no_ring: None,
            pool: OnceLock::new(),
        };
        if queue == QueueKind::Best {
            parts.take_rings();
        }
        Self { parts: Arc::new(parts), held: Vec::new() }
    }

    fn folder(&self, path: &Path) -> Option<&Arc<OwnedFd>> {
        self.held.iter().find(|(held, _)| held == path).map(|(_, folder)| folder)
    }

    /// Folder and name of a path. Uses the held folder, if any.
    fn place<'a>(&self, path: &'a Path) -> io::Result<(Arc<OwnedFd>, &'a OsStr)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let above = path.parent().unwrap_or(Path::new(""));
        let folder = match self.folder(above) {
            Some(held) => Arc::clone(held),
            None => Arc::new(regular::folder(above)?),
        };
        Ok((folder, name))
    }

    /// Open a folder for listing or syncing.
    fn entries(&self, path: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(match self.folder(path) {
            Some(held) => rustix::fs::openat(held, ".", flags, Mode::empty())?,
            None => rustix::fs::open(path, flags, Mode::empty())?,
        })
    }
}

impl SystemFile {
    fn new(plain: fs::File, direct: Option<fs::File>, refused: &Arc<DirectRefusal>) -> Self {
        Self { plain, direct, refused: Arc::clone(refused), locked: AtomicBool::new(false) }
    }
}

impl Drop for SystemFile {
    fn drop(&mut self) {
        if *self.locked.get_mut() {
            // Closing does not release a lock while a fork has the descriptor.
            let _ = self.plain.unlock();
        }
    }
}

impl Parts {
    #[cfg(target_os = "linux")]
    fn take_rings(&mut self) {
        let rings = crate::ring::Rings::default();
        match rings.probe() {
            Ok(()) => self.rings = Some(rings),
            Err(error) => self.no_ring = Some(format!("io_uring: {error}")),
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn take_rings(&mut self) {
        self.no_ring = Some("io_uring: not on this system".into());
    }

    #[cfg(target_os = "linux")]
    fn in_rings(&self, work: &mut dyn Work<'_>) -> bool {
        self.rings.as_ref().is_some_and(|rings| rings.run(work, &descriptor).is_ok())
    }

    #[cfg(not(target_os = "linux"))]
    fn in_rings(&self, _work: &mut dyn Work<'_>) -> bool {
        false
    }

    fn pool(&self) -> io::Result<&ThreadPool> {
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        let made = threads::pool()?;
        Ok(self.pool.get_or_init(|| made))
    }
}

/// Descriptor for an operation.
fn descriptor(op: &mut Op<'_>) -> RawFd {
    let file = system_file(&*op.file);
    let refused = file.refused.once.load(Ordering::Acquire);
    // The rest of a short transfer may start within a page.
    let whole = paged(op.rest()) && op.place().is_multiple_of(PAGE);
    let direct = file.direct.as_ref().filter(|_| whole && !refused);
    op.direct = direct.is_some();
    direct.unwrap_or(&file.plain).as_raw_fd()
}

fn system_file(file: &dyn File) -> &SystemFile {
    let file: &dyn std::any::Any = file;
    file.downcast_ref().expect("the system runs operations on its own files")
}

fn perform(op: &mut Op<'_>) -> io::Result<usize> {
    descriptor(op);
    let file = Arc::clone(&op.file);
    let file = system_file(&*file);
    let file = file.direct.as_ref().filter(|_| op.direct).unwrap_or(&file.plain);
    let place = op.place();
    if op.writes() { file.write_at(op.rest(), place) } else { file.read_at(op.rest_mut(), place) }
}

/// Retries operations refused by direct I/O.
struct DirectFallback<'w, 'a> {
    work: &'w mut dyn Work<'a>,
    again: VecDeque<Op<'a>>,
}

impl<'a> Work<'a> for DirectFallback<'_, 'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        self.again.pop_front().or_else(|| self.work.next())
    }

    fn done(&mut self, op: Op<'a>, moved: io::Result<usize>) {
        match moved {
            // EINVAL: direct I/O refused the alignment. The page cache takes any alignment.
            Err(error) if op.direct && error.kind() == io::ErrorKind::InvalidInput => {
                let what = if op.writes() { "writing" } else { "reading" };
                system_file(&*op.file).refused.note(what, &error);
                self.again.push_back(op);
            }
            other => self.work.done(op, other),
        }
    }

    fn between(&mut self) -> bool {
        self.work.between()
    }
}

impl Device for System {
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        let (folder, name) = self.place(path)?;
        let plain = regular::open(folder, name, access, OFlags::empty())?;
        Ok(Arc::new(SystemFile::new(plain, None, &self.parts.refused)))
    }

    fn open_bulk(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        let (folder, name) = self.place(path)?;
        let refused = &self.parts.refused;
        let plain = regular::open(&folder, name, access, OFlags::empty())?;
        let mut direct = None;
        if self.parts.asked && !refused.once.load(Ordering::Acquire) {
            match past_the_cache(&folder, name, access) {
                Ok(file) => direct = Some(file),
                Err(error) => refused.note("opening", &error),
            }
        }
        Ok(Arc::new(SystemFile::new(plain, direct, refused)))
    }

    fn run(&self, work: &mut dyn Work<'_>) {
        let mut work = DirectFallback { work, again: VecDeque::new() };
        if self.parts.in_rings(&mut work) {
            return;
        }
        if let Ok(pool) = self.parts.pool() {
            return threads::run(pool, &mut work, &perform);
        }
        loop {
            while let Some(mut op) = work.next() {
                let moved = perform(&mut op);
                work.done(op, moved);
            }
            if !work.between() {
                return;
            }
        }
    }

    fn travel(&self) -> TransferPath {
        let parts = &self.parts;
        #[cfg(target_os = "linux")]
        let ring = parts.rings.is_some();
        #[cfg(not(target_os = "linux"))]
        let ring = false;
        let why = lock(&parts.refused.why).clone();
        TransferPath {
            direct: parts.asked && why.is_none(),
            queue: if ring { "io_uring" } else { "threads" },
            reasons: parts.no_ring.iter().cloned().chain(why).collect(),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let ((old, from), (new, to)) = (self.place(from)?, self.place(to)?);
        Ok(rustix::fs::renameat(old, from, new, to)?)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let (folder, name) = self.place(path)?;
        Ok(rustix::fs::unlinkat(folder, name, AtFlags::empty())?)
    }

    fn hold(&self, folder: &Path) -> io::Result<Option<Arc<dyn Device>>> {
        if self.folder(folder).is_some() {
            return Ok(None);
        }
        let mut view = self.clone();
        view.held.push((folder.to_path_buf(), Arc::new(regular::folder(folder)?)));
        Ok(Some(Arc::new(view)))
    }

    fn leads_to(&self, folder: &Path) -> bool {
        self.folder(folder).is_none_or(|held| regular::leads_to(folder, held))
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        match (fs::create_dir_all(path), regular::check_folder(path)) {
            (Err(error), Err(found)) if !regular::is_not_regular(&found) => Err(error),
            (_, checked) => checked,
        }
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        fs::File::from(self.entries(path)?).sync_all()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Item>> {
        let folder = self.entries(path)?;
        let mut items = Vec::new();
        for entry in Dir::read_from(&folder)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let mut kind = entry.file_type();
            // Some file systems do not list the type.
            if kind == FileType::Unknown {
                match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => kind = FileType::from_raw_mode(stat.st_mode),
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(error.into()),
                }
            }
            let name = name.to_string_lossy().into_owned();
            items.push(Item { name, folder: kind == FileType::Directory });
        }
        items.sort();
        Ok(items)
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn past_the_cache(folder: &OwnedFd, name: &OsStr, access: Access) -> io::Result<fs::File> {
    let access = if access == Access::Fresh { Access::Write } else { access };
    regular::open(folder, name, access, OFlags::DIRECT)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn past_the_cache(_folder: &OwnedFd, _name: &OsStr, _access: Access) -> io::Result<fs::File> {
    Err(io::ErrorKind::Unsupported.into())
}

impl File for SystemFile {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        self.plain.read_at(buffer, at)
    }

    fn write_at(&self, buffers: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        let few = &buffers[..buffers.len().min(MOST_BUFFERS)];
        Ok(rustix::io::pwritev(&self.plain, few, at)?)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.plain.set_len(len)
    }

    fn size(&self) -> io::Result<Size> {
        let data = self.plain.metadata()?;
        Ok(Size { len: data.len(), allocated: data.blocks() * 512 })
    }

    fn sync(&self) -> io::Result<()> {
        self.plain.sync_data()
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn data_from(&self, at: u64) -> u64 {
        match rustix::fs::seek(&self.plain, rustix::fs::SeekFrom::Data(at)) {
            Ok(found) => found,
            Err(rustix::io::Errno::NXIO) => u64::MAX,
            Err(_) => at,
        }
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn punch(&self, at: u64, len: u64) -> io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        Ok(fallocate(&self.plain, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)?)
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn punch(&self, _at: u64, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn try_lock(&self) -> io::Result<bool> {
        match self.plain.try_lock() {
            Ok(()) => {
                self.locked.store(true, Ordering::Release);
                Ok(true)
            }
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn lock_descriptor(&self) -> Option<RawFd> {
        self.locked.load(Ordering::Acquire).then(|| self.plain.as_raw_fd())
    }

    fn is_at(&self, path: &Path) -> bool {
        regular::leads_to(path, &self.plain)
    }

    fn paged(&self) -> bool {
        self.direct.is_some() && !self.refused.once.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::io;

    use kvtrie_core::Layers;

    use super::{DirectFallback, System, descriptor, system_file};
    use crate::device::{Access, Device};
    use crate::pages::Pages;
    use crate::work::{Bytes, Op, Work};

    struct Nothing(Vec<io::Result<usize>>);

    impl<'a> Work<'a> for Nothing {
        fn next(&mut self) -> Option<Op<'a>> {
            None
        }

        fn done(&mut self, _op: Op<'a>, moved: io::Result<usize>) {
            self.0.push(moved);
        }
    }

    #[test]
    fn operations_that_direct_io_refuses_use_the_cache() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let system = System::default();
        let open = system.open_bulk(file.path(), Access::Read).unwrap();
        if !system.travel().direct {
            return;
        }
        let bytes = || Bytes::IntoPages(Pages::new(4096), None);
        let mut op = Op::new(open, 0, bytes(), 0, Layers::NONE);
        descriptor(&mut op);
        assert!(op.direct && op.file.paged());
        let mut seen = Nothing(Vec::new());
        let mut work = DirectFallback { work: &mut seen, again: VecDeque::new() };
        let refused = || Err(io::ErrorKind::InvalidInput.into());
        work.done(op, refused());
        let mut op = work.next().unwrap();
        assert!(work.next().is_none());
        descriptor(&mut op);
        assert!(!op.direct && !system_file(&*op.file).plain.metadata().unwrap().is_dir());
        let travel = system.travel();
        assert!(!travel.direct && travel.reasons[0].contains("direct I/O: reading"), "{travel:?}");
        // Through the cache it is an ordinary error.
        work.done(op, refused());
        assert!(work.next().is_none() && seen.0.len() == 1);
    }
}
