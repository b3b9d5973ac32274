//! Consequences: what follows from a failed move or from a slot that a lease gives up, as data.
//!
//! A method that finds a consequence pushes it and goes on; public methods carry all of them out
//! before they return. So no method reaches itself through another. Invariant: the list is empty
//! between calls. Order: depth first, i.e. the consequences of one step run in the order found and
//! before all found earlier. Cost: O(1) per consequence.

use std::sync::Arc;

use crate::block::{BlockId, Handle, LeaseId, MoveId};

use crate::manager::kinds::Ahead;
use crate::private_slots::PrivateSlotId;
use crate::transfer::InFlightMove;

/// A failure of a move and why it failed.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) id: MoveId,
    pub(super) reason: String,
    /// Whether source or destination is to blame; a move that never started blames neither.
    pub(super) blame: bool,
    /// Whether no request is concerned, so that nothing is reported.
    pub(super) silent: bool,
    /// The block of the move before it whose failure is to blame, if any.
    pub(super) cause: Option<Handle>,
}

/// A failed move as it was, and its failure; the leases that awaited it share them.
pub(super) type FailedMove = Arc<(InFlightMove, Failure)>;

/// Step that is still to be carried out.
#[derive(Clone, Debug)]
pub(super) enum Consequence {
    /// A move fails, and then those that depend on it.
    Fail(Failure),
    /// The moves that depend on a failed move have failed: its block and its leases follow.
    Failed(FailedMove),
    /// A failed move has ended on every rank.
    End(MoveId),
    /// A lease that awaited a failed move gives up the copies that it made ahead.
    TakeBack(LeaseId),
    /// The same lease computes the block instead.
    Recompute(LeaseId, FailedMove),
    /// A block may have lost its last copy.
    Sweep(BlockId),
    /// A copy that was made ahead is not needed any more.
    GiveBack(Ahead),
    /// Moves wait for a slot that no lease will name.
    Unnamed(PrivateSlotId),
    /// The last reference to a copy that was made ahead.
    Unref(PrivateSlotId),
}

/// List of steps, the next one first.
#[derive(Debug, Default)]
pub(super) struct Consequences {
    steps: Vec<Consequence>,
    /// Those that the step at hand has found, in order.
    found: Vec<Consequence>,
}

impl Consequences {
    /// Adds a step after those that the step at hand has found already.
    pub(super) fn push(&mut self, step: Consequence) {
        self.found.push(step);
    }

    /// Takes the next step.
    pub(super) fn next(&mut self) -> Option<Consequence> {
        self.steps.extend(self.found.drain(..).rev());
        self.steps.pop()
    }

    /// Whether every step was carried out.
    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.found.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::{Consequence, Consequences};

    #[test]
    fn steps_are_taken_depth_first() {
        let mut list = Consequences::default();
        (1..3).for_each(|id| list.push(Consequence::End(id)));
        let mut order = Vec::new();
        while let Some(Consequence::End(id)) = list.next() {
            order.push(id);
            if id < 10 {
                (id * 10..id * 10 + 2).for_each(|id| list.push(Consequence::End(id)));
            }
        }
        assert_eq!(order, [1, 10, 11, 2, 20, 21]);
        assert!(list.is_empty());
    }
}
