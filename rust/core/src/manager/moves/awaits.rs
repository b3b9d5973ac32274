//! Awaits: an index of the loads and copies that each lease awaits before its blocks may be read.
//!
//! Only leases with awaited moves have a row, so a report visits few leases regardless of the
//! number of requests. Invariant: no row is empty, and its moves ascend. Cost: O(log leases + moves
//! of the lease) to add. Ending moves costs a search per row and a comparison of the moves between
//! the first and the last ended move.

use std::collections::BTreeMap;

use crate::block::{LeaseId, MoveId};

/// Awaited moves by lease.
#[derive(Debug, Default)]
pub(crate) struct Awaits(BTreeMap<LeaseId, Vec<MoveId>>);

impl Awaits {
    /// All rows, by lease.
    pub(crate) fn all(&self) -> impl Iterator<Item = (LeaseId, &[MoveId])> {
        self.0.iter().map(|(&lease, moves)| (lease, &moves[..]))
    }

    /// The moves awaited by a lease.
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

    /// Removes a move from a lease's row.
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

    /// Removes ended moves from all rows.
    pub(crate) fn end(&mut self, mut ended: Vec<MoveId>) {
        ended.sort_unstable();
        let (Some(&first), Some(&last)) = (ended.first(), ended.last()) else { return };
        self.0.retain(|_, moves| {
            // A long row with moves ending one by one is not read once per move.
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
        /// Compares with a plain set of pairs.
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
