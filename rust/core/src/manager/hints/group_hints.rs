//! Hints to load and demote the blocks of a model with several groups.
//!
//! With the blocks of a path go the windows and states of the border at which it resumes. Invariant:
//! nothing that a lease or another block of the path needs leaves for it. Cost: that of a request's
//! loads.

use std::ops::Range;

use crate::block::{BlockId, LeaseId, NO_MOVE, NO_SLOT, TierId};
use crate::manager::Manager;
use crate::time::Nanos;
use crate::transfer::MoveKind;

/// No lease waits for these moves.
const NO_LEASE: LeaseId = NO_MOVE;

impl Manager {
    /// Loads to a tier what the longest border of a path needs of the groups after the first, if there
    /// is room. The border is a resume point on the tier then, if it is one elsewhere.
    pub(super) fn fetch_windows(&mut self, path: &[BlockId], tier: TierId, now: Nanos) {
        if self.points.is_none() {
            return;
        }
        let path = &path[..self.longest_border(path, self.tiers.len()) as usize];
        let border = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
        let needs = self.needs(path, border);
        let (lacking, there): (Vec<_>, Vec<_>) =
            needs.into_iter().partition(|&(at, block)| self.nearest(at, block) > tier);
        // Bytes that cannot be read, or a failed move that may still write them.
        let free = |&(at, block): &(usize, BlockId)| {
            self.blocks.group_residency(tier, at, block).slot == NO_SLOT
        };
        if !lacking.iter().all(free) {
            return;
        }
        let groups = self.points.as_ref().map_or(0, |points| points.groups.len());
        let (mut wanted, mut held) = (vec![0; groups + 1], vec![Vec::new(); groups]);
        let mut holds: Vec<(TierId, usize, BlockId)> = Vec::new();
        for &(at, block) in lacking.iter().chain(&there) {
            holds.push((self.nearest(at, block), at, block));
        }
        for &(from, at, block) in &holds {
            self.blocks.hold_group(from, at, [block]);
            if from == tier {
                held[at].push(self.trie().depth(block));
            }
            wanted[at + 1] += u64::from(from > tier);
        }
        let fits = if lacking.is_empty() {
            true
        } else if tier == 0 {
            self.make_group_room(0, &wanted, (path, &held), now).is_ok()
        } else {
            self.make_room_below(tier, &wanted, now)
        };
        if fits {
            for &(from, at, block) in holds.iter().filter(|&&(from, ..)| from > tier) {
                self.move_group((MoveKind::Load, NO_LEASE), (at, block), (from, tier), now);
            }
            self.settle_fetched(path, tier);
        }
        for (from, at, block) in holds {
            self.blocks.unhold_group(from, at, [block]);
        }
    }

    /// Puts the point at the end of a path, if there is one, on a tier that has all that it needs.
    fn settle_fetched(&mut self, path: &[BlockId], tier: TierId) {
        let border = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
        if let Some(&last) = path.last()
            && self.has_point(last)
            && !self.has_point_on(tier, last)
            && self.can_resume(tier, path, border)
        {
            self.hold_point(tier, path, border);
        }
    }

    /// Takes the point after a block from a tier, if a tier below has it or can take it, and makes room
    /// for the block there. Returns whether the block has no point on the tier then.
    pub(super) fn lower_point(&mut self, tier: TierId, block: BlockId, now: Nanos) -> bool {
        let below = |manager: &Self| -> bool {
            let mut lower: Range<TierId> = tier + 1..manager.tiers.len();
            lower.any(|lower| manager.has_point_on(lower, block))
        };
        if self.has_point_on(tier, block) {
            if !below(self) && self.tiers.writes(tier) {
                self.store_point(tier, block, now);
            }
            if !below(self) {
                return false;
            }
            self.drop_point_on(tier, block);
        }
        if self.tiers.writes(tier) && self.make_room_below(tier + 1, &[1], now) {
            self.blocks.stock(tier + 1, 1);
        }
        true
    }

    /// Gives room that was not taken back.
    pub(super) fn end_lowering(&mut self) {
        if self.points.is_some() {
            (0..self.tiers.len()).for_each(|tier| self.blocks.unstock(tier));
        }
    }
}
