//! Tail eviction: the last blocks of a leaf-only run leave a tier as a single victim.
//!
//! Invariant: the victims and their order are equal to decisions block by block. Cost: O(blocks) to
//! check whether they are fully resident and idle. O(log n) once if the policy ranks deeper blocks
//! first, otherwise a comparison per block.

use std::ops::Range;

use crate::block::{BlockId, Structure, TierId};
use crate::policy::{Entry, Order};
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::evict::set::{EvictionSet, Fate, Victim};

impl Manager {
    /// Adds the tail of a leaf-only run as a single victim of at most `most` blocks.
    ///
    /// The tail extends while the next block has the lowest value and its eviction affects only
    /// slots. Returns whether a tail was added.
    pub(crate) fn evict_tail(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        tail: Entry,
        most: u64,
        now: Nanos,
    ) -> bool {
        let Some(fate) = self.tail_fate(set, tier, tail.id) else { return false };
        let last = tail.id;
        let run = self.trie().run(last);
        let mut first = last;
        // If no block of the stretch costs more than the tail, the stretch leaves first, except for
        // ties.
        let more = u64::from(last - run.start).min(most.saturating_sub(1));
        let front = last - u32::try_from(more).expect("no more than the run has");
        let index = &self.tiers[tier].eviction;
        let alone = || !index.ties(&tail, self.band(tier, last));
        // Blocks that serve no resume leave run by run.
        let pointless = || fate == Fate::Drop && !self.serves_points(tier, last);
        if more > 0
            && (pointless() || (self.ranks_by_place() && index.policy().deepens() && alone()))
            && self.leave_alike(set, tier, front..last, fate)
        {
            first = front;
        }
        let mut chosen = tail;
        if let Some(farthest) = self.farthest_same_use(tier, front..last, &tail)
            && self.leave_alike(set, tier, farthest.id..last, fate)
        {
            (first, chosen) = (farthest.id, farthest);
        }
        // Compare the remaining blocks individually, as the index does.
        let (mut next, band) = (None, self.band(tier, last));
        while first > run.start {
            let block = first - 1;
            // From here on the blocks differ, or there is enough room.
            if u64::from(last + 1 - first) >= most
                || !self.leave_alike(set, tier, block..first, fate)
            {
                break;
            }
            let entry = self.entry(tier, block, self.all_layers());
            // A different branch has the lowest value now.
            let follows = self.tiers[tier].eviction.follows(&entry, &chosen, band)
                && self.band(tier, block) == band;
            if !follows && !self.leaves_next(tier, entry, &mut next, now) {
                break;
            }
            (first, chosen) = (block, entry);
        }
        let (blocks, layers) = (last + 1 - first, self.all_layers());
        set.victims.push(Victim { tier, block: last, blocks, layers, fate, idle: true });
        self.free_slots(set, tier, first..last + 1, u64::from(blocks));
        set.add_tail(tier, first..last + 1);
        true
    }

    /// The fate of the last block of a run, if its eviction affects only its slot.
    fn tail_fate(&self, set: &EvictionSet, tier: TierId, last: BlockId) -> Option<Fate> {
        let run = self.trie().run(last);
        let plain = set.preview.is_none()
            && !self.points.has_on(tier, last)
            && set.added.is_empty()
            && !set.guards(tier, run.start..last + 1)
            && set.moving.is_empty()
            && !self.tiers[tier].spec.layer_slots
            && self.node(last).refs == 0
            && self.departures(last) == Structure::LeafOnly
            // Leaving blocks count individually against a quota.
            && self.band(tier, last).share == 0;
        // A partial, arriving or busy block needs its own decision.
        if !plain || !self.blocks.table(tier).all_idle(last..last + 1) {
            return None;
        }
        // A block to be written needs room below: `decide` makes it.
        let fate = self.fate(set, tier, last..last + 1)?;
        // A drop also removes its children from the trie. A lost block with children in flight
        // stays for them.
        let over = |child| set.in_tail(tier, child) && self.absent(set, child);
        (fate != Fate::Drop || self.trie().children(last).all(over)).then_some(fate)
    }

    /// Whether blocks of a run are idle and have the same fate.
    fn leave_alike(
        &self,
        set: &EvictionSet,
        tier: TierId,
        blocks: Range<BlockId>,
        fate: Fate,
    ) -> bool {
        self.blocks.table(tier).all_idle(blocks.clone())
            && !self.points.among(tier, blocks.clone())
            && self.fate(set, tier, blocks) == Some(fate)
    }

