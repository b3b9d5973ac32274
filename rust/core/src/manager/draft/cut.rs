//! Cuts: the end of a leaf-only run leaves a tier at once.
//!
//! Invariant: the victims are those that deciding block by block gives, in the same order. Cost:
//! O(blocks) to see that they stand whole and quiet; O(log n) once where what is deeper leaves first,
//! otherwise a comparison per block.

use std::ops::Range;

use crate::block::{BlockId, Structure, TierId};
use crate::policy::{Entry, Order};
use crate::time::{Nanos, stamp};

use super::super::Manager;
use super::{Draft, Fate, Victim};

impl Manager {
    /// Decides on a run of a leaf-only scope from its end, as long as its next block leaves before
    /// all others and room is wanted, where that needs nothing but their slots. Whether it did.
    pub(super) fn cut(
        &mut self,
        draft: &mut Draft,
        tier: TierId,
        tail: Entry,
        wanted: u64,
        now: Nanos,
    ) -> bool {
        let last = tail.id;
        let run = self.trie.run(last);
        let plain = draft.looked_at.is_none()
            && draft.added.is_empty()
            && !draft.guards(tier, run.start..last + 1)
            && draft.moving.is_empty()
            && !self.tiers[tier].spec.layer_slots
            && self.node(last).refs == 0
            && self.structure(last) == Structure::LeafOnly
            // What leaves counts against a quota one by one.
            && self.band(tier, last).share == 0;
        if !plain || !self.tiers[tier].here.quietly(last..last + 1) {
            return false;
        }
        let Some(fate) = self.fate(draft, tier, last..last + 1) else { return false };
        // What stands behind it must leave the trie with it. A block that was lost while others behind
        // it were on their way stays there for them.
        let over = |child| draft.cuts(tier, child) && self.gone(draft, child);
        if fate == Fate::Drop && !self.trie.children(last).all(over) {
            return false;
        }
        let mut first = last;
        self.choose_last(draft, tier, last);
        // Where nothing before the tail costs more, nothing before it leaves later, but for ties.
        let more = u64::from(last - run.start).min(wanted.saturating_sub(draft.spare[tier]));
        let front = last - u32::try_from(more).expect("no more than the run has");
        let retention = &self.tiers[tier].retention;
        let alone = || !retention.ties(&tail, self.band(tier, last));
        if more > 0
            && self.ranks_by_place()
            && retention.policy().deepens(front..last + 1, alone())
            && self.tiers[tier].here.quietly(front..last)
            && self.fate(draft, tier, front..last) == Some(fate)
        {
            draft.spare[tier] += more;
            first = front;
        }
        let mut next = None;
        while first > run.start {
            let block = first - 1;
            let here = self.tiers[tier].here.quietly(block..first);
            let full = draft.spare[tier] >= wanted;
            if full || !here || self.fate(draft, tier, block..first) != Some(fate) {
                break;
            }
            let entry = self.entry(tier, block, self.all_layers());
            if !self.leaves_next(tier, entry, &mut next, now) {
                break;
            }
            self.choose_last(draft, tier, block);
            first = block;
        }
        let (blocks, layers) = (last + 1 - first, self.all_layers());
        if fate == Fate::Drop && self.told.remembers() {
            self.trie.warm_text(first..last + 1);
        }
        (first..=last).for_each(|block| self.foresee(tier, block));
        draft.victims.push(Victim { tier, block: last, blocks, layers, fate, quiet: true });
        draft.add_cut(tier, first..last + 1);
        true
    }

    /// Links what the latest cut exposed, unless it is to leave next: then it is returned.
    pub(super) fn expose(
        &mut self,
        draft: &mut Draft,
        tier: TierId,
        wanted: u64,
        now: Nanos,
    ) -> Option<Entry> {
        let first = draft.cut.1.start;
        let parent = self.trie.parent(first)?;
        let entry = self.exposed(draft, tier, parent, self.trie.only_child(first))?;
        let compared = self.tiers[tier].retention.policy().order() != Order::Own;
        if compared && draft.spare[tier] < wanted && self.leaves_next(tier, entry, &mut None, now) {
            return Some(entry);
        }
        self.link(tier, entry);
        draft.sure.push((tier, parent));
        None
    }

    /// The last block of a cut that grows is to leave.
    fn choose_last(&mut self, draft: &mut Draft, tier: TierId, block: BlockId) {
        draft.spare[tier] += 1;
        if self.told.watched {
            let band = self.band(tier, block);
            self.tiers[tier].retention.choose(block, band);
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
        let (band, retention) = (self.band(tier, entry.id), &mut self.tiers[tier].retention);
        if retention.policy().order() == Order::Own {
            retention.link(entry, band);
            let first = retention.victim(stamp(now));
            retention.unlink(entry.id);
            return first.is_some_and(|first| first.id == entry.id);
        }
        *next = next.or_else(|| retention.victim(stamp(now)));
        next.is_none_or(|next| retention.precedes(&entry, band, &next, stamp(now)))
    }

    /// Whether nothing was said of single blocks that tells them from others of their run.
    fn ranks_by_place(&self) -> bool {
        self.hints.quiet() && self.prices.is_empty()
    }

    /// What becomes of whole blocks that nobody uses, if nothing must be written for them and it is
    /// the same for all.
    fn fate(&self, draft: &Draft, tier: TierId, blocks: Range<BlockId>) -> Option<Fate> {
        let mut others = (0..self.tiers.len()).filter(|&other| other != tier);
        let mut safe = if tier == self.last() { 0..tier } else { tier + 1..self.tiers.len() };
        if safe.any(|other| self.tiers[other].here.wholly(blocks.clone())) {
            return Some(Fate::Clean);
        }
        let dropped = tier == self.last() || draft.dropping || !self.writes(tier);
        let alone = others.all(|other| self.tiers[other].here.nowhere(blocks.clone()));
        (dropped && alone).then_some(Fate::Drop)
    }
}
