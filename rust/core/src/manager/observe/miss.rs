//! Misses: the reasons for computing the tokens of a prompt.
//!
//! A prompt diverges from the cached sequences at a token. Every new chat diverges from the shared
//! system prompt, so a divergence alone says nothing: a cached branch explains a miss if the rest of
//! the prompt recurs in it. [`Manager::miss`] copies the branches under the manager's lock, and
//! [`OpenMiss::close`] compares them without it.
//!
//! ```text
//! prompt  |---- found ----|-- not stored yet --|-- evicted --|-- other scope --|-- rest --|part|
//!         0            matched               known                                      full  end
//! with several groups, the tokens from the last border where all groups resume to the end of the
//! cached blocks have no resume point
//! rest: diverged if 0.3 of the tokens after the divergence recur in a single branch, else new
//! ```
//!
//! Invariant: nothing changes, and no blocks or sessions of a different tenant are read. Cost: a
//! lookup, at most 128 Ki tokens copied per branch, and the walk of up to 64 scopes of the tenant.
//! Closing costs the same as `recurrence`.

use crate::block::{BlockId, TierId, Token};
use crate::error::Result;
use crate::record::BlockKey;
use crate::recurrence::recurring;
use crate::scope::{FIRST_DIGEST, Scope, ScopeId, Whose};
use crate::time::{Nanos, stamp};
use crate::trie::Query;

use crate::manager::Manager;
use crate::manager::kinds::LoadMode;
use crate::manager::request::life::acquire::Acquire;
use crate::manager::request::matching::residency_scan::Prefill;

/// Maximum number of tokens read from a branch.
const MOST_TOKENS: usize = 128 << 10;

/// Number of newest children of the last common block searched for the longest common prefix.
const NEWEST: usize = 64;

/// Maximum number of scopes of the tenant searched.
const MOST_SCOPES: usize = 64;

/// Maximum number of tokens reported per branch.
const SHOWN: usize = 64;

/// Minimum share of the tokens after the divergence, in tenths, for a branch to explain a miss.
const TENTHS: usize = 3;

/// Question: a prompt with its scope and session.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The prompt.
    pub tokens: &'a [Token],
    /// Scope within which its blocks are shared.
    pub scope: &'a Scope,
    /// Name of its conversation.
    pub session: Option<&'a str>,
    /// Maximum number of branches. With 0, no branch is copied, and no rest is `diverged`.
    pub limit: usize,
}

/// Cause of a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissCause {
    /// No similar sequence is cached.
    New,
    /// The rest of the prompt recurs in a cached branch.
    Diverged,
    /// It was cached and evicted.
    Evicted,
    /// It is cached for a different adapter or digest of the same tenant.
    OtherScope,
    /// Its blocks are cached, but a group of layers lacks its windows or its state there.
    NoResumePoint,
    /// It is known, but no copy is complete yet.
    NotStoredYet,
    /// It is cached, but computing it is expected to be faster than loading it.
    Recomputed,
    /// The last block is not full.
    NotCacheable,
}

impl MissCause {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Diverged => "diverged",
            Self::Evicted => "evicted",
            Self::OtherScope => "other scope",
            Self::NoResumePoint => "no resume point",
            Self::NotStoredYet => "not stored yet",
            Self::Recomputed => "recomputed",
            Self::NotCacheable => "not cacheable",
        }
    }
}

/// Cached branch left by a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissBranch {
    /// Its tokens from the divergence on, at most 64.
    pub tokens: Vec<Token>,
    /// Number of tokens cached after the divergence, at most 128 Ki.
    pub cached: usize,
    /// Nanoseconds since the last use of its first block.
    pub idle: Nanos,
    /// The session that ends with it.
    pub session: Option<String>,
    /// Number of tokens of the prompt after the divergence that recur in it.
    pub recurring: usize,
}

/// Explanation of a miss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Number of tokens of the prompt.
    pub tokens: usize,
    /// Number of tokens found, by tier.
    pub found: Vec<usize>,
    /// Index of the first token different from the cached branches.
    pub diverged_at: Option<usize>,
    /// Content key of the last block shared by the prompt and the branches. `None` at a first
    /// block.
    pub divergence: Option<BlockKey>,
    /// The branches at the divergence.
    pub branches: Vec<MissBranch>,
    /// Number of formerly cached tokens after the match.
    pub evicted: usize,
    /// Number of known tokens without a complete copy yet.
    pub in_flight: usize,
    /// Number of tokens after the match cached in a different scope of the tenant.
    pub other_scope: usize,
    /// Number of tokens of the match expected to be computed faster than loaded.
    pub recomputed: usize,
    /// Ranges of computed tokens with their causes, in order.
    pub causes: Vec<(usize, usize, MissCause)>,
}

