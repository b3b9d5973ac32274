//! Policy feed: the events and past uses that policies need, and the tables behind them.
//!
//! Invariant: a policy that needs events has exactly the resident blocks of its tier; tags and turns
//! are kept only if a policy needs them. Cost: nothing where no policy of the manager needs any;
//! otherwise O(1) per block that is inserted, hit or evicted, beside the policy's own.

pub(super) mod reuse;

use std::ops::Range;

use crate::block::{BlockId, TierId};
use crate::eviction::{EvictionIndex, GhostTable};
use crate::paged_vec::PagedVec;
use crate::policy::{Event, LastUse, MOST_USES, Needs, pack, unpack};
use crate::tier::ResidencyState;
use crate::trie::GroupSlice;

use crate::manager::{Manager, Tier};
use reuse::Uses;

/// Context of the request that is served, for events.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestContext {
    /// Its number.
    number: u64,
    /// Number of requests, one after the other, that made the path that it found.
    turn: u32,
    /// Blocks that it adds to the path.
    added: u32,
    /// Blocks of its prompt.
    blocks: u32,
    /// Its turn, by blocks that were evicted as well; kept if a policy learns.
    run: u8,
}

impl RequestContext {
    /// Full blocks of its prompt.
    pub(super) fn prompt_blocks(self) -> u32 {
        self.blocks
    }
}

/// Tables for policies that need events or past uses.
#[derive(Debug)]
pub(super) struct PolicyFeed {
    /// Whether a policy needs events.
    pub(super) events: bool,
    /// Whether a policy needs the turns of conversations.
    counts_turns: bool,
    /// Number of requests so far.
    requests: u64,
    /// The request that is served.
    pub(super) request: RequestContext,
    /// Tags of blocks by id, if a policy needs events.
    tags: PagedVec<u64>,
    /// By block id: the number of requests, one after the other, that made the path to it, and the
    /// last of them.
    turns: PagedVec<(u32, u64)>,
    /// Uses of evicted blocks, if a policy needs them.
    ghosts: Option<GhostTable>,
    /// Uses of blocks, if a policy learns. Then a ghost is a block's turn and uses.
    uses: Option<Uses>,
}

impl PolicyFeed {
    /// Empty tables for the needs of these tiers' policies.
    pub(super) fn new(tiers: &[Tier]) -> Self {
        let any = |needs| tiers.iter().any(|tier| tier.eviction.needs(needs));
        let room = |needs: &[Needs]| -> u64 {
            let such = |tier: &&Tier| needs.iter().any(|&needs| tier.eviction.needs(needs));
            tiers.iter().filter(such).map(|tier| u64::from(tier.spec.blocks)).sum()
        };
        let (capacity, learned) = (room(&[Needs::PAST_USES, Needs::REUSE]), room(&[Needs::REUSE]));
        Self {
            events: any(Needs::EVENTS),
            counts_turns: any(Needs::TURNS),
            requests: 0,
            request: RequestContext::default(),
            tags: PagedVec::new(0),
            turns: PagedVec::new((0, 0)),
            ghosts: (capacity > 0).then(|| GhostTable::new(capacity)),
            uses: (learned > 0).then(|| Uses::new(learned)),
        }
    }

    /// Prefetches the CPU cache line of a group's ghosts.
    pub(super) fn prefetch_line(&self, slice: &GroupSlice) {
        if let Some(ghosts) = &self.ghosts {
            ghosts.prefetch_line(slice);
        }
    }

    /// Takes a slice's ghosts out of the table; `each` gets numbers of consecutive blocks and their
    /// ghosts.
    pub(super) fn take_ghosts(&mut self, slice: &GroupSlice, each: impl FnMut(usize, u32)) {
        if let Some(ghosts) = &mut self.ghosts {
            ghosts.take(slice, each);
        }
    }

    /// Place and ghost of the last of a slice's blocks that has one.
    fn last_ghost(&self, slice: &GroupSlice) -> Option<(u32, u32)> {
        self.ghosts.as_ref()?.last(slice)
    }

    /// The uses that a ghost stands for.
    pub(super) fn uses_of(&self, ghost: u32) -> u32 {
        if self.uses.is_none() { ghost } else { unpack(ghost).map_or(0, |(_, uses)| uses) }
    }

    /// The ghost of a block with so many uses that leaves the trie.
    pub(super) fn ghost_of(&self, block: BlockId, uses: u32) -> u32 {
        match &self.uses {
            Some(known) => pack(known.last[block].turn, uses),
            None => uses.clamp(1, MOST_USES),
        }
    }

    /// Whether a block's ghost is its own, not its run's.
    pub(super) fn learns(&self) -> bool {
        self.uses.is_some()
    }

    /// A block's last use, where a policy learns.
    pub(super) fn last_use(&self, block: BlockId) -> LastUse {
        self.uses.as_ref().and_then(|uses| uses.last.get(block)).copied().unwrap_or_default()
    }

    /// Last uses of consecutive blocks, the last block's first; nothing where no policy learns.
    pub(super) fn last_uses(&self, blocks: Range<BlockId>) -> impl Iterator<Item = &LastUse> {
        let uses = self.uses.iter();
        uses.flat_map(move |uses| blocks.clone().rev().map(|block| &uses.last[block]))
    }

    /// A block was inserted into the trie.
    pub(super) fn on_insert(&mut self, parent: Option<BlockId>, block: BlockId, tag: u64) {
        if self.events {
            self.tags.put(block, tag);
        }
        if self.counts_turns {
            let (turn, by) = parent.map_or((0, u64::MAX), |parent| self.turns[parent]);
            // A request that goes on where it ended is still in its own turn.
            let turn = turn + u32::from(by != self.request.number);
            self.turns.put(block, (turn, self.request.number));
        }
    }

