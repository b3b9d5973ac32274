//! Pending hints: a table of hints for blocks that are not cached yet.
//!
//! Hints of a lease end with the lease, and hints of a session with the session. A hint of a
//! sequence is anchored at its last cached block and advances with each added block. Invariant: an
//! anchor is a living block, or the root of the scope. Cost: none without pending hints, otherwise
//! O(log hints) per new block. O(hints of the scope) to add a hint. A scope has at most [`MOST`]
//! pending hints over [`MOST_TOKENS`] tokens, so that no scope can use up the memory.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::block::{BlockId, LeaseId, Token};
use crate::hint::Priority;
use crate::scope::ScopeId;
use crate::time::Nanos;
use crate::visits;

/// Maximum number of pending hints of a scope.
pub(crate) const MOST: usize = 4096;

/// Maximum number of tokens of a scope's pending sequences.
pub(crate) const MOST_TOKENS: usize = 1 << 24;

/// Hint of an owner for the blocks of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PendingHint {
    pub(crate) owner: Arc<str>,
    pub(crate) start: u64,
    pub(crate) end: Option<u64>,
    pub(crate) priority: Priority,
    pub(crate) until: Option<Nanos>,
    /// Priority of blocks after the prompt, and its duration from the commit on.
    pub(crate) decode: Option<(Priority, Option<Nanos>)>,
}

impl PendingHint {
    /// The claim on the block with the first token `first`, for a prompt of `prompt` tokens.
    pub(crate) fn claim_on(
        &self,
        first: u64,
        prompt: u64,
        now: Nanos,
    ) -> Option<(Priority, Option<Nanos>)> {
        // Decoded blocks have a duration from their commit, not from the hint.
        if let (true, Some((priority, ttl))) = (first >= prompt, self.decode) {
            return Some((priority, ttl.map(|ttl| now.saturating_add(ttl))));
        }
        let inside = self.start <= first && first < self.end.unwrap_or(prompt);
        let alive = self.until.is_none_or(|until| until > now);
        (inside && alive).then_some((self.priority, self.until))
    }

    /// Whether two hints have the same owner and range.
    fn replaces(&self, other: &Self) -> bool {
        let range = |hint: &Self| (hint.start, hint.end);
        self.owner == other.owner && range(self) == range(other)
    }
}

/// Sequence with uncached blocks.
#[derive(Clone, Debug)]
struct Sequence {
    content: Vec<Token>,
    /// Its last cached block.
    at: Option<BlockId>,
    hint: PendingHint,
}

type Number = u64;

/// Pending hints of leases, sessions and sequences, by scope.
#[derive(Clone, Debug, Default)]
pub(crate) struct PendingHints {
    leases: BTreeMap<(ScopeId, LeaseId), Vec<PendingHint>>,
    sessions: BTreeMap<(ScopeId, String), Vec<PendingHint>>,
    sequences: BTreeMap<(ScopeId, Number), Sequence>,
    anchors: BTreeSet<(ScopeId, Option<BlockId>, Number)>,
    ends: BTreeSet<(Nanos, ScopeId, Number)>,
    next: Number,
    /// Number of tokens of each scope's sequences.
    tokens: BTreeMap<ScopeId, usize>,
    /// Scopes and contents of ended hints, until the manager frees them.
    ended: Vec<(ScopeId, Vec<Token>)>,
}

impl PendingHints {
    /// Whether a lease or a session has a pending hint.
    pub(crate) fn followed(&self) -> bool {
        !self.leases.is_empty() || !self.sessions.is_empty()
    }

