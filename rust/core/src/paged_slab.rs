//! Paged slab: values at reusable indices.
//!
//! Invariant: a value keeps its index and address until its removal. Cost: O(1).

use std::ops::{Index, IndexMut};

use crate::paged_vec::PagedVec;

/// Index of a value.
pub(crate) type SlabIndex = u32;

/// Slab of values.
#[derive(Clone, Debug)]
pub(crate) struct PagedSlab<T> {
    values: PagedVec<T>,
    /// The highest index ever used, plus 1.
    bound: SlabIndex,
    free: Vec<SlabIndex>,
}

impl<T: Clone> PagedSlab<T> {
    /// An empty slab. `vacant` fills unused indices.
    #[must_use]
    pub(crate) fn new(vacant: T) -> Self {
        Self { values: PagedVec::new(vacant), bound: 0, free: Vec::new() }
    }

    /// Adds a value and returns its index.
    pub(crate) fn insert(&mut self, value: T) -> SlabIndex {
        let at = self.free.pop().unwrap_or_else(|| {
            self.bound += 1;
            self.bound - 1
        });
        self.values.put(at, value);
        at
    }

    /// Frees an index in use. Its value stays readable until the index is reused.
    pub(crate) fn remove(&mut self, at: SlabIndex) {
        debug_assert!(at < self.bound, "index {at} was never used");
        self.free.push(at);
    }

    /// Highest number of indices in use at once.
    #[cfg(test)]
    pub(crate) fn bound(&self) -> SlabIndex {
        self.bound
    }
}

impl<T> Index<SlabIndex> for PagedSlab<T> {
    type Output = T;

    #[inline]
    fn index(&self, at: SlabIndex) -> &T {
        &self.values[at]
    }
}

impl<T> IndexMut<SlabIndex> for PagedSlab<T> {
    #[inline]
    fn index_mut(&mut self, at: SlabIndex) -> &mut T {
        &mut self.values[at]
    }
}

#[cfg(test)]
mod tests {
    use super::PagedSlab;

    #[test]
    fn a_removed_index_is_reused() {
        let mut slab = PagedSlab::new(0);
        let used: Vec<_> = (1..=3).map(|value| slab.insert(value)).collect();
        assert_eq!(used.iter().map(|&at| slab[at]).collect::<Vec<_>>(), [1, 2, 3]);
        slab.remove(used[1]);
        assert_eq!(slab.insert(9), used[1]);
        slab[used[0]] += 4;
        assert_eq!((slab[used[0]], slab[used[1]], slab.bound()), (5, 9, 3));
    }
}
