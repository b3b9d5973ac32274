//! In-flight moves: a table by id, with the manager's state of each move.
//!
//! Ids count up and most moves end in about this order, so a ring buffer holds them by id. Moves
//! outlasting thousands of younger moves go to a hash map. Invariant: the ring has at most four
//! places per move, plus 1024. Cost: O(1), amortised.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut, Index};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::arrival::MoveIds;
use crate::block::{Handle, Layers, MoveId, Place, Slot, TierId};
use crate::time::Nanos;

use super::{End, Endpoint, Move};

/// Allowed empty places of the ring, however few moves it holds.
const SLACK: usize = 1024;

/// Slot of an evicted block being written back by a move, with the block's layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaves {
    pub(crate) tier: TierId,
    pub(crate) slot: Slot,
    pub(crate) held: Layers,
}

/// Move in flight.
#[derive(Clone, Debug)]
pub(crate) struct InFlightMove {
    /// The part sent to the executor.
    pub(crate) spec: Move,
    pub(crate) from: End,
    pub(crate) to: End,
    /// The slot to free at the end of this move.
    pub(crate) leaves: Option<Leaves>,
    pub(crate) deps: MoveIds,
    /// Ready time of a marked source. 0 if it is resident or brought by a move.
    pub(crate) since: Nanos,
    pub(crate) issued: bool,
    pub(crate) failed: bool,
    /// Bit set of ranks reporting its end.
    pub(crate) done_ranks: u64,
    /// Bit set of ranks reporting it as hanging.
    pub(crate) hung_ranks: u64,
    /// Layers done by rank. Empty before the first report.
    pub(crate) progress: SmallVec<[u16; 2]>,
    /// Number of layers arrived on all ranks.
    pub(crate) landed: u16,
    pub(crate) started: Nanos,
    /// Time of handing it out.
    pub(crate) handed: Nanos,
}

impl InFlightMove {
    /// Source place.
    pub(crate) fn source(&self) -> Place {
        Place::new(self.spec.src, self.spec.group.into())
    }

    /// Both ends.
    pub(crate) fn ends(&self) -> [Endpoint; 2] {
        let Move { src_slot, dst_slot, .. } = self.spec;
        [
            Endpoint { place: self.source(), slot: src_slot, end: self.from },
            Endpoint { place: self.target(), slot: dst_slot, end: self.to },
        ]
    }

    /// The block to receive its layers one by one. `None` for groups after the first: their layers
    /// count only when all have arrived.
    pub(crate) fn lands_on(&self) -> Option<Handle> {
        self.spec.block.filter(|_| self.to == End::Resident && self.spec.group == 0)
    }

    /// Destination place.
    pub(crate) fn target(&self) -> Place {
        Place::new(self.spec.dst, self.spec.group.into())
    }
}

impl Deref for InFlightMove {
    type Target = Move;

    fn deref(&self) -> &Move {
        &self.spec
    }
}

impl DerefMut for InFlightMove {
    fn deref_mut(&mut self) -> &mut Move {
        &mut self.spec
    }
}

/// Moves in flight, by id.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    /// Id of the ring's first place.
    first: MoveId,
    ring: VecDeque<Option<InFlightMove>>,
    late: FxHashMap<MoveId, InFlightMove>,
    len: usize,
}

impl InFlight {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn contains(&self, id: MoveId) -> bool {
        self.get(id).is_some()
    }

    pub(crate) fn get(&self, id: MoveId) -> Option<&InFlightMove> {
        match self.place(id) {
            Some(at) => self.ring.get(at)?.as_ref(),
            None => self.late.get(&id),
        }
    }

    pub(crate) fn get_mut(&mut self, id: MoveId) -> Option<&mut InFlightMove> {
        match self.place(id) {
            Some(at) => self.ring.get_mut(at)?.as_mut(),
            None => self.late.get_mut(&id),
        }
    }

    /// Adds a move with the highest id so far.
    pub(crate) fn push(&mut self, flight: InFlightMove) {
        // After a pause the ring begins at the next id.
        if self.ring.is_empty() {
            self.first = flight.id;
        }
        let next = self.place(flight.id);
        debug_assert_eq!(next, Some(self.ring.len()), "ids count up");
        self.ring.push_back(Some(flight));
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, id: MoveId) -> Option<InFlightMove> {
        let ended = match self.place(id) {
            Some(at) => self.ring.get_mut(at)?.take(),
            None => self.late.remove(&id),
        }?;
        self.len -= 1;
        self.shrink();
        Some(ended)
    }

    /// Removes moves in place, after `visit` has seen each.
    pub(crate) fn forget(&mut self, ids: &[MoveId], mut visit: impl FnMut(&InFlightMove)) {
        for &id in ids {
            if let Some(at) = self.place(id) {
                if let Some(flight) = self.ring.get_mut(at)
                    && let Some(known) = flight
                {
                    visit(known);
                    *flight = None;
                    self.len -= 1;
                }
            // It is no longer in the ring.
            } else if let Some(late) = self.late.remove(&id) {
                visit(&late);
                self.len -= 1;
            }
        }
        self.shrink();
    }

