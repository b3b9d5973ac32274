//! Work for a queue: operations that a device may have under way at the same time.
//!
//! A work hands operations out as long as there is room and gets each back with what came of it, so
//! that it can take checksums of one layer while the device moves others.
//! Invariant: an operation comes back exactly once, with its memory; what moved fewer bytes than
//! asked goes on from there. Cost: one dynamic call to get an operation and one to give it back.

use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::sync::Arc;

use kvtrie_core::block::Layers;

use crate::device::File;
use crate::pages::Pages;

/// The memory of an operation, which is its own until it comes back.
#[derive(Debug)]
pub enum Bytes<'a> {
    /// Read into the caller's memory.
    Into(&'a mut [u8]),
    /// Read into pages, whose content goes to the caller's memory, if there is any.
    IntoPages(Pages, Option<&'a mut [u8]>),
    /// Written from the caller's memory.
    From(&'a [u8]),
    /// Written from pages.
    FromPages(Pages),
}

/// One operation.
#[derive(Debug)]
pub struct Op<'a> {
    /// The file.
    pub file: Arc<dyn File>,
    /// Where the first byte lies in the file.
    pub at: u64,
    /// The memory.
    pub bytes: Bytes<'a>,
    /// How many bytes have moved already.
    pub moved: usize,
    /// At most so many bytes move at once.
    pub most: usize,
    /// Whose it is, for the work.
    pub whose: usize,
    /// The layers that it moves; none for header pages.
    pub layers: Layers,
    /// Whether it went past the page cache, for the device.
    pub(crate) direct: bool,
}

/// What hands operations out.
pub trait Work<'a> {
    /// The next operation; `None` if there is none before one comes back, or none at all.
    fn next(&mut self) -> Option<Op<'a>>;

    /// Takes an operation back, with how many bytes moved this time.
    fn done(&mut self, op: Op<'a>, moved: io::Result<usize>);

    /// Time for what takes time, while the device is busy with all that there is room for. Tells
    /// whether there was anything to do.
    fn between(&mut self) -> bool {
        false
    }
}

impl<'a> Op<'a> {
    /// An operation that has not begun.
    #[must_use]
    pub fn new(
        file: Arc<dyn File>,
        at: u64,
        bytes: Bytes<'a>,
        whose: usize,
        layers: Layers,
    ) -> Self {
        Self { file, at, bytes, moved: 0, most: usize::MAX, whose, layers, direct: false }
    }

    /// Whether bytes go to the file.
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

    /// The part of its memory that moves next.
    #[must_use]
    pub fn rest(&self) -> &[u8] {
        let all = self.all();
        &all[self.moved..all.len().min(self.moved.saturating_add(self.most))]
    }

    /// The same, to read into; empty for a write.
    pub fn rest_mut(&mut self) -> &mut [u8] {
        let all: &mut [u8] = match &mut self.bytes {
            Bytes::Into(bytes) => bytes,
            Bytes::IntoPages(pages, _) => pages,
            Bytes::From(_) | Bytes::FromPages(_) => &mut [],
        };
        let end = all.len().min(self.moved.saturating_add(self.most));
        &mut all[self.moved.min(end)..end]
    }

    /// Where the next byte lies in the file.
    #[must_use]
    pub fn place(&self) -> u64 {
        self.at + self.moved as u64
    }

    /// Does it at once, in this thread.
    ///
    /// # Errors
    /// What the device says.
    pub fn perform(&mut self) -> io::Result<usize> {
        let file = Arc::clone(&self.file);
        if self.writes() {
            file.write_at(&[IoSlice::new(self.rest())], self.place())
        } else {
            let place = self.place();
            file.read_at(self.rest_mut(), place)
        }
    }

    /// After so many bytes moved: whether all have, or what goes on. Memory that pages stood for is
    /// filled when all have.
    ///
    /// # Errors
    /// The device's, [`io::ErrorKind::UnexpectedEof`] where the file ends, or
    /// [`io::ErrorKind::WriteZero`]; each with the operation.
    pub(crate) fn step(mut self, moved: io::Result<usize>) -> Step<'a> {
        match moved {
            Ok(0) if !self.rest().is_empty() => {
                let ends = if self.writes() {
                    io::ErrorKind::WriteZero
                } else {
                    io::ErrorKind::UnexpectedEof
                };
                Step::Failed(self, ends.into())
            }
            Ok(count) => {
                self.moved += count;
                self.most = usize::MAX;
                if self.rest().is_empty() { Step::Whole(self) } else { Step::Again(self) }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Step::Again(self),
            Err(error) => Step::Failed(self, error),
        }
    }
}

/// What comes after an operation.
#[derive(Debug)]
pub(crate) enum Step<'a> {
    /// All bytes have moved.
    Whole(Op<'a>),
    /// The rest is still to move.
    Again(Op<'a>),
    /// The device failed.
    Failed(Op<'a>, io::Error),
}
