//! Columns: one value per id, in pieces that never move.
//!
//! Invariant: a value stays where it is however long the column grows, so no call pays for copying
//! the column; what was never written is `vacant`. Cost: O(1); growing fills one piece at a time.

use std::ops::{Index, IndexMut};

use prefetch_index::prefetch_index;

/// Values per piece: a power of two, small enough that filling one takes microseconds.
pub const PIECE: usize = 1 << 12;

/// A value for every id below `len`.
#[derive(Clone, Debug)]
pub struct PagedVec<T> {
    pieces: Vec<Box<[T; PIECE]>>,
    vacant: T,
}

impl<T: Clone> PagedVec<T> {
    /// A column without a value; `vacant` stands wherever nothing was written.
    #[must_use]
    pub fn new(vacant: T) -> Self {
        Self { pieces: Vec::new(), vacant }
    }

    /// Makes room for the ids below `bound`.
    pub fn reach(&mut self, bound: u32) {
        while self.pieces.len() * PIECE < bound as usize {
            let piece = vec![self.vacant.clone(); PIECE].into_boxed_slice();
            self.pieces.push(piece.try_into().unwrap_or_else(|_| unreachable!("a whole piece")));
        }
    }

    /// Sets the value of an id, which the column reaches then.
    pub fn put(&mut self, id: u32, value: T) {
        self.reach(id + 1);
        self[id] = value;
    }

    /// The value of an id; `None` if the column does not reach it.
    #[inline]
    #[must_use]
    pub fn get(&self, id: u32) -> Option<&T> {
        self.pieces.get(id as usize / PIECE).map(|piece| &piece[id as usize % PIECE])
    }

    /// Prefetches the CPU cache line that holds an id's value.
    #[inline]
    pub fn prefetch_line(&self, id: u32) {
        if let Some(piece) = self.pieces.get(id as usize / PIECE) {
            prefetch_index(&piece[..], id as usize % PIECE);
        }
    }

    /// Values of consecutive ids, up to the end of the range or of their piece.
    #[inline]
    #[must_use]
    pub fn stretch(&self, from: u32, to: u32) -> &[T] {
        let at = from as usize % PIECE;
        let end = (at + (to - from) as usize).min(PIECE);
        &self.pieces[from as usize / PIECE][at..end]
    }

    /// The same, to be changed.
    #[inline]
    pub fn stretch_mut(&mut self, from: u32, to: u32) -> &mut [T] {
        let at = from as usize % PIECE;
        let end = (at + (to - from) as usize).min(PIECE);
        &mut self.pieces[from as usize / PIECE][at..end]
    }

    /// Sets the values of consecutive ids.
    pub fn fill(&mut self, mut from: u32, to: u32, value: &T) {
        while from < to {
            let piece = self.stretch_mut(from, to);
            piece.fill(value.clone());
            from += u32::try_from(piece.len()).expect("less than a piece");
        }
    }
}

impl<T> Index<u32> for PagedVec<T> {
    type Output = T;

    #[inline]
    fn index(&self, id: u32) -> &T {
        &self.pieces[id as usize / PIECE][id as usize % PIECE]
    }
}

impl<T> IndexMut<u32> for PagedVec<T> {
    #[inline]
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.pieces[id as usize / PIECE][id as usize % PIECE]
    }
}

#[cfg(test)]
mod tests {
    use super::{PIECE, PagedVec};

    #[test]
    fn what_was_not_written_is_vacant() {
        let mut column = PagedVec::new(7_u8);
        assert_eq!(column.get(0), None);
        column.reach(1);
        let last = u32::try_from(PIECE).unwrap() - 1;
        column[last] = 3;
        assert_eq!((column[0], column[last], column.get(last + 1)), (7, 3, None));
        let place = std::ptr::from_ref(&column[0]);
        column.reach(100_000);
        assert_eq!((place, column[99_999]), (std::ptr::from_ref(&column[0]), 7));
    }

    #[test]
    fn a_stretch_ends_with_its_piece() {
        let mut column = PagedVec::new(0_u32);
        column.reach(10_000);
        (0..10_000).for_each(|id| column[id] = id);
        assert_eq!(column.stretch(5, 8), [5, 6, 7]);
        assert_eq!(column.stretch(4_090, 5_000), [4_090, 4_091, 4_092, 4_093, 4_094, 4_095]);
        column.stretch_mut(4_095, 9_000)[0] = 7;
        assert_eq!(column.stretch(4_095, 9_000), [7]);
        column.fill(4_094, 8_194, &1);
        let ends = [4_093, 4_094, 4_096, 8_193, 8_194].map(|id| column[id]);
        assert_eq!(ends, [4_093, 1, 1, 1, 8_194]);
    }
}
