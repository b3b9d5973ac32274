//! How recent moves ended, so that a report that contradicts an earlier one is noticed.
//!
//! Invariant: of the moves whose ids leave the same rest the one that was told last is known. Cost:
//! O(1); 32 KiB from the first move on.

use crate::block::{MoveId, NO_MOVE};

/// How many are known at most.
const KEPT: usize = 4096;

/// Ids of moves and how they ended.
#[derive(Debug, Default)]
pub(super) struct Outcomes {
    /// By the id's rest: twice the id, and one more if it ended well.
    told: Vec<u64>,
}

impl Outcomes {
    /// Moves have ended.
    pub(super) fn remember(&mut self, ids: &[MoveId], ok: bool) {
        if self.told.is_empty() {
            self.told.resize(KEPT, NO_MOVE);
        }
        for &id in ids {
            self.told[place(id)] = id << 1 | u64::from(ok);
        }
    }

    /// Whether a move ended well, if that is known.
    pub(super) fn of(&self, id: MoveId) -> Option<bool> {
        let told = self.told.get(place(id)).copied().filter(|told| told >> 1 == id)?;
        Some(told & 1 == 1)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a rest below 4096")]
fn place(id: MoveId) -> usize {
    (id % KEPT as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::{KEPT, Outcomes};

    #[test]
    fn the_last_of_those_in_one_place_is_known() {
        let mut outcomes = Outcomes::default();
        assert_eq!(outcomes.of(7), None);
        outcomes.remember(&[7], true);
        outcomes.remember(&[8], false);
        assert_eq!([7, 8, 9].map(|id| outcomes.of(id)), [Some(true), Some(false), None]);
        outcomes.remember(&[7 + KEPT as u64], false);
        assert_eq!((outcomes.of(7), outcomes.of(7 + KEPT as u64)), (None, Some(false)));
    }
}
