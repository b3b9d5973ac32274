//! A manager driven by raw operations beside a naive world that holds the bytes.
//!
//! The world keeps what every slot contains as the tokens it was computed from, and copies only
//! when a move runs: a destination is spoilt when its move starts and written when it ends. So a
//! slot that is reused too early, a block that moves under a lease, or a copy that is believed
//! before its completion shows as wrong content. After every operation the manager is audited;
//! after every error its snapshot must be what it was.

#![allow(dead_code, reason = "each test binary uses a part")]

mod engine;
mod executor;
mod hints;
mod nonsense;
mod shape;
mod tally;

use std::collections::BTreeMap;

use kvtrie_core::block::{Handle, Layers, LeaseId, MoveId, NO_SLOT, Slot, TierId, Token};
use kvtrie_core::error::{Error, Result};
use kvtrie_core::manager::{Acquire, LoadMode, Manager, Mark, MatchedBlock, Move, Settings};
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::{Kind, Owner};

pub(crate) use shape::settings;

/// One raw operation: its kind and two numbers that are taken modulo what is possible.
pub(crate) type Raw = (u8, u16, u16);

/// How often each thing happened.
pub(crate) type Mix = BTreeMap<&'static str, u64>;

type Content = (Vec<Token>, u16);

struct Running {
    move_: Move,
    started: bool,
    hung: bool,
}

struct Held {
    id: LeaseId,
    scope: usize,
    tokens: Vec<Token>,
    suspended: bool,
    /// The slots that the engine has given it, block by block; empty where kvtrie gives them.
    table: Vec<Slot>,
    /// Tokens behind the match that the engine has still to compute.
    todo: Vec<Token>,
}

/// The manager and what the world knows.
pub(crate) struct World {
    /// The manager under test.
    pub(crate) manager: Manager,
    /// Everything that was handed out, for comparison of two runs.
    pub(crate) log: Vec<Move>,
    /// What happened how often.
    pub(crate) mix: Mix,
    /// One operation in so many is followed by an audit, and compared if it was refused.
    pub(crate) every: u64,
    steps: u64,
    now: u64,
    held: Vec<Held>,
    running: BTreeMap<MoveId, Running>,
    ended_ok: std::collections::BTreeSet<MoveId>,
    bytes: BTreeMap<(TierId, Slot, u16), Content>,
    slots: engine::Engine,
    tally: tally::Tally,
    hints: hints::Hints,
}

