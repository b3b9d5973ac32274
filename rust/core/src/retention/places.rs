//! Where the linked entries are found: by block, and each at a seat of its own.
//!
//! Few blocks of a tier may leave at once, in leaf-only scopes the last ones of paths, so nothing
//! is kept for the others. Invariant: exactly the linked entries are here, and each keeps its seat
//! while it is. Cost: O(1), a line of memory for the seat's number and one for the seat.

use std::ops::{Index, IndexMut};

use crate::block::BlockId;
use crate::column::Column;
use crate::pairs::Pairs;

use super::list::Place;

/// Where an entry is kept.
pub(super) type Seat = u32;

/// The entries of one tier.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// Seats by block.
    known: Pairs,
    seats: Column<Place>,
    /// One behind the last seat ever taken.
    bound: Seat,
    free: Vec<Seat>,
}

impl Places {
    pub(super) fn new() -> Self {
        let seats = Column::new(Place::vacant());
        Self { known: Pairs::default(), seats, bound: 0, free: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    pub(super) fn get(&self, id: BlockId) -> Option<&Place> {
        self.known.find(id, |_| true).map(|seat| &self[seat])
    }

    /// Adds the place of a block that has none.
    pub(super) fn insert(&mut self, place: Place) -> Seat {
        let seat = self.free.pop().unwrap_or_else(|| {
            self.bound += 1;
            self.seats.reach(self.bound);
            self.bound - 1
        });
        self.known.insert(place.entry.id, seat);
        self[seat] = place;
        seat
    }

    pub(super) fn remove(&mut self, id: BlockId) -> Option<Place> {
        let seat = self.known.remove(id, |_| true)?;
        self.free.push(seat);
        Some(self[seat])
    }

    /// Begins to fetch where a block's seat is found.
    pub(super) fn warm(&self, id: BlockId) {
        self.known.warm(id);
    }

    /// Begins to fetch what stands at a seat.
    pub(super) fn warm_seat(&self, seat: Seat) {
        self.seats.warm(seat);
    }
}

impl Index<Seat> for Places {
    type Output = Place;

    fn index(&self, seat: Seat) -> &Place {
        &self.seats[seat]
    }
}

impl IndexMut<Seat> for Places {
    fn index_mut(&mut self, seat: Seat) -> &mut Place {
        &mut self.seats[seat]
    }
}
