//! Hints about what is not cached yet: they wait for its commit.
//!
//! Those about a lease wait with it, those about a session until it is over, and those about a
//! sequence stand at the last of its blocks that is there and go on with each that comes. Invariant:
//! a sequence waits at a living block, or before the first one of its scope. Cost: nothing while
//! nothing waits; O(log wishes) per new block otherwise. At most [`MOST`] wishes wait, over
//! [`MOST_TOKENS`] tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::block::{BlockId, LeaseId, Token};
use crate::hint::Priority;
use crate::scope::ScopeId;
use crate::time::Nanos;

/// So many wishes can wait.
pub(in crate::manager) const MOST: usize = 4096;

/// The sequences that wait have at most so many tokens in all.
pub(in crate::manager) const MOST_TOKENS: usize = 1 << 24;

/// What an owner wants for the blocks of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::manager) struct Wish {
    pub(in crate::manager) owner: Arc<str>,
    pub(in crate::manager) start: u64,
    pub(in crate::manager) end: Option<u64>,
    pub(in crate::manager) priority: Priority,
    pub(in crate::manager) until: Option<Nanos>,
    /// For blocks behind the prompt: the priority, and for how long from the commit on.
    pub(in crate::manager) decode: Option<(Priority, Option<Nanos>)>,
}

impl Wish {
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
        let range = |wish: &Self| (wish.start, wish.end);
        self.owner == other.owner && range(self) == range(other)
    }
}

/// A sequence whose blocks are not all there.
#[derive(Clone, Debug)]
struct Sequence {
    scope: ScopeId,
    content: Vec<Token>,
    /// Its last block that is there.
    at: Option<BlockId>,
    wish: Wish,
}

type Number = u64;

/// All wishes.
#[derive(Clone, Debug, Default)]
pub(in crate::manager) struct Wishes {
    leases: BTreeMap<LeaseId, Vec<Wish>>,
    sessions: BTreeMap<(ScopeId, String), Vec<Wish>>,
    sequences: BTreeMap<Number, Sequence>,
    anchors: BTreeSet<(ScopeId, Option<BlockId>, Number)>,
    ends: BTreeSet<(Nanos, Number)>,
    next: Number,
    tokens: usize,
    /// Scopes and contents of sequences that wait no more, until somebody asks.
    ended: Vec<(ScopeId, Vec<Token>)>,
}

impl Wishes {
    /// Whether a wish of a lease or a session waits.
    pub(in crate::manager) fn followed(&self) -> bool {
        !self.leases.is_empty() || !self.sessions.is_empty()
    }