impl World {
    /// A world around a fresh manager.
    #[must_use]
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            tally: tally::Tally::new(settings.tiers.len()),
            manager: Manager::new(settings).expect("the settings are good"),
            log: Vec::new(),
            mix: Mix::new(),
            every: 1,
            steps: 0,
            now: 1,
            held: Vec::new(),
            running: BTreeMap::new(),
            ended_ok: std::collections::BTreeSet::new(),
            bytes: BTreeMap::new(),
            slots: engine::Engine::default(),
            hints: hints::Hints::default(),
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.mix.entry(what).or_default() += 1;
    }

    fn size(&self) -> usize {
        self.manager.settings().block_tokens as usize
    }

    fn engine(&self) -> bool {
        self.manager.settings().tiers[0].owner == Owner::Engine
    }

    fn thorough(&self) -> bool {
        self.steps.is_multiple_of(self.every)
    }

    /// Carries out one operation and checks everything that can be checked.
    pub(crate) fn step(&mut self, raw: Raw) {
        let (kind, a, b) = raw;
        self.steps += 1;
        self.now += u64::from(a % 7);
        let (a, b) = (usize::from(a), usize::from(b));
        match kind % 54 {
            0..=4 => self.acquire(a, b),
            5..=13 => self.compute(a, b),
            14 | 15 => self.reserve(a, b),
            16..=18 => self.release(a),
            19 => self.fork(a, b),
            20 => self.truncate(a, b),
            21 => self.suspend(a),
            22 | 23 => self.resume(a),
            24..=27 => self.hand_out(1 + a % 16),
            28..=30 => self.start(a),
            31..=42 => self.finish(a, b),
            43 if b % 4 == 0 => self.flush(),
            43 if b % 4 == 1 => self.appear(a, b),
            43 => self.mark(a, b),
            44 | 45 => self.load(a, b),
            46 => self.nonsense(a, b),
            47 => self.run_all(),
            _ => self.hint(a, b),
        }
        if self.thorough()
            && let Err(error) = self.manager.audit()
        {
            panic!("after {raw:?}: {error}");
        }
        self.tally.check(&mut self.manager);
        self.check_leases(raw);
        self.follow_hints(raw);
    }

    /// Runs every move to its end and lets every lease go.
    pub(crate) fn drain(&mut self) {
        for round in 0..10_000 {
            self.hand_out(64);
            if self.running.is_empty() {
                break;
            }
            assert!(round < 9_999, "moves never end: {:?}", self.manager.pending());
            self.run_all();
        }
        while !self.held.is_empty() {
            self.release(0);
        }
        for _ in 0..10_000 {
            self.hand_out(64);
            if self.running.is_empty() {
                break;
            }
            self.run_all();
        }
        self.manager.audit().unwrap();
        self.tally.check(&mut self.manager);
        let left = self.manager.pending().1;
        let state = self.manager.snapshot();
        assert_eq!(left, 0, "moves are left: {}", String::from_utf8_lossy(&state));
    }

    /// An operation that may fail, and then must have changed nothing.
    fn attempt<T>(
        &mut self,
        what: &'static str,
        f: impl FnOnce(&mut Manager, u64) -> Result<T>,
    ) -> Option<T> {
        let now = self.now;
        // Time passes whether the call goes through or not.
        self.manager.hint(&[], now).expect("the manager is open");
        let before = self.thorough().then(|| self.manager.snapshot());
        match f(&mut self.manager, now) {
            Ok(value) => {
                self.count(what);
                Some(value)
            }
            Err(error) => {
                self.count(match error {
                    Error::NoSpace { .. } => "no space",
                    Error::Config(_) => "config error",
                    Error::Closed(_) => "closed error",
                    Error::Invariant(_) => panic!("{what}: {error}"),
                });
                if let Some(before) = before {
                    let after = self.manager.snapshot();
                    assert!(
                        before == after,
                        "{what} failed with '{error}' and changed the state:\n{}",
                        difference(&before, &after)
                    );
                }
                None
            }
        }
    }

    fn ask(&mut self, what: &'static str, ask: &Acquire<'_>) -> Option<LeaseId> {
        let mut refusal = None;
        let lease = self.attempt(what, |m, now| {
            m.acquire(ask, now).inspect_err(|error| refusal = Some(error.clone()))
        });
        let ended = lease.ok_or_else(|| refusal.as_ref().expect("it was refused"));
        self.tally.acquired(&self.manager, ask.tokens.len(), ended);
        lease
    }

    fn sequence(a: usize, b: usize) -> Vec<Token> {
        // Few stems and few branches, so that prefixes are shared and cut everywhere.
        let len = 1 + b % 13;
        let stem = a % 3;
        let branch = (a / 3) % 5;
        let turn = (a / 15) % 4 * 4;
        (0..len)
            .map(|at| {
                let token = if at < turn { stem } else { 10 * stem + branch + 3 };
                u32::try_from(token * 100 + at).unwrap()
            })
            .collect()
    }

    fn scope(which: usize) -> Scope {
        match which % 8 {
            0 => Scope { tenant: b"other".to_vec(), ..Scope::default() },
            1 => Scope { extra: vec![(4, vec![7])], ..Scope::default() },
            _ => Scope::default(),
        }
    }

    /// Whether a scope is leaf-only: whoever used it first has said so, or the settings.
    fn leaf_only(&self, scope: &Scope) -> bool {
        let state = String::from_utf8(self.manager.snapshot()).expect("text");
        let named = format!(" {:?} {:?} leaf-only", scope.tenant, scope.lora);
        state.lines().any(|line| line.starts_with("scope ") && line.ends_with(&named))
    }

    fn acquire(&mut self, a: usize, b: usize) {
        if self.held.len() > 3 {
            return self.release(a);
        }
        let tokens = Self::sequence(a, b);
        let mode = [LoadMode::Plan, LoadMode::All, LoadMode::All, LoadMode::None][b / 13 % 4];
        let session = (!a.is_multiple_of(4)).then(|| ["s", "t", "u"][a % 3]);
        let scope = Self::scope(a / 60);
        let ask = Acquire {
            tokens: &tokens,
            scope: scope.clone(),
            session,
            keep: 1,
            reserve: b / 52 % 3,
            load: mode,
            deadline: b.is_multiple_of(31).then_some(self.now + 100),
        };
        let probe = self.manager.lookup(&tokens, self.now, &scope, 1).expect("a good lookup");
        let Some(id) = self.ask("acquire", &ask) else { return };
        let lease = self.manager.lease(id).unwrap();
        let matched = lease.matched();
        // An engine that loads all of a prefix is given none with a gap: the match ends before what
        // would have to pass through a host that is full.
        let gap = mode == LoadMode::All
            && probe
                .blocks
                .get(matched / self.size())
                .is_some_and(|next| next.copies.iter().any(|copy| copy.tier > 1));
        let shorter = matched < probe.tokens && gap && self.leaf_only(&scope);
        assert!(matched == probe.tokens || shorter, "acquire and lookup match alike");
        let todo = tokens[matched..].to_vec();
        self.used(&tokens[..matched], &scope);
        let table = Vec::new();
        self.held.push(Held { id, scope: a / 60, tokens, suspended: false, table, todo });
        if b.is_multiple_of(6) {
            self.bind_some(self.held.len() - 1, 1);
        } else {
            self.bind(self.held.len() - 1);
        }
    }

    /// The engine names slots for everything it may touch.
    fn bind(&mut self, at: usize) {
        let blocks = self.held[at].tokens.len().div_ceil(self.size()) + 4;
        self.bind_some(at, blocks);
    }

    /// The engine names the slots of at least so many blocks, old ones once more.
    fn bind_some(&mut self, at: usize, blocks: usize) {
        if !self.engine() {
            return;
        }
        let Held { id, table, .. } = &mut self.held[at];
        self.slots.grow(table, blocks);
        let (id, table) = (*id, table.clone());
        let bound = self.attempt("bind", |m, _| m.bind(id, 0, &table));
        assert!(bound.is_some(), "lease {id} was not bound to its own table {table:?}");
    }

    fn pick(&self, a: usize) -> Option<usize> {
        (!self.held.is_empty()).then(|| a % self.held.len())
    }

    /// The engine computes holes and some of the tokens it has still to compute, and commits.
    fn compute(&mut self, a: usize, b: usize) {
        let Some(at) = self.pick(a) else { return };
        let id = self.held[at].id;
        if self.held[at].suspended {
            self.attempt("commit", |m, now| m.commit(id, &[5], now));
            return;
        }
        self.bind(at);
        if !self.manager.awaits(id).unwrap().is_empty() {
            return;
        }
        let mut fresh = self.held[at].todo.clone();
        if fresh.is_empty() {
            fresh = (0..=(b % 4)).map(|i| u32::try_from(9000 + (b + i) % 3).unwrap()).collect();
        }
        fresh.truncate(1 + b % 7);
        let room = self.manager.room_left(id).unwrap();
        if fresh.len() > room {
            self.attempt("commit", |m, now| m.commit(id, &fresh, now));
            return;
        }
        self.write_holes(at);
        let known = self.manager.lease_tokens(id).unwrap();
        self.held[at].tokens.truncate(known);
        assert_eq!(self.held[at].tokens.len(), known, "the world lost count of a lease's tokens");
        let from = known;
        self.held[at].tokens.extend_from_slice(&fresh);
        self.write(at, from);
        let size = self.size();
        let sealed = (from + fresh.len()) / size - from / size;
        let whose = Self::scope(self.held[at].scope);
        let all = self.held[at].tokens.clone();
        let known = self.manager.known(&all, &whose).unwrap();
        self.hints.used(known.into_iter().skip(from / size).take(sealed));
        let done = self.attempt("commit", |m, now| m.commit(id, &fresh, now));
        let done = done.expect("a commit with room and without open moves goes through");
        let told = done.new.len().max(done.duplicate.len());
        assert!(told <= sealed + from / size, "more blocks told than sealed");
        let todo = &mut self.held[at].todo;
        todo.drain(..fresh.len().min(todo.len()));
    }

    fn write_holes(&mut self, at: usize) {
        let id = self.held[at].id;
        let size = self.size();
        let holes: Vec<_> = self.manager.lease(id).unwrap().recompute().collect();
        if !holes.is_empty() {
            self.count("hole computed");
        }
        let (rows, table) = self.manager.slots(id, 0).unwrap();
        let blocks = table.len() / rows;
        for (block, layers) in holes {
            for layer in layers.iter() {
                let row = if rows == 1 { 0 } else { usize::from(layer) };
                let slot = table[row * blocks + block as usize];
                let tokens = self.held[at].tokens[..(block as usize + 1) * size].to_vec();
                self.put(0, slot, layer, (tokens, layer));
            }
        }
    }

    /// The engine writes the KV of a lease's tokens from `from` on.
    fn write(&mut self, at: usize, from: usize) {
        let held = &self.held[at];
        let size = self.size();
        let (rows, table) = self.manager.slots(held.id, 0).unwrap();
        let blocks = table.len() / rows;
        let layers = self.manager.settings().layers;
        let tokens = held.tokens.clone();
        for block in from / size..tokens.len().div_ceil(size) {
            for layer in 0..layers {
                let row = if rows == 1 { 0 } else { usize::from(layer) };
                let slot = table[row * blocks + block];
                let end = tokens.len().min((block + 1) * size);
                if from > block * size {
                    let (old, _) = self.get(0, slot, layer).expect("the tail was written");
                    assert!(
                        old.starts_with(&tokens[..from]),
                        "the tail of lease {} was {old:?}",
                        held_id(&self.held[at])
                    );
                }
                self.put(0, slot, layer, (tokens[..end].to_vec(), layer));
            }
        }
    }

    fn key(&self, tier: TierId, slot: Slot, layer: u16) -> (TierId, Slot, u16) {
        let layer_slots = self.manager.settings().tiers[tier].layer_slots;
        (tier, slot, if layer_slots { u16::MAX } else { layer })
    }

    fn put(&mut self, tier: TierId, slot: Slot, layer: u16, content: Content) {
        assert_ne!(slot, NO_SLOT, "a write without a slot");
        let key = self.key(tier, slot, layer);
        self.bytes.insert(key, content);
    }

    fn get(&self, tier: TierId, slot: Slot, layer: u16) -> Option<Content> {
        self.bytes.get(&self.key(tier, slot, layer)).cloned()
    }

    /// What every lease may count on is there: each block of its path that needs no computing.
    fn check_leases(&mut self, raw: Raw) {
        let size = self.size();
        let layers = self.manager.settings().layers;
        for held in &self.held {
            if held.suspended {
                continue;
            }
            if self.engine() {
                let (_, known) = self.manager.slots(held.id, 0).unwrap();
                let kept = known.iter().zip(&held.table).all(|(one, other)| one == other);
                let rest = known.iter().skip(held.table.len()).all(|&slot| slot == NO_SLOT);
                assert!(
                    kept && rest,
                    "after {raw:?}: lease {} uses the slots {known:?}, the engine {:?}",
                    held.id,
                    held.table
                );
            }
            if !self.manager.awaits(held.id).unwrap().is_empty() {
                continue;
            }
            let lease = self.manager.lease(held.id).unwrap();
            let holes: BTreeMap<u32, _> = lease.recompute().collect();
            let (rows, table) = self.manager.slots(held.id, 0).unwrap();
            let blocks = table.len() / rows;
            let full = self.manager.lease_tokens(held.id).unwrap() / size;
            for block in 0..full {
                for layer in 0..layers {
                    let hole = holes.get(&u32::try_from(block).unwrap());
                    if hole.is_some_and(|layers| layers.contains(layer)) {
                        continue;
                    }
                    let row = if rows == 1 { 0 } else { usize::from(layer) };
                    let slot = table[row * blocks + block];
                    let wanted = &held.tokens[..(block + 1) * size];
                    let found = self.get(0, slot, layer);
                    assert!(
                        found.as_ref().is_some_and(|(tokens, at)| tokens == wanted && *at == layer),
                        "after {raw:?}: lease {} block {block} layer {layer} slot {slot}: wanted \
                         {wanted:?}, found {found:?}",
                        held.id
                    );
                }
            }
        }
    }

    fn reserve(&mut self, a: usize, b: usize) {
        let Some(at) = self.pick(a) else { return };
        let id = self.held[at].id;
        let tokens = 1 + b % 6;
        if self.attempt("reserve", |m, now| m.reserve(id, tokens, now)).is_some() && !self.engine()
        {
            assert!(self.manager.room_left(id).unwrap() >= tokens);
        }
    }

    fn release(&mut self, a: usize) {
        let Some(at) = self.pick(a) else { return };
        let held = self.held.remove(at);
        let touching = self.attempt("release", |m, now| m.release(held.id, now));
        self.slots.leave(touching.expect("releasing never fails"), held.table);
        self.attempt("release again", |m, now| m.release(held.id, now));
    }

    fn fork(&mut self, a: usize, b: usize) {
        let Some(at) = self.pick(a) else { return };
        if self.held.len() > 5 || self.engine() {
            return;
        }
        let id = self.held[at].id;
        let n = 1 + b % 2;
        let Some(forks) = self.attempt("fork", |m, now| m.fork(id, n, now)) else { return };
        let known = self.manager.lease_tokens(id).unwrap();
        let tokens = self.held[at].tokens[..known].to_vec();
        let scope = self.held[at].scope;
        for id in forks {
            let tokens = tokens.clone();
            let (table, todo) = (Vec::new(), Vec::new());
            self.held.push(Held { id, scope, tokens, suspended: false, table, todo });
        }
    }

    fn truncate(&mut self, a: usize, b: usize) {
        let Some(at) = self.pick(a) else { return };
        if self.engine() {
            return;
        }
        let id = self.held[at].id;
        let known = self.manager.lease_tokens(id).unwrap();
        let to = b % (known + 2);
        if self.attempt("truncate", |m, now| m.truncate(id, to, now)).is_some() && to < known {
            self.held[at].tokens.truncate(to);
            self.held[at].todo.clear();
        }
    }

    fn suspend(&mut self, a: usize) {
        let Some(at) = self.pick(a) else { return };
        let id = self.held[at].id;
        let held = &self.held[at];
        let known = self.manager.lease_tokens(id).unwrap();
        let to = self.manager.settings().tiers.get(1).map_or(Kind::Host, |tier| tier.kind);
        if held.suspended {
            self.attempt("suspend", |m, now| m.suspend(id, to, now));
        } else if let Some(touching) = self.attempt("suspend", |m, now| m.suspend(id, to, now)) {
            let held = &mut self.held[at];
            self.slots.leave(touching, std::mem::take(&mut held.table));
            held.suspended = true;
            held.tokens.truncate(known);
            held.todo.clear();
        }
    }

    fn resume(&mut self, a: usize) {
        let Some(at) = self.pick(a) else { return };
        let id = self.held[at].id;
        let mode = [LoadMode::Plan, LoadMode::All, LoadMode::None][a / 5 % 3];
        if self.attempt("resume", |m, now| m.resume(id, 2, mode, now)).is_some() {
            let matched = self.manager.lease(id).unwrap().matched();
            let (whose, tokens) = (Self::scope(self.held[at].scope), self.held[at].tokens.clone());
            self.used(&tokens[..matched], &whose);
            let held = &mut self.held[at];
            held.suspended = false;
            held.todo = held.tokens[matched..].to_vec();
            self.bind(at);
        }
    }

    fn load(&mut self, a: usize, b: usize) {
        let Some(at) = self.pick(a) else { return };
        let id = self.held[at].id;
        let layers = [None, None, Some(Layers::new(0, 1)), Some(Layers::new(1, 3))][b % 4];
        let blocks = [None, Some(0..1), Some(1..2), Some(2..2)][b / 4 % 4].clone();
        self.attempt("load", |m, now| m.load(id, layers, blocks, now));
    }

    fn mark(&mut self, a: usize, b: usize) {
        if self.manager.settings().tiers.len() < 2 {
            return;
        }
        let tokens = Self::sequence(a, b);
        let tier = 1 + b % (self.manager.settings().tiers.len() - 1);
        let mark = Mark {
            tokens: &tokens,
            scope: Scope::default(),
            tier,
            present: false,
            ready: None,
            first: None,
        };
        self.attempt("mark", |m, now| m.mark(&mark, now));
    }

    /// Blocks appear on a tier, and their bytes with them.
    fn appear(&mut self, a: usize, b: usize) {
        let (tokens, tier) = (Self::sequence(a, b), b / 13 % self.manager.settings().tiers.len());
        let full = tokens.len() / self.size();
        let all = Layers::new(0, self.manager.settings().layers);
        let rows = self.manager.settings().tiers[tier].layer_slots;
        let units = full * usize::from(if rows { all.hi } else { 1 });
        if self.manager.occupancy(tier).free < units as u64 {
            // A store may still read what they would be written over.
            return;
        }
        let scope = Scope::default();
        let there = |m: &Manager, blocks: &[Handle]| {
            let copy = |block: MatchedBlock| block.copies.into_iter().find(|c| c.tier == tier);
            m.describe(blocks, 0).into_iter().map(copy).collect::<Vec<_>>()
        };
        let known = self.manager.known(&tokens, &scope).expect("a good scope");
        let before = there(&self.manager, &known);
        let ready = a.is_multiple_of(3).then_some(self.now + 5);
        let mark = Mark { tokens: &tokens, scope, tier, present: true, ready, first: None };
        let Some(blocks) = self.attempt("appear", |m, now| m.mark(&mark, now)) else { return };
        assert_eq!(blocks.len(), full, "all of them are there or will be");
        for (at, copy) in there(&self.manager, &blocks).into_iter().enumerate() {
            let copy = copy.unwrap_or_else(|| panic!("block {at} is not on tier {tier}"));
            assert_eq!(copy.coming, all, "block {at} on tier {tier}");
            let old = before.get(at).copied().flatten().map_or(Layers::NONE, |copy| copy.coming);
            let slots = self.manager.copy_slots(blocks[at], &copy);
            for layer in all.iter().filter(|&layer| !old.contains(layer)) {
                let slot = slots[if rows { usize::from(layer) } else { 0 }];
                let end = (at + 1) * self.size();
                self.put(tier, slot, layer, (tokens[..end].to_vec(), layer));
            }
        }
    }

    fn flush(&mut self) {
        self.attempt("flush", Manager::flush);
    }
}

fn held_id(held: &Held) -> LeaseId {
    held.id
}

fn difference(before: &[u8], after: &[u8]) -> String {
    let (before, after) = (String::from_utf8_lossy(before), String::from_utf8_lossy(after));
    let changed = before.lines().zip(after.lines()).filter(|(a, b)| a != b).take(3);
    changed.flat_map(|(a, b)| ["- ", a, "\n+ ", b, "\n"]).collect()
}
