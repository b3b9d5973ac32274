//! Lost blocks: a failure removed their last copy, so no request reaches the blocks after them.
//!
//! Invariant: after a lost block only moves in flight use copies. Each copy is dropped when its
//! moves have ended. Cost: O(subtree) per failure and, while there are lost blocks, O(path +
//! subtree) per ending move.

use crate::block::{BlockId, Structure};

use crate::manager::Manager;
use crate::manager::kinds::Cause;

impl Manager {
    /// Whether an unleased leaf-only block has lost its last copy, so that no request reaches the
    /// blocks after it.
    pub(crate) fn is_lost(&self, block: BlockId) -> bool {
        self.trie().alive(block)
            && self.structure(block) == Structure::LeafOnly
            && self.node(block).refs == 0
            && !self.missing(block).is_empty()
    }

    /// Drops the subtree of a lost block, except copies in use by moves.
    pub(crate) fn sweep(&mut self, block: BlockId) {
        if !self.is_lost(block) {
            return;
        }
        let (root, mut moves) = (self.trie().handle(block), false);
        for &block in self.subtree(block).iter().rev() {
            for tier in 0..self.tiers.len() {
                let moving = self.arrival(tier, block).is_some_and(|a| !a.moves.is_empty());
                if self.residency(tier, block).busy == 0 && !moving {
                    self.drop_copy(tier, block, Cause::Failed);
                } else {
                    moves = true;
                }
            }
            self.prune(block);
        }
        if moves && !self.lost.contains(&root) {
            self.lost.push(root);
        }
    }

    /// Sweeps the nearest lost block of the path up to `end`, and forgets removed lost blocks.
    /// Called after a move of the block after `end` has ended.
    pub(crate) fn sweep_path(&mut self, end: Option<BlockId>) {
        if let Some(end) = end {
            self.sweep(end);
        }
        let mut lost = std::mem::take(&mut self.lost);
        lost.retain(|&root| self.trie().resolve(root).is_some_and(|root| self.is_lost(root)));
        self.lost = lost;
        // Blocks in flight may be between the two. A path is walked only while a block is lost.
        let end = end.filter(|&end| !self.lost.is_empty() && self.trie().alive(end));
        let mut path = std::iter::successors(end, |&block| self.trie().parent(block));
        if let Some(lost) = path.find(|&block| self.is_lost(block)) {
            self.sweep(lost);
        }
    }
}