    /// Whether a sequence is pending.
    pub(crate) fn awaited(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// The reason why a scope can have no further pending hint of `tokens` tokens, or `None`. First
    /// removes hints of sessions and leases without possible claims.
    pub(crate) fn full(&mut self, scope: ScopeId, tokens: usize, now: Nanos) -> Option<String> {
        let waiting = self.keep(scope, |hint| {
            hint.until.is_none_or(|until| until > now) || hint.decode.is_some()
        });
        let waiting = waiting + self.numbers(scope).len();
        visits::note(waiting);
        if waiting >= MOST {
            return Some(format!("{waiting} hints of the scope wait already, {MOST} can"));
        }
        let known = self.tokens.get(&scope).copied().unwrap_or(0);
        (known.saturating_add(tokens) > MOST_TOKENS).then(|| {
            format!("{known} tokens of the scope's hints wait and {tokens} more, {MOST_TOKENS} can")
        })
    }

    /// Keeps the hints of a scope's leases and sessions with a true `stays`. Returns their number.
    fn keep(&mut self, scope: ScopeId, stays: impl Fn(&PendingHint) -> bool) -> usize {
        let (mut kept, mut over) = (0, Vec::new());
        for (&key, pending) in self.leases.range_mut((scope, LeaseId::MIN)..=(scope, LeaseId::MAX))
        {
            pending.retain(|hint| stays(hint));
            kept += pending.len();
            if pending.is_empty() {
                over.push(key);
            }
        }
        for key in over {
            self.leases.remove(&key);
        }
        // Session keys have no greatest name, so the range ends at the next scope.
        let mut over = Vec::new();
        let mine = (scope, String::new())..(scope.saturating_add(1), String::new());
        for (key, pending) in self.sessions.range_mut(mine) {
            pending.retain(|hint| stays(hint));
            kept += pending.len();
            if pending.is_empty() {
                over.push(key.clone());
            }
        }
        for key in over {
            self.sessions.remove(&key);
            self.ended.push((scope, Vec::new()));
        }
        kept
    }

    /// The sequences of a scope.
    fn numbers(&self, scope: ScopeId) -> Vec<Number> {
        let mine = (scope, Number::MIN)..=(scope, Number::MAX);
        self.sequences.range(mine).map(|(&(_, number), _)| number).collect()
    }

    /// Adds a hint for blocks a lease will commit.
    pub(crate) fn follow_lease(&mut self, scope: ScopeId, id: LeaseId, hint: PendingHint) {
        put(self.leases.entry((scope, id)).or_default(), hint);
    }

    /// Adds a hint for blocks a session will reach. Returns whether it is the session's first hint:
    /// then the caller holds the scope.
    pub(crate) fn follow_session(&mut self, scope: ScopeId, name: &str, hint: PendingHint) -> bool {
        let pending = self.sessions.entry((scope, name.to_owned())).or_default();
        // The replaced hint may have been the only hint.
        let first = pending.is_empty();
        put(pending, hint);
        first
    }

    /// The hints of a lease and of its session.
    pub(crate) fn about(
        &self,
        id: LeaseId,
        scope: ScopeId,
        session: Option<&str>,
    ) -> Vec<PendingHint> {
        let of = |pending: Option<&Vec<PendingHint>>| pending.cloned().unwrap_or_default();
        let mut all = of(session.and_then(|name| self.sessions.get(&(scope, name.to_owned()))));
        all.extend(of(self.leases.get(&(scope, id))));
        all
    }

    /// Adds a hint for a sequence with the last cached block `at`.
    pub(crate) fn await_sequence(
        &mut self,
        scope: ScopeId,
        at: Option<BlockId>,
        content: Vec<Token>,
        hint: PendingHint,
    ) {
        // A newer hint of the owner for the same range replaces it.
        for number in self.anchored(scope, at) {
            let known = &self.sequences[&(scope, number)];
            if known.content == content && hint.replaces(&known.hint) {
                self.end(scope, number);
            }
        }
        let number = self.next;
        self.next += 1;
        *self.tokens.entry(scope).or_default() += content.len();
        self.anchors.insert((scope, at, number));
        if let Some(until) = hint.until {
            self.ends.insert((until, scope, number));
        }
        self.sequences.insert((scope, number), Sequence { content, at, hint });
    }

    /// Takes the hints for a new block below `parent`, of owners with the name prefix `mine`, and
    /// advances them to the block. `before` is the number of tokens before the block.
    pub(crate) fn arrived(
        &mut self,
        (scope, mine): (ScopeId, &str),
        parent: Option<BlockId>,
        block: BlockId,
        tokens: &[Token],
        before: usize,
    ) -> Vec<PendingHint> {
        let mut pending = Vec::new();
        for number in self.anchored(scope, parent) {
            let known = self.sequences.get_mut(&(scope, number)).expect("anchored");
            let rest = known.content.get(before..).unwrap_or_default();
            // A different child: the sequence continues to wait at the parent.
            if !rest.starts_with(tokens) || !known.hint.owner.starts_with(mine) {
                continue;
            }
            pending.push(known.hint.clone());
            // The last block of the sequence: nothing is left to wait for.
            if rest.len() == tokens.len() {
                self.end(scope, number);
            } else {
                self.anchor(scope, number, Some(block));
            }
        }
        pending
    }

    /// Moves the anchors of a removed block to its parent.
    pub(crate) fn removed(&mut self, scope: ScopeId, block: BlockId, parent: Option<BlockId>) {
        for number in self.anchored(scope, Some(block)) {
            self.anchor(scope, number, parent);
        }
    }

    /// Ends the hints of a lease.
    pub(crate) fn end_lease(&mut self, scope: ScopeId, id: LeaseId) {
        self.leases.remove(&(scope, id));
    }

    /// Ends the hints of a session. Returns their number.
    pub(crate) fn end_session(&mut self, scope: ScopeId, name: &str) -> usize {
        let Some(pending) = self.sessions.remove(&(scope, name.to_owned())) else { return 0 };
        self.ended.push((scope, Vec::new()));
        pending.len()
    }

    /// Ends the hints of an owner of a scope. Returns their number.
    pub(crate) fn end_owner(&mut self, scope: ScopeId, owner: &str) -> usize {
        let ended = Cell::new(0);
        self.keep(scope, |hint| {
            let mine = &*hint.owner == owner;
            ended.set(ended.get() + usize::from(mine));
            !mine
        });
        let mut numbers = self.numbers(scope);
        numbers.retain(|&number| &*self.sequences[&(scope, number)].hint.owner == owner);
        for &number in &numbers {
            self.end(scope, number);
        }
        ended.get() + numbers.len()
    }

    /// Ends the expired hints of sequences. Expired hints of sessions and leases only stop
    /// claiming.
    pub(crate) fn expire(&mut self, now: Nanos) {
        while let Some(&(until, scope, number)) = self.ends.first() {
            if until > now {
                return;
            }
            self.end(scope, number);
        }
    }

    /// Whether the scopes and contents of ended hints must be freed.
    #[inline]
    pub(crate) fn any_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Takes the scopes and contents of ended hints.
    pub(crate) fn take_ended(&mut self) -> Vec<(ScopeId, Vec<Token>)> {
        std::mem::take(&mut self.ended)
    }

    /// The scopes held by sequences and sessions, with their contents.
    pub(crate) fn contents(&self) -> impl Iterator<Item = (ScopeId, &[Token])> {
        let sequences = self.sequences.iter().map(|(&(scope, _), known)| (scope, &*known.content));
        sequences.chain(self.sessions.keys().map(|&(scope, _)| (scope, &[][..])))
    }

    /// The sequences waiting at a block.
    fn anchored(&self, scope: ScopeId, at: Option<BlockId>) -> Vec<Number> {
        let range = (scope, at, Number::MIN)..=(scope, at, Number::MAX);
        self.anchors.range(range).map(|&(_, _, number)| number).collect()
    }

    /// Moves a sequence's anchor.
    fn anchor(&mut self, scope: ScopeId, number: Number, at: Option<BlockId>) {
        let known = self.sequences.get_mut(&(scope, number)).expect("it waits");
        self.anchors.remove(&(scope, known.at, number));
        known.at = at;
        self.anchors.insert((scope, at, number));
    }

    /// Ends the hint of a sequence.
    fn end(&mut self, scope: ScopeId, number: Number) {
        let Some(Sequence { content, at, hint }) = self.sequences.remove(&(scope, number)) else {
            return;
        };
        if let Some(tokens) = self.tokens.get_mut(&scope) {
            *tokens -= content.len();
            // Rows without tokens would keep the scope in the table.
            if *tokens == 0 {
                self.tokens.remove(&scope);
            }
        }
        self.anchors.remove(&(scope, at, number));
        if let Some(until) = hint.until {
            self.ends.remove(&(until, scope, number));
        }
        self.ended.push((scope, content));
    }

    /// Checks the table against living blocks and leases.
    pub(crate) fn audit(
        &self,
        block: impl Fn(BlockId) -> bool,
        lease: impl Fn(LeaseId) -> bool,
    ) -> Vec<String> {
        let mut broken = Vec::new();
        for (&(scope, number), known) in &self.sequences {
            let place = (scope, known.at, number);
            if known.at.is_some_and(|at| !block(at)) || !self.anchors.contains(&place) {
                broken.push(format!("hint {number} waits at {:?}", known.at));
            }
        }
        let mut tokens: BTreeMap<ScopeId, usize> = BTreeMap::new();
        for (&(scope, _), known) in &self.sequences {
            *tokens.entry(scope).or_default() += known.content.len();
        }
        if self.anchors.len() != self.sequences.len() || tokens != self.tokens {
            broken.push(format!(
                "{} hints with {tokens:?} tokens wait in {} places with {:?}",
                self.sequences.len(),
                self.anchors.len(),
                self.tokens
            ));
        }
        let ended = self.leases.keys().filter(|&&(_, id)| !lease(id));
        broken.extend(ended.map(|(_, id)| format!("a hint waits for lease {id}, which has ended")));
        broken
    }
}

/// Adds a hint, and removes the hints it replaces.
fn put(pending: &mut Vec<PendingHint>, hint: PendingHint) {
    pending.retain(|known| !hint.replaces(known));
    pending.push(hint);
}
