//! Page array of the tokens of all blocks by id: consecutive ids are contiguous in memory.
//!
//! Invariant: a page never moves. Cost: 4 bytes per token of every id ever allocated, in use or
//! not.

use prefetch_index::prefetch_index;

use crate::block::{BlockId, Token};
use crate::paged_vec::PAGE;

/// Tokens per CPU cache line.
const LINE: usize = 64 / size_of::<Token>();

/// Tokens by block id.
#[derive(Clone, Debug)]
pub(super) struct TokenPages {
    size: usize,
    pages: Vec<Page>,
}

/// The tokens of a page of ids, aligned to a cache line.
#[derive(Clone, Debug)]
struct Page {
    tokens: Box<[Token]>,
    from: usize,
}

impl Page {
    fn new(tokens: usize) -> Self {
        // Room to start at a cache line, wherever the allocator puts the vector.
        let tokens = vec![0; tokens + LINE - 1].into_boxed_slice();
        let from = tokens.as_ptr().align_offset(64).min(LINE - 1);
        Self { tokens, from }
    }

    #[inline]
    fn slice(&self, at: usize, tokens: usize) -> &[Token] {
        &self.tokens[self.from + at..][..tokens]
    }
}

impl TokenPages {
    /// No pages, for blocks of `size` tokens.
    pub(super) fn new(size: usize) -> Self {
        Self { size, pages: Vec::new() }
    }

    /// The tokens of consecutive blocks of a page.
    #[inline]
    pub(super) fn of(&self, first: BlockId, blocks: u32) -> &[Token] {
        let at = first as usize % PAGE * self.size;
        self.pages[first as usize / PAGE].slice(at, blocks as usize * self.size)
    }

    /// Bytes of the pages still to be allocated for the ids below `bound`.
    pub(super) fn growth(&self, bound: usize) -> usize {
        let pages = bound.div_ceil(PAGE).saturating_sub(self.pages.len());
        pages.saturating_mul(PAGE * size_of::<Token>()).saturating_mul(self.size)
    }

    /// Prefetches the CPU cache lines of a block's tokens.
    #[inline]
    pub(super) fn prefetch_lines(&self, block: BlockId) {
        let tokens = self.of(block, 1);
        for line in (0..tokens.len()).step_by(LINE) {
            prefetch_index(tokens, line);
        }
    }

    /// Copies the tokens of blocks from `first` on, within a page.
    pub(super) fn put(&mut self, first: BlockId, tokens: &[Token]) {
        let page = first as usize / PAGE;
        while self.pages.len() <= page {
            self.pages.push(Page::new(PAGE * self.size));
        }
        let Page { tokens: known, from } = &mut self.pages[page];
        let at = *from + first as usize % PAGE * self.size;
        known[at..at + tokens.len()].copy_from_slice(tokens);
    }
}