    /// Whether any uses of evicted blocks are known.
    pub(super) fn has_ghosts(&self) -> bool {
        self.ghosts.as_ref().is_some_and(|ghosts| !ghosts.is_empty())
    }

    /// Whether it needs [`PolicyFeed::on_insert`].
    pub(super) fn wants_inserts(&self) -> bool {
        self.events || self.counts_turns
    }

    /// Whether it needs [`PolicyFeed::put_ghosts`].
    pub(super) fn keeps_ghosts(&self) -> bool {
        self.ghosts.is_some()
    }

    /// Puts the ghost of blocks that leave the trie into the table.
    pub(super) fn put_ghosts(&mut self, slice: &GroupSlice, ghost: u32) {
        if let Some(ghosts) = &mut self.ghosts {
            ghosts.put(slice, ghost);
        }
    }

    /// Begins to serve a request of so many blocks, which found `path` and is in turn `run`.
    pub(super) fn begin_request(&mut self, path: &[BlockId], blocks: usize, run: u8) {
        let count = |blocks: usize| u32::try_from(blocks).unwrap_or(u32::MAX);
        let turn = path.last().and_then(|&last| self.turns.get(last));
        self.requests += 1;
        self.request = RequestContext {
            number: self.requests,
            turn: turn.map_or(0, |turn| turn.0),
            added: count(blocks.saturating_sub(path.len())),
            blocks: count(blocks),
            run,
        };
    }
}

impl Manager {
    /// Feeds a block's residency to its tier's policy, as an insertion or an eviction, if it changed.
    pub(super) fn on_residency(&mut self, tier: TierId, block: BlockId) {
        if !self.feed.events || !self.tiers[tier].eviction.needs(Needs::EVENTS) {
            return;
        }
        let resident = self.residency(tier, block).state != ResidencyState::Absent;
        // A block whose layers come or go one by one changes several times, and once for the policy.
        if resident == self.tiers[tier].eviction.holds(block) {
            return;
        }
        let changed = if resident {
            self.feed_event(tier, block, EvictionIndex::on_resident)
        } else {
            let tag = self.feed.tags[block];
            self.tiers[tier].eviction.on_evict(block, tag)
        };
        for block in changed {
            self.refresh_on(tier, block);
        }
    }

    /// Feeds new blocks of a tier to its policy, and applies the hints that wait for them.
    pub(super) fn on_resident(&mut self, tier: TierId, blocks: &[BlockId]) {
        if self.feed.events {
            for &block in blocks {
                self.on_residency(tier, block);
            }
        }
        self.attend_all(tier, blocks.iter().copied());
    }

    /// Feeds a use of a block to the policies of all tiers that have it.
    pub(super) fn on_hit(&mut self, block: BlockId) {
        if !self.feed.events {
            return;
        }
        for tier in 0..self.tiers.len() {
            let index = &self.tiers[tier].eviction;
            if index.needs(Needs::EVENTS) && index.holds(block) {
                for block in self.feed_event(tier, block, EvictionIndex::on_hit) {
                    self.refresh_on(tier, block);
                }
            }
        }
    }

    /// Builds the event of a block and feeds it through `call`; returns the blocks whose entries
    /// changed.
    fn feed_event(
        &mut self,
        tier: TierId,
        block: BlockId,
        call: impl FnOnce(&mut EvictionIndex, &Event<'_>) -> Vec<BlockId>,
    ) -> Vec<BlockId> {
        let facts = self.facts(tier, block, self.all_layers());
        let RequestContext { turn, added, blocks, .. } = self.feed.request;
        let event = Event {
            tag: self.feed.tags[block],
            request: self.feed.requests,
            used: self.node(block).refs > 0,
            turn,
            added,
            last: facts.block + 1 == blocks,
            facts: &facts,
            cost: self.settings.worth(),
        };
        call(&mut self.tiers[tier].eviction, &event)
    }
}

#[cfg(test)]
mod tests {
    use super::PolicyFeed;
    use crate::trie::GroupSlice;

    #[test]
    fn a_turn_is_a_request_that_made_the_path_longer() {
        let mut feed = PolicyFeed { counts_turns: true, events: true, ..PolicyFeed::new(&[]) };
        feed.begin_request(&[], 2, 0);
        assert_eq!((feed.request.turn, feed.request.added, feed.request.blocks), (0, 2, 2));
        feed.on_insert(None, 0, 1);
        feed.on_insert(Some(0), 1, 2);
        let first = feed.request;
        feed.begin_request(&[0], 3, 0);
        assert_eq!((feed.request.turn, feed.request.added), (1, 2));
        feed.on_insert(Some(0), 2, 7);
        feed.begin_request(&[0, 2], 2, 0);
        assert_eq!((feed.request.turn, feed.request.added), (2, 0));
        // The first request goes on: still its own turn.
        feed.request = first;
        feed.on_insert(Some(1), 3, 3);
        assert_eq!(feed.turns.stretch(0, 4), [(1, 1), (1, 1), (2, 2), (1, 1)]);
        assert_eq!(feed.tags.stretch(0, 4), [1, 2, 7, 3]);
    }

    #[test]
    fn nothing_is_kept_without_a_need() {
        let mut feed = PolicyFeed::new(&[]);
        feed.begin_request(&[], 9, 0);
        feed.on_insert(None, 5, 1);
        let slice = GroupSlice { group: 1, places: 0..1, checks: 0 };
        feed.put_ghosts(&slice, 3);
        feed.take_ghosts(&slice, |_, _| unreachable!("nothing is kept"));
        assert!(!feed.has_ghosts());
        assert_eq!((feed.tags.get(0), feed.turns.get(0)), (None, None));
    }
}
