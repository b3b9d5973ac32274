//! The requests that decode: each makes a token in every step.
//!
//! Steps are counted, and a request is known by the count at which it needs attention: it has ended,
//! or its blocks are full. Invariant: `contexts` is the sum of the contexts of all members. Cost:
//! O(log members) per member that joins, leaves or is due; O(1) per step however many there are.

use std::collections::BTreeSet;

use kvtrie_core::Nanos;

use crate::cost::{Cost, nanos};

/// Requests that decode.
#[derive(Debug, Default)]
pub(super) struct Decodes {
    /// Steps that decoded, since the run began.
    count: u64,
    contexts: u64,
    /// Members by the count at which they are due.
    due: BTreeSet<(u64, u64)>,
}

impl Decodes {
    /// Steps since the run began.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Number of requests that decode.
    pub(super) fn members(&self) -> u64 {
        self.due.len() as u64
    }

    /// Adds a request with `context` tokens that is due at a count.
    pub(super) fn join(&mut self, id: u64, context: u64, due: u64) {
        self.contexts += context;
        self.due.insert((due, id));
    }

    /// Removes a member with `context` tokens.
    pub(super) fn leave(&mut self, id: u64, context: u64, due: u64) {
        if self.due.remove(&(due, id)) {
            self.contexts -= context;
        }
    }

    /// The members that are due, in the order of their ids.
    pub(super) fn finished(&self) -> Vec<u64> {
        let due = self.due.range(..=(self.count, u64::MAX));
        let mut due: Vec<u64> = due.map(|&(_, id)| id).collect();
        due.sort_unstable();
        due
    }

    /// Number of steps until a member is due; `None` without members.
    pub(super) fn steps_left(&self) -> Option<u64> {
        self.due.first().map(|&(due, _)| due.saturating_sub(self.count))
    }

    /// Members and the sum of their contexts.
    pub(super) fn batch(&self) -> (u64, u64) {
        (self.members(), self.contexts)
    }

    /// When each of the next steps ends, if the first begins at a time and none does anything else.
    pub(super) fn ends(&self, from: Nanos, cost: &dyn Cost) -> impl Iterator<Item = Nanos> {
        let (members, contexts) = self.batch();
        (0..).scan(from, move |at, step| {
            let parts = cost.step((members, contexts + step * members), &[]);
            *at = at.saturating_add(nanos(parts));
            Some(*at)
        })
    }

    /// Some steps have passed.
    pub(super) fn advance(&mut self, steps: u64) {
        self.count += steps;
        self.contexts += steps * self.members();
    }
}
