//! Trips: the moves that have not ended, with what only the manager knows of them.
//!
//! Ids count up and most moves end in about that order, so they lie side by side in the order of
//! their ids; those that outlast thousands of younger ones are kept apart. Invariant: there is at
//! most one place in the row per four trips and 1024 more. Cost: O(1), amortised.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut, Index};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::arrival::MoveIds;
use crate::block::{Layers, MoveId, Slot, TierId};
use crate::time::Nanos;

use super::moves::{End, Move};

/// Empty places that the row may have whatever it holds.
const SLACK: usize = 1024;

/// A slot whose block leaves it with a move, and the layers that it held.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaves {
    pub(super) tier: TierId,
    pub(super) slot: Slot,
    pub(super) held: Layers,
}

/// A move that has not ended.
#[derive(Clone, Debug)]
pub(super) struct Trip {
    /// What the executor is told.
    pub(super) told: Move,
    pub(super) from: End,
    pub(super) to: End,
    /// What comes free when this move has ended well.
    pub(super) leaves: Option<Leaves>,
    /// It failed, and its block is back in that slot.
    pub(super) returned: bool,
    pub(super) deps: MoveIds,
    pub(super) issued: bool,
    pub(super) failed: bool,
    pub(super) done_ranks: u64,
    /// By rank: how many layers it said are there; nothing before the first word.
    pub(super) progress: SmallVec<[u16; 2]>,
    pub(super) landed: u16,
    pub(super) started: Nanos,
    /// When it was handed out.
    pub(super) handed: Nanos,
}

impl Deref for Trip {
    type Target = Move;

    fn deref(&self) -> &Move {
        &self.told
    }
}

impl DerefMut for Trip {
    fn deref_mut(&mut self) -> &mut Move {
        &mut self.told
    }
}

/// Trips by id.
#[derive(Debug, Default)]
pub(super) struct Trips {
    /// The id of the first one in the row.
    first: MoveId,
    row: VecDeque<Option<Trip>>,
    late: FxHashMap<MoveId, Trip>,
    len: usize,
}

impl Trips {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn contains(&self, id: MoveId) -> bool {
        self.get(id).is_some()
    }

    pub(super) fn get(&self, id: MoveId) -> Option<&Trip> {
        match self.place(id) {
            Some(at) => self.row.get(at)?.as_ref(),
            None => self.late.get(&id),
        }
    }

    pub(super) fn get_mut(&mut self, id: MoveId) -> Option<&mut Trip> {
        match self.place(id) {
            Some(at) => self.row.get_mut(at)?.as_mut(),
            None => self.late.get_mut(&id),
        }
    }

    /// Adds a trip whose id is the highest so far.
    pub(super) fn push(&mut self, trip: Trip) {
        if self.row.is_empty() {
            self.first = trip.id;
        }
        let next = self.place(trip.id);
        debug_assert_eq!(next, Some(self.row.len()), "ids count up");
        self.row.push_back(Some(trip));
        self.len += 1;
    }

    pub(super) fn remove(&mut self, id: MoveId) -> Option<Trip> {
        let ended = match self.place(id) {
            Some(at) => self.row.get_mut(at)?.take(),
            None => self.late.remove(&id),
        }?;
        self.len -= 1;
        self.close_up();
        Some(ended)
    }

    /// Removes trips where they lie, after a last look at each.
    pub(super) fn forget(&mut self, ids: &[MoveId], mut look: impl FnMut(&Trip)) {
        for &id in ids {
            if let Some(at) = self.place(id) {
                if let Some(trip) = self.row.get_mut(at)
                    && let Some(known) = trip
                {
                    look(known);
                    *trip = None;
                    self.len -= 1;
                }
            } else if let Some(late) = self.late.remove(&id) {
                look(&late);
                self.len -= 1;
            }
        }
        self.close_up();
    }

