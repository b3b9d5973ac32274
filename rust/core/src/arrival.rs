//! Arrival: the moves in flight to one block on one tier, and the layers that result.
//!
//! Invariant: `landed` are layers already copied that do not touch the resident range yet. Cost:
//! plain values.

use smallvec::SmallVec;

use crate::block::{Layers, MoveId};
use crate::time::Nanos;

/// A few moves; most copies wait for one at most.
pub(crate) type MoveIds = SmallVec<[MoveId; 2]>;

/// Moves in flight to one block on one tier.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    /// The layers resident once all have ended.
    pub target: Layers,
    /// The moves that have not ended; none if the caller marked the copy.
    pub moves: MoveIds,
    /// Layers that landed before those next to the resident range.
    pub landed: SmallVec<[Layers; 2]>,
    /// Predicted end of its first layer.
    pub first: Nanos,
    /// Predicted end.
    pub ready: Nanos,
    /// One of its moves failed: the arrival will not complete.
    pub failed: bool,
}

impl Arrival {
    /// All of `target` in flight, none landed.
    #[must_use]
    pub(crate) fn new(target: Layers, moves: MoveIds, first: Nanos, ready: Nanos) -> Self {
        Self { target, moves, landed: SmallVec::new(), first, ready, failed: false }
    }
}
