//! Moves sharing a transmission.
//!
//! Invariant: same way for all moves, and a single move to wait for, or none. Cost: plain values.

use kvtrie_core::{LaneId, Layers, MoveId, MoveKind};

use crate::call::Handed;

/// Urgency of a job, ascending: the first enters first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    /// A lease waits for the job, directly or through waiting jobs.
    Demand,
    /// A load without a lease.
    Prefetch,
    /// A store without waiting jobs.
    Background,
}

/// Moves sharing a transmission.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) moves: Vec<(MoveId, Layers)>,
    pub(super) lane: LaneId,
    /// Bytes of all moves.
    pub(super) bytes: u64,
    pub(super) after: MoveId,
    pub(super) urgency: Urgency,
}

impl Job {
    /// Create a job with a single move.
    pub(super) fn of(order: &Handed, lane: LaneId, bytes: u64) -> Self {
        let urgency = match (order.lease, order.kind) {
            (0, MoveKind::Store) => Urgency::Background,
            (0, _) => Urgency::Prefetch,
            _ => Urgency::Demand,
        };
        Self { moves: vec![(order.id, order.layers)], lane, bytes, after: order.after, urgency }
    }

    /// Add a move of the same way.
    pub(super) fn add(&mut self, order: &Handed, bytes: u64) {
        self.moves.push((order.id, order.layers));
        self.bytes += bytes;
    }

    /// Whether `layers` is a single layer next to the single layers of this job.
    pub(super) fn adjoins(&self, layers: Layers) -> bool {
        let single = |layers: Layers| layers.len() == 1;
        let all = || self.moves.iter().map(|&(_, layers)| layers);
        single(layers)
            && all().all(single)
            && all().any(|one| one.hi == layers.lo || layers.hi == one.lo)
    }
}
