//! Uses for policies that learn: the last one of each block, the turns of conversations, and lives.
//!
//! Invariant: a block of the trie has its last use from its insertion on; a request uses a block once.
//! Cost: nothing where no policy learns; otherwise O(1) per block that a request uses, a hash of
//! three tokens for all and of all tokens for one in eight.

use crate::block::{BlockId, TierId, Token};
use crate::paged_vec::PagedVec;
use crate::policy::{LastUse, Lives, Needs, class_of, unpack};
use crate::residency::Blocks;
use crate::scope::ScopeId;
use crate::tiers::Tier;
use crate::trie::sampled;

use crate::manager::Manager;
use crate::manager::node::Node;
use crate::manager::policy_feed::RequestContext;

/// Last uses and lives.
#[derive(Debug)]
pub(super) struct Uses {
    pub(super) last: PagedVec<LastUse>,
    /// Of each tier whose policy learns.
    lives: Vec<(TierId, Lives)>,
}

impl Uses {
    /// Empty, for these tiers; none if no policy learns.
    pub(super) fn new(tiers: &[Tier]) -> Option<Self> {
        let learning = tiers.iter().enumerate();
        let learning = learning.filter(|(_, tier)| tier.eviction.needs(Needs::REUSE));
        let lives = learning.map(|(id, tier)| (id, Lives::new(u64::from(tier.spec.blocks))));
        let lives: Vec<_> = lives.collect();
        (!lives.is_empty()).then(|| Self { last: PagedVec::new(LastUse::default()), lives })
    }

    /// Counts the life of a block with these tokens, which a request uses for the first time, if it is
    /// among those that are sampled. On a tier below one that serves the block no reuse ends its life:
    /// the tier could have evicted it without a loss.
    #[inline]
    fn sample(
        &mut self,
        blocks: &Blocks<Node>,
        seed: u64,
        (block, depth, tokens): (BlockId, u32, &[Token]),
        last_use: LastUse,
        request: u64,
    ) {
        if sampled(tokens, depth) {
            let trie = blocks.trie();
            let tag = trie.tags(seed, trie.parent(block)).next(tokens);
            let print = u32::try_from(tag >> 32).expect("half of the bits");
            for (tier, lives) in &mut self.lives {
                let served = (0..*tier).any(|above| blocks.table(above).fully_resident(block));
                lives.use_again(print, last_use.class, request, !served);
            }
        }
    }
}

impl RequestContext {
    /// The class of its use of a block that had `uses` uses before.
    fn class(self, depth: u32, uses: u32) -> u8 {
        class_of(self.run, uses, depth + 1 == self.blocks)
    }
}

impl Manager {
    /// Turn of a request for these tokens, of which `path` was found: one more than that of the path
    /// that is known, if it extends that.
    pub(crate) fn next_turn(
        &self,
        scope: Option<ScopeId>,
        path: &[BlockId],
        tokens: &[Token],
    ) -> u8 {
        let Some(uses) = &self.feed.uses else { return 0 };
        let (size, all) = (self.block_tokens(), tokens.len() / self.block_tokens());
        let mut last = path.last().copied();
        let (mut known, mut turn) = (path.len(), 0);
        if let Some(scope) = scope {
            let known_scope = self.scopes.get(scope);
            // Blocks that the plan computes again though they are here.
            while let Some(block) = (known < all)
                .then(|| &tokens[known * size..(known + 1) * size])
                .and_then(|tokens| self.trie().child(known_scope.root, last, tokens))
            {
                (known, last) = (known + 1, Some(block));
            }
            turn = last.map_or(0, |block| uses.last[block].turn);
            if known < all && self.feed.has_ghosts() {
                let rest = &tokens[known * size..all * size];
                let mut at = known;
                for slice in self.trie().slices(known_scope.seed, last, rest) {
                    // A group may have lost its ghost: go on to the next group.
                    if let Some((place, ghost)) = self.feed.last_ghost(&slice) {
                        turn = unpack(ghost).map_or(turn, |(turn, _)| turn);
                        known = at + (place + 1 - slice.places.start) as usize;
                    }
                    at += slice.places.len();
                }
            }
        }
        turn.saturating_add(u8::from(known < all)).min(7)
    }

