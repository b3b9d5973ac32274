//! Uses for learning policies: each block's last use, the turns of conversations, and lives.
//!
//! Blocks of a run used by a request share a use, written once for all of them. The weight differs
//! between blocks, and is computed at eviction. Invariant: a block of the trie has its last use
//! from its insertion on. Cost: nothing if no policy learns. Otherwise a fill of eight bytes per used
//! block, a hash of three tokens per new block, and a hash of all tokens per sampled block.

use std::ops::Range;

use crate::block::{BlockId, TierId, Token};
use crate::paged_vec::{PAGE, PagedVec};
use crate::policy::{EXPECTED, LastUse, Lives, Needs, Sampling, class_of, is_sooner, unpack};
use crate::residency::Blocks;
use crate::scope::ScopeId;
use crate::tiers::Tier;
use crate::trie::sample_hash;

use crate::manager::Manager;
use crate::manager::node::Node;
use crate::manager::policy_feed::RequestContext;
use crate::manager::settings::Settings;

/// Bits of the class in a use.
const CLASS: u32 = (1 << 7) - 1;

/// Bit of sampled blocks in a use.
const SAMPLED: u32 = 1 << 7;

/// Bits of the turn in a use.
const TURN: u32 = 7 << 8;

/// Place of the start in a use. Starts beyond its 21 bits are stored as the maximum.
const START: u32 = 11;

/// Number of sampled blocks with lives prefetched together.
const TOGETHER: usize = 16;

/// Last use of a block by a request.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// Number of the request, modulo 2^32.
    request: u32,
    /// From the lowest bit: class of the life begun by the use, [`SAMPLED`], turn of the request
    /// that stored the block, and number of blocks before the unshared suffix that ended at the
    /// block at this use.
    bits: u32,
}

impl Use {
    /// A use by a request. The path of the block has no branch from `start` on.
    fn new(request: u32, start: u32) -> Self {
        Self { request, bits: start.min(u32::MAX >> START) << START }
    }

    fn class(self) -> u8 {
        u8::try_from(self.bits & CLASS).expect("seven bits")
    }

    fn turn(self) -> u8 {
        u8::try_from((self.bits & TURN) >> TURN.trailing_zeros()).expect("three bits")
    }

    fn start(self) -> u32 {
        self.bits >> START
    }

    fn is_sampled(self) -> bool {
        self.bits & SAMPLED != 0
    }

    /// This use with a class in the place of its class.
    fn of_class(self, class: u8) -> Self {
        Self { bits: self.bits & !CLASS | u32::from(class), ..self }
    }

    /// Whether both blocks have the same request, class and start.
    fn is_same(self, other: Self) -> bool {
        self.request == other.request && (self.bits ^ other.bits) & !(SAMPLED | TURN) == 0
    }
}

/// Last uses and lives.
#[derive(Debug)]
pub(super) struct Uses {
    latest: PagedVec<Use>,
    /// Lives per tier with a learning policy.
    lives: Vec<(TierId, Lives)>,
    sampling: Sampling,
}

impl Uses {
    /// Empty tables for these tiers of a model with a single group or `several`, or `None` if no
    /// policy learns.
    pub(super) fn new(tiers: &[Tier], several: bool) -> Option<Self> {
        let learning = tiers.iter().enumerate();
        let learning = learning.filter(|(_, tier)| tier.eviction.needs(Needs::REUSE));
        let blocks = |tier: &Tier| u64::from(tier.spec.blocks);
        let learning: Vec<_> = learning.map(|(id, tier)| (id, blocks(tier))).collect();
        let least = learning.iter().map(|(_, blocks)| *blocks).min()?;
        let sampling = Sampling::new(least, several);
        let lives = |(id, blocks)| (id, Lives::new(Sampling::new(blocks, several), sampling));
        let lives = learning.into_iter().map(lives).collect();
        Some(Self { latest: PagedVec::new(Use::default()), lives, sampling })
    }

    /// Prefetches the CPU cache line of a block's last use.
    pub(super) fn prefetch_line(&self, block: BlockId) {
        self.latest.prefetch_line(block);
    }

    /// Turn of the request that stored a block.
    pub(super) fn turn(&self, block: BlockId) -> u8 {
        self.latest[block].turn()
    }

