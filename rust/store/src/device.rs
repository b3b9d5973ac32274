//! Device: the few file operations that a store needs, as a trait for tests to replace.
//!
//! Invariant: every method takes `&self` and may be called from several threads. Cost: one dynamic
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
    /// For reading; it must exist.
    Read,
    /// For reading and writing; created if it does not exist.
    Write,
    /// For reading and writing; created. Anything but a folder is removed first.
    Fresh,
}

/// Entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    /// The name, without the folder.
    pub name: String,
    /// Whether it is a folder.
    pub folder: bool,
}

/// How bytes are transferred between segments and memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Travel {
    /// Whether by direct I/O.
    pub direct: bool,
    /// The I/O queue: `io_uring`, `threads` or `none`.
    pub queue: &'static str,
    /// Reasons for fallbacks.
    pub reasons: Vec<String>,
}

/// File system.
pub trait Device: Send + Sync + Debug {
    /// Opens a regular file.
    ///
    /// # Errors
    /// The device's errors; another type of file, or another hard link of a file to write. Links
    /// are not followed.
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>>;

    /// Opens a file for queued operations.
    ///
    /// # Errors
    /// The device's errors.
    fn open_bulk(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        self.open(path, access)
    }

    /// Runs all of a work's operations, concurrently if the device can; returns when none is in
    /// flight. Only the calling thread calls the work.
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

    /// How bytes are transferred.
    fn travel(&self) -> Travel {
        Travel { direct: false, queue: "none", reasons: Vec::new() }
    }

    /// Renames a file, replacing one of the new name.
    ///
    /// # Errors
    /// The device's errors.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// The device's errors.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// This device with a folder held open: names in it are resolved there from then on, wherever
    /// its path leads by then. `None` where there is nothing to hold.
    ///
    /// # Errors
    /// The device's errors; no folder there, or a link to one.
    fn hold(&self, _folder: &Path) -> io::Result<Option<Arc<dyn Device>>> {
        Ok(None)
    }

    /// Whether the path of a held folder still leads to it.
    fn leads_to(&self, _folder: &Path) -> bool {
        true
    }

    /// Creates a folder and its parents.
    ///
    /// # Errors
    /// The device's errors; another type of file there, even a link to a folder.
    fn make_folder(&self, path: &Path) -> io::Result<()>;

    /// Waits until the entries of a folder are durable.
    ///
    /// # Errors
    /// The device's errors.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// The entries of a folder, sorted.
    ///
    /// # Errors
    /// The device's errors.
    fn list(&self, path: &Path) -> io::Result<Vec<Item>>;
}
