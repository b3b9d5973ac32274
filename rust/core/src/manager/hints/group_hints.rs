//! Hints to load and demote the blocks of a model with several groups.
//!
//! With the blocks of a path go the windows and states of the border at which it resumes. Invariant:
//! nothing that a lease or another block of the path needs leaves for it. Cost: that of a request's
//! loads.

use std::ops::Range;

use crate::block::{BlockId, LeaseId, NO_MOVE, NO_SLOT, Part, Place, TierId};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::request::matching::path::path_border;
use crate::time::Nanos;
use crate::transfer::MoveKind;

/// No lease waits for these moves.
const NO_LEASE: LeaseId = NO_MOVE;

impl Manager {
    /// Loads to a tier what the longest border of a path needs of the groups after the first, if there
    /// is room. The border is a resume point on the tier then, if it is one elsewhere.
    pub(super) fn fetch_windows(&mut self, path: &[BlockId], tier: TierId, now: Nanos) {
        let path = &path[..self.longest_border(path, self.tiers.len()) as usize];
        let border = path_border(path);
        let needs = self.points.needs(path, border);
        let (lacking, there): (Vec<_>, Vec<_>) =
            needs.into_iter().partition(|&part| self.nearest(part) > tier);
        // Bytes that cannot be read, or a failed move that may still write them.
        let free = |&Part { group, block }: &Part| {
            self.residency(Place::new(tier, group), block).slot == NO_SLOT
        };
        if !lacking.iter().all(free) {
            return;
        }
        let groups = self.points.other_numbers().end;
        let mut slots = vec![0; groups];
        let mut holds: Vec<(Place, BlockId)> = Vec::new();
        for &part in lacking.iter().chain(&there) {
            holds.push((Place::new(self.nearest(part), part.group), part.block));
        }
        for &(from, block) in &holds {
            self.blocks.hold(from, [block]);
            slots[from.group] += u64::from(from.tier > tier);
        }
        let wanted = Wanted { tier, slots: &slots };
        let fits = if lacking.is_empty() {
            true
        } else if tier == 0 {
            self.make_room(&[wanted], &[], now).is_ok()
        } else {
            self.make_soft_room(wanted, &[], now)
        };
        if fits {
            for &(from, block) in holds.iter().filter(|&&(from, _)| from.tier > tier) {
                self.copy_part(self.whole(MoveKind::Load, NO_LEASE, block), from, tier, now);
            }
            self.raise_point(tier, path);
        }
        for (from, block) in holds {
            self.blocks.unhold(from, [block]);
        }
    }

    /// Takes the point after a block from a tier, if a tier below has it or can take it. Returns whether the block has no point on the tier then.
    pub(super) fn lower_point(&mut self, tier: TierId, block: BlockId, now: Nanos) -> bool {
        let below = |manager: &Self| -> bool {
            let mut lower: Range<TierId> = tier + 1..manager.tiers.len();
            lower.any(|lower| manager.points.has_on(lower, block))
        };
        if self.points.has_on(tier, block) {
            if !below(self) {
                return self.tiers.writes(tier) && self.copy_point_below(tier, block, true, now);
            }
            self.drop_point_on(tier, block);
        }
        true
    }
}
