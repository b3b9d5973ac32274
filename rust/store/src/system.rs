//! The operating system's files.
//!
//! Invariant: nothing is kept here; every call is one system call or a few.
//! Cost: the system calls.

use std::fs::{self, OpenOptions, TryLockError};
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use crate::device::{Access, Device, File, Item, Size};

/// As many buffers as one call takes.
const MOST_BUFFERS: usize = 1024;

/// Files as the operating system has them.
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

#[derive(Debug)]
struct SystemFile(fs::File);

impl Device for System {
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        let write = access != Access::Read;
        let file = OpenOptions::new()
            .read(true)
            .write(write)
            .create(write)
            .truncate(access == Access::Fresh)
            .open(path)?;
        Ok(Arc::new(SystemFile(file)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        fs::File::open(path)?.sync_all()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Item>> {
        let mut items = Vec::new();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            items.push(Item { name, folder: entry.file_type()?.is_dir() });
        }
        items.sort();
        Ok(items)
    }
}

impl File for SystemFile {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        self.0.read_at(buffer, at)
    }

    fn write_at(&self, buffers: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        let few = &buffers[..buffers.len().min(MOST_BUFFERS)];
        Ok(rustix::io::pwritev(&self.0, few, at)?)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn size(&self) -> io::Result<Size> {
        let data = self.0.metadata()?;
        Ok(Size { len: data.len(), allocated: data.blocks() * 512 })
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn punch(&self, at: u64, len: u64) -> io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        Ok(fallocate(&self.0, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)?)
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn punch(&self, _at: u64, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn try_lock(&self) -> io::Result<bool> {
        match self.0.try_lock() {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}
