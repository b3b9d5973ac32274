//! Moves that are one transmission.
//!
//! Invariant: they go one way, and wait for one move or none. Cost: plain values.

use kvtrie_core::{Layers, MoveId, MoveKind};

use crate::call::Handed;

/// Which job enters first, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    /// A lease waits for it, or something that a lease waits for does.
    Demand,
    /// A load that no lease asked for.
    Prefetch,
    /// A store that nothing waits for.
    Background,
}

/// Moves of one way.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) moves: Vec<Handed>,
    pub(super) after: MoveId,
    pub(super) urgency: Urgency,
}

impl Job {
    /// A job of one move.
    pub(super) fn of(order: Handed) -> Self {
        let urgency = match (order.lease, order.kind) {
            (0, MoveKind::Store) => Urgency::Background,
            (0, _) => Urgency::Prefetch,
            _ => Urgency::Demand,
        };
        Self { after: order.after, urgency, moves: vec![order] }
    }

    /// Whether that is a single layer next to the single layers of this job.
    pub(super) fn adjoins(&self, layers: Layers) -> bool {
        let single = |layers: Layers| layers.len() == 1;
        let all = || self.moves.iter().map(|order| order.layers);
        single(layers)
            && all().all(single)
            && all().any(|one| one.hi == layers.lo || layers.hi == one.lo)
    }
}