    /// The farthest of the blocks directly before a chosen block with the same last use, if they
    /// are evicted next.
    fn farthest_same_use(
        &self,
        tier: TierId,
        before: Range<BlockId>,
        chosen: &Entry,
    ) -> Option<Entry> {
        let index = &self.tiers[tier].eviction;
        if before.is_empty() || index.order_kind() != Order::Ends || !self.ranks_by_place() {
            return None;
        }
        let count = self.feed.same_use_before(before, chosen.id);
        if count == 0 {
            return None;
        }
        let farthest = chosen.id - count;
        let depth = self.trie().depth(farthest);
        let lightest = self.feed.last_use(farthest, depth, &self.settings);
        index.following(chosen, count, &lightest)
    }

    /// Links the block exposed by the latest tail. Returns it unlinked if `more` victims are wanted
    /// and it is the next.
    pub(crate) fn expose(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        more: bool,
        now: Nanos,
    ) -> Option<Entry> {
        let first = set.latest_tail.1.start;
        let parent = self.trie().parent(first)?;
        let entry = self.exposed(set, tier, parent, self.trie().only_child(first))?;
        // A policy with `Order::Own` must see every entry.
        let compared = self.tiers[tier].eviction.order_kind() != Order::Own;
        // Comparing is cheaper than a link and an unlink.
        if compared && more && self.leaves_next(tier, entry, &mut None, now) {
            return Some(entry);
        }
        self.link(tier, entry);
        set.tail_entries.push((tier, parent));
        None
    }

    /// Whether an unlinked entry would leave before all linked entries. `next` caches the first
    /// linked entry, for policies with an order independent of choices.
    fn leaves_next(
        &mut self,
        tier: TierId,
        entry: Entry,
        next: &mut Option<Entry>,
        now: Nanos,
    ) -> bool {
        let (band, index) = (self.band(tier, entry.id), &mut self.tiers[tier].eviction);
        if let Some(leads) = index.leads(&entry, band, stamp(now)) {
            return leads;
        }
        // These policies compare only linked entries.
        if matches!(index.order_kind(), Order::Own | Order::Ends) {
            index.link(entry, band);
            let first = index.victim(stamp(now));
            index.unlink(entry.id);
            return first.is_some_and(|first| first.id == entry.id);
        }
        *next = next.or_else(|| index.victim(stamp(now)));
        next.is_none_or(|next| index.precedes(&entry, band, &next, stamp(now)))
    }

    /// Whether no hint or price ranks a block differently from its run.
    fn ranks_by_place(&self) -> bool {
        self.hints.all_normal() && self.prices.is_empty() && !self.points.several()
    }

    /// The common fate of fully resident, idle blocks, if none must be written.
    fn fate(&self, set: &EvictionSet, tier: TierId, blocks: Range<BlockId>) -> Option<Fate> {
        let mut others = (0..self.tiers.len()).filter(|&other| other != tier);
        if self.tiers.has_shared() && !self.alike_on_shared(set, tier, blocks.clone()) {
            return None;
        }
        let full = |other: TierId| self.blocks.table(other).all_full(blocks.clone());
        if self.covering(set, tier).any(full) {
            return Some(Fate::Clean);
        }
        let writes = self.tiers.writes(tier) && !self.tiers.above_shared(tier);
        let dropped = tier == self.tiers.last() || set.dropping || !writes;
        let alone = others.all(|other| self.blocks.table(other).none_present(blocks.clone()));
        let arrives = || blocks.clone().any(|block| self.groups_arrive(set, block));
        (dropped && alone && (self.blocks.arena(tier).is_none() || !arrives()))
            .then_some(Fate::Drop)
    }

    /// Whether blocks have the same fate next to a shared tier.
    ///
    /// This requires that no block is on its way there, because `decide` skips it, and that no copy
    /// leaving in this set makes a block clean.
    #[inline(never)]
    fn alike_on_shared(&self, set: &EvictionSet, tier: TierId, blocks: Range<BlockId>) -> bool {
        if self.tiers.above_shared(tier) {
            let shared = self.blocks.table(tier + 1);
            if !shared.all_full(blocks.clone()) && !shared.none_present(blocks.clone()) {
                return false;
            }
        }
        let leaves = |other: TierId| {
            self.tiers.above_shared(tier.max(other))
                && self.blocks.table(other).all_full(blocks.clone())
                && !set.keeps(other, blocks.clone())
        };
        !self.covering(set, tier).any(leaves)
    }
}
