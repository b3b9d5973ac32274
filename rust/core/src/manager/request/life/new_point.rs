//! New resume points: a border of a path at which later requests can go on.
//!
//! Invariant: a point is made only where a tier has all that a resume at its border needs.
//! Cost: O(path) per point.

use crate::block::{BlockId, TierId};
use crate::manager::Manager;
use crate::manager::points::{Point, Stay};

impl Manager {
    /// Makes a border of a path a resume point, if the first tier has all that it needs. One that a hint has
    /// named stays whatever follows; of the newest ones the oldest is released where there are too many.
    pub(crate) fn add_point(&mut self, path: &[BlockId], border: u32, stay: Stay) {
        self.add_point_on(0, path, border, stay);
    }

    /// The same on a tier.
    pub(crate) fn add_point_on(&mut self, tier: TierId, path: &[BlockId], border: u32, stay: Stay) {
        // With one group a request resumes after any block.
        if border == 0 || !self.points.several() {
            return;
        }
        let block = path[border as usize - 1];
        let there = self.points.has_on(tier, block);
        if !there && !self.can_resume(tier, path, border) {
            return;
        }
        let stay = if self.take_named(block) { Stay::Always } else { stay };
        let points = &mut self.points;
        if let Some(known) = points.get_mut(block) {
            known.stay = known.stay.max(stay);
            if !there {
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
        // The worth of the points around it hangs on it.
        for other in after.into_iter().chain(before) {
            self.refresh(other);
        }
        self.replace_points(block);
        if tier == 0 && self.tiers.writes_through(0) && self.points.has_on(0, block) {
            self.copy_point(0, block, self.clock.last());
        }
    }
}