/// A miss with copied branches, before their comparison.
#[derive(Clone, Debug)]
pub struct OpenMiss {
    miss: Miss,
    /// The prompt from the divergence on.
    rest: Vec<Token>,
    /// Each branch from the divergence on.
    branches: Vec<Vec<Token>>,
    /// Number of tokens of known blocks.
    known: usize,
    /// Number of tokens of full blocks.
    full: usize,
}

impl Manager {
    /// Copies everything needed to explain why tokens of a prompt would be computed now.
    ///
    /// # Errors
    /// The errors of [`Manager::lookup`].
    pub fn miss(&mut self, asked: &Asked<'_>, now: Nanos) -> Result<OpenMiss> {
        self.open()?;
        let Asked { tokens, scope, .. } = *asked;
        self.scopes.digests.check(scope, tokens)?;
        let (size, now) = (self.block_tokens(), self.clock.read(now));
        let found = self.scopes.find(scope)?;
        let content = self.scopes.digests.content(scope, 0, tokens);
        let known = self.visible_path(scope, &content);
        let (mut usable, mut cached) = (Vec::new(), 0);
        if let Some(id) = found {
            usable = self.path(id, scope, Query::Tokens(&content), 0, 0);
            cached = usable.len();
            self.cut_to_groups(&mut usable);
        }
        let known_tokens = known.len() * size;
        let full = tokens.len() / size * size;
        let rest = &content[known_tokens..];
        let mut miss = Miss {
            tokens: tokens.len(),
            found: vec![0; self.tiers.len()],
            diverged_at: None,
            divergence: None,
            branches: Vec::new(),
            evicted: self.once_cached(scope, found, known.last().copied(), rest),
            in_flight: (known.len() - cached) * size,
            other_scope: self.elsewhere(asked, &content, known.len()),
            recomputed: 0,
            causes: Vec::new(),
        };
        self.explain_match(&usable, asked, now, &mut miss);
        cause(&mut miss.causes, usable.len() * size, cached * size, MissCause::NoResumePoint);
        cause(&mut miss.causes, cached * size, known_tokens, MissCause::NotStoredYet);
        let first = found.map_or_else(Vec::new, |id| self.candidates(asked, id, &known, rest));
        let shared_most = first.iter().map(|&block| self.shared(block, rest)).max();
        let shared_most = shared_most.filter(|&shared| shared < rest.len());
        let mut open =
            OpenMiss { miss, rest: Vec::new(), branches: Vec::new(), known: known_tokens, full };
        if let Some(shared) = shared_most {
            open.miss.diverged_at = Some(known_tokens + shared);
            open.miss.divergence = known.last().map(|&block| self.key(block));
            if asked.limit > 0 {
                open.rest = rest[shared..].to_vec();
            }
            for (at, block) in first.into_iter().enumerate() {
                if at >= asked.limit
                    && !self.diverges_at_digest(rest, self.trie().tokens(block), shared)
                {
                    continue;
                }
                let (tokens, last) = self.follow(scope, block);
                open.miss.other_scope =
                    open.miss.other_scope.max(self.other_digest(rest, &tokens, shared));
                if at < asked.limit {
                    let session = self.sessions.ending_in(last).and_then(|name| scope.named(name));
                    self.add_branch((block, session), &tokens, shared, now, &mut open);
                }
            }
        }
        Ok(open)
    }

    /// Number of blocks of a match loaded by a request. Blocks after a border of several groups are
    /// computed.
    fn loaded_of(&self, usable: &[BlockId], asked: &Asked<'_>, now: Nanos) -> usize {
        if !self.points.several() {
            return usable.len();
        }
        let load = if self.tiers.engine_owned() { LoadMode::All } else { LoadMode::Plan };
        let ask = Acquire { tokens: asked.tokens, load, ..Acquire::default() };
        self.choose_border(&ask, usable, now) as usize
    }

