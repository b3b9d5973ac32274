//! A copy under way: what will stand on a tier when all that brings it has ended well.
//!
//! Invariant: `landed` are layers that are there and do not yet join what counts. Cost: plain values.

use smallvec::SmallVec;

use crate::block::{Layers, MoveId};
use crate::time::Nanos;

/// A few moves; most copies wait for none or one.
pub type MoveIds = SmallVec<[MoveId; 2]>;

/// What is on its way to a block on a tier.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// The layers that will stand there.
    pub target: Layers,
    /// What brings them and has not ended; none if the copy was marked.
    pub moves: MoveIds,
    /// Layers that are there before those below or above them.
    pub landed: SmallVec<[Layers; 2]>,
    /// Predicted end of its first layer.
    pub first: Nanos,
    /// Predicted end.
    pub ready: Nanos,
    /// One of its moves failed: it will not come.
    pub failed: bool,
}

impl Arrival {
    /// All of `target`, of which nothing is there yet.
    #[must_use]
    pub fn new(target: Layers, moves: MoveIds, first: Nanos, ready: Nanos) -> Self {
        Self { target, moves, landed: SmallVec::new(), first, ready, failed: false }
    }
}
