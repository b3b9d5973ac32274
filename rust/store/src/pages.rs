//! Page-aligned memory for direct I/O.
//!
//! Invariant: starts on a page, has a multiple of the page size, and is never resized. Cost: an
//! allocation, one page longer than the length.

/// Page-aligned memory.
#[derive(Debug)]
pub struct Pages {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

/// Bytes of a page.
pub(crate) const SIZE: usize = 4096;

/// Whether direct I/O can use this memory.
pub(crate) fn paged(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(SIZE) && bytes.len().is_multiple_of(SIZE)
}

impl Pages {
    /// Allocate `len` zero bytes, rounded up to whole pages.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let len = len.next_multiple_of(SIZE);
        let bytes = vec![0; len + SIZE];
        let start = bytes.as_ptr().addr().next_multiple_of(SIZE) - bytes.as_ptr().addr();
        Self { bytes, start, len }
    }
}

impl std::ops::Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl std::ops::DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::{Pages, paged};

    #[test]
    fn pages_start_on_a_page() {
        for len in [0, 1, 4096, 4097, 1 << 20] {
            let pages = Pages::new(len);
            assert!(paged(&pages) && pages.len() >= len && pages.len() < len + 4096);
        }
    }
}
