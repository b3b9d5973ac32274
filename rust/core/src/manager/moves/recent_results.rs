//! How recent moves ended, so that a report that contradicts an earlier one is noticed.
//!
//! Invariant: of the moves whose ids leave the same rest the one that was told last is known. Cost:
//! O(1); 32 KiB from the first move on.

use crate::block::{MoveId, NO_MOVE};

/// How many are known at most.
const KEPT: usize = 4096;

/// Ids of moves and how they ended.
#[derive(Debug, Default)]
pub(in crate::manager) struct RecentResults {
    /// By the id's rest: twice the id, and one more if it ended well.
    results: Vec<u64>,
}

impl RecentResults {
    /// Moves have ended.
    pub(in crate::manager) fn remember(&mut self, ids: &[MoveId], ok: bool) {
        if self.results.is_empty() {
            self.results.resize(KEPT, NO_MOVE);
        }
        for &id in ids {
            self.results[place(id)] = id << 1 | u64::from(ok);
        }
    }

    /// Whether a move ended well, if that is known.
    pub(in crate::manager) fn of(&self, id: MoveId) -> Option<bool> {
        let results = self.results.get(place(id)).copied().filter(|results| results >> 1 == id)?;
        Some(results & 1 == 1)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a rest below 4096")]
fn place(id: MoveId) -> usize {
    (id % KEPT as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::{KEPT, RecentResults};

    #[test]
    fn the_last_of_those_in_one_place_is_known() {
        let mut recent_results = RecentResults::default();
        assert_eq!(recent_results.of(7), None);
        recent_results.remember(&[7], true);
        recent_results.remember(&[8], false);
        assert_eq!([7, 8, 9].map(|id| recent_results.of(id)), [Some(true), Some(false), None]);
        recent_results.remember(&[7 + KEPT as u64], false);
        assert_eq!((recent_results.of(7), recent_results.of(7 + KEPT as u64)), (None, Some(false)));
    }
}