    /// The last use of a block at this depth, or a default without a recorded use.
    pub(super) fn last_use(&self, block: BlockId, depth: u32, settings: &Settings) -> LastUse {
        let Some(&latest) = self.latest.get(block) else { return LastUse::default() };
        let tokens = u64::from(settings.block_tokens) * u64::from(settings.token_weight);
        let middle = u64::midpoint(u64::from(latest.start()) * tokens, u64::from(depth) * tokens);
        #[expect(clippy::cast_possible_truncation, reason = "seven digits are enough")]
        let weight = settings.cost.worth(middle) as f32;
        LastUse { request: latest.request, weight, class: latest.class(), turn: latest.turn() }
    }

    /// Number of blocks directly before `last` in this range with an equal last use, within a page.
    pub(super) fn same_use_before(&self, before: Range<BlockId>, last: BlockId) -> u32 {
        let page = u32::try_from(PAGE).expect("a small number");
        let first = before.start.max(before.end.saturating_sub(1) / page * page);
        let (uses, last) = (self.latest.stretch(first, before.end), self.latest[last]);
        let number = uses.iter().rev().take_while(|latest| latest.is_same(last)).count();
        u32::try_from(number).expect("at most a page")
    }

    /// Whether these blocks were stored in a single turn. False if they span two pages.
    pub(super) fn one_turn(&self, blocks: Range<BlockId>) -> bool {
        let uses = self.latest.stretch(blocks.start, blocks.end);
        uses.len() == blocks.len() && uses.iter().all(|latest| latest.turn() == uses[0].turn())
    }

    /// Replaces a block's last use by an expected request, unless a sooner request is already
    /// expected. Returns whether it was replaced.
    pub(super) fn expect(
        &mut self,
        block: BlockId,
        request: u32,
        before: Option<u32>,
        now: u64,
    ) -> bool {
        let Some(&latest) = self.latest.get(block) else { return true };
        let theirs = latest.class() == EXPECTED && Some(latest.request) != before;
        if theirs && is_sooner(latest.request, request, now) {
            return false;
        }
        self.latest.put(block, Use { request, ..latest.of_class(EXPECTED) });
        true
    }

    /// Records that a request uses consecutive blocks of a run again.
    fn use_again(&mut self, blocks: Range<BlockId>, latest: Use, classes: Classes) {
        let Use { request, bits } = latest.of_class(classes.class);
        for known in self.latest.stretch_mut(blocks.start, blocks.end) {
            *known = Use { request, bits: known.bits & (SAMPLED | TURN) | bits };
        }
        self.end_prompt(blocks.end, classes);
    }

    /// Records the first use of consecutive blocks of a run. `text` has their tokens, and `depth`
    /// is the first block's depth.
    fn use_first(
        &mut self,
        blocks: Range<BlockId>,
        depth: u32,
        text: &[Token],
        latest: Use,
        turn: u8,
        classes: Classes,
    ) {
        self.latest.reach(blocks.end);
        let Use { request, bits } = latest.of_class(classes.class);
        let bits = bits | u32::from(turn) << TURN.trailing_zeros();
        let (mut text, mut depth) = (text.chunks_exact(text.len() / blocks.len()), depth);
        let mut from = blocks.start;
        while from < blocks.end {
            let page = self.latest.stretch_mut(from, blocks.end);
            from += u32::try_from(page.len()).expect("at most a page");
            for (known, tokens) in page.iter_mut().zip(text.by_ref()) {
                let sampled = self.sampling.samples(sample_hash(tokens, depth));
                *known = Use { request, bits: bits | if sampled { SAMPLED } else { 0 } };
                depth += 1;
            }
        }
        self.end_prompt(blocks.end, classes);
    }

    /// Sets the class of the last block before `end`, if it differs.
    fn end_prompt(&mut self, end: BlockId, classes: Classes) {
        if let Some(class) = classes.last {
            let last = &mut self.latest[end - 1];
            *last = last.of_class(class);
        }
    }

    /// The first sampled block, within a page, or the end of the searched blocks.
    fn first_sampled(&self, blocks: Range<BlockId>) -> BlockId {
        let page = self.latest.stretch(blocks.start, blocks.end);
        // Few blocks are sampled, so eight are checked together.
        let some = |eight: &[Use]| eight.iter().fold(0, |all, latest| all | latest.bits) & SAMPLED;
        let skipped = 8 * page.chunks(8).take_while(|eight| some(eight) == 0).count();
        let rest = page.get(skipped..).unwrap_or_default();
        let at = rest.iter().position(|latest| latest.is_sampled()).unwrap_or(rest.len());
        let at = (skipped + at).min(page.len());
        blocks.start + u32::try_from(at).expect("at most a page")
    }

