//! CPU cache prefetches for a chosen victim: the lines read by its removal.
//!
//! Invariant: no effect on results. No call waits for the lines. Cost: a few instructions per line,
//! and a wait if the address of a line is in another line.

use crate::block::BlockId;

use super::Trie;
use super::run::RunId;

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// Prefetches the lines of a victim's run needed for its removal. Returns the run and its first
    /// block.
    pub(crate) fn prefetch_lines(&self, block: BlockId) -> (RunId, BlockId) {
        let id = self.ids.run_of(block);
        let run = &self.runs[id];
        self.runs.prefetch_line(run.parent);
        self.ids.prefetch_line(run.first);
        (id, run.first)
    }

    /// Prefetches the line of the block before a run, and returns the block. It becomes a leaf
    /// after the removal of the run.
    pub(crate) fn prefetch_parent(&self, run: RunId) -> Option<BlockId> {
        let before = self.runs[self.runs[run].parent].last()?;
        self.ids.prefetch_line(before);
        Some(before)
    }
}
