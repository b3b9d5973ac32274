//! Recent results: a direct-mapped cache of move results, to detect contradicting reports.
//!
//! 4096 results by `id % 4096`. Later ids overwrite earlier. Cost: O(1). 32 KiB from the first move
//! on.

use crate::block::{MoveId, NO_MOVE};

/// Capacity of the cache.
const KEPT: usize = 4096;

/// Results of ended moves.
#[derive(Debug, Default)]
pub(crate) struct RecentResults {
    /// Twice the id, plus 1 if the move succeeded.
    results: Vec<u64>,
}

impl RecentResults {
    /// Stores the result of moves.
    pub(crate) fn remember(&mut self, ids: &[MoveId], ok: bool) {
        // Allocated lazily: 32 KiB.
        if self.results.is_empty() {
            self.results.resize(KEPT, NO_MOVE);
        }
        for &id in ids {
            self.results[place(id)] = id << 1 | u64::from(ok);
        }
    }

    /// Whether a move succeeded. `None` if it is in flight or was overwritten.
    pub(crate) fn of(&self, id: MoveId) -> Option<bool> {
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
    fn a_later_id_overwrites() {
        let mut recent_results = RecentResults::default();
        assert_eq!(recent_results.of(7), None);
        recent_results.remember(&[7], true);
        recent_results.remember(&[8], false);
        assert_eq!([7, 8, 9].map(|id| recent_results.of(id)), [Some(true), Some(false), None]);
        recent_results.remember(&[7 + KEPT as u64], false);
        assert_eq!((recent_results.of(7), recent_results.of(7 + KEPT as u64)), (None, Some(false)));
    }
}
