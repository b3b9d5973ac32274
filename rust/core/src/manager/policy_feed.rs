//! What policies with a memory are told, and what is remembered for them.
//!
//! Invariant: a policy that watches knows exactly the blocks that stand on its tier; prints and
//! turns are kept only if a policy asks. Cost: nothing where no policy of the manager has a memory;
//! otherwise O(1) per block that comes, goes or is used, beside the policy's own.

use crate::block::{BlockId, TierId};
use crate::eviction::{EvictionIndex, GhostTable};
use crate::paged_vec::PagedVec;
use crate::policy::Seen;
use crate::tier::State;
use crate::trie::GroupSlice;

use crate::manager::{Manager, Tier};

/// What policies may know of the request that is served.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestContext {
    /// Its number.
    number: u64,
    /// By how many requests one after the other the path was made that it found.
    turn: u32,
    /// Blocks that it adds to the path.
    added: u32,
    /// Blocks of its prompt.
    blocks: u32,
}

impl RequestContext {
    /// Full blocks of its prompt.
    pub(super) fn prompt_blocks(self) -> u32 {
        self.blocks
    }
}

/// What is kept for policies that have a memory.
#[derive(Debug)]
pub(super) struct PolicyFeed {
    /// Whether a policy watches its tier.
    pub(super) watched: bool,
    /// Whether a policy counts the turns of conversations.
    turning: bool,
    /// How many requests took their path.
    requests: u64,
    /// The one that is served.
    pub(super) request: RequestContext,
    /// The prints of blocks by id, if a policy watches: it asks for them often.
    tags: PagedVec<u64>,
    /// By block id: by how many requests one after the other the path to it was made, and the
    /// number of the last of them.
    turns: PagedVec<(u32, u64)>,
    /// Uses of blocks that are gone, if a policy counts them.
    ghosts: Option<GhostTable>,
}

impl PolicyFeed {
    /// What the policies of these tiers ask for.
    pub(super) fn new(tiers: &[Tier]) -> Self {
        let rules = || tiers.iter().map(|tier| (tier.eviction.policy(), tier.spec.blocks));
        let remembered = rules().filter(|(rule, _)| rule.remembers());
        let remembered: u64 = remembered.map(|(_, blocks)| u64::from(blocks)).sum();
        let watched = rules().any(|(rule, _)| rule.watches());
        Self {
            watched,
            turning: rules().any(|(rule, _)| rule.turns()),
            requests: 0,
            request: RequestContext::default(),
            tags: PagedVec::new(0),
            turns: PagedVec::new((0, 0)),
            ghosts: (remembered > 0).then(|| GhostTable::new(remembered)),
        }
    }

    /// Prefetches the CPU cache line of a group's ghosts.
    pub(super) fn prefetch_line(&self, slice: &GroupSlice) {
        if let Some(ghosts) = &self.ghosts {
            ghosts.prefetch_line(slice);
        }
    }

    /// Tells how often blocks that come were used in a former life, so many one after the other so
    /// often; it is remembered no longer.
    pub(super) fn recall(&mut self, slice: &GroupSlice, tell: impl FnMut(usize, u32)) {
        if let Some(ghosts) = &mut self.ghosts {
            ghosts.recall(slice, tell);
        }
    }

    /// A block is new in the trie.
    pub(super) fn on_insert(&mut self, parent: Option<BlockId>, block: BlockId, tag: u64) {
        if self.watched {
            self.tags.put(block, tag);
        }
        if self.turning {
            let (turn, by) = parent.map_or((0, u64::MAX), |parent| self.turns[parent]);
            let turn = turn + u32::from(by != self.request.number);
            self.turns.put(block, (turn, self.request.number));
        }
    }

    /// Whether something is remembered.
    pub(super) fn has_ghosts(&self) -> bool {
        self.ghosts.as_ref().is_some_and(|ghosts| !ghosts.is_empty())
    }

    /// Whether it wants to meet what is new.
    pub(super) fn wants_inserts(&self) -> bool {
        self.watched || self.turning
    }

    /// Whether it wants to know what leaves the trie.
    pub(super) fn keeps_ghosts(&self) -> bool {
        self.ghosts.is_some()
    }

    /// Blocks leave the trie.
    pub(super) fn remember(&mut self, slice: &GroupSlice, uses: u32) {
        if let Some(ghosts) = &mut self.ghosts {
            ghosts.remember(slice, uses);
        }
    }

