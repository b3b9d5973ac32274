//! Hints about what is not cached yet: they wait for its commit.
//!
//! Those about a lease wait with it, those about a session until it is over, and those about a
//! sequence stand at the last of its blocks that is there and go on with each that comes. Invariant:
//! a sequence waits at a living block, or before the first one of its scope. Cost: nothing while
//! nothing waits; O(log wishes) per new block otherwise. Of each scope at most [`MOST`] wishes wait,
//! over [`MOST_TOKENS`] tokens, so that none can use up another's; O(wishes of the scope) to add one.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::block::{BlockId, LeaseId, Token};
use crate::hint::Priority;
use crate::scope::ScopeId;
use crate::time::Nanos;
use crate::visits;

/// So many wishes of a scope can wait.
pub(in crate::manager) const MOST: usize = 4096;

/// The sequences of a scope that wait have at most so many tokens in all.
pub(in crate::manager) const MOST_TOKENS: usize = 1 << 24;

/// What an owner wants for the blocks of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::manager) struct PendingHint {
    pub(in crate::manager) owner: Arc<str>,
    pub(in crate::manager) start: u64,
    pub(in crate::manager) end: Option<u64>,
    pub(in crate::manager) priority: Priority,
    pub(in crate::manager) until: Option<Nanos>,
    /// For blocks behind the prompt: the priority, and for how long from the commit on.
    pub(in crate::manager) decode: Option<(Priority, Option<Nanos>)>,
}

impl PendingHint {
    /// What it says of the block whose first token is `first`, of a prompt of so many tokens.
    pub(in crate::manager) fn says(
        &self,
        first: u64,
        prompt: u64,
        now: Nanos,
    ) -> Option<(Priority, Option<Nanos>)> {
        if let (true, Some((priority, ttl))) = (first >= prompt, self.decode) {
            return Some((priority, ttl.map(|ttl| now.saturating_add(ttl))));
        }
        let inside = self.start <= first && first < self.end.unwrap_or(prompt);
        let alive = self.until.is_none_or(|until| until > now);
        (inside && alive).then_some((self.priority, self.until))
    }

    /// Whether two wishes of one owner are about the same range.
    fn replaces(&self, other: &Self) -> bool {
        let range = |hint: &Self| (hint.start, hint.end);
        self.owner == other.owner && range(self) == range(other)
    }
}

/// A sequence whose blocks are not all there.
#[derive(Clone, Debug)]
struct Sequence {
    content: Vec<Token>,
    /// Its last block that is there.
    at: Option<BlockId>,
    hint: PendingHint,
}

type Number = u64;

/// All wishes, scope by scope.
#[derive(Clone, Debug, Default)]
pub(in crate::manager) struct PendingHints {
    leases: BTreeMap<(ScopeId, LeaseId), Vec<PendingHint>>,
    sessions: BTreeMap<(ScopeId, String), Vec<PendingHint>>,
    sequences: BTreeMap<(ScopeId, Number), Sequence>,
    anchors: BTreeSet<(ScopeId, Option<BlockId>, Number)>,
    ends: BTreeSet<(Nanos, ScopeId, Number)>,
    next: Number,
    /// Tokens of the sequences of each scope that has some.
    tokens: BTreeMap<ScopeId, usize>,
    /// Scopes and contents of what waits no more, until somebody asks.
    ended: Vec<(ScopeId, Vec<Token>)>,
}

impl PendingHints {
    /// Whether a wish of a lease or a session waits.
    pub(in crate::manager) fn followed(&self) -> bool {
        !self.leases.is_empty() || !self.sessions.is_empty()
    }

