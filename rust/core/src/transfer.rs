//! Moves: copies of a block's layers between two slots, and the table of moves in flight.
//!
//! A move names at most one dependency for the executor to wait for, its `after`. All further
//! dependencies are resolved here. Invariant: a move that has not failed is in exactly one place:
//! queued, parked or handed out. The queue is in topological order. Cost: O(1) per move, amortised.
//! O(parked) per [`Moves::unpark`].

mod in_flight;
mod recent_results;

use std::collections::{BTreeSet, VecDeque};
use std::ops::{Deref, DerefMut};

use rustc_hash::FxHashMap;

use crate::arrival::MoveIds;
use crate::block::{Handle, Layers, LeaseId, MoveId, NO_MOVE, NO_SLOT, Place, Slot, TierId};
use crate::private_slots::PrivateSlotId;
use crate::record::{BlockKey, Label};
use crate::time::Nanos;

pub(crate) use in_flight::{InFlight, InFlightMove, Leaves};
use recent_results::RecentResults;

/// Direction of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoveKind {
    /// Towards a faster tier.
    Load,
    /// Towards a slower tier.
    Store,
    /// Within the first tier, before a shared partial block is written.
    Copy,
}

/// Kind of a move's source or destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The block's residency on that tier.
    Resident,
    /// A private slot of a lease or for transit.
    PrivateSlot(PrivateSlotId),
    /// The slot of an evicted block, written back by this move.
    Leaving,
    /// A slot being written by a lease, in a group after the first.
    Open,
}

/// Source or destination of a move: a slot, its place and its holder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Endpoint {
    pub(crate) place: Place,
    pub(crate) slot: Slot,
    pub(crate) end: End,
}

impl Endpoint {
    /// The slot of a block's residency.
    #[inline]
    pub(crate) fn resident(place: impl Into<Place>, slot: Slot) -> Self {
        Self { place: place.into(), slot, end: End::Resident }
    }

    /// A private slot.
    pub(crate) fn private(place: impl Into<Place>, slot: Slot, id: PrivateSlotId) -> Self {
        Self { place: place.into(), slot, end: End::PrivateSlot(id) }
    }
}

/// A copy of a block's `layers` between two slots.
#[derive(Clone, Debug)]
pub struct Move {
    /// Id, never reused.
    pub id: MoveId,
    /// Direction.
    pub kind: MoveKind,
    /// The lease that requested it, or the first waiting lease. 0 if none.
    pub lease: LeaseId,
    /// The block. `None` for blocks not in the trie: partial or not committed yet.
    pub block: Option<Handle>,
    /// Content hash of the block. Zeros unless a disk, remote or kept tier takes part.
    pub key: BlockKey,
    /// Record to store with the block on a disk, remote or kept destination. `None` for any other
    /// destination.
    pub label: Option<Box<Label>>,
    /// Source tier.
    pub src: TierId,
    /// Destination tier.
    pub dst: TierId,
    /// The source's slot.
    pub src_slot: Slot,
    /// The destination's slot.
    pub dst_slot: Slot,
    /// Group of layers.
    pub group: u8,
    /// Layers of the group to copy.
    pub layers: Layers,
    /// Move to finish before the start of this move. 0 if none.
    pub after: MoveId,
    /// Number of valid tokens of the block.
    pub tokens: u32,
    /// Predicted end of its first layer.
    pub first: Nanos,
    /// Predicted end.
    pub ready: Nanos,
}

/// Moves in flight, with their queues.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    in_flight: InFlight,
    /// By move: its dependents.
    waiters: FxHashMap<MoveId, MoveIds>,
    /// Latest id.
    latest: MoveId,
    /// Moves ready to be handed out, in topological order.
    queue: VecDeque<MoveId>,
    /// Moves with more than one remaining dependency, or with unknown slots.
    parked: BTreeSet<MoveId>,
    recent: RecentResults,
}

impl Moves {
    /// An empty table. Ids continue after `latest`.
    pub(crate) fn starting_after(latest: MoveId) -> Self {
        Self { latest, ..Self::default() }
    }

    /// Latest id. 0 before the first.
    pub(crate) fn latest(&self) -> MoveId {
        self.latest
    }

    /// Whether this id has been issued.
    pub(crate) fn issued_id(&self, id: MoveId) -> bool {
        id != NO_MOVE && id <= self.latest
    }

    /// The id of the next move.
    pub(crate) fn next_id(&mut self) -> MoveId {
        self.latest += 1;
        self.latest
    }

    /// Removes ended moves from the dependencies of a new move, and registers it as a waiter of the
    /// rest. Returns the ready time of the last dependency, but not before `start`.
    pub(crate) fn depend(&mut self, id: MoveId, deps: &mut MoveIds, start: Nanos) -> Nanos {
        if deps.is_empty() {
            return start;
        }
        deps.retain(|dep| self.in_flight.contains(*dep));
        // One store may both bring the source and free the destination.
        deps.sort_unstable();
        deps.dedup();
        for &dep in deps.iter() {
            self.waiters.entry(dep).or_default().push(id);
        }
        deps.iter().map(|dep| self.in_flight[*dep].ready).fold(start, Nanos::max)
    }

    /// Adds a move. It is queued if its ends have slots and its turn has come.
    pub(crate) fn add(&mut self, mut flight: InFlightMove) {
        let id = flight.id;
        // Executors wait for `after` only, so moves with a second dependency are held back here.
        match self.queueable_after(&flight, flight.started) {
            Some(after) => {
                flight.spec.after = after;
                self.queue.push_back(id);
            }
            None => {
                self.parked.insert(id);
            }
        }
        self.in_flight.push(flight);
    }