    /// Counts the tokens of a match by tier, and the causes of tokens that are still computed.
    fn explain_match(&self, usable: &[BlockId], asked: &Asked<'_>, now: Nanos, miss: &mut Miss) {
        let tokens = asked.tokens.len();
        let size = self.block_tokens();
        let (usable, after) = usable.split_at(self.loaded_of(usable, asked, now));
        let mut missing = self.scan(usable, now);
        if !self.tiers.engine_owned() {
            let weight = u64::from(self.settings.token_weight);
            let context = (usable.len() * size) as u64 * weight;
            let rest = (tokens - usable.len() * size) as u64 * weight;
            let rest = self.settings.cost.compute_ns(context, rest);
            let mode = if self.points.several() { LoadMode::All } else { LoadMode::Plan };
            self.decide_loads(
                &mut missing,
                now,
                Prefill { mode, deadline: None, rest, layerwise: false },
            );
        }
        let mut missing = missing.iter().peekable();
        for (at, &block) in usable.iter().enumerate() {
            let (from, to) = (at * size, (at + 1) * size);
            let planned = missing.next_if(|miss| miss.at == at);
            let lacks = |tier: &TierId| self.residency(*tier, block).usable().is_empty();
            let tier = (0..self.tiers.len()).find(|tier| !lacks(tier));
            let computes = planned.is_some_and(|plan| !plan.load && !plan.compute.is_empty());
            match tier {
                _ if computes && !self.tiers.engine_owned() => {
                    let held =
                        (0..self.tiers.len()).any(|tier| !self.expected(tier, block).is_empty());
                    miss.recomputed += if held { size } else { 0 };
                    let reason = if held { MissCause::Recomputed } else { MissCause::Evicted };
                    cause(&mut miss.causes, from, to, reason);
                }
                Some(tier) => miss.found[tier] += size,
                None => miss.in_flight += size,
            }
        }
        let (from, more) = (usable.len() * size, after.len() * size);
        miss.recomputed += more;
        cause(&mut miss.causes, from, from + more, MissCause::Recomputed);
    }

    /// Number of formerly cached tokens after a path, in full blocks, up to the first forgotten
    /// block: later ghosts may be of a different path.
    fn once_cached(
        &self,
        scope: &Scope,
        id: Option<ScopeId>,
        last: Option<BlockId>,
        rest: &[Token],
    ) -> usize {
        // Records of evicted blocks do not name the tenant.
        if scope.shares() {
            return 0;
        }
        let seed = id.map_or_else(|| Whose::seed_of(scope), |id| self.scopes.get(id).seed);
        let mut known = 0;
        for slice in self.trie().slices(seed, last, rest) {
            let evicted = self.feed.evicted_blocks(&slice);
            known += evicted;
            if evicted < slice.places.len() {
                break;
            }
        }
        known * self.block_tokens()
    }

    /// Number of tokens beyond `known` blocks cached for a different adapter of the same tenant.
    fn elsewhere(&self, asked: &Asked<'_>, content: &[Token], known: usize) -> usize {
        let mut most = 0;
        let mut path = Vec::new();
        for scope in self.scopes.of(asked.scope.owner()).take(MOST_SCOPES) {
            if scope.whose.lora() != asked.scope.lora {
                path.clear();
                self.trie().walk(scope.root, Query::Tokens(content), &mut path);
                self.cut_to_visible(asked.scope, &mut path);
                most = most.max(path.len());
            }
        }
        most.saturating_sub(known) * self.block_tokens()
    }

    /// First blocks of the branches after a path: of the request's session, then with the longest
    /// common prefix, then the newest.
    fn candidates(
        &self,
        asked: &Asked<'_>,
        scope: ScopeId,
        known: &[BlockId],
        rest: &[Token],
    ) -> Vec<BlockId> {
        let visible = |&block: &BlockId| self.visible(asked.scope, block);
        let newest: Vec<BlockId> = if let Some(&last) = known.last() {
            self.trie().children(last).filter(visible).take(NEWEST).collect()
        } else {
            let firsts = self.trie().first_blocks(self.scopes.get(scope).root);
            firsts.filter(visible).take(NEWEST).collect()
        };
        let own = asked
            .session
            .and_then(|name| self.sessions.find(scope, &asked.scope.local(name)))
            .and_then(|session| self.sessions.tip(session))
            .and_then(|tip| self.at_depth(tip, known.len()))
            .filter(|&block| self.trie().parent(block) == known.last().copied());
        // Of equal prefixes the newest branch, which comes first.
        let closest = newest.iter().rev().max_by_key(|&&block| self.shared(block, rest));
        let mut chosen: Vec<BlockId> = own.into_iter().chain(closest.copied()).collect();
        chosen.dedup();
        for block in newest {
            if !chosen.contains(&block) {
                chosen.push(block);
            }
        }
        // Without branches the closest branch still gives the divergence.
        chosen.truncate(if asked.limit == 0 { 2 } else { asked.limit });
        chosen
    }

    /// The block at a depth on the path to `block`.
    fn at_depth(&self, mut block: BlockId, depth: usize) -> Option<BlockId> {
        let depth = u32::try_from(depth).ok()?;
        if self.trie().depth(block) < depth {
            return None;
        }
        loop {
            let first = self.trie().run(block).start;
            let above = self.trie().depth(first);
            if above <= depth {
                return Some(first + (depth - above));
            }
            block = self.trie().parent(first)?;
        }
    }