    /// Whether a sequence waits.
    pub(in crate::manager) fn awaited(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// Why no further wish of a scope, with so many tokens, can wait. Those of sessions and leases
    /// that say nothing more end.
    pub(in crate::manager) fn full(
        &mut self,
        scope: ScopeId,
        tokens: usize,
        now: Nanos,
    ) -> Option<String> {
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

    /// Keeps those wishes of a scope's leases and sessions that `stays` names. Returns how many.
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

    pub(in crate::manager) fn follow_lease(
        &mut self,
        scope: ScopeId,
        id: LeaseId,
        hint: PendingHint,
    ) {
        put(self.leases.entry((scope, id)).or_default(), hint);
    }

    /// Returns whether it is the session's first: then its scope is to be held.
    pub(in crate::manager) fn follow_session(
        &mut self,
        scope: ScopeId,
        name: &str,
        hint: PendingHint,
    ) -> bool {
        let pending = self.sessions.entry((scope, name.to_owned())).or_default();
        // A wish may take the place of the only one.
        let first = pending.is_empty();
        put(pending, hint);
        first
    }

    /// The wishes about a lease and its session.
    pub(in crate::manager) fn about(
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

    /// A sequence of which the block `at` is the last one there.
    pub(in crate::manager) fn await_sequence(
        &mut self,
        scope: ScopeId,
        at: Option<BlockId>,
        content: Vec<Token>,
        hint: PendingHint,
    ) {
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

    /// A block came behind `parent`: the wishes about it and what follows. `before` is how many
    /// tokens stand before it.
    pub(in crate::manager) fn arrived(
        &mut self,
        scope: ScopeId,
        parent: Option<BlockId>,
        block: BlockId,
        tokens: &[Token],
        before: usize,
    ) -> Vec<PendingHint> {
        let mut pending = Vec::new();
        for number in self.anchored(scope, parent) {
            let known = self.sequences.get_mut(&(scope, number)).expect("anchored");
            let rest = known.content.get(before..).unwrap_or_default();
            if !rest.starts_with(tokens) {
                continue;
            }
            pending.push(known.hint.clone());
            if rest.len() == tokens.len() {
                self.end(scope, number);
            } else {
                self.anchor(scope, number, Some(block));
            }
        }
        pending
    }

    /// A block is gone: what stood there goes back to its parent.
    pub(in crate::manager) fn gone(
        &mut self,
        scope: ScopeId,
        block: BlockId,
        parent: Option<BlockId>,
    ) {
        for number in self.anchored(scope, Some(block)) {
            self.anchor(scope, number, parent);
        }
    }

    /// A lease has ended.
    pub(in crate::manager) fn end_lease(&mut self, scope: ScopeId, id: LeaseId) {
        self.leases.remove(&(scope, id));
    }

    /// A session is over. Returns how many wishes it had.
    pub(in crate::manager) fn end_session(&mut self, scope: ScopeId, name: &str) -> usize {
        let Some(pending) = self.sessions.remove(&(scope, name.to_owned())) else { return 0 };
        self.ended.push((scope, Vec::new()));
        pending.len()
    }

    /// An owner of a scope is gone. Returns how many wishes it had.
    pub(in crate::manager) fn end_owner(&mut self, scope: ScopeId, owner: &str) -> usize {
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

    /// Ends the wishes about sequences whose time has come. Those of sessions and leases say
    /// nothing more.
    pub(in crate::manager) fn expire(&mut self, now: Nanos) {
        while let Some(&(until, scope, number)) = self.ends.first() {
            if until > now {
                return;
            }
            self.end(scope, number);
        }
    }

    /// Takes the scopes and contents of what waits no more.
    pub(in crate::manager) fn take_ended(&mut self) -> Vec<(ScopeId, Vec<Token>)> {
        std::mem::take(&mut self.ended)
    }

    /// The scopes that sequences and sessions hold, and the contents that wait.
    pub(in crate::manager) fn contents(&self) -> impl Iterator<Item = (ScopeId, &[Token])> {
        let sequences = self.sequences.iter().map(|(&(scope, _), known)| (scope, &*known.content));
        sequences.chain(self.sessions.keys().map(|&(scope, _)| (scope, &[][..])))
    }

    fn anchored(&self, scope: ScopeId, at: Option<BlockId>) -> Vec<Number> {
        let here = (scope, at, Number::MIN)..=(scope, at, Number::MAX);
        self.anchors.range(here).map(|&(_, _, number)| number).collect()
    }

    fn anchor(&mut self, scope: ScopeId, number: Number, at: Option<BlockId>) {
        let known = self.sequences.get_mut(&(scope, number)).expect("it waits");
        self.anchors.remove(&(scope, known.at, number));
        known.at = at;
        self.anchors.insert((scope, at, number));
    }

    fn end(&mut self, scope: ScopeId, number: Number) {
        let Some(Sequence { content, at, hint }) = self.sequences.remove(&(scope, number)) else {
            return;
        };
        if let Some(tokens) = self.tokens.get_mut(&scope) {
            *tokens -= content.len();
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

    /// What is broken, where `alive` tells living blocks and leases.
    pub(in crate::manager) fn audit(
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
        let gone = self.leases.keys().filter(|&&(_, id)| !lease(id));
        broken.extend(gone.map(|(_, id)| format!("a hint waits for lease {id}, which has ended")));
        broken
    }
}

fn put(pending: &mut Vec<PendingHint>, hint: PendingHint) {
    pending.retain(|known| !hint.replaces(known));
    pending.push(hint);
}
