//! What a policy remembers of each block on its tier, by block id.
//!
//! Invariant: a block that is not remembered has the default. Cost: one value per block id.

use crate::block::BlockId;

/// One value per block.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory<T>(Vec<T>);

impl<T: Copy + Default> Memory<T> {
    /// What is remembered of a block.
    pub(super) fn get(&self, id: BlockId) -> T {
        self.0.get(id as usize).copied().unwrap_or_default()
    }

    /// Remembers a block.
    pub(super) fn set(&mut self, id: BlockId, value: T) {
        let at = id as usize;
        if self.0.len() <= at {
            self.0.resize(at + 1, T::default());
        }
        self.0[at] = value;
    }

    /// Forgets a block and returns what was remembered of it.
    pub(super) fn take(&mut self, id: BlockId) -> T {
        self.0.get_mut(id as usize).map(std::mem::take).unwrap_or_default()
    }
}