    /// Counts the lives of the sampled blocks among consecutive blocks at a request's first use.
    ///
    /// Reuse served by a higher tier does not end a life on the tiers below: they could have
    /// evicted the block without a loss.
    fn sample(&mut self, known: &Blocks<Node>, seed: u64, blocks: Range<BlockId>, request: u64) {
        let mut rest = blocks;
        while !rest.is_empty() {
            let mut prints = [(0, 0); TOGETHER];
            let mut number = 0;
            while number < TOGETHER && !rest.is_empty() {
                // The blocks checked together end with a page.
                rest.start = self.first_sampled(rest.clone());
                let block = rest.start;
                if block < rest.end && self.latest[block].is_sampled() {
                    prints[number] = (block, known.trie().print(seed, block));
                    self.lives.iter().for_each(|(_, lives)| lives.prefetch_head(prints[number].1));
                    number += 1;
                    rest.start = block + 1;
                }
            }
            let prints = &prints[..number];
            for (_, lives) in &self.lives {
                for &(_, print) in prints {
                    lives.prefetch_life(print);
                }
            }
            for &(block, print) in prints {
                let class = self.latest[block].class();
                for (tier, lives) in &mut self.lives {
                    let served = (0..*tier).any(|above| known.table(above).fully_resident(block));
                    lives.use_again(print, class, request, !served);
                }
            }
        }
    }
}

/// Class of the use of consecutive blocks. `last` is the class of their last block if it differs.
#[derive(Clone, Copy)]
struct Classes {
    class: u8,
    last: Option<u8>,
}

impl RequestContext {
    /// Classes of the request's use of blocks with `uses` earlier uses, the last of them before
    /// `end`.
    fn classes(self, end: u32, uses: u32) -> Classes {
        let last = (end == self.blocks).then(|| class_of(self.run, uses, true));
        Classes { class: class_of(self.run, uses, false), last }
    }
}

impl Manager {
    /// Turn of a request for these tokens with the found path `path`: the turn of the known path,
    /// plus 1 if the request extends it.
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
            // Skip resident blocks that the plan recomputes.
            while let Some(block) = (known < all)
                .then(|| &tokens[known * size..(known + 1) * size])
                .and_then(|tokens| self.trie().child(known_scope.root, last, tokens))
            {
                (known, last) = (known + 1, Some(block));
            }
            turn = last.map_or(0, |block| uses.turn(block));
            if known < all && self.feed.has_ghosts() {
                let slices =
                    self.slices_of(known_scope.seed, last, &tokens[known * size..all * size]);
                // The deepest known block decides, so search from the end.
                let mut end = all;
                for slice in slices.into_iter().rev() {
                    if let Some((place, ghost)) = self.feed.last_ghost(&slice) {
                        turn = unpack(ghost).map_or(turn, |(turn, _)| turn);
                        known = end - (slice.places.end - place - 1) as usize;
                        break;
                    }
                    end -= slice.places.len();
                }
            }
        }
        turn.saturating_add(u8::from(known < all)).min(7)
    }

    /// Counts a request, and passes new estimates of reuse to learning policies.
    pub(crate) fn pass_request(&mut self) {
        let Some(uses) = &mut self.feed.uses else { return };
        for (tier, lives) in &mut uses.lives {
            let learned = lives.learn(self.feed.requests);
            self.tiers[*tier].eviction.on_request(self.feed.requests, learned.as_ref());
        }
    }

    /// Records that the current request uses blocks of a path. Their uses are already counted.
    pub(crate) fn use_cached(&mut self, path: &[BlockId]) {
        let Self { feed, blocks, scopes, .. } = self;
        let (Some(uses), Some(&first)) = (&mut feed.uses, path.first()) else { return };
        let (trie, request) = (blocks.trie(), low(feed.requests));
        let seed = scopes.get(trie.value(first).scope).seed;
        let mut depth = trie.depth(first);
        for (run, node, start) in trie.starts_along(path) {
            let latest = Use::new(request, start);
            depth += run.end - run.start;
            let classes = feed.request.classes(depth, node.uses.saturating_sub(1));
            uses.use_again(run.clone(), latest, classes);
            uses.sample(blocks, seed, run, feed.requests);
        }
    }

    /// Records new blocks of a path. `ghosts` has the ghosts of consecutive blocks, 0 for none.
    /// `requested` is false for restored blocks, which no request uses.
    pub(crate) fn use_new(&mut self, added: &[BlockId], ghosts: &[(usize, u32)], requested: bool) {
        let Self { feed, blocks, scopes, .. } = self;
        let (Some(uses), Some(&first)) = (&mut feed.uses, added.first()) else { return };
        let trie = blocks.trie();
        let seed = scopes.get(trie.value(first).scope).seed;
        let latest = Use::new(low(feed.requests), trie.start(first));
        let (mut depth, mut rest) = (trie.depth(first), added);
        let all = [(added.len(), 0)];
        for &(number, ghost) in if ghosts.is_empty() { &all } else { ghosts } {
            let (now, later) = rest.split_at(number);
            rest = later;
            let stored = if requested { feed.request.run } else { 1 };
            let (turn, before) = unpack(ghost).unwrap_or((stored, 0));
            for (run, node) in trie.along(now) {
                let end = depth + run.end - run.start;
                let classes = if requested {
                    feed.request.classes(end, before)
                } else {
                    let class = class_of(turn, node.uses.saturating_sub(1), false);
                    Classes { class, last: None }
                };
                let text = trie.tokens_of(run.clone());
                uses.use_first(run.clone(), depth, text, latest, turn, classes);
                if requested {
                    uses.sample(blocks, seed, run, feed.requests);
                }
                depth = end;
            }
        }
    }
}

