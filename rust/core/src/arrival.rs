//! Arrival: the moves in flight to a block on a tier, and the resulting layers.
//!
//! Invariant: `landed` are copied layers not adjacent to the resident range yet. Cost: plain
//! values.

use smallvec::SmallVec;

use crate::block::{Layers, MoveId};
use crate::time::Nanos;

/// Short list of moves. Most copies wait for at most one move.
pub(crate) type MoveIds = SmallVec<[MoveId; 2]>;

/// Moves in flight to a block on a tier.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    /// Layers resident after all moves have ended.
    pub target: Layers,
    /// Moves in flight. Empty if the caller marked the copy.
    pub moves: MoveIds,
    /// Landed layers not adjacent to the resident range yet.
    pub landed: SmallVec<[Layers; 2]>,
    /// Predicted end of its first layer.
    pub first: Nanos,
    /// Predicted end.
    pub ready: Nanos,
    /// Whether a move failed, so the arrival cannot complete.
    pub failed: bool,
}

impl Arrival {
    /// An arrival of `target` with no landed layers.
    #[must_use]
    pub(crate) fn new(target: Layers, moves: MoveIds, first: Nanos, ready: Nanos) -> Self {
        Self { target, moves, landed: SmallVec::new(), first, ready, failed: false }
    }
}
