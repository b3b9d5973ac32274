//! What a policy remembers of each block on its tier, by block id.
//!
//! Invariant: a block that is not remembered has the default. Cost: one value per block id.

use std::ops::Range;

use crate::block::BlockId;
use crate::paged_vec::PagedVec;

/// One value per block.
#[derive(Clone, Debug)]
pub(super) struct Memory<T>(PagedVec<T>);

impl<T: Copy + Default> Default for Memory<T> {
    fn default() -> Self {
        Self(PagedVec::new(T::default()))
    }
}

impl<T: Copy + Default> Memory<T> {
    /// What is remembered of a block.
    pub(super) fn get(&self, id: BlockId) -> T {
        self.0.get(id).copied().unwrap_or_default()
    }

    /// Remembers a block.
    pub(super) fn set(&mut self, id: BlockId, value: T) {
        self.0.put(id, value);
    }

    /// Forgets a block and returns what was remembered of it.
    pub(super) fn take(&mut self, id: BlockId) -> T {
        match self.0.get(id).copied() {
            Some(known) => {
                self.0[id] = T::default();
                known
            }
            None => T::default(),
        }
    }

    /// Whether `rank` puts each of consecutive blocks before the last of them or, if `alike`, none
    /// behind it.
    pub(super) fn ends_highest<R: Ord>(
        &self,
        blocks: Range<BlockId>,
        alike: bool,
        rank: impl Fn(T) -> R,
    ) -> bool {
        let last = rank(self.get(blocks.end - 1));
        let lower = |rank: R| rank < last || alike && rank == last;
        (blocks.start..blocks.end - 1).all(|id| lower(rank(self.get(id))))
    }
}
