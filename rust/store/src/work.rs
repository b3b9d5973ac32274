//! Work: a source of operations for concurrent execution by a device.
//!
//! The device takes operations while its queue has room and returns each with its result, so the
//! work can hash a layer while the device transfers the next layers. Invariant: an operation is
//! returned exactly once, with its memory, and a short transfer is continued. Cost: two dynamic
//! calls per operation.

use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::sync::Arc;

use kvtrie_core::Layers;

use crate::file::File;
use crate::pages::Pages;

/// Memory owned by an operation.
#[derive(Debug)]
pub enum Bytes<'a> {
    /// Read into the caller's memory.
    Into(&'a mut [u8]),
    /// Read into pages, then copied to the caller's memory, if any.
    IntoPages(Pages, Option<&'a mut [u8]>),
    /// Written from the caller's memory.
    From(&'a [u8]),
    /// Written from pages.
    FromPages(Pages),
}

/// I/O operation.
#[derive(Debug)]
pub struct Op<'a> {
    /// The file.
    pub file: Arc<dyn File>,
    /// Offset in the file.
    pub at: u64,
    /// The memory.
    pub bytes: Bytes<'a>,
    /// Number of bytes already transferred.
    pub moved: usize,
    /// Limit of the next transfer.
    pub most: usize,
    /// Index of its block in the work.
    pub owner: usize,
    /// Transferred layers. Empty for header pages.
    pub layers: Layers,
    /// Whether the device used direct I/O.
    pub(crate) direct: bool,
}

/// Source of operations.
pub trait Work<'a> {
    /// Next operation. `None` if none is available now.
    fn next(&mut self) -> Option<Op<'a>>;

    /// Return an operation, with the bytes transferred this time.
    fn done(&mut self, op: Op<'a>, moved: io::Result<usize>);

    /// Compute while the device's queue is full. Returns whether there was anything to do.
    fn between(&mut self) -> bool {
        false
    }
}

impl<'a> Op<'a> {
    /// Create an operation with nothing transferred.
    #[must_use]
    pub fn new(
        file: Arc<dyn File>,
        at: u64,
        bytes: Bytes<'a>,
        owner: usize,
        layers: Layers,
    ) -> Self {
        Self { file, at, bytes, moved: 0, most: usize::MAX, owner, layers, direct: false }
    }

    /// Whether it writes to the file.
    #[must_use]
    pub fn writes(&self) -> bool {
        matches!(self.bytes, Bytes::From(_) | Bytes::FromPages(_))
    }

    /// All of its memory.
    #[must_use]
    pub fn all(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Into(bytes) => bytes,
            Bytes::From(bytes) => bytes,
            Bytes::IntoPages(pages, _) | Bytes::FromPages(pages) => pages,
        }
    }

    /// Next part of its memory to transfer.
    #[must_use]
    pub fn rest(&self) -> &[u8] {
        let all = self.all();
        &all[self.moved..all.len().min(self.moved.saturating_add(self.most))]
    }

    /// Next part of its memory to read into. Empty for a write.
    pub fn rest_mut(&mut self) -> &mut [u8] {
        let all: &mut [u8] = match &mut self.bytes {
            Bytes::Into(bytes) => bytes,
            Bytes::IntoPages(pages, _) => pages,
            Bytes::From(_) | Bytes::FromPages(_) => &mut [],
        };
        let end = all.len().min(self.moved.saturating_add(self.most));
        &mut all[self.moved.min(end)..end]
    }

    /// File offset of the next byte.
    #[must_use]
    pub fn place(&self) -> u64 {
        self.at + self.moved as u64
    }

    /// Perform the operation in this thread.
    ///
    /// # Errors
    /// The device's errors.
    pub fn perform(&mut self) -> io::Result<usize> {
        let file = Arc::clone(&self.file);
        if self.writes() {
            file.write_at(&[IoSlice::new(self.rest())], self.place())
        } else {
            let place = self.place();
            file.read_at(self.rest_mut(), place)
        }
    }

    /// Advance by a transfer's result.
    ///
    /// # Errors
    /// The device's errors, [`io::ErrorKind::UnexpectedEof`] at the end of the file, or
    /// [`io::ErrorKind::WriteZero`], each with the operation.
    pub(crate) fn step(mut self, moved: io::Result<usize>) -> Transferred<'a> {
        match moved {
            Ok(0) if !self.rest().is_empty() => {
                let ends = if self.writes() {
                    io::ErrorKind::WriteZero
                } else {
                    io::ErrorKind::UnexpectedEof
                };
                Transferred::Failed(self, ends.into())
            }
            Ok(count) => {
                self.moved += count;
                self.most = usize::MAX;
                if self.rest().is_empty() {
                    Transferred::Done(self)
                } else {
                    Transferred::Partial(self)
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Transferred::Partial(self),
            Err(error) => Transferred::Failed(self, error),
        }
    }
}

/// An operation after a transfer.
#[derive(Debug)]
pub(crate) enum Transferred<'a> {
    /// All bytes are transferred.
    Done(Op<'a>),
    /// The rest is still to transfer.
    Partial(Op<'a>),
    /// The device failed.
    Failed(Op<'a>, io::Error),
}