    /// Drops ended moves from the ring's front, and moves the oldest to the map while the ring is
    /// sparse.
    fn shrink(&mut self) {
        loop {
            let ended = self.ring.iter().take_while(|flight| flight.is_none()).count();
            self.ring.drain(..ended);
            self.first += ended as MoveId;
            if self.len * 4 + SLACK >= self.ring.len() {
                return;
            }
            let late = self.ring.pop_front().flatten().expect("the ring begins with a move");
            self.late.insert(late.id, late);
            self.first += 1;
        }
    }

    /// All moves, in no order.
    pub(crate) fn values(&self) -> impl Iterator<Item = &InFlightMove> {
        self.late.values().chain(self.ring.iter().flatten())
    }

    /// All moves, in no order.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut InFlightMove> {
        self.late.values_mut().chain(self.ring.iter_mut().flatten())
    }

    /// The place of an id in the ring, or `None` if it is older than the ring.
    fn place(&self, id: MoveId) -> Option<usize> {
        usize::try_from(id.checked_sub(self.first)?).ok()
    }
}

impl Index<MoveId> for InFlight {
    type Output = InFlightMove;

    fn index(&self, id: MoveId) -> &InFlightMove {
        self.get(id).expect("a move that has not ended")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use smallvec::SmallVec;

    use super::{InFlight, InFlightMove, SLACK};
    use crate::arrival::MoveIds;
    use crate::block::{Layers, MoveId, NO_MOVE, NO_SLOT};
    use crate::record::BlockKey;
    use crate::transfer::{End, Move, MoveKind};

    fn flight(id: MoveId) -> InFlightMove {
        let spec = Move {
            id,
            kind: MoveKind::Load,
            lease: 0,
            block: None,
            key: BlockKey::default(),
            label: None,
            src: 1,
            dst: 0,
            src_slot: NO_SLOT,
            dst_slot: NO_SLOT,
            group: 0,
            layers: Layers::new(0, 1),
            after: NO_MOVE,
            tokens: 1,
            first: 0,
            ready: 0,
        };
        InFlightMove {
            spec,
            from: End::Resident,
            to: End::Resident,
            leaves: None,
            deps: MoveIds::new(),
            since: 0,
            issued: false,
            failed: false,
            done_ranks: 0,
            hung_ranks: 0,
            progress: SmallVec::new(),
            landed: 0,
            started: 0,
            handed: 0,
        }
    }

    proptest! {
        /// Compares with a set of ids. A few moves stay while thousands end.
        #[test]
        fn it_is_a_map_of_the_moves_in_flight(
            start in 1..50u64,
            waves in prop::collection::vec((1..900u64, 0..5u64, any::<prop::sample::Index>()), 1..12),
        ) {
            let (mut in_flight, mut set, mut next) = (InFlight::default(), BTreeSet::new(), start);
            for (number, stay, other) in waves {
                for id in next..next + number {
                    in_flight.push(flight(id));
                    set.insert(id);
                }
                next += number;
                let old = *set.iter().nth(other.index(set.len())).expect("some are left");
                prop_assert!(in_flight.remove(old).is_some_and(|ended| ended.id == old));
                prop_assert!(in_flight.remove(old).is_none());
                set.remove(&old);
                let end: Vec<MoveId> = set.iter().copied().filter(|id| id % 7 >= stay).collect();
                if number % 2 == 0 {
                    let mut seen = Vec::new();
                    in_flight.forget(&end, |flight| seen.push(flight.id));
                    prop_assert_eq!(&seen, &end);
                    in_flight.forget(&end, |ended| panic!("{} was removed before", ended.id));
                }
                for id in end {
                    prop_assert_eq!(in_flight.remove(id).is_some(), number % 2 == 1);
                    set.remove(&id);
                }
                prop_assert_eq!((in_flight.len(), in_flight.is_empty()), (set.len(), set.is_empty()));
                prop_assert!(in_flight.ring.len() <= in_flight.len() * 4 + SLACK);
                for id in 0..next + 2 {
                    prop_assert_eq!(in_flight.contains(id), set.contains(&id));
                    prop_assert_eq!(in_flight.get_mut(id).map(|flight| flight.id), in_flight.get(id).map(|t| t.id));
                }
                let mut all: Vec<MoveId> = in_flight.values().map(|flight| flight.id).collect();
                all.sort_unstable();
                prop_assert_eq!(all.len(), in_flight.values_mut().count());
                prop_assert_eq!(all, set.iter().copied().collect::<Vec<_>>());
            }
        }
    }
}
