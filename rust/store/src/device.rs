//! Device: the file operations of a store, as a trait for tests to replace.
//!
//! Invariant: every method takes `&self` and may be called from several threads. Cost: a dynamic
//! call per operation.

use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::file::File;
use crate::work::Work;

/// Mode of opening a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading. The file must exist.
    Read,
    /// Reading and writing. Creates a missing file.
    Write,
    /// Reading and writing a new file. Removes an existing path first, unless it is a folder.
    Fresh,
}

/// Directory entry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    /// Name, without the folder.
    pub name: String,
    /// Whether it is a folder.
    pub folder: bool,
}

/// Transfer path between segments and memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferPath {
    /// Whether direct I/O is used.
    pub direct: bool,
    /// I/O queue: `io_uring`, `threads` or `none`.
    pub queue: &'static str,
    /// Reasons for fallbacks.
    pub reasons: Vec<String>,
}

/// File system.
pub trait Device: Send + Sync + Debug {
    /// Open a regular file.
    ///
    /// # Errors
    /// The device's errors, a non-regular file, or, for writing, a file with further hard links.
    /// Links are not followed.
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>>;

    /// Open a file for queued operations.
    ///
    /// # Errors
    /// The device's errors.
    fn open_bulk(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        self.open(path, access)
    }

    /// Run all operations of a work, concurrently if possible. Returns when none is in flight. Only
    /// the calling thread calls the work.
    fn run(&self, work: &mut dyn Work<'_>) {
        loop {
            while let Some(mut op) = work.next() {
                let moved = op.perform();
                work.done(op, moved);
            }
            if !work.between() {
                return;
            }
        }
    }

    /// Transfer path of queued operations.
    fn travel(&self) -> TransferPath {
        TransferPath { direct: false, queue: "none", reasons: Vec::new() }
    }

    /// Rename a file, replacing the destination.
    ///
    /// # Errors
    /// The device's errors.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Remove a file.
    ///
    /// # Errors
    /// The device's errors.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Return this device with a handle of a folder. Names in the folder are resolved in the
    /// handle, even if the path changes. `None` if there is nothing to hold.
    ///
    /// # Errors
    /// The device's errors, a missing folder, or a link to a folder.
    fn hold(&self, _folder: &Path) -> io::Result<Option<Arc<dyn Device>>> {
        Ok(None)
    }

    /// Whether the path of a held folder still leads to it.
    fn leads_to(&self, _folder: &Path) -> bool {
        true
    }

    /// Create a folder and its parents.
    ///
    /// # Errors
    /// The device's errors, or a different kind of file at the path, including a link to a folder.
    fn make_folder(&self, path: &Path) -> io::Result<()>;

    /// Wait until the entries of a folder are durable.
    ///
    /// # Errors
    /// The device's errors.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// List the entries of a folder, sorted.
    ///
    /// # Errors
    /// The device's errors.
    fn list(&self, path: &Path) -> io::Result<Vec<Item>>;
}
