//! Ahead: what will be asked for is fetched from memory before it is.
//!
//! Invariant: nothing changes by it, and nobody waits for what is fetched. Cost: a few instructions a
//! line; one wait where the next line is told by the last one.

use std::ops::Range;

use crate::block::BlockId;

use super::Trie;
use super::run::{NONE, RunId};

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// Begins to fetch what will be asked of the last blocks of a run that leave; returns the run
    /// and its first block.
    pub fn warm(&self, block: BlockId) -> (RunId, BlockId) {
        self.generations.warm(block);
        let home = self.ids.home(block);
        let run = &self.runs[home];
        self.runs.warm(run.parent);
        self.generations.warm(run.first);
        self.ids.warm(run.first);
        if (run.previous, run.next) != (NONE, NONE) {
            self.siblings.warm(run.key);
        }
        (home, run.first)
    }

    /// The same for the block before a run, which is returned.
    pub fn warm_before(&self, run: RunId) -> Option<BlockId> {
        let before = self.runs[self.runs[run].parent].last()?;
        self.ids.warm(before);
        Some(before)
    }

    /// Begins to fetch the runs of a path, which otherwise come one after the other.
    pub fn warm_path(&self, path: &[BlockId]) {
        for &block in path.iter().step_by(16) {
            self.ids.warm(block);
        }
        let mut before = NONE;
        for &block in path.iter().step_by(8) {
            let run = self.ids.home(block);
            if run != before {
                self.runs.warm(run);
                before = run;
            }
        }
    }

    /// Begins to fetch the tokens of consecutive blocks of one run.
    pub fn warm_text(&self, blocks: Range<BlockId>) {
        self.token_pages.warm(blocks.start, blocks.end - blocks.start);
    }
}
