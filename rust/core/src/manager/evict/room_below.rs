//! Room of all groups on the tiers below the first, and the victims of a shared arena.
//!
//! Such room is soft: without it a victim of the tier above is dropped instead of stored. Invariant:
//! nothing leaves a tier above for it. Cost: O(log n) per victim and tier.

use std::ops::Range;

use crate::block::{BlockId, Handle, TierId};
use crate::manager::Manager;
use crate::policy::Entry;
use crate::tier::ResidencyState;
use crate::time::{Nanos, stamp};

/// Slots of the first group that a tier is short of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shortage {
    pub(crate) tier: TierId,
    pub(crate) slots: u64,
    /// Whether tiers above lose what they have of a victim, if there is no other way.
    pub(crate) must: bool,
}

impl Manager {
    /// Makes room on a tier below the first, as far as its victims can be stored or dropped. Returns
    /// whether there is enough.
    pub(crate) fn make_room_below(&mut self, tier: TierId, wanted: &[u64], now: Nanos) -> bool {
        while !self.groups_fit(tier, wanted) {
            if !self.free_some(tier, false, wanted, now) {
                return false;
            }
        }
        true
    }

    /// Frees released slots of a tier as far as room is wanted or, without any, stores or drops what has
    /// the lowest value there, with what tiers above have of it if it `must`. Returns whether it did.
    pub(crate) fn free_some(
        &mut self,
        tier: TierId,
        must: bool,
        wanted: &[u64],
        now: Nanos,
    ) -> bool {
        // A slot frees one page at most.
        let lacking = self.blocks.arena(tier).map_or(0, |arena| arena.lacking(wanted));
        if self.blocks.take_released(tier, lacking) {
            return true;
        }
        let victim = self.tiers[tier].eviction.victim(stamp(now));
        let slots = victim.map_or(1, |victim| self.without_point(tier, victim.id, wanted));
        self.free_victim(Shortage { tier, slots, must }, victim, None, now)
    }

    /// Stores or drops `victim`, which has the lowest value on a tier, or what else can leave: a point, or
    /// up to as many blocks as there are slots short, which are added to `left`. Returns whether it did.
    pub(crate) fn free_victim(
        &mut self,
        shortage: Shortage,
        victim: Option<Entry>,
        mut left: Option<&mut Vec<Handle>>,
        now: Nanos,
    ) -> bool {
        let Shortage { tier, slots, must } = shortage;
        let Some(victim) = victim else { return self.demote_any(tier, None, now) };
        if self.has_point_on(tier, victim.id) {
            return self.demote_any(tier, Some(victim.id), now);
        }
        let stored = self.tiers.writes(tier) && self.serves_points(tier, victim.id);
        // Blocks after a victim leave with it on all tiers if there is no other way.
        let ways = [(slots, false), (1, false), (1, true)];
        // Room below may change the order here.
        let mut lowest = (!stored).then_some(victim);
        for (slots, dropping) in ways.into_iter().take(if must { 3 } else { 2 }) {
            if stored && !dropping {
                self.make_room_below(tier + 1, &[slots], now);
            }
            let lowest = lowest.take();
            let left = left.as_deref_mut();
            if self.evict_lowest(tier, slots, dropping, lowest, left, now) {
                return true;
            }
        }
        self.demote_any(tier, None, now)
    }

    /// Takes the point after a block from a tier, or any if moves in flight keep the blocks of the lowest
    /// value: also one whose block is on another tier. Returns whether there is one.
    fn demote_any(&mut self, tier: TierId, point: Option<BlockId>, now: Nanos) -> bool {
        let leaves = |&block: &BlockId| {
            self.has_point_on(tier, block)
                && (self.tiers[tier].eviction.get(block).is_some()
                    || self.residency(tier, block).state == ResidencyState::Absent)
        };
        let all = || self.points.iter().flat_map(|points| points.all().map(|(block, _)| block));
        let point = point.or_else(|| all().find(leaves));
        point.inspect(|&block| self.demote_point(tier, block, now)).is_some()
    }

    /// Keeps copies on tiers below the first from leaving while room is made, or no longer.
    pub(crate) fn keep_sources(&mut self, stay: &[(TierId, Range<BlockId>)], keep: bool) {
        for (tier, block) in stay.iter().flat_map(|(tier, run)| run.clone().map(|id| (*tier, id))) {
            let change = |busy: &mut u16| if keep { *busy += 1 } else { *busy -= 1 };
            if tier > 0 {
                self.blocks.alter(tier, block, |here| change(&mut here.busy));
                self.refresh_on(tier, block);
            }
        }
    }

    /// Evicts blocks of the first group from a tier, the lowest first, until `slots` of its slots are
    /// free; those that leave are added to `left`. `lowest` is the lowest entry, if it is known.
    pub(crate) fn evict_lowest(
        &mut self,
        tier: TierId,
        slots: u64,
        dropping: bool,
        lowest: Option<Entry>,
        left: Option<&mut Vec<Handle>>,
        now: Nanos,
    ) -> bool {
        let mut set = self.reuse_set(dropping);
        set.lowest = lowest;
        let slots = slots + Self::spare(&set, tier);
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
        fits
    }

    /// Blocks of a run up to a victim that serve no resume point of their own, as far as room is
    /// wanted: they leave before any point.
    fn without_point(&self, tier: TierId, victim: BlockId, wanted: &[u64]) -> u64 {
        let (Some(points), Some(arena)) = (&self.points, self.blocks.arena(tier)) else { return 1 };
        let run = self.trie().run(victim).start..victim + 1;
        let mut before =
            points.within(run.clone()).rev().filter(|(_, point)| point.tiers >> tier & 1 == 1);
        let start = before.next().map_or(run.start, |(point, _)| point + 1);
        let pages = arena.lacking(wanted).max(1);
        u64::from(run.end - start).min(pages.saturating_mul(u64::from(arena.per_page(0))))
    }

    pub(crate) fn groups_fit(&self, tier: TierId, wanted: &[u64]) -> bool {
        self.blocks.arena(tier).is_some_and(|arena| arena.fits(wanted))
    }
}
