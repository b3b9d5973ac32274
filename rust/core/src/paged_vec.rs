//! Paged vector: a value per id, in pages at fixed addresses.
//!
//! Invariant: a value keeps its address while the vector grows, so no call pays for a copy of all
//! values. Ids never written hold `vacant`. Cost: O(1). Growing fills a page at a time.

use std::ops::{Index, IndexMut};

use prefetch_index::prefetch_index;

/// Values per page: a power of two. Filling a page takes microseconds.
pub(crate) const PAGE: usize = 1 << 12;

/// A value for every id below `len`.
#[derive(Clone, Debug)]
pub(crate) struct PagedVec<T> {
    pages: Vec<Box<[T; PAGE]>>,
    vacant: T,
}

impl<T: Clone> PagedVec<T> {
    /// An empty vector. `vacant` fills ids never written.
    #[must_use]
    pub(crate) fn new(vacant: T) -> Self {
        Self { pages: Vec::new(), vacant }
    }

    /// Grows to the ids below `bound`.
    pub(crate) fn reach(&mut self, bound: u32) {
        while self.pages.len() * PAGE < bound as usize {
            let page = vec![self.vacant.clone(); PAGE].into_boxed_slice();
            self.pages.push(page.try_into().unwrap_or_else(|_| unreachable!("a whole page")));
        }
    }

    /// Sets the value of an id, growing the vector if necessary.
    pub(crate) fn put(&mut self, id: u32, value: T) {
        self.reach(id + 1);
        self[id] = value;
    }

    /// The value of an id, or `None` beyond the end of the vector.
    #[inline]
    #[must_use]
    pub(crate) fn get(&self, id: u32) -> Option<&T> {
        self.pages.get(id as usize / PAGE).map(|page| &page[id as usize % PAGE])
    }

    /// Prefetches the CPU cache line of an id's value.
    #[inline]
    pub(crate) fn prefetch_line(&self, id: u32) {
        if let Some(page) = self.pages.get(id as usize / PAGE) {
            prefetch_index(&page[..], id as usize % PAGE);
        }
    }

    /// Slice of consecutive ids, up to the end of the range or of their page.
    #[inline]
    #[must_use]
    pub(crate) fn stretch(&self, from: u32, to: u32) -> &[T] {
        let at = from as usize % PAGE;
        let end = (at + (to - from) as usize).min(PAGE);
        &self.pages[from as usize / PAGE][at..end]
    }

    /// Mutable [`PagedVec::stretch`].
    #[inline]
    pub(crate) fn stretch_mut(&mut self, from: u32, to: u32) -> &mut [T] {
        let at = from as usize % PAGE;
        let end = (at + (to - from) as usize).min(PAGE);
        &mut self.pages[from as usize / PAGE][at..end]
    }

    /// Sets the values of consecutive ids.
    pub(crate) fn fill(&mut self, mut from: u32, to: u32, value: &T) {
        while from < to {
            let page = self.stretch_mut(from, to);
            page.fill(value.clone());
            from += u32::try_from(page.len()).expect("less than a page");
        }
    }
}

impl<T> Index<u32> for PagedVec<T> {
    type Output = T;

    #[inline]
    fn index(&self, id: u32) -> &T {
        &self.pages[id as usize / PAGE][id as usize % PAGE]
    }
}

impl<T> IndexMut<u32> for PagedVec<T> {
    #[inline]
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.pages[id as usize / PAGE][id as usize % PAGE]
    }
}

#[cfg(test)]
mod tests {
    use super::{PAGE, PagedVec};

    #[test]
    fn ids_never_written_are_vacant() {
        let mut values = PagedVec::new(7_u8);
        assert_eq!(values.get(0), None);
        values.reach(1);
        let last = u32::try_from(PAGE).unwrap() - 1;
        values[last] = 3;
        assert_eq!((values[0], values[last], values.get(last + 1)), (7, 3, None));
        let place = std::ptr::from_ref(&values[0]);
        values.reach(100_000);
        assert_eq!((place, values[99_999]), (std::ptr::from_ref(&values[0]), 7));
    }

    #[test]
    fn a_stretch_ends_with_its_page() {
        let mut values = PagedVec::new(0_u32);
        values.reach(10_000);
        (0..10_000).for_each(|id| values[id] = id);
        assert_eq!(values.stretch(5, 8), [5, 6, 7]);
        assert_eq!(values.stretch(4_090, 5_000), [4_090, 4_091, 4_092, 4_093, 4_094, 4_095]);
        values.stretch_mut(4_095, 9_000)[0] = 7;
        assert_eq!(values.stretch(4_095, 9_000), [7]);
        values.fill(4_094, 8_194, &1);
        let ends = [4_093, 4_094, 4_096, 8_193, 8_194].map(|id| values[id]);
        assert_eq!(ends, [4_093, 1, 1, 1, 8_194]);
    }
}
