//! The few file operations that a store needs, so that a test can stand where a disk does.
//!
//! Invariant: a file may move fewer bytes than asked; whoever calls goes on from there. Every
//! method takes `&self` and may be called from several threads at once.
//! Cost: one dynamic call per operation.

use std::any::Any;
use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::Arc;

use crate::work::Work;

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// For reading; it must exist.
    Read,
    /// For reading and writing; created if it does not exist.
    Write,
    /// For reading and writing; created. What stood there, a folder aside, is removed before.
    Fresh,
}

/// How large a file is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// The end of the file.
    pub len: u64,
    /// Bytes that it takes up on the device.
    pub allocated: u64,
}

/// One name in a folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    /// The name, without the folder.
    pub name: String,
    /// Whether it is a folder.
    pub folder: bool,
}

/// How bytes travel between segments and memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Travel {
    /// Whether they pass the system's page cache by.
    pub direct: bool,
    /// What keeps several operations under way: `io_uring`, `threads` or `none`.
    pub queue: &'static str,
    /// Why it is not what was asked for.
    pub reasons: Vec<String>,
}

/// An open file. A lock that it holds goes when it is dropped.
pub trait File: Any + Send + Sync + Debug {
    /// Reads at `at` and returns how many bytes came; 0 at the end of the file.
    ///
    /// # Errors
    /// What the device says.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize>;

    /// Writes the buffers one behind another at `at` and returns how many bytes went.
    ///
    /// # Errors
    /// What the device says.
    fn write_at(&self, buffers: &[IoSlice<'_>], at: u64) -> io::Result<usize>;

    /// Cuts or extends the file.
    ///
    /// # Errors
    /// What the device says.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// The size now.
    ///
    /// # Errors
    /// What the device says.
    fn size(&self) -> io::Result<Size>;

    /// Returns when everything written before is durable.
    ///
    /// # Errors
    /// What the device says; what was written since the last sync may be lost then.
    fn sync(&self) -> io::Result<()>;

    /// Where the next byte at or behind `at` stands that a device has; `at` if it does not say.
    fn data_from(&self, at: u64) -> u64 {
        at
    }

    /// Gives a range's space back; it reads as zeros.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] where files have no holes, or what the device says.
    fn punch(&self, at: u64, len: u64) -> io::Result<()>;

    /// Takes the file's exclusive lock if nobody else has it.
    ///
    /// # Errors
    /// What the device says.
    fn try_lock(&self) -> io::Result<bool>;

    /// Whether operations of a queue want memory, length and place in whole pages.
    fn paged(&self) -> bool {
        false
    }
}

/// Where files live.
pub trait Device: Send + Sync + Debug {
    /// Opens a regular file.
    ///
    /// # Errors
    /// What the device says; what else stands there, and whether a file to be written has other names.
    /// Links are not followed.
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>>;

    /// Opens a file for the operations of a queue.
    ///
    /// # Errors
    /// What the device says.
    fn open_bulk(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        self.open(path, access)
    }

    /// Does all of a work's operations, several at once where the device can; returns when none is
    /// under way. The work is asked and told by the calling thread only.
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

    /// How bytes travel.
    fn travel(&self) -> Travel {
        Travel { direct: false, queue: "none", reasons: Vec::new() }
    }

    /// Renames a file, over another one if there is one.
    ///
    /// # Errors
    /// What the device says.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// What the device says.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes a folder and those above it, if they do not exist.
    ///
    /// # Errors
    /// What the device says, or what else stands there; a link to a folder is none.
    fn make_folder(&self, path: &Path) -> io::Result<()>;

    /// Returns when the names in a folder are durable.
    ///
    /// # Errors
    /// What the device says.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// The names in a folder, in order.
    ///
    /// # Errors
    /// What the device says.
    fn list(&self, path: &Path) -> io::Result<Vec<Item>>;
}

/// Reads until `buffer` is full or the file ends; returns how many bytes came.
pub(crate) fn read_full(file: &dyn File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Writes all of the buffers, one behind another.
pub(crate) fn write_full(
    file: &dyn File,
    mut buffers: &mut [IoSlice<'_>],
    mut at: u64,
) -> io::Result<()> {
    IoSlice::advance_slices(&mut buffers, 0);
    while !buffers.is_empty() {
        match file.write_at(buffers, at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                IoSlice::advance_slices(&mut buffers, count);
                at += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
