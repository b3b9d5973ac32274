//! The tokens of all blocks, by id: what is contiguous in ids is contiguous in memory.
//!
//! Invariant: the tokens of a piece of ids stay where they are. Cost: four bytes per token of every
//! id ever given out, in use or not.

use prefetch_index::prefetch_index;

use crate::block::{BlockId, Token};
use crate::paged_vec::PAGE;

/// Tokens of a line of memory.
const LINE: usize = 64 / size_of::<Token>();

/// Tokens by block id.
#[derive(Clone, Debug)]
pub(super) struct TokenPages {
    size: usize,
    pieces: Vec<Piece>,
}

/// The tokens of a piece of ids, from the beginning of a line of memory on.
#[derive(Clone, Debug)]
struct Piece {
    tokens: Box<[Token]>,
    from: usize,
}

impl Piece {
    fn new(tokens: usize) -> Self {
        let tokens = vec![0; tokens + LINE - 1].into_boxed_slice();
        let from = tokens.as_ptr().align_offset(64).min(LINE - 1);
        Self { tokens, from }
    }

    #[inline]
    fn part(&self, at: usize, tokens: usize) -> &[Token] {
        &self.tokens[self.from + at..][..tokens]
    }
}

impl TokenPages {
    /// No text of blocks of `size` tokens.
    pub(super) fn new(size: usize) -> Self {
        Self { size, pieces: Vec::new() }
    }

    /// The tokens of consecutive blocks of one piece.
    #[inline]
    pub(super) fn of(&self, first: BlockId, blocks: u32) -> &[Token] {
        let at = first as usize % PAGE * self.size;
        self.pieces[first as usize / PAGE].part(at, blocks as usize * self.size)
    }

    /// Bytes of the pieces that are still to be made for the ids below `bound`.
    pub(super) fn growth(&self, bound: usize) -> usize {
        let pieces = bound.div_ceil(PAGE).saturating_sub(self.pieces.len());
        pieces.saturating_mul(PAGE * size_of::<Token>()).saturating_mul(self.size)
    }

    /// Prefetches the CPU cache lines of a block's tokens.
    #[inline]
    pub(super) fn prefetch_lines(&self, block: BlockId) {
        let tokens = self.of(block, 1);
        for line in (0..tokens.len()).step_by(LINE) {
            prefetch_index(tokens, line);
        }
    }

    /// Sets the tokens of blocks from `first` on, of one piece.
    pub(super) fn put(&mut self, first: BlockId, tokens: &[Token]) {
        let piece = first as usize / PAGE;
        while self.pieces.len() <= piece {
            self.pieces.push(Piece::new(PAGE * self.size));
        }
        let Piece { tokens: known, from } = &mut self.pieces[piece];
        let at = *from + first as usize % PAGE * self.size;
        known[at..at + tokens.len()].copy_from_slice(tokens);
    }
}
