//! Resume points on their way down: what they need is copied to the tier below.
//!
//! A resume point leaves the first tier as a whole: what the tier below lacks is stored there, and the
//! point is on that tier from then on. A request loads what its border needs in the same way.
//! Invariant: a point is on a tier only while all that it needs is there or arrives. Cost: O(slots of
//! the point), and room for them.

use std::cmp::Reverse;

use crate::block::{BlockId, LeaseId, Part, Place, TierId};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::request::slots::window_slots::blocks_at;
use crate::tier::ResidencyState;
use crate::time::Nanos;

impl Manager {
    /// Copies all resume points of a tier one tier down, the youngest first. Blocks of the tier that
    /// points below it still lack there follow those.
    pub(in crate::manager) fn flush_points(&mut self, tier: TierId, now: Nanos) {
        let there = |manager: &Self, block| {
            (tier..manager.tiers.len()).any(|at| manager.points.has_on(at, block))
        };
        let points = self.points.all().map(|(block, _)| block);
        let mut points: Vec<BlockId> = points.filter(|&block| there(self, block)).collect();
        points.sort_by_key(|&block| (Reverse(self.node(block).access), block));
        for block in points {
            // Room for a younger point may have ended it.
            if there(self, block) {
                self.copy_point(tier, block, now);
            }
        }
    }

    /// Copies a resume point of a tier one tier down with all blocks before it, as far as there is
    /// room; they stay where they are. A tier below that writes through copies them further.
    pub(in crate::manager) fn copy_point(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        self.copy_point_down(tier, block, now);
        for below in tier + 1..self.tiers.len() {
            if !self.tiers.writes_through(below) || !self.points.has_on(below, block) {
                break;
            }
            self.copy_point_down(below, block, now);
        }
    }

    /// The same to the next tier alone.
    fn copy_point_down(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        let below = tier + 1;
        if !self.tiers.writes(tier)
            || !self.worth_writing(tier, block)
            || !self.refused.may_write(block, below)
        {
            return;
        }
        let stored = |manager: &Self| {
            (below..manager.tiers.len()).any(|lower| manager.points.has_on(lower, block))
        };
        if !stored(self) {
            self.copy_point_below(tier, block, false, now);
        }
        if !stored(self) {
            return;
        }
        let path = self.path_to(Some(block));
        let lacks = |manager: &Self| -> Vec<BlockId> {
            let absent = |&&block: &&BlockId| {
                let lower = |at| manager.residency(at, block).state != ResidencyState::Absent;
                !(below..manager.tiers.len()).any(lower)
                    && manager.expected(tier, block) == manager.all_layers()
            };
            path.iter().filter(absent).copied().collect()
        };
        // A block of the path has no child below yet, so it would make room for the next.
        let stay: Vec<_> = self.runs(&path).into_iter().map(|run| (below, run)).collect();
        let slots = [lacks(self).len() as u64];
        let wanted = Wanted { tier: below, slots: &slots };
        let fits = slots[0] > 0 && self.make_soft_room(wanted, &stay, now);
        let lacking = lacks(self);
        // Room for the blocks may have ended the point.
        if fits && stored(self) && lacking.len() as u64 <= slots[0] {
            for block in lacking {
                self.copy_down(tier, block, self.all_layers(), None, now);
            }
        }
        self.refresh_stay(stay);
    }

    /// Moves a lease's holds to the border of a path at which it goes on.
    pub(in crate::manager) fn move_windows(&mut self, id: LeaseId, path: &[BlockId], border: u32) {
        let lease = self.leases.get_mut(&id).expect("held");
        let Some(mut windows) = lease.windows.take() else { return };
        for (group, held) in windows.held.iter_mut().enumerate() {
            self.blocks.unhold(Place::new(0, group), blocks_at(path, held));
            held.clear();
        }
        for Part { group, block } in self.points.needs(&path[..border as usize], border) {
            self.blocks.hold(Place::new(0, group), [block]);
            windows.held[group].push(self.trie().depth(block));
        }
        windows.done = border;
        self.leases.get_mut(&id).expect("held").windows = Some(windows);
    }

    /// Ends the holds of all leases on a block of the first tier that a failed move was to bring.
    pub(in crate::manager) fn lose_window(&mut self, Part { group, block }: Part) {
        let place = self.trie().depth(block);
        let mut lost = 0;
        for lease in self.leases.values_mut() {
            let on = lease.path.blocks().get(place as usize) == Some(&block);
            if let (true, Some(windows)) = (on, &mut lease.windows) {
                let before = windows.held[group].len();
                windows.held[group].retain(|&held| held != place);
                lost += before - windows.held[group].len();
            }
        }
        self.blocks.unhold(Place::new(0, group), std::iter::repeat_n(block, lost));
    }
}
