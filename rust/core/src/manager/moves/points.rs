//! Resume points: made at borders of a path, and copied to the tier below.
//!
//! A resume point leaves the first tier as a whole: its missing parts are stored on the tier below,
//! and the point is on that tier from then on. A request loads the needs of its border in the same
//! way. Invariant: a point is on a tier only while all its needs are there or arriving. Cost:
//! O(slots of the point), and room for them.

use std::cmp::Reverse;

use crate::block::{BlockId, Part, Place, TierId};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::points::{Point, Stay};
use crate::manager::request::matching::path::path_border;
use crate::tier::ResidencyState;
use crate::time::Nanos;

impl Manager {
    /// Makes a border of a path a resume point on a tier that has all its needs. A point named by a
    /// hint stays regardless of later points. Too many newest points on a path release the oldest.
    pub(in crate::manager) fn add_point(
        &mut self,
        tier: TierId,
        path: &[BlockId],
        border: u32,
        stay: Stay,
    ) {
        // With a single group a request resumes after any block.
        if border == 0 || !self.points.several() {
            return;
        }
        let block = path[border as usize - 1];
        let stored = self.points.has_on(tier, block);
        if !stored && !self.can_resume(tier, path, border) {
            return;
        }
        let stay = if self.take_named(block) { Stay::Always } else { stay };
        let points = &mut self.points;
        if let Some(known) = points.get_mut(block) {
            known.stay = known.stay.max(stay);
            if !stored {
                self.hold_point(tier, path, border);
            }
            return;
        }
        let before = path[..border as usize - 1].iter().rev();
        let before = before.copied().find(|&block| points.has(block));
        let after = self.points_below(block);
        let points = &mut self.points;
        for below in &after {
            points.get_mut(*below).expect("a point").before = Some(block);
        }
        if let Some(before) = before.and_then(|before| points.get_mut(before)) {
            before.after.retain(|below| !after.contains(below));
            before.after.push(block);
        }
        points.insert(block, Point { border, stay, tiers: 0, before, after: after.clone() });
        self.hold_point(tier, path, border);
        // It affects the worth of its neighbours.
        for other in after.into_iter().chain(before) {
            self.refresh(other);
        }
        self.replace_points(block);
        if tier == 0 && self.tiers.writes_through(0) && self.points.has_on(0, block) {
            self.copy_point(0, block, self.clock.last());
        }
    }

    /// Adds a tier with all its needs to the resume point at the end of a path, if any.
    pub(in crate::manager) fn raise_point(&mut self, tier: TierId, path: &[BlockId]) {
        let (border, Some(&last)) = (path_border(path), path.last()) else { return };
        if self.points.has(last)
            && !self.points.has_on(tier, last)
            && self.can_resume(tier, path, border)
        {
            self.hold_point(tier, path, border);
        }
    }

    /// Copies all resume points of a tier to the next tier, the youngest first. For points already
    /// below, copies their blocks missing there.
    pub(in crate::manager) fn flush_points(&mut self, tier: TierId, now: Nanos) {
        let stored = |manager: &Self, block| {
            (tier..manager.tiers.len()).any(|at| manager.points.has_on(at, block))
        };
        let points = self.points.all().map(|(block, _)| block);
        let mut points: Vec<BlockId> = points.filter(|&block| stored(self, block)).collect();
        points.sort_by_key(|&block| (Reverse(self.node(block).access), block));
        for block in points {
            // Room for a younger point may have ended it.
            if stored(self, block) {
                self.copy_point(tier, block, now);
            }
        }
    }

    /// Copies a resume point and its path from a tier to the next tier, as far as there is room.
    /// The source stays resident. A write-through tier below copies them further.
    pub(in crate::manager) fn copy_point(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        self.copy_point_down(tier, block, now);
        for below in tier + 1..self.tiers.len() {
            if !self.tiers.writes_through(below) || !self.points.has_on(below, block) {
                break;
            }
            self.copy_point_down(below, block, now);
        }
    }

    /// Copies a resume point and its path only to the next tier.
    fn copy_point_down(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        let below = tier + 1;
        if !self.tiers.writes(tier)
            || !self.worth_writing(tier, block)
            || !self.refused.may_write(block, below)
        {
            return;
        }
        if self.tiers.above_shared(tier) {
            self.store_point_shared(tier, block);
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

    /// Ends the holds of all leases on a block of the first tier after its move failed.
    pub(in crate::manager) fn end_lease_holds(&mut self, Part { group, block }: Part) {
        let place = self.trie().depth(block);
        let mut lost = 0;
        for lease in self.leases.values_mut() {
            if lease.path.blocks().get(place as usize) == Some(&block) {
                let held = &mut lease.groups[group].held;
                let before = held.len();
                held.retain(|&held| held != place);
                lost += before - held.len();
            }
        }
        self.blocks.unhold(Place::new(0, group), std::iter::repeat_n(block, lost));
    }
}
