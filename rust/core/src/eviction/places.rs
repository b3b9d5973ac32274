//! Where the linked entries are found: by block, and each at a seat of its own.
//!
//! Few blocks of a tier may leave at once, in leaf-only scopes the last ones of paths, so nothing
//! is kept for the others. Invariant: exactly the linked entries are here, and each keeps its seat
//! while it is. Cost: O(1), a line of memory for the seat's number and one for the seat.

use std::ops::{Index, IndexMut};

use crate::block::BlockId;
use crate::paged_slab::{PagedSlab, SlabIndex};
use crate::u32_map::U32Map;

use super::list::Place;

/// The entries of one tier.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// Seats by block.
    known: U32Map,
    seats: PagedSlab<Place>,
}

impl Places {
    pub(super) fn new() -> Self {
        Self { known: U32Map::default(), seats: PagedSlab::new(Place::vacant()) }
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    pub(super) fn get(&self, id: BlockId) -> Option<&Place> {
        self.known.find(id, |_| true).map(|seat| &self[seat])
    }

    /// Adds the place of a block that has none.
    pub(super) fn insert(&mut self, place: Place) -> SlabIndex {
        let seat = self.seats.insert(place);
        self.known.insert(place.entry.id, seat);
        seat
    }

    pub(super) fn remove(&mut self, id: BlockId) -> Option<Place> {
        let seat = self.known.remove(id, |_| true)?;
        self.seats.remove(seat);
        Some(self[seat])
    }

    /// Prefetches the CPU cache line in which a block's entry is looked for first.
    pub(super) fn prefetch_line(&self, id: BlockId) {
        self.known.prefetch_line(id);
    }
}

impl Index<SlabIndex> for Places {
    type Output = Place;

    fn index(&self, seat: SlabIndex) -> &Place {
        &self.seats[seat]
    }
}

impl IndexMut<SlabIndex> for Places {
    fn index_mut(&mut self, seat: SlabIndex) -> &mut Place {
        &mut self.seats[seat]
    }
}