    /// Counts a request, and passes new estimates of reuse to the policies that learn.
    pub(crate) fn pass_request(&mut self) {
        let Some(uses) = &mut self.feed.uses else { return };
        for (tier, lives) in &mut uses.lives {
            let learned = lives.learn(self.feed.requests);
            self.tiers[*tier].eviction.on_request(self.feed.requests, learned.as_ref());
        }
    }

    /// The request that is served uses blocks of one path, whose uses are counted already.
    pub(crate) fn use_cached(&mut self, path: &[BlockId]) {
        let Self { feed, blocks, scopes, settings, .. } = self;
        let (Some(uses), Some(&first)) = (&mut feed.uses, path.first()) else { return };
        let trie = blocks.trie();
        let tokens = u64::from(settings.block_tokens) * u64::from(settings.token_weight);
        let low = u32::try_from(feed.requests & u64::from(u32::MAX)).expect("masked");
        let seed = scopes.get(trie.value(first).scope).seed;
        let (mut depth, mut start) = (trie.depth(first), None);
        for (run, node) in trie.along(path) {
            // Along a chain without a branch the start stays.
            start = start.filter(|_| trie.only_child(run.start)).or(Some(trie.start(run.start)));
            let start = u64::from(start.unwrap_or_default()) * tokens;
            let size = settings.block_tokens as usize;
            let text = trie.tokens_of(run.clone()).chunks_exact(size);
            for (block, tokens_here) in run.zip(text) {
                let known = uses.last[block];
                if known.request != low {
                    let middle = u64::midpoint(start, u64::from(depth) * tokens);
                    let class = feed.request.class(depth, node.uses.saturating_sub(1));
                    let weight = weight(settings.cost.worth(middle));
                    let last_use = LastUse { request: low, weight, class, ..known };
                    uses.last[block] = last_use;
                    uses.sample(blocks, seed, (block, depth, tokens_here), last_use, feed.requests);
                }
                depth += 1;
            }
        }
    }

    /// Blocks of one path were added to the trie. `ghosts` are those that they had, for consecutive
    /// blocks, 0 for none; `requested` is false if no request uses them because their bytes come from
    /// elsewhere.
    pub(crate) fn use_new(&mut self, added: &[BlockId], ghosts: &[(usize, u32)], requested: bool) {
        let Self { feed, blocks, scopes, settings, .. } = self;
        let (Some(uses), Some(&first)) = (&mut feed.uses, added.first()) else { return };
        let trie = blocks.trie();
        let tokens = u64::from(settings.block_tokens) * u64::from(settings.token_weight);
        let low = u32::try_from(feed.requests & u64::from(u32::MAX)).expect("masked");
        let seed = scopes.get(trie.value(first).scope).seed;
        let start = u64::from(trie.start(first)) * tokens;
        let mut ghosts = ghosts.iter().flat_map(|&(n, ghost)| std::iter::repeat_n(ghost, n));
        let mut depth = trie.depth(first);
        let turn_now = if requested { feed.request.run } else { 1 };
        for (run, node) in trie.along(added) {
            uses.last.reach(run.end);
            let text = trie.tokens_of(run.clone()).chunks_exact(settings.block_tokens as usize);
            for (block, tokens_here) in run.zip(text) {
                let ghost = unpack(ghosts.next().unwrap_or(0));
                let middle = u64::midpoint(start, u64::from(depth) * tokens);
                let weight = weight(settings.cost.worth(middle));
                let (turn, before) = ghost.unwrap_or((turn_now, 0));
                let class = if requested {
                    feed.request.class(depth, before)
                } else {
                    class_of(turn, node.uses.saturating_sub(1), false)
                };
                let last_use = LastUse { request: low, weight, class, turn };
                uses.last[block] = last_use;
                if requested {
                    uses.sample(blocks, seed, (block, depth, tokens_here), last_use, feed.requests);
                }
                depth += 1;
            }
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "seven digits are enough")]
fn weight(cost: f64) -> f32 {
    cost as f32
}
