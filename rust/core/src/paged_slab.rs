//! Seats: values kept at numbers that are taken again once they are given back.
//!
//! Invariant: a value stays where it is while its seat is taken. Cost: O(1).

use std::ops::{Index, IndexMut};

use crate::paged_vec::PagedVec;

/// Where a value is kept.
pub type SlabIndex = u32;

/// Values that come and go.
#[derive(Clone, Debug)]
pub struct PagedSlab<T> {
    values: PagedVec<T>,
    /// One behind the last seat ever taken.
    bound: SlabIndex,
    free: Vec<SlabIndex>,
}

impl<T: Clone> PagedSlab<T> {
    /// None is taken; `vacant` stands where none was.
    #[must_use]
    pub fn new(vacant: T) -> Self {
        Self { values: PagedVec::new(vacant), bound: 0, free: Vec::new() }
    }

    /// Keeps a value; returns where.
    pub fn take(&mut self, value: T) -> SlabIndex {
        let seat = self.free.pop().unwrap_or_else(|| {
            self.bound += 1;
            self.bound - 1
        });
        self.values.put(seat, value);
        seat
    }

    /// Gives a taken seat back. Its value stands there until somebody takes it.
    pub fn give(&mut self, seat: SlabIndex) {
        debug_assert!(seat < self.bound, "seat {seat} was never taken");
        self.free.push(seat);
    }

    /// How many seats were ever taken at once.
    #[must_use]
    pub fn bound(&self) -> SlabIndex {
        self.bound
    }

    /// Prefetches the CPU cache line that holds a seat's value.
    #[inline]
    pub fn prefetch_line(&self, seat: SlabIndex) {
        self.values.prefetch_line(seat);
    }
}

impl<T> Index<SlabIndex> for PagedSlab<T> {
    type Output = T;

    #[inline]
    fn index(&self, seat: SlabIndex) -> &T {
        &self.values[seat]
    }
}

impl<T> IndexMut<SlabIndex> for PagedSlab<T> {
    #[inline]
    fn index_mut(&mut self, seat: SlabIndex) -> &mut T {
        &mut self.values[seat]
    }
}

#[cfg(test)]
mod tests {
    use super::PagedSlab;

    #[test]
    fn what_is_given_back_is_taken_again() {
        let mut seats = PagedSlab::new(0);
        let taken: Vec<_> = (1..=3).map(|value| seats.take(value)).collect();
        assert_eq!(taken.iter().map(|&seat| seats[seat]).collect::<Vec<_>>(), [1, 2, 3]);
        seats.give(taken[1]);
        assert_eq!(seats.take(9), taken[1]);
        seats[taken[0]] += 4;
        assert_eq!((seats[taken[0]], seats[taken[1]], seats.bound()), (5, 9, 3));
    }
}