    /// Lets the row begin with a trip, and not long before most of them.
    fn close_up(&mut self) {
        loop {
            let ended = self.row.iter().take_while(|trip| trip.is_none()).count();
            self.row.drain(..ended);
            self.first += ended as MoveId;
            if self.len * 4 + SLACK >= self.row.len() {
                return;
            }
            let late = self.row.pop_front().flatten().expect("the row begins with a trip");
            self.late.insert(late.id, late);
            self.first += 1;
        }
    }

    /// All of them, in no order.
    pub(super) fn values(&self) -> impl Iterator<Item = &Trip> {
        self.late.values().chain(self.row.iter().flatten())
    }

    /// All of them, in no order.
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Trip> {
        self.late.values_mut().chain(self.row.iter_mut().flatten())
    }

    /// Where an id would stand in the row, unless it is too old.
    fn place(&self, id: MoveId) -> Option<usize> {
        usize::try_from(id.checked_sub(self.first)?).ok()
    }
}

impl Index<MoveId> for Trips {
    type Output = Trip;

    fn index(&self, id: MoveId) -> &Trip {
        self.get(id).expect("a move that has not ended")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use smallvec::SmallVec;

    use super::{SLACK, Trip, Trips};
    use crate::arrival::MoveIds;
    use crate::block::{Layers, MoveId, NO_MOVE, NO_SLOT};
    use crate::manager::moves::{End, Move, MoveKind};
    use crate::record::Key;

    fn trip(id: MoveId) -> Trip {
        let told = Move {
            id,
            kind: MoveKind::Load,
            lease: 0,
            block: None,
            key: Key::default(),
            label: None,
            src: 1,
            dst: 0,
            src_slot: NO_SLOT,
            dst_slot: NO_SLOT,
            layers: Layers::new(0, 1),
            after: NO_MOVE,
            tokens: 1,
            first: 0,
            ready: 0,
        };
        Trip {
            told,
            from: End::Here,
            to: End::Here,
            leaves: None,
            returned: false,
            deps: MoveIds::new(),
            issued: false,
            failed: false,
            done_ranks: 0,
            progress: SmallVec::new(),
            landed: 0,
            started: 0,
            handed: 0,
        }
    }

    proptest! {
        /// Beside a set of ids; a few stay while thousands go.
        #[test]
        fn it_holds_what_has_not_ended(
            start in 1..50u64,
            waves in prop::collection::vec((1..900u64, 0..5u64, any::<prop::sample::Index>()), 1..12),
        ) {
            let (mut trips, mut set, mut next) = (Trips::default(), BTreeSet::new(), start);
            for (number, stay, other) in waves {
                for id in next..next + number {
                    trips.push(trip(id));
                    set.insert(id);
                }
                next += number;
                let old = *set.iter().nth(other.index(set.len())).expect("some are left");
                prop_assert!(trips.remove(old).is_some_and(|gone| gone.id == old));
                prop_assert!(trips.remove(old).is_none());
                set.remove(&old);
                let end: Vec<MoveId> = set.iter().copied().filter(|id| id % 7 >= stay).collect();
                if number % 2 == 0 {
                    let mut seen = Vec::new();
                    trips.forget(&end, |trip| seen.push(trip.id));
                    prop_assert_eq!(&seen, &end);
                    trips.forget(&end, |gone| panic!("{} is gone", gone.id));
                }
                for id in end {
                    prop_assert_eq!(trips.remove(id).is_some(), number % 2 == 1);
                    set.remove(&id);
                }
                prop_assert_eq!((trips.len(), trips.is_empty()), (set.len(), set.is_empty()));
                prop_assert!(trips.row.len() <= trips.len() * 4 + SLACK);
                for id in 0..next + 2 {
                    prop_assert_eq!(trips.contains(id), set.contains(&id));
                    prop_assert_eq!(trips.get_mut(id).map(|trip| trip.id), trips.get(id).map(|t| t.id));
                }
                let mut all: Vec<MoveId> = trips.values().map(|trip| trip.id).collect();
                all.sort_unstable();
                prop_assert_eq!(all.len(), trips.values_mut().count());
                prop_assert_eq!(all, set.iter().copied().collect::<Vec<_>>());
            }
        }
    }
}