    /// Whether a sequence waits.
    pub(in crate::manager) fn awaited(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// Why no further wish, with so many tokens, can wait.
    pub(in crate::manager) fn full(&mut self, tokens: usize, now: Nanos) -> Option<String> {
        let lasts = |wishes: &mut Vec<Wish>| {
            let alive = |wish: &Wish| wish.until.is_none_or(|until| until > now);
            wishes.retain(|wish| alive(wish) || wish.decode.is_some());
            !wishes.is_empty()
        };
        self.leases.retain(|_, wishes| lasts(wishes));
        self.sessions.retain(|_, wishes| lasts(wishes));
        let followed: usize =
            self.leases.values().chain(self.sessions.values()).map(Vec::len).sum();
        let waiting = followed + self.sequences.len();
        if waiting >= MOST {
            return Some(format!("{waiting} hints wait already, {MOST} can"));
        }
        let all = self.tokens.saturating_add(tokens);
        (all > MOST_TOKENS).then(|| {
            format!("{} tokens of hints wait and {tokens} more, {MOST_TOKENS} can", self.tokens)
        })
    }

    pub(in crate::manager) fn follow_lease(&mut self, id: LeaseId, wish: Wish) {
        put(self.leases.entry(id).or_default(), wish);
    }

    pub(in crate::manager) fn follow_session(&mut self, scope: ScopeId, name: &str, wish: Wish) {
        put(self.sessions.entry((scope, name.to_owned())).or_default(), wish);
    }

    /// The wishes about a lease and its session.
    pub(in crate::manager) fn about(
        &self,
        id: LeaseId,
        scope: ScopeId,
        session: Option<&str>,
    ) -> Vec<Wish> {
        let of = |wishes: Option<&Vec<Wish>>| wishes.cloned().unwrap_or_default();
        let mut all = of(session.and_then(|name| self.sessions.get(&(scope, name.to_owned()))));
        all.extend(of(self.leases.get(&id)));
        all
    }

    /// A sequence of which the block `at` is the last one there.
    pub(in crate::manager) fn await_sequence(
        &mut self,
        scope: ScopeId,
        at: Option<BlockId>,
        content: Vec<Token>,
        wish: Wish,
    ) {
        let same: Vec<Number> = self.anchored(scope, at);
        for number in same {
            let known = &self.sequences[&number];
            if known.content == content && wish.replaces(&known.wish) {
                self.end(number);
            }
        }
        let number = self.next;
        self.next += 1;
        self.tokens += content.len();
        self.anchors.insert((scope, at, number));
        if let Some(until) = wish.until {
            self.ends.insert((until, number));
        }
        self.sequences.insert(number, Sequence { scope, content, at, wish });
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
    ) -> Vec<Wish> {
        let mut wishes = Vec::new();
        for number in self.anchored(scope, parent) {
            let known = self.sequences.get_mut(&number).expect("anchored");
            let rest = known.content.get(before..).unwrap_or_default();
            if !rest.starts_with(tokens) {
                continue;
            }
            wishes.push(known.wish.clone());
            if rest.len() == tokens.len() {
                self.end(number);
            } else {
                self.anchor(number, Some(block));
            }
        }
        wishes
    }

    /// A block is gone: what stood there goes back to its parent.
    pub(in crate::manager) fn gone(
        &mut self,
        scope: ScopeId,
        block: BlockId,
        parent: Option<BlockId>,
    ) {
        for number in self.anchored(scope, Some(block)) {
            self.anchor(number, parent);
        }
    }

    /// A lease has ended.
    pub(in crate::manager) fn end_lease(&mut self, id: LeaseId) {
        self.leases.remove(&id);
    }

    /// A session is over. Returns how many wishes it had.
    pub(in crate::manager) fn end_session(&mut self, scope: ScopeId, name: &str) -> usize {
        self.sessions.remove(&(scope, name.to_owned())).map_or(0, |wishes| wishes.len())
    }

    /// An owner of a scope is gone, where `lease` tells the leases of that scope. Returns how many
    /// wishes it had.
    pub(in crate::manager) fn end_owner(
        &mut self,
        scope: ScopeId,
        owner: &str,
        lease: impl Fn(LeaseId) -> bool,
    ) -> usize {
        let mut ended = 0;
        let others = |wishes: &mut Vec<Wish>, ended: &mut usize| {
            let before = wishes.len();
            wishes.retain(|wish| &*wish.owner != owner);
            *ended += before - wishes.len();
            !wishes.is_empty()
        };
        self.leases.retain(|&id, wishes| !lease(id) || others(wishes, &mut ended));
        self.sessions.retain(|(whose, _), wishes| *whose != scope || others(wishes, &mut ended));
        let mine = |known: &Sequence| known.scope == scope && &*known.wish.owner == owner;
        let all = self.sequences.iter().filter(|(_, known)| mine(known));
        let numbers: Vec<Number> = all.map(|(&number, _)| number).collect();
        ended += numbers.len();
        for number in numbers {
            self.end(number);
        }
        ended
    }

    /// Ends the wishes about sequences whose time has come. Those of sessions and leases say
    /// nothing more.
    pub(in crate::manager) fn expire(&mut self, now: Nanos) {
        while let Some(&(until, number)) = self.ends.first() {
            if until > now {
                return;
            }
            self.end(number);
        }
    }

    /// Takes the scopes and contents of the sequences that wait no more.
    pub(in crate::manager) fn take_ended(&mut self) -> Vec<(ScopeId, Vec<Token>)> {
        std::mem::take(&mut self.ended)
    }

    /// The scopes and contents of the sequences that wait.
    pub(in crate::manager) fn contents(&self) -> impl Iterator<Item = (ScopeId, &[Token])> {
        self.sequences.values().map(|known| (known.scope, &*known.content))
    }

    fn anchored(&self, scope: ScopeId, at: Option<BlockId>) -> Vec<Number> {
        let here = (scope, at, Number::MIN)..=(scope, at, Number::MAX);
        self.anchors.range(here).map(|&(_, _, number)| number).collect()
    }

    fn anchor(&mut self, number: Number, at: Option<BlockId>) {
        let known = self.sequences.get_mut(&number).expect("it waits");
        self.anchors.remove(&(known.scope, known.at, number));
        known.at = at;
        self.anchors.insert((known.scope, at, number));
    }

    fn end(&mut self, number: Number) {
        let Some(known) = self.sequences.remove(&number) else { return };
        self.tokens -= known.content.len();
        self.anchors.remove(&(known.scope, known.at, number));
        if let Some(until) = known.wish.until {
            self.ends.remove(&(until, number));
        }
        self.ended.push((known.scope, known.content));
    }

    /// What is broken, where `alive` tells living blocks and leases.
    pub(in crate::manager) fn audit(
        &self,
        block: impl Fn(BlockId) -> bool,
        lease: impl Fn(LeaseId) -> bool,
    ) -> Vec<String> {
        let mut broken = Vec::new();
        for (number, known) in &self.sequences {
            let place = (known.scope, known.at, *number);
            if known.at.is_some_and(|at| !block(at)) || !self.anchors.contains(&place) {
                broken.push(format!("hint {number} waits at {:?}", known.at));
            }
        }
        let tokens: usize = self.sequences.values().map(|known| known.content.len()).sum();
        if self.anchors.len() != self.sequences.len() || tokens != self.tokens {
            broken.push(format!(
                "{} hints with {tokens} tokens wait in {} places with {}",
                self.sequences.len(),
                self.anchors.len(),
                self.tokens
            ));
        }
        let gone = self.leases.keys().filter(|&&id| !lease(id));
        broken.extend(gone.map(|id| format!("a hint waits for lease {id}, which has ended")));
        broken
    }
}

fn put(wishes: &mut Vec<Wish>, wish: Wish) {
    wishes.retain(|known| !wish.replaces(known));
    wishes.push(wish);
}
