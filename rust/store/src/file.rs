//! File: the operations of one open file that a store needs.
//!
//! Invariant: a file may transfer fewer bytes than requested; the caller continues. Every method
//! takes `&self` and may be called from several threads. Cost: one dynamic call per operation.

use std::any::Any;
use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::path::Path;

/// Size of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// The end of the file.
    pub len: u64,
    /// Bytes that it occupies on the device.
    pub allocated: u64,
}

/// Open file; dropping it releases its lock.
pub trait File: Any + Send + Sync + Debug {
    /// Reads at `at`; returns the number of bytes, 0 at the end of the file.
    ///
    /// # Errors
    /// The device's errors.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize>;

    /// Writes buffers consecutively at `at`; returns the number of bytes.
    ///
    /// # Errors
    /// The device's errors.
    fn write_at(&self, buffers: &[IoSlice<'_>], at: u64) -> io::Result<usize>;

    /// Truncates or extends the file.
    ///
    /// # Errors
    /// The device's errors.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// The size now.
    ///
    /// # Errors
    /// The device's errors.
    fn size(&self) -> io::Result<Size>;

    /// Waits until everything written before is durable.
    ///
    /// # Errors
    /// The device's errors; writes since the last sync may be lost then.
    fn sync(&self) -> io::Result<()>;

    /// Offset of the next data at or after `at`, past any hole; `at` if unknown.
    fn data_from(&self, at: u64) -> u64 {
        at
    }

    /// Punches a hole; it reads as zeros.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] if files have no holes; the device's errors.
    fn punch(&self, at: u64, len: u64) -> io::Result<()>;

    /// Takes the file's exclusive lock if it is free.
    ///
    /// # Errors
    /// The device's errors.
    fn try_lock(&self) -> io::Result<bool>;

    /// Whether a path still leads to this file.
    fn is_at(&self, _path: &Path) -> bool {
        true
    }

    /// Whether queued operations need memory, length and offset in full pages.
    fn paged(&self) -> bool {
        false
    }
}

/// Reads until `buffer` is full or the file ends; returns the number of bytes.
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

/// Writes all buffers consecutively.
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
