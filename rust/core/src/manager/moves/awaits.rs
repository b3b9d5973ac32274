//! Awaits: an index from leases to the loads and copies that must end before the engine may read
//! their blocks.
//!
//! Most leases await nothing, so only those that do have a row: a report visits them alone, however
//! many requests run. Invariant: no row is empty; its moves ascend. Cost: O(log leases + moves of
//! the lease) to add; moves that end are searched for, and only those between them are compared.

use std::collections::BTreeMap;

use crate::block::{LeaseId, MoveId};

/// Moves that leases await, by lease.
#[derive(Debug, Default)]
pub(crate) struct Awaits(BTreeMap<LeaseId, Vec<MoveId>>);

impl Awaits {
    /// All rows, by lease.
    pub(crate) fn all(&self) -> impl Iterator<Item = (LeaseId, &[MoveId])> {
        self.0.iter().map(|(&lease, moves)| (lease, &moves[..]))
    }

    /// The moves that a lease awaits.
    pub(crate) fn of(&self, lease: LeaseId) -> &[MoveId] {
        self.0.get(&lease).map_or(&[], Vec::as_slice)
    }

    /// Adds moves to a lease's row.
    pub(crate) fn add(&mut self, lease: LeaseId, more: impl IntoIterator<Item = MoveId>) {
        let mut more = more.into_iter().peekable();
        // No row without a move.
        if more.peek().is_some() {
            let moves = self.0.entry(lease).or_default();
            moves.extend(more);
            moves.sort_unstable();
            moves.dedup();
        }
    }

    /// Removes one move from a lease's row.
    pub(crate) fn remove(&mut self, lease: LeaseId, id: MoveId) {
        if let Some(moves) = self.0.get_mut(&lease) {
            moves.retain(|&awaited| awaited != id);
            if moves.is_empty() {
                self.0.remove(&lease);
            }
        }
    }

    /// Removes a lease's row.
    pub(crate) fn forget(&mut self, lease: LeaseId) {
        self.0.remove(&lease);
    }

    /// Removes moves that have ended from all rows.
    pub(crate) fn end(&mut self, mut ended: Vec<MoveId>) {
        ended.sort_unstable();
        let (Some(&first), Some(&last)) = (ended.first(), ended.last()) else { return };
        self.0.retain(|_, moves| {
            // A long row whose moves end one by one is not read once per move.
            let from = moves.partition_point(|&id| id < first);
            let to = moves.partition_point(|&id| id <= last);
            let left = |id: &MoveId| ended.binary_search(id).is_err();
            let kept: Vec<MoveId> = moves[from..to].iter().copied().filter(left).collect();
            moves.splice(from..to, kept);
            !moves.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::Awaits;

    proptest! {
        /// Against a plain set of pairs.
        #[test]
        fn it_is_a_set_of_pairs(
            ops in prop::collection::vec(
                (0..4_u8, 1..5_u64, prop::collection::vec(1..12_u64, 0..6)), 1..60,
            ),
        ) {
            let (mut awaits, mut model) = (Awaits::default(), BTreeSet::new());
            for (what, lease, moves) in ops {
                match what {
                    0 => {
                        awaits.end(moves.clone());
                        model.retain(|(_, id)| !moves.contains(id));
                    }
                    1 => {
                        awaits.forget(lease);
                        model.retain(|&(other, _)| other != lease);
                    }
                    2 => moves.iter().for_each(|&id| {
                        awaits.remove(lease, id);
                        model.remove(&(lease, id));
                    }),
                    _ => {
                        awaits.add(lease, moves.clone());
                        model.extend(moves.into_iter().map(|id| (lease, id)));
                    }
                }
                let pairs = |(lease, moves): (u64, &[u64])| {
                    moves.iter().map(move |&id| (lease, id)).collect::<Vec<_>>()
                };
                let all: Vec<_> = awaits.all().flat_map(pairs).collect();
                prop_assert_eq!(all, model.iter().copied().collect::<Vec<_>>());
                prop_assert!(awaits.all().all(|(_, moves)| !moves.is_empty()));
                let mine: Vec<_> = model.iter().filter(|pair| pair.0 == lease).collect();
                prop_assert_eq!(awaits.of(lease).len(), mine.len());
            }
        }
    }
}