    /// The `after` of a move, or `None` while it must stay parked.
    ///
    /// A move may be queued once its slots are named, its source is present, and at most one
    /// dependency remains, which must be queued. After a failed dependency still running, the move
    /// stays parked, because executors take a failed `after` for the move's own failure.
    fn queueable_after(&self, flight: &InFlightMove, now: Nanos) -> Option<MoveId> {
        let named = flight.src_slot != NO_SLOT && flight.dst_slot != NO_SLOT;
        if !named || flight.since > now {
            return None;
        }
        match *flight.deps {
            [] => Some(NO_MOVE),
            [dep] if self.fails_with(dep, flight) && !self.parked.contains(&dep) => Some(dep),
            _ => None,
        }
    }

    /// Whether a move fails together with its dependency `dep`, which has not failed.
    ///
    /// A copy within the first tier only needs the slot freed by a store. The slot stays granted if
    /// the store fails. The copy is held back until the store ends, because executors skip moves
    /// after a failed `after`.
    fn fails_with(&self, dep: MoveId, flight: &InFlightMove) -> bool {
        let dep = &self.in_flight[dep];
        let needs_slot_only = flight.kind == MoveKind::Copy && dep.kind == MoveKind::Store;
        !dep.failed && !needs_slot_only
    }

    /// Queues all parked moves that may start by `now`.
    // A queued move may unblock the next, so repeat until nothing changes.
    pub(crate) fn unpark(&mut self, now: Nanos) {
        let mut ready = true;
        while ready {
            ready = false;
            for id in self.parked.iter().copied().collect::<Vec<_>>() {
                if let Some(after) = self.queueable_after(&self.in_flight[id], now) {
                    self.in_flight.get_mut(id).expect("a parked move").after = after;
                    self.queue.push_back(id);
                    self.parked.remove(&id);
                    ready = true;
                }
            }
        }
    }

    /// Number of moves ready to hand out.
    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// The first moves of the queue.
    pub(crate) fn peek(&self, number: usize) -> impl Iterator<Item = &InFlightMove> {
        self.queue.iter().take(number).map(|&id| &self.in_flight[id])
    }

    /// Hands out moves from the queue at `now`.
    pub(crate) fn hand_out(&mut self, number: usize, now: Nanos, mut give: impl FnMut(&Move)) {
        for id in self.queue.drain(..number) {
            let known = self.in_flight.get_mut(id).expect("a queued move");
            known.issued = true;
            known.handed = now;
            give(&known.spec);
        }
    }

    /// Marks a move as failed and removes it from the queues.
    ///
    /// Returns it with its waiters that fail together with it. `None` if it has ended or failed
    /// before.
    pub(crate) fn fail(&mut self, id: MoveId) -> Option<(InFlightMove, Vec<MoveId>)> {
        // A move with two dependencies may have failed with the first.
        self.in_flight.get(id).filter(|known| !known.failed)?;
        let waiters = self.waiters.get(&id).into_iter().flatten().copied();
        let alive = |other: &MoveId| {
            let other = self.in_flight.get(*other);
            other.is_some_and(|other| !other.failed && self.fails_with(id, other))
        };
        let waiters = waiters.filter(alive).collect();
        let known = self.in_flight.get_mut(id).expect("seen above");
        known.failed = true;
        let known = known.clone();
        self.queue.retain(|queued| *queued != id);
        self.parked.remove(&id);
        Some((known, waiters))
    }

    /// Records the results of ended moves, and removes them from the dependencies of their waiters.
    pub(crate) fn ended(&mut self, ids: &[MoveId], ok: bool) {
        self.recent.remember(ids, ok);
        if self.waiters.is_empty() {
            return;
        }
        for id in ids {
            self.release_waiters(*id);
        }
    }

    /// Removes a move from the dependencies of its waiters.
    pub(crate) fn release_waiters(&mut self, id: MoveId) {
        for waiter in self.waiters.remove(&id).unwrap_or_default() {
            // The waiting move may have failed and ended first.
            let Some(other) = self.in_flight.get_mut(waiter) else { continue };
            other.deps.retain(|dep| *dep != id);
            // An issued move keeps its `after`, because the executor knows it.
            if other.after == id && !other.issued {
                other.after = NO_MOVE;
            }
        }
    }

    /// Whether a recent move succeeded. `None` if it is in flight or ended long ago.
    pub(crate) fn result(&self, id: MoveId) -> Option<bool> {
        self.recent.of(id)
    }

    /// The queued and the parked moves, as text.
    pub(crate) fn queues(&self) -> String {
        format!("{:?} {:?}", self.queue, self.parked)
    }

    /// Finds moves in no place or in several, and waits for ended moves.
    pub(crate) fn audit(&self, broken: &mut Vec<String>) {
        for known in self.in_flight.values() {
            if known.deps.iter().any(|dep| *dep >= known.id) {
                broken.push(format!("move {} waits for a later one", known.id));
            }
            let queued = self.queue.contains(&known.id);
            let parked = self.parked.contains(&known.id);
            let places = u8::from(queued) + u8::from(parked) + u8::from(known.issued);
            if !known.failed && places != 1 {
                broken.push(format!("move {} is in {places} places", known.id));
            }
        }
        let over = self.waiters.keys().filter(|&&id| !self.in_flight.contains(id));
        broken.extend(over.map(|id| format!("move {id} has ended and is waited for")));
    }
}

impl Deref for Moves {
    type Target = InFlight;

    fn deref(&self) -> &InFlight {
        &self.in_flight
    }
}

impl DerefMut for Moves {
    fn deref_mut(&mut self) -> &mut InFlight {
        &mut self.in_flight
    }
}
