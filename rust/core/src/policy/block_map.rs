//! Map from block ids to a policy's state per block.
//!
//! Invariant: a block without an entry has the default. Cost: one value per block id.

use crate::block::BlockId;
use crate::paged_vec::PagedVec;

/// One value per block.
#[derive(Clone, Debug)]
pub(super) struct BlockMap<T>(PagedVec<T>);

impl<T: Copy + Default> Default for BlockMap<T> {
    fn default() -> Self {
        Self(PagedVec::new(T::default()))
    }
}

impl<T: Copy + Default> BlockMap<T> {
    /// The block's value.
    pub(super) fn get(&self, id: BlockId) -> T {
        self.0.get(id).copied().unwrap_or_default()
    }

    /// Sets the block's value.
    pub(super) fn set(&mut self, id: BlockId, value: T) {
        self.0.put(id, value);
    }

    /// Resets the block's value to the default and returns the old one.
    pub(super) fn take(&mut self, id: BlockId) -> T {
        match self.0.get(id).copied() {
            Some(known) => {
                self.0[id] = T::default();
                known
            }
            None => T::default(),
        }
    }
}
