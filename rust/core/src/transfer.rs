//! Moves: copies of one block's layers between two slots, and the table of those that have not ended.
//!
//! A move names at most one other, its `after`, for which the executor waits; on all others it
//! depends here. Invariant: a move that has not failed is in one place: queued, parked or handed out;
//! the queue is in topological order. Cost: O(1) per move, amortised; O(parked) per [`Moves::unpark`].

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
    Here,
    /// A lease's private slot, or one reserved for transit.
    PrivateSlot(PrivateSlotId),
    /// A slot whose block was evicted from it and is written back by this move.
    Leaving,
    /// A slot of a group after the first that a lease writes.
    Open,
}

/// Source or destination of a move: a slot, where it is, and what has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Endpoint {
    pub(crate) place: Place,
    pub(crate) slot: Slot,
    pub(crate) end: End,
}

impl Endpoint {
    /// The slot of a block's residency.
    #[inline]
    pub(crate) fn here(place: impl Into<Place>, slot: Slot) -> Self {
        Self { place: place.into(), slot, end: End::Here }
    }

    /// A private slot.
    pub(crate) fn private(place: impl Into<Place>, slot: Slot, id: PrivateSlotId) -> Self {
        Self { place: place.into(), slot, end: End::PrivateSlot(id) }
    }
}

/// Copies `layers` of one block from one slot to another.
#[derive(Clone, Debug)]
pub struct Move {
    /// Its id, never used twice.
    pub id: MoveId,
    /// Direction.
    pub kind: MoveKind,
    /// The lease that asked for it, or the first one that waits for it; 0 if none does.
    pub lease: LeaseId,
    /// The block; `None` for one that is partial or not committed yet, and so not in the trie.
    pub block: Option<Handle>,
    /// Content hash of the block; zeros unless a disk, remote or kept tier takes part.
    pub key: BlockKey,
    /// Record that a disk, remote or kept tier stores with the block; `None` unless it is the
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
    /// The move that must have finished before this one starts; 0 if none.
    pub after: MoveId,
    /// Number of tokens of the block that are valid.
    pub tokens: u32,
    /// Predicted end of its first layer.
    pub first: Nanos,
    /// Predicted end.
    pub ready: Nanos,
}

/// Moves that have not ended, with the queues that they pass through.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    in_flight: InFlight,
    /// By move: the moves that depend on it.
    waiters: FxHashMap<MoveId, Vec<MoveId>>,
    /// The latest id.
    latest: MoveId,
    /// Moves ready to be handed out, in topological order.
    queue: VecDeque<MoveId>,
    /// Moves that still depend on more than one other, or whose slots are not all known.
    parked: BTreeSet<MoveId>,
    recent: RecentResults,
}

impl Moves {
    /// An empty table whose ids continue after `latest`.
    pub(crate) fn starting_after(latest: MoveId) -> Self {
        Self { latest, ..Self::default() }
    }

    /// The latest id; 0 before the first.
    pub(crate) fn latest(&self) -> MoveId {
        self.latest
    }

    /// Whether a move has had this id.
    pub(crate) fn issued_id(&self, id: MoveId) -> bool {
        id != NO_MOVE && id <= self.latest
    }

    /// The id of the next move.
    pub(crate) fn next_id(&mut self) -> MoveId {
        self.latest += 1;
        self.latest
    }

    /// Removes what has ended from the dependencies of a move that is about to be added, and lists
    /// it as their waiter. Returns when the last of them is ready, but not before `start`.
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

    /// Adds a move, which is queued if its ends have slots and its turn has come.
    pub(crate) fn add(&mut self, mut flight: InFlightMove) {
        let id = flight.id;
        // Executors wait for `after` only, so a move with a second dependency is held back here.
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

    /// The `after` of a move once it may be queued: when its slots are named, its source is there,
    /// and all but one of its dependencies have ended and that one is queued. After one that failed
    /// and still runs it stays parked: executors take a failed `after` for their own failure.
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

    /// Whether a move fails with one that it depends on and that has not failed. A copy within the
    /// first tier needs no more of a store than the slot, which stays granted if the store fails: it
    /// is held back until then, since executors skip what follows a failed `after`.
    fn fails_with(&self, dep: MoveId, flight: &InFlightMove) -> bool {
        let dep = &self.in_flight[dep];
        let needs_slot_only = flight.kind == MoveKind::Copy && dep.kind == MoveKind::Store;
        !dep.failed && !needs_slot_only
    }

    /// Queues the parked moves whose turn has come by `now`.
    // A move that is queued may allow the next one: repeat until none does.
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

    /// Number of moves that are ready to be handed out.
    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// The first moves of the queue.
    pub(crate) fn peek(&self, number: usize) -> impl Iterator<Item = &InFlightMove> {
        self.queue.iter().take(number).map(|&id| &self.in_flight[id])
    }

    /// Takes moves from the queue, as handed out at `now`.
    pub(crate) fn hand_out(&mut self, number: usize, now: Nanos, mut give: impl FnMut(&Move)) {
        for id in self.queue.drain(..number) {
            let known = self.in_flight.get_mut(id).expect("a queued move");
            known.issued = true;
            known.handed = now;
            give(&known.spec);
        }
    }

    /// Marks a move as failed and takes it out of the queues. Returns it, and the moves that fail
    /// with it and have not failed; `None` if it has ended or failed before.
    pub(crate) fn fail(&mut self, id: MoveId) -> Option<(InFlightMove, Vec<MoveId>)> {
        // A move with two dependencies may have failed with the other one.
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

    /// Records how moves ended, and removes them from the dependencies of others.
    pub(crate) fn ended(&mut self, ids: &[MoveId], ok: bool) {
        self.recent.remember(ids, ok);
        if self.waiters.is_empty() {
            return;
        }
        for id in ids {
            self.let_go(*id);
        }
    }

    /// Removes a move from the dependencies of others.
    pub(crate) fn let_go(&mut self, id: MoveId) {
        for waiter in self.waiters.remove(&id).unwrap_or_default() {
            // The waiting move may have failed and ended first.
            let Some(other) = self.in_flight.get_mut(waiter) else { continue };
            other.deps.retain(|dep| *dep != id);
            // A move that was handed out keeps the `after` that the executor knows.
            if other.after == id && !other.issued {
                other.after = NO_MOVE;
            }
        }
    }

    /// Whether a recent move ended well; `None` if it has not ended, or long ago.
    pub(crate) fn result(&self, id: MoveId) -> Option<bool> {
        self.recent.of(id)
    }

    /// The queued and the parked moves, as text.
    pub(crate) fn queues(&self) -> String {
        format!("{:?} {:?}", self.queue, self.parked)
    }

    /// Finds moves that are in no place or in several, or that a move waits for in vain.
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