/// The lower half of a request number.
fn low(request: u64) -> u32 {
    u32::try_from(request & u64::from(u32::MAX)).expect("masked")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{EXPECTED, PAGE, SAMPLED, Sampling, TURN, Use, Uses};
    use crate::paged_vec::PagedVec;

    /// Uses of the blocks around the end of a page: each block was used by the first or the second
    /// request.
    fn uses(bits: &[(bool, bool)]) -> (Uses, u32) {
        let mut latest = PagedVec::new(Use::default());
        let first = u32::try_from(PAGE - bits.len() / 2).expect("a page");
        for (block, &(again, sampled)) in (first..).zip(bits) {
            let Use { request, bits } = Use::new(u32::from(again), 0).of_class(3);
            latest.put(block, Use { request, bits: bits | if sampled { SAMPLED } else { 0 } });
        }
        (Uses { latest, lives: Vec::new(), sampling: Sampling::new(1, false) }, first)
    }

    #[test]
    fn a_use_keeps_its_parts() {
        for (class, start) in [(0, 0), (127, (1 << 21) - 1), (EXPECTED, 70_000)] {
            let one = Use::new(9, start).of_class(class);
            assert_eq!((one.class(), one.start(), one.turn()), (class, start, 0));
            let other = Use { bits: one.bits | SAMPLED | TURN, ..one };
            assert_eq!((other.class(), other.start(), other.turn()), (class, start, 7));
            assert!(other.is_sampled() && other.is_same(one));
            assert!(!other.is_same(one.of_class(class ^ 1)));
            assert!(!other.is_same(Use { request: 8, ..one }));
        }
        assert_eq!(Use::new(9, u32::MAX).start(), (1 << 21) - 1);
    }

    proptest! {
        /// Searches of stretches find the same blocks as a search block by block.
        #[test]
        fn stretches_are_those_of_single_blocks(
            bits in prop::collection::vec((prop::bool::weighted(0.2), prop::bool::weighted(0.1)), 1..90),
        ) {
            let (uses, first) = uses(&bits);
            let end = first + u32::try_from(bits.len()).expect("few");
            let of = |so: &dyn Fn(&(bool, bool)) -> bool| -> Vec<u32> {
                (first..end).zip(&bits).filter(|(_, bit)| so(bit)).map(|(block, _)| block).collect()
            };
            let (mut sampled, mut at) = (Vec::new(), first);
            while at < end {
                let block = uses.first_sampled(at..end);
                sampled.extend((block < end && uses.latest[block].is_sampled()).then_some(block));
                at = block + u32::from(sampled.last() == Some(&block));
            }
            prop_assert_eq!(sampled, of(&|bit| bit.1));
            let last = end - 1;
            let page = u32::try_from(PAGE).expect("a page");
            let same = |block: &u32| uses.latest[*block].is_same(uses.latest[last]);
            let alike = (first..last).rev().take_while(|b| same(b) && b / page == (last - 1) / page);
            prop_assert_eq!(uses.same_use_before(first..last, last) as usize, alike.count());
        }
    }
}
