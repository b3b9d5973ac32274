//! Room of all groups on the tier below the first, and the victims of a shared arena.
//!
//! Such room is soft: without it a victim of the first tier is dropped instead of stored. Invariant:
//! nothing leaves the first tier for it. Cost: O(log n) per victim.

use crate::block::{BlockId, Handle, TierId};
use crate::manager::Manager;
use crate::time::{Nanos, stamp};

impl Manager {
    /// Makes room on the tier below the first, as far as its victims can be dropped. Returns whether
    /// there is enough; all of it is in the arena then.
    pub(crate) fn make_room_below(&mut self, wanted: &[u64], now: Nanos) -> bool {
        self.blocks.unstock(1);
        while !self.groups_fit(1, wanted) {
            if !self.drop_some(wanted, now) {
                return false;
            }
        }
        true
    }

    /// Frees a released slot of the tier below, or drops what has the lowest value there. Returns
    /// whether it did.
    fn drop_some(&mut self, wanted: &[u64], now: Nanos) -> bool {
        if self.blocks.take_released(1) {
            return true;
        }
        let Some(victim) = self.tiers[1].eviction.victim(stamp(now)) else { return false };
        if self.has_point_on(1, victim.id) {
            self.drop_point_on(1, victim.id);
            return true;
        }
        let slots = self.useless(1, victim.id, wanted);
        if self.evict_lowest((1, slots), false, None, now)
            || self.evict_lowest((1, 1), false, None, now)
        {
            return true;
        }
        self.linked_point(1).inspect(|&block| self.drop_point_on(1, block)).is_some()
    }

    /// A point that can leave a tier while moves in flight keep the blocks of the lowest value.
    pub(crate) fn linked_point(&self, tier: TierId) -> Option<BlockId> {
        let mut points = self.points.iter().flat_map(|points| points.at.keys().copied());
        points.find(|&block| {
            self.has_point_on(tier, block) && self.tiers[tier].eviction.get(block).is_some()
        })
    }

    /// Evicts blocks of the first group from a tier, the lowest first, until `slots` of its slots are
    /// free; those that leave are added to `left`.
    pub(crate) fn evict_lowest(
        &mut self,
        (tier, slots): (TierId, u64),
        dropping: bool,
        left: Option<&mut Vec<Handle>>,
        now: Nanos,
    ) -> bool {
        let mut set = self.reuse_set(dropping);
        let fits = self.room(&mut set, tier, slots, now);
        if fits {
            if let Some(left) = left {
                let victims = set.victims.iter().filter(|victim| victim.tier == tier);
                let blocks = victims.flat_map(|victim| victim.run().rev());
                left.extend(blocks.map(|block| self.trie().handle(block)));
            }
            self.apply(&set, now);
        } else {
            self.abandon(&set);
        }
        self.keep(set);
        (tier..self.tiers.len()).for_each(|tier| self.blocks.unstock(tier));
        fits
    }

    /// Blocks of a run up to a victim that serve no resume point of their own, as far as room is
    /// wanted: they leave before any point.
    pub(crate) fn useless(&self, tier: TierId, victim: BlockId, wanted: &[u64]) -> u64 {
        let (Some(points), Some(arena)) = (&self.points, self.blocks.arena(tier)) else { return 1 };
        let run = self.trie().run(victim).start..victim + 1;
        let before = points.at.range(run.clone()).rev();
        let mut before = before.filter(|(_, point)| point.tiers >> tier & 1 == 1);
        let start = before.next().map_or(run.start, |(point, _)| point + 1);
        let pages = arena.lacking(wanted).max(1);
        u64::from(run.end - start).min(pages.saturating_mul(u64::from(arena.per_page(0))))
    }

    pub(crate) fn groups_fit(&self, tier: TierId, wanted: &[u64]) -> bool {
        self.blocks.arena(tier).is_some_and(|arena| arena.fits(wanted))
    }
}
