//! File: operations of an open file.
//!
//! Invariant: a file may transfer fewer bytes than requested, and the caller continues. Every
//! method takes `&self` and may be called from several threads. Cost: a dynamic call per operation.

use std::any::Any;
use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::os::fd::RawFd;
use std::path::Path;

/// Size of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Length of the file.
    pub len: u64,
    /// Allocated bytes on the device.
    pub allocated: u64,
}

/// Open file. Dropping it releases its lock, even while a fork shares the file.
pub trait File: Any + Send + Sync + Debug {
    /// Read at `at`. Returns the number of bytes, 0 at the end of the file.
    ///
    /// # Errors
    /// The device's errors.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize>;

    /// Write buffers consecutively at `at`. Returns the number of bytes.
    ///
    /// # Errors
    /// The device's errors.
    fn write_at(&self, buffers: &[IoSlice<'_>], at: u64) -> io::Result<usize>;

    /// Truncate or extend the file.
    ///
    /// # Errors
    /// The device's errors.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Current size.
    ///
    /// # Errors
    /// The device's errors.
    fn size(&self) -> io::Result<Size>;

    /// Wait until all earlier writes are durable.
    ///
    /// # Errors
    /// The device's errors. Writes since the last sync may be lost then.
    fn sync(&self) -> io::Result<()>;

    /// Offset of the next data at or after `at`, past any hole. `at` if unknown.
    fn data_from(&self, at: u64) -> u64 {
        at
    }

    /// Punch a hole. It reads as zeros.
    ///
    /// # Errors
    /// The device's errors, or [`io::ErrorKind::Unsupported`] without support for holes.
    fn punch(&self, at: u64, len: u64) -> io::Result<()>;

    /// Take the file's exclusive lock if it is free.
    ///
    /// # Errors
    /// The device's errors.
    fn try_lock(&self) -> io::Result<bool>;

    /// Descriptor with the lock, if the file is locked and belongs to the operating system.
    fn lock_descriptor(&self) -> Option<RawFd> {
        None
    }

    /// Whether a path still leads to this file.
    fn is_at(&self, _path: &Path) -> bool {
        true
    }

    /// Whether queued operations need page-aligned memory, length and offset.
    fn paged(&self) -> bool {
        false
    }
}

/// Read until `buffer` is full or the file ends. Returns the number of bytes.
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

/// Write all buffers consecutively.
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
