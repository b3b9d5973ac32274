//! Cuts: the end of a leaf-only run leaves a tier at once.
//!
//! Invariant: the victims are those that deciding block by block gives, in the same order. Cost:
//! O(blocks) to see that they stand whole and quiet; O(log n) once where what is deeper leaves first,
//! otherwise a comparison per block.

use std::ops::Range;

use crate::block::{BlockId, Structure, TierId};
use crate::policy::{Entry, Order};
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::evict::set::{EvictionSet, Fate, Victim};

impl Manager {
    /// Decides on a run of a leaf-only scope from its end, as long as its next block leaves before
    /// all others and room is wanted, where that needs nothing but their slots. Whether it did.
    pub(in crate::manager) fn evict_tail(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        tail: Entry,
        wanted: u64,
        now: Nanos,
    ) -> bool {
        let last = tail.id;
        let run = self.blocks.trie().run(last);
        let plain = set.looked_at.is_none()
            && set.added.is_empty()
            && !set.guards(tier, run.start..last + 1)
            && set.moving.is_empty()
            && !self.tiers[tier].spec.layer_slots
            && self.node(last).refs == 0
            && self.structure(last) == Structure::LeafOnly
            // What leaves counts against a quota one by one.
            && self.band(tier, last).share == 0;
        if !plain || !self.blocks.table(tier).all_idle(last..last + 1) {
            return false;
        }
        let Some(fate) = self.fate(set, tier, last..last + 1) else { return false };
        // What stands behind it must leave the trie with it. A block that was lost while others behind
        // it were on their way stays there for them.
        let over = |child| set.in_tail(tier, child) && self.gone(set, child);
        if fate == Fate::Drop && !self.blocks.trie().children(last).all(over) {
            return false;
        }
        let mut first = last;
        self.choose_last(set, tier, last);
        // Where nothing before the tail costs more, nothing before it leaves later, but for ties.
        let more = u64::from(last - run.start).min(wanted.saturating_sub(set.spare[tier]));
        let front = last - u32::try_from(more).expect("no more than the run has");
        let index = &self.tiers[tier].eviction;
        let alone = || !index.ties(&tail, self.band(tier, last));
        if more > 0
            && self.ranks_by_place()
            && index.policy().deepens(front..last + 1, alone())
            && self.blocks.table(tier).all_idle(front..last)
            && self.fate(set, tier, front..last) == Some(fate)
        {
            set.spare[tier] += more;
            first = front;
        }
        let mut next = None;
        while first > run.start {
            let block = first - 1;
            let here = self.blocks.table(tier).all_idle(block..first);
            let full = set.spare[tier] >= wanted;
            if full || !here || self.fate(set, tier, block..first) != Some(fate) {
                break;
            }
            let entry = self.entry(tier, block, self.all_layers());
            if !self.leaves_next(tier, entry, &mut next, now) {
                break;
            }
            self.choose_last(set, tier, block);
            first = block;
        }
        let (blocks, layers) = (last + 1 - first, self.all_layers());
        set.victims.push(Victim { tier, block: last, blocks, layers, fate, quiet: true });
        set.add_tail(tier, first..last + 1);
        true
    }

    /// Links what the latest cut exposed, unless it is to leave next: then it is returned.
    pub(in crate::manager) fn expose(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        wanted: u64,
        now: Nanos,
    ) -> Option<Entry> {
        let first = set.latest_tail.1.start;
        let parent = self.blocks.trie().parent(first)?;
        let entry = self.exposed(set, tier, parent, self.blocks.trie().only_child(first))?;
        let compared = self.tiers[tier].eviction.policy().order() != Order::Own;
        if compared && set.spare[tier] < wanted && self.leaves_next(tier, entry, &mut None, now) {
            return Some(entry);
        }
        self.link(tier, entry);
        set.sure.push((tier, parent));
        None
    }

    /// The last block of a cut that grows is to leave.
    fn choose_last(&mut self, set: &mut EvictionSet, tier: TierId, block: BlockId) {
        set.spare[tier] += 1;
        if self.feed.watched {
            let band = self.band(tier, block);
            self.tiers[tier].eviction.choose(block, band);
        }
    }

    /// Whether an entry that is not linked would leave before all that are. `next` is the one of them
    /// that leaves first, where choosing others does not change that.
    fn leaves_next(
        &mut self,
        tier: TierId,
        entry: Entry,
        next: &mut Option<Entry>,
        now: Nanos,
    ) -> bool {
        let (band, index) = (self.band(tier, entry.id), &mut self.tiers[tier].eviction);
        if index.policy().order() == Order::Own {
            index.link(entry, band);
            let first = index.victim(stamp(now));
            index.unlink(entry.id);
            return first.is_some_and(|first| first.id == entry.id);
        }
        *next = next.or_else(|| index.victim(stamp(now)));
        next.is_none_or(|next| index.precedes(&entry, band, &next, stamp(now)))
    }

    /// Whether nothing was said of single blocks that tells them from others of their run.
    fn ranks_by_place(&self) -> bool {
        self.hints.quiet() && self.prices.is_empty()
    }

    /// What becomes of whole blocks that nobody uses, if nothing must be written for them and it is
    /// the same for all.
    fn fate(&self, set: &EvictionSet, tier: TierId, blocks: Range<BlockId>) -> Option<Fate> {
        let mut others = (0..self.tiers.len()).filter(|&other| other != tier);
        let mut safe = if tier == self.last() { 0..tier } else { tier + 1..self.tiers.len() };
        if safe.any(|other| self.blocks.table(other).all_whole(blocks.clone())) {
            return Some(Fate::Clean);
        }
        let dropped = tier == self.last() || set.dropping || !self.writes(tier);
        let alone = others.all(|other| self.blocks.table(other).none_present(blocks.clone()));
        (dropped && alone).then_some(Fate::Drop)
    }
}
