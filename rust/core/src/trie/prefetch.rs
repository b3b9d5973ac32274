//! CPU cache prefetches of a chosen victim: the lines that its removal reads.
//!
//! Invariant: a hint only; nothing changes by it and no call waits for the lines. Cost: a few
//! instructions per line, and one wait where the address of a line lies in another one.

use crate::block::BlockId;

use super::Trie;
use super::run::RunId;

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// Prefetches the lines of a victim's run that its removal reads; returns the run and its first
    /// block.
    pub fn prefetch_lines(&self, block: BlockId) -> (RunId, BlockId) {
        let home = self.ids.home(block);
        let run = &self.runs[home];
        self.runs.prefetch_line(run.parent);
        self.ids.prefetch_line(run.first);
        (home, run.first)
    }

    /// Prefetches the line of the block before a run, which becomes a leaf when the run leaves;
    /// returns that block.
    pub fn prefetch_parent(&self, run: RunId) -> Option<BlockId> {
        let before = self.runs[self.runs[run].parent].last()?;
        self.ids.prefetch_line(before);
        Some(before)
    }
}
