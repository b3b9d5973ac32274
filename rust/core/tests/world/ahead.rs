//! Stores ahead of a commit, in worlds whose first tier is the engine's.
//!
//! Invariant: the engine writes the slots before any move that reads them runs.

use kvtrie_core::Token;

use super::World;

impl World {
    /// Has the blocks that `fresh` will fill stored ahead, now and then. Returns how many, or `None`
    /// if all else is left for later.
    pub(super) fn begin_ahead(&mut self, at: usize, fresh: &[Token], b: usize) -> Option<usize> {
        if !self.ahead || !self.engine() || b.is_multiple_of(3) {
            return Some(0);
        }
        let (id, size) = (self.held[at].id, self.size());
        let held = self.manager.lease_tokens(id).unwrap();
        let (first, end) = (held / size, (held + fresh.len()) / size);
        let named = self.held[at].table.len();
        let blocks = [None, Some(first..end), Some(first..end.max(first + 1)), Some(0..end)];
        let blocks = blocks[if b.is_multiple_of(4) { b / 4 % 4 } else { 1 }].clone();
        let most = blocks.clone().map_or(named - first, |blocks| blocks.len());
        let begun = self.attempt("store ahead", |m, now| m.store_ahead(id, blocks.clone(), now));
        let Some(begun) = begun else {
            assert!(blocks.is_some_and(|blocks| blocks.start < first), "it was asked well");
            return Some(0);
        };
        assert!(begun.len() <= most, "{begun:?} of {most} blocks");
        // Blocks after those that are written now will have other tokens than planned.
        let wild = blocks.is_none_or(|blocks| blocks.end > end);
        if !begun.is_empty() && (wild || b.is_multiple_of(5)) {
            self.hand_out(b % 8);
            self.attempt("drop ahead", |m, now| m.drop_ahead(id, now));
            self.writes_nothing(at);
            return (!wild).then_some(0);
        }
        if b.is_multiple_of(2) {
            self.hand_out(64);
        }
        Some(begun.len())
    }

    /// Ends a lease whose last tokens were written and are not committed, now and then.
    pub(super) fn gives_up(&mut self, at: usize, b: usize) -> bool {
        if !self.ahead || !self.engine() || !b.is_multiple_of(11) {
            return false;
        }
        self.count("given up");
        let known = self.manager.lease_tokens(self.held[at].id).unwrap();
        self.held[at].tokens.truncate(known);
        if b.is_multiple_of(2) {
            self.release(at);
        } else {
            self.suspend(at);
        }
        true
    }

    /// Counts the commits that adopted copies of their new blocks, out of these moves
    /// begun to the second tier before and after.
    pub(super) fn took_over(&mut self, begun: usize, new: usize, moves: (u64, u64)) {
        let stored = usize::try_from(moves.1 - moves.0).unwrap();
        if begun > 0 && new > 0 && stored == 0 {
            self.count("taken over");
        }
    }

    /// Gives slots some unused content that moves may read.
    fn writes_nothing(&mut self, at: usize) {
        for slot in self.held[at].table.clone() {
            for layer in 0..self.manager.settings().layers {
                if self.get(0, slot, layer).is_none() {
                    self.put(0, slot, layer, (vec![Token::MAX], layer));
                }
            }
        }
    }
}
