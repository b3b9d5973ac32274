//! Consequences: steps that follow from a failed move or from a slot released by a lease, as data.
//!
//! A method pushes a consequence and goes on, and public methods carry out all consequences before
//! they return. So no method calls itself through a second method. Invariant: the list is empty
//! between calls. Order: depth first. A step's consequences run in the order found, and before all
//! earlier steps. Cost: O(1) per consequence.

use std::sync::Arc;

use crate::block::{BlockId, Handle, LeaseId, MoveId};

use crate::manager::kinds::Ahead;
use crate::private_slots::PrivateSlotId;
use crate::transfer::InFlightMove;

/// Failure of a move, with the reason.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) id: MoveId,
    pub(super) reason: String,
    /// Whether source or destination is to blame. A move that never started blames neither.
    pub(super) blame: bool,
    /// Whether no request is concerned: then nothing is reported.
    pub(super) silent: bool,
    /// The block of the failed move that caused this failure, if any.
    pub(super) cause: Option<Handle>,
}

/// A failed move before its failure, and the failure. Shared by the leases that awaited the move.
pub(super) type FailedMove = Arc<(InFlightMove, Failure)>;

/// Step still to carry out.
#[derive(Clone, Debug)]
pub(super) enum Consequence {
    /// A move fails, and then its dependent moves.
    Fail(Failure),
    /// The moves depending on a failed move have failed. Its block and its leases follow.
    Failed(FailedMove),
    /// A failed move has ended on every rank.
    End(MoveId),
    /// A lease drops its copies ahead after it awaited a failed move.
    TakeBack(LeaseId),
    /// The same lease computes the block instead.
    Recompute(LeaseId, FailedMove),
    /// A block may have lost its last copy.
    Sweep(BlockId),
    /// A copy ahead is no longer needed.
    GiveBack(Ahead),
    /// Moves wait for a slot that no lease will name.
    Unnamed(PrivateSlotId),
    /// The last reference to a copy ahead.
    Unref(PrivateSlotId),
}

/// List of steps, the next step first.
#[derive(Debug, Default)]
pub(super) struct Consequences {
    steps: Vec<Consequence>,
    /// Steps found by the current step, in order.
    found: Vec<Consequence>,
}

impl Consequences {
    /// Adds a step after the steps already found by the current step.
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