    /// Number of leading tokens shared by a block and the rest of a prompt.
    fn shared(&self, block: BlockId, rest: &[Token]) -> usize {
        self.trie()
            .tokens(block)
            .iter()
            .zip(rest)
            .take_while(|(known, given)| known == given)
            .count()
    }

    /// The tokens of a branch along its newest visible blocks, and its last block.
    fn follow(&self, scope: &Scope, first: BlockId) -> (Vec<Token>, BlockId) {
        let (size, mut tokens, mut block) = (self.block_tokens(), Vec::new(), first);
        loop {
            let run = self.trie().run(block);
            let room = u32::try_from((MOST_TOKENS - tokens.len()).div_ceil(size)).expect("few");
            let end = run.end.min(block.saturating_add(room));
            let end = (block + 1..end).find(|&next| !self.visible(scope, next)).unwrap_or(end);
            tokens.extend_from_slice(self.trie().tokens_of(block..end));
            let next = self.trie().children(end - 1).find(|&next| self.visible(scope, next));
            match next.filter(|_| tokens.len() < MOST_TOKENS) {
                Some(next) => block = next,
                None => return (tokens, end - 1),
            }
        }
    }

    /// Whether a branch and the rest of a prompt differ by a digest.
    fn diverges_at_digest(&self, rest: &[Token], branch: &[Token], shared: usize) -> bool {
        let both = rest.get(shared).zip(branch.get(shared));
        self.scopes.digests.begun()
            && both.is_some_and(|(&ours, &theirs)| ours >= FIRST_DIGEST && theirs >= FIRST_DIGEST)
    }

    /// Number of tokens of full blocks shared by a branch and the rest of a prompt, ignoring
    /// digests. 0 unless they part at a digest.
    fn other_digest(&self, rest: &[Token], branch: &[Token], shared: usize) -> usize {
        if !self.diverges_at_digest(rest, branch, shared) {
            return 0;
        }
        let alike = |&(&ours, &theirs): &(&Token, &Token)| {
            ours == theirs || (ours >= FIRST_DIGEST && theirs >= FIRST_DIGEST)
        };
        let common = rest.iter().zip(branch).take_while(alike).count();
        common / self.block_tokens() * self.block_tokens()
    }

    fn add_branch(
        &self,
        (block, session): (BlockId, Option<&str>),
        tokens: &[Token],
        shared: usize,
        now: Nanos,
        open: &mut OpenMiss,
    ) {
        let after = tokens[shared.min(tokens.len())..].to_vec();
        let shown = after[..after.len().min(SHOWN)].to_vec();
        open.miss.branches.push(MissBranch {
            tokens: self.scopes.digests.tokens(shown),
            cached: after.len(),
            idle: stamp(now).saturating_sub(self.node(block).access),
            session: session.map(str::to_owned),
            recurring: 0,
        });
        open.branches.push(after);
    }
}

impl OpenMiss {
    /// Compares the branches with the prompt, and assigns a cause to every computed token.
    #[must_use]
    pub fn close(self) -> Miss {
        let Self { mut miss, rest, branches, known, full } = self;
        let others: Vec<&[Token]> = branches.iter().map(Vec::as_slice).collect();
        let counts = recurring(&rest, &others);
        for (branch, recurring) in miss.branches.iter_mut().zip(&counts) {
            branch.recurring = *recurring;
        }
        let most = counts.iter().max().copied().unwrap_or(0);
        let diverged = most > 0 && most * 10 >= TENTHS * rest.len();
        let evicted = known + miss.evicted;
        let elsewhere = known + miss.other_scope;
        let causes = &mut miss.causes;
        cause(causes, known, evicted.min(full), MissCause::Evicted);
        cause(causes, evicted.min(full), elsewhere.min(full), MissCause::OtherScope);
        let rest = if diverged { MissCause::Diverged } else { MissCause::New };
        cause(causes, evicted.max(elsewhere).min(full), full, rest);
        cause(causes, full, miss.tokens, MissCause::NotCacheable);
        miss
    }
}

/// Adds a range with a cause. Extends the last range if it continues.
fn cause(causes: &mut Vec<(usize, usize, MissCause)>, from: usize, to: usize, why: MissCause) {
    if from >= to {
        return;
    }
    match causes.last_mut() {
        Some((_, end, last)) if *end == from && *last == why => *end = to,
        _ => causes.push((from, to, why)),
    }
}
