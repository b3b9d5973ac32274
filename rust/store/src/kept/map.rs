//! Shared memory mapping of a file.
//!
//! Invariant: every access is inside the mapping, and words are aligned. Other processes may read
//! the bytes at any time. Only the holder of the file's lock writes them, under one mutex. Cost: a
//! copy per access.

#![expect(unsafe_code, reason = "the file is mapped; the invariant above keeps accesses inside it")]

use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Mapped start of a file.
#[derive(Debug)]
pub(super) struct Map {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory belongs to no thread. Copies and atomic words are the only accesses.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Map the first `length` bytes, also for writing if `write`.
    pub(super) fn new(file: &File, length: usize, write: bool) -> io::Result<Self> {
        let access = if write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: the kernel picks an unused range of addresses.
        let start = unsafe { mmap(ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("no address"))?;
        Ok(Self { start, length })
    }

    /// Number of mapped bytes.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    fn check(&self, at: usize, length: usize) {
        let end = at.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.length), "{at} + {length} of {}", self.length);
    }

    /// Word at a multiple of eight.
    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        self.check(at, 8);
        assert!(at.is_multiple_of(8), "a word at {at}");
        // SAFETY: inside the mapping and aligned, as the mapping starts on a page.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// Copy bytes out.
    pub(super) fn read(&self, at: usize, length: usize) -> Vec<u8> {
        self.check(at, length);
        let mut out = vec![0; length];
        // SAFETY: inside the mapping, and the vector is separate memory.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr().add(at), out.as_mut_ptr(), length) };
        out
    }

    /// Write bytes.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        // SAFETY: inside the mapping. No Rust reference points into it.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(at), bytes.len());
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`. No reference into it is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}
