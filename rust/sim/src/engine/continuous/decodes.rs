//! Decoding requests: each produces a token in every step.
//!
//! Steps are counted. A request is due at a step count: at its end, or when its blocks are full.
//! Invariant: `contexts` is the sum of the members' contexts. Cost: O(log members) per join, leave
//! or due member, and O(1) per step for any number of members.

use std::collections::BTreeSet;

use kvtrie_core::Nanos;

use crate::cost::{Cost, nanos};

/// Decoding requests.
#[derive(Debug, Default)]
pub(super) struct Decodes {
    /// Number of decode steps since the start of the run.
    count: u64,
    contexts: u64,
    /// Pairs of due step count and member id.
    due: BTreeSet<(u64, u64)>,
}

impl Decodes {
    /// Number of steps since the start of the run.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Number of decoding requests.
    pub(super) fn members(&self) -> u64 {
        self.due.len() as u64
    }

    /// Add a request with `context` tokens, due at step count `due`.
    pub(super) fn join(&mut self, id: u64, context: u64, due: u64) {
        self.contexts += context;
        self.due.insert((due, id));
    }

    /// Remove a member with `context` tokens.
    pub(super) fn leave(&mut self, id: u64, context: u64, due: u64) {
        if self.due.remove(&(due, id)) {
            self.contexts -= context;
        }
    }

    /// Due members, ordered by id.
    pub(super) fn finished(&self) -> Vec<u64> {
        let due = self.due.range(..=(self.count, u64::MAX));
        let mut due: Vec<u64> = due.map(|&(_, id)| id).collect();
        due.sort_unstable();
        due
    }

    /// Number of steps until the next member is due, or `None` without members.
    pub(super) fn steps_left(&self) -> Option<u64> {
        self.due.first().map(|&(due, _)| due.saturating_sub(self.count))
    }

    /// Number of members, and the sum of their contexts.
    pub(super) fn batch(&self) -> (u64, u64) {
        (self.members(), self.contexts)
    }

    /// End times of the next decode-only steps, if the first begins at `from`.
    pub(super) fn ends(&self, from: Nanos, cost: &dyn Cost) -> impl Iterator<Item = Nanos> {
        let (members, contexts) = self.batch();
        (0..).scan(from, move |at, step| {
            let parts = cost.step((members, contexts + step * members), &[]);
            *at = at.saturating_add(nanos(parts));
            Some(*at)
        })
    }

    /// Count `steps` completed steps.
    pub(super) fn advance(&mut self, steps: u64) {
        self.count += steps;
        self.contexts += steps * self.members();
    }
}
