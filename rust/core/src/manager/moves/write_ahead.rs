//! Writes ahead of need: the blocks of lowest value are on the tier below before their room is
//! wanted.
//!
//! With several groups, room is counted in pages: free pages, and pages without blocks except
//! released and clean blocks. Points are written with their blocks. Invariant: nothing leaves the
//! tier for it. Cost: nothing above the watermark. Below it, the cost of an eviction set, or with
//! several groups O(log n) for at most 64 entries and the stores.

use crate::block::{BlockId, TierId};
use crate::manager::Manager;
use crate::residency::Arena;
use crate::time::{Nanos, Stamp, stamp};

/// Maximum number of entries of the eviction index visited per call.
const MOST_SEEN: usize = 64;

impl Manager {
    /// Writes ahead of need on every tier below its watermark `free_low`. The copies above stay
    /// valid.
    pub(crate) fn write_ahead(&mut self, now: Nanos) {
        for tier in 0..self.tiers.len() {
            if self.tiers[tier].spec.free_low <= 0.0 {
                continue;
            }
            let ours = tier > 0 || !self.tiers.engine_owned();
            // An engine evicts from its own tier.
            if ours && self.tiers.writes(tier) {
                if self.blocks.arena(tier).is_some() {
                    self.write_points_ahead(tier, now);
                } else {
                    self.write_ahead_on(tier, now);
                }
            }
        }
    }

    /// Copies the points of lowest value of a tier and their blocks to the next tier, until the
    /// share `free_low` of the tier's pages is free or can be freed without a store.
    fn write_points_ahead(&mut self, tier: TierId, now: Nanos) {
        let pages = self.blocks.arena(tier).map_or(0, Arena::room);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share below one of a number below 2^32"
        )]
        let low = (f64::from(pages) * self.tiers[tier].spec.free_low) as u64;
        let free = self.free_room(tier);
        // The next search is due once an eighth of the watermark has been used.
        if free + self.tiers[tier].credit + low / 8 >= low {
            return;
        }
        let (mut clean, mut seen) = (0.0, Vec::new());
        #[expect(clippy::cast_precision_loss, reason = "numbers of pages")]
        let short = low.saturating_sub(free) as f64;
        while clean < short
            && seen.len() < MOST_SEEN
            && let Some(victim) = self.tiers[tier].eviction.victim(stamp(now))
        {
            self.tiers[tier].eviction.unlink(victim.id);
            seen.push(victim.id);
            if !self.points.has_on(tier, victim.id) && self.serves_points(tier, victim.id) {
                self.write_down(tier, victim.id, None, Stamp::MAX, now);
            }
            // Earlier points on the path are exposed once it has left.
            let mut next = Some(victim.id);
            while let Some(block) = next.filter(|_| clean < short) {
                if self.points.has_on(tier, block) && !self.point_below(tier, block) {
                    self.copy_point(tier, block, now);
                }
                clean += self.clean_pages(tier, block);
                next = self.point_before(block);
            }
        }
        for block in seen {
            self.refresh_on(tier, block);
        }
        // Also if the tier below is too small for them: its victims would be written again.
        self.tiers[tier].credit = low.saturating_sub(free);
    }

    /// Number of pages of a tier with only free slots and released residencies.
    fn free_room(&self, tier: TierId) -> u64 {
        let Some(arena) = self.blocks.arena(tier) else { return 0 };
        let slots = self.blocks.group_slots(tier);
        let held = slots
            .iter()
            .enumerate()
            .map(|(group, slots)| slots.held.div_ceil(u64::from(arena.per_page(group))));
        u64::from(arena.room()).saturating_sub(held.sum())
    }

    /// Whether a tier below has the point of a block.
    fn point_below(&self, tier: TierId, block: BlockId) -> bool {
        (tier + 1..self.tiers.len()).any(|below| self.points.has_on(below, block))
    }

    fn point_before(&self, block: BlockId) -> Option<BlockId> {
        self.points.get(block).and_then(|point| point.before)
    }

    /// Number of pages that could be freed without a store if a block left a tier, with its point
    /// and the blocks after the previous point. Fractions of pages count.
    fn clean_pages(&self, tier: TierId, block: BlockId) -> f64 {
        let Some(arena) = self.blocks.arena(tier) else { return 0.0 };
        let points = &self.points;
        let page = |group: usize, slots: u32| f64::from(slots) / f64::from(arena.per_page(group));
        let Some(point) = points.get(block).filter(|point| point.tiers >> tier & 1 == 1) else {
            return page(0, 1);
        };
        if !self.point_below(tier, block) {
            return 0.0;
        }
        let needs = points.others().map(|(number, group)| {
            let slots = group.needed(point.border, points.block_tokens).iter().count();
            page(number, u32::try_from(slots).unwrap_or(u32::MAX))
        });
        let before = point.before.and_then(|before| points.get(before));
        let from = before.map_or(0, |before| before.border);
        needs.sum::<f64>() + page(0, point.border - from)
    }
}