    /// A request of so many blocks found `path` and is served from now on.
    pub(super) fn begin_request(&mut self, path: &[BlockId], blocks: usize) {
        let count = |blocks: usize| u32::try_from(blocks).unwrap_or(u32::MAX);
        let turn = path.last().and_then(|&last| self.turns.get(last));
        self.requests += 1;
        self.request = RequestContext {
            number: self.requests,
            turn: turn.map_or(0, |turn| turn.0),
            added: count(blocks.saturating_sub(path.len())),
            blocks: count(blocks),
        };
    }
}

impl Manager {
    /// Tells a tier's policy, if it watches, that a block has come or gone.
    pub(super) fn on_change(&mut self, tier: TierId, block: BlockId) {
        if !self.feed.watched || !self.tiers[tier].eviction.policy().watches() {
            return;
        }
        let stands = self.residency(tier, block).state != State::Absent;
        if stands == self.tiers[tier].eviction.holds(block) {
            return;
        }
        let moved = if stands {
            self.tell(tier, block, EvictionIndex::arrived)
        } else {
            let tag = self.feed.tags[block];
            self.tiers[tier].eviction.left(block, tag)
        };
        for block in moved {
            self.refresh_on(tier, block);
        }
    }

    /// New blocks stand on a tier: policies that watch and what was said of them take note.
    pub(super) fn on_resident(&mut self, tier: TierId, blocks: &[BlockId]) {
        if self.feed.watched {
            for &block in blocks {
                self.on_change(tier, block);
            }
        }
        self.attend_all(tier, blocks.iter().copied());
    }

    /// Tells the policies that watch that a block on their tiers is used.
    pub(super) fn on_hit(&mut self, block: BlockId) {
        if !self.feed.watched {
            return;
        }
        for tier in 0..self.tiers.len() {
            let index = &self.tiers[tier].eviction;
            if index.policy().watches() && index.holds(block) {
                for block in self.tell(tier, block, EvictionIndex::touched) {
                    self.refresh_on(tier, block);
                }
            }
        }
    }

    fn tell(
        &mut self,
        tier: TierId,
        block: BlockId,
        what: impl FnOnce(&mut EvictionIndex, &Seen<'_>) -> Vec<BlockId>,
    ) -> Vec<BlockId> {
        let facts = self.facts(tier, block, self.all_layers());
        let RequestContext { turn, added, blocks, .. } = self.feed.request;
        let seen = Seen {
            tag: self.feed.tags[block],
            request: self.feed.requests,
            used: self.node(block).refs > 0,
            turn,
            added,
            last: facts.block + 1 == blocks,
            facts: &facts,
            cost: &self.settings.cost,
        };
        what(&mut self.tiers[tier].eviction, &seen)
    }
}

#[cfg(test)]
mod tests {
    use super::PolicyFeed;
    use crate::trie::GroupSlice;

    #[test]
    fn a_turn_is_a_request_that_made_the_path_longer() {
        let mut feed = PolicyFeed { turning: true, watched: true, ..PolicyFeed::new(&[]) };
        feed.begin_request(&[], 2);
        assert_eq!((feed.request.turn, feed.request.added, feed.request.blocks), (0, 2, 2));
        feed.on_insert(None, 0, 1);
        feed.on_insert(Some(0), 1, 2);
        let first = feed.request;
        feed.begin_request(&[0], 3);
        assert_eq!((feed.request.turn, feed.request.added), (1, 2));
        feed.on_insert(Some(0), 2, 7);
        feed.begin_request(&[0, 2], 2);
        assert_eq!((feed.request.turn, feed.request.added), (2, 0));
        // The first request goes on: still its own turn.
        feed.request = first;
        feed.on_insert(Some(1), 3, 3);
        assert_eq!(feed.turns.stretch(0, 4), [(1, 1), (1, 1), (2, 2), (1, 1)]);
        assert_eq!(feed.tags.stretch(0, 4), [1, 2, 7, 3]);
    }

    #[test]
    fn nothing_is_kept_if_nobody_asks() {
        let mut feed = PolicyFeed::new(&[]);
        feed.begin_request(&[], 9);
        feed.on_insert(None, 5, 1);
        let slice = GroupSlice { group: 1, places: 0..1, checks: 0 };
        feed.remember(&slice, 3);
        feed.recall(&slice, |_, _| unreachable!("nothing is kept"));
        assert!(!feed.has_ghosts());
        assert_eq!((feed.tags.get(0), feed.turns.get(0)), (None, None));
    }
}
