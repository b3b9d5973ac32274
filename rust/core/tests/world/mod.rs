//! World: a manager driven by raw operations, compared with a naive model that holds the bytes.
//!
//! The model stores for each slot the tokens it was computed from, and copies only when a move
//! runs: a destination is garbage from the start of a move and written at its end. So a slot reused
//! too early, a block evicted under a lease, or a copy used before its completion shows as wrong
//! content. The slots of a lease stay as they are between two of its calls, but for those of blocks
//! whose loads have failed, and none is written while a move reads it. After every operation the manager is audited; after every error its snapshot must be
//! unchanged.

#![allow(dead_code, reason = "each test binary uses a part")]

mod ahead;
mod compute;
mod directory;
mod engine;
mod executor;
mod generation;
mod hints;
mod index;
mod mark;
mod nonsense;
mod shape;
mod tally;

use std::collections::BTreeMap;

use kvtrie_core::{
    Acquire, Error, Event, Handle, Kind, Layers, LeaseId, LoadMode, Manager, Move, MoveId, NO_SLOT,
    Owner, Result, Scope, Settings, Slot, TierId, Token,
};

#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use shape::{engines, mixed, settings, shared};

/// A raw operation: its kind and two numbers, taken modulo the possibilities.
pub(crate) type Raw = (u8, u16, u16);

/// Counts by name.
pub(crate) type Mix = BTreeMap<&'static str, u64>;

type Content = (Vec<Token>, u16);

struct Running {
    move_: Move,
    started: bool,
    hung: bool,
    /// It failed on one rank, and runs on the others.
    elsewhere: bool,
}

struct Held {
    id: LeaseId,
    scope: usize,
    tokens: Vec<Token>,
    suspended: bool,
    /// The slots bound by the engine, block by block; empty if kvtrie owns them.
    table: Vec<Slot>,
    /// The slots since its last call, row by row; empty just after a call.
    known: Vec<Vec<Slot>>,
    /// Tokens after the match that the engine has still to compute.
    todo: Vec<Token>,
}

/// The manager and the model.
pub(crate) struct World {
    /// The manager under test.
    pub(crate) manager: Manager,
    /// Everything that was handed out, to compare two runs.
    pub(crate) log: Vec<Move>,
    /// Counts of what happened.
    pub(crate) mix: Mix,
    /// One operation in `every` is audited, and the state compared if it was refused.
    pub(crate) every: u64,
    /// Whether an engine that owns its slots has blocks stored ahead.
    pub(crate) ahead: bool,
    steps: u64,
    now: u64,
    held: Vec<Held>,
    running: BTreeMap<MoveId, Running>,
    ended_ok: std::collections::BTreeSet<MoveId>,
    bytes: BTreeMap<(TierId, Slot, u16), Content>,
    slots: engine::Engine,
    index: Option<index::Index>,
    /// Blocks to price, some of which were removed since.
    prices: Vec<Handle>,
    tally: tally::Tally,
    directory: directory::Directory,
    hints: hints::Hints,
    generation: generation::Generation,
}

impl World {
    /// A world around a fresh manager.
    #[must_use]
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            tally: tally::Tally::new(settings.tiers.len()),
            directory: directory::Directory::default(),
            manager: Manager::new(settings).expect("the settings are good"),
            log: Vec::new(),
            mix: Mix::new(),
            every: 1,
            ahead: true,
            steps: 0,
            now: 1,
            held: Vec::new(),
            running: BTreeMap::new(),
            ended_ok: std::collections::BTreeSet::new(),
            bytes: BTreeMap::new(),
            slots: engine::Engine::default(),
            index: None,
            prices: Vec::new(),
            hints: hints::Hints::default(),
            generation: generation::Generation::default(),
        }
    }

    /// Every eviction so far.
    pub(crate) fn evictions(&self) -> &[Event] {
        &self.tally.events
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

    /// Makes one operation and checks all of the model.
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
            52 => self.compute_many(b),
            53 if a.is_multiple_of(3) => self.price(b),
            53 => self.index(a, b),
            _ => self.hint(a, b),
        }
        if self.thorough()
            && let Err(error) = self.manager.audit()
        {
            panic!("after {raw:?}: {error}");
        }
        self.tally.check(&mut self.manager);
        let thorough = self.thorough();
        self.directory.check(&mut self.manager, thorough);
        self.check_generation();
        self.check_leases(raw);
        self.follow_hints(raw);
    }

    /// Ends every move and every lease.
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
        self.directory.check(&mut self.manager, true);
        let left = self.manager.pending().1;
        let state = self.manager.snapshot();
        assert_eq!(left, 0, "moves are left: {}", String::from_utf8_lossy(&state));
        assert_eq!(self.manager.shared_stores().0, 0, "stores wait for ever");
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
        let deferred = ask.load == LoadMode::None;
        self.tally.acquired(&self.manager, (ask.tokens.len(), deferred), ended);
        lease
    }

    fn sequence(a: usize, b: usize) -> Vec<Token> {
        // Few stems and few branches: prefixes are shared and diverge everywhere.
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
        // Some scopes are frequent; the many others are rare, so that they are forgotten in
        // between.
        let other = u8::try_from(which / 8 % 100).unwrap();
        let digest = |at: u8, digest: u8| vec![(u64::from(at), vec![digest])];
        match which % 8 {
            0 => Scope { tenant: b"other".to_vec(), ..Scope::default() },
            1 => Scope { extra: digest(4, 7), ..Scope::default() },
            2 => Scope { tenant: vec![other], ..Scope::default() },
            3 => Scope { extra: digest(other % 9, other % 7), ..Scope::default() },
            4 => Scope {
                tenant: vec![other % 3],
                lora: other.to_string(),
                extra: digest(1, other),
                ..Scope::default()
            },
            _ => Scope::default(),
        }
    }

    /// The content that a sequence's KV is computed from: its tokens and its scope's digests.
    fn written(scope: &Scope, tokens: &[Token]) -> Vec<Token> {
        let Scope { tenant, lora, extra, .. } = scope;
        let name = tenant.iter().chain(lora.as_bytes());
        let whose = name.fold(0, |sum: Token, &byte| (sum * 256 + Token::from(byte)) % 100_000);
        let mut written: Vec<Token> = tokens.iter().map(|token| token + 10_000 * whose).collect();
        for (at, digest) in extra {
            if let Some(token) = usize::try_from(*at).ok().and_then(|at| written.get_mut(at)) {
                *token += 1_000_000_000 + 1_000_000 * Token::from(digest[0]);
            }
        }
        written
    }

    /// Whether a scope is leaf-only, by its first user or else the settings.
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
            session_blocks: a.is_multiple_of(9).then_some(6),
            keep: 1,
            reserve: b / 52 % 3,
            load: mode,
            deadline: b.is_multiple_of(31).then_some(self.now + 100),
            layerwise: a.is_multiple_of(3),
        };
        let probe = self.manager.lookup(&tokens, self.now, &scope, 1).expect("a good lookup");
        let Some(id) = self.ask("acquire", &ask) else { return };
        let lease = self.manager.lease(id).unwrap();
        let matched = lease.matched();
        // An engine that loads all of a prefix gets none with a gap: the match ends before the
        // first block that would have to pass through a full host.
        let gap = mode == LoadMode::All
            && probe
                .blocks
                .get(matched / self.size())
                .is_some_and(|next| next.copies.iter().any(|copy| copy.tier > 1));
        let shorter = matched < probe.tokens && gap && self.leaf_only(&scope);
        assert!(matched == probe.tokens || shorter, "acquire and lookup match alike");
        let todo = tokens[matched..].to_vec();
        self.used(&tokens[..matched], &scope);
        let (table, known) = (Vec::new(), Vec::new());
        self.held.push(Held { id, scope: a / 60, tokens, suspended: false, table, known, todo });
        if b.is_multiple_of(6) {
            self.bind_some(self.held.len() - 1, 1);
        } else {
            self.bind(self.held.len() - 1);
        }
    }

    /// Binds the engine's slots for everything a lease may touch.
    fn bind(&mut self, at: usize) {
        let blocks = self.held[at].tokens.len().div_ceil(self.size()) + 4;
        self.bind_some(at, blocks);
    }

    /// Binds the slots of at least `blocks` blocks, old ones again.
    fn bind_some(&mut self, at: usize, blocks: usize) {
        if !self.engine() {
            return;
        }
        let Held { id, table, known, .. } = &mut self.held[at];
        known.clear();
        self.slots.grow(table, blocks);
        let (id, table) = (*id, table.clone());
        let bound = self.attempt("bind", |m, _| m.bind(id, 0, &table));
        assert!(bound.is_some(), "lease {id} was not bound to its own table {table:?}");
    }

    fn pick(&self, a: usize) -> Option<usize> {
        (!self.held.is_empty()).then(|| a % self.held.len())
    }

    fn key(&self, tier: TierId, slot: Slot, layer: u16) -> (TierId, Slot, u16) {
        let layer_slots = self.manager.settings().tiers[tier].layer_slots;
        (tier, slot, if layer_slots { u16::MAX } else { layer })
    }

    fn put(&mut self, tier: TierId, slot: Slot, layer: u16, content: Content) {
        assert_ne!(slot, NO_SLOT, "a write without a slot");
        let key = self.key(tier, slot, layer);
        // An engine that owns its slots orders what it reads and writes there.
        let reads = |running: &&Running| {
            let started = running.started && !self.engine();
            let may_start =
                self.ended_ok.contains(&running.move_.after) || running.move_.after == 0;
            // A worker reads for a shared tier at any time once it has the move.
            (started || may_start && self.stores_to_shared(&running.move_))
                && (!running.hung || running.elsewhere)
        };
        for Running { move_, .. } in self.running.values().filter(reads) {
            let read = self.key(move_.src, move_.src_slot, layer) == key;
            assert!(!(read && move_.layers.contains(layer)), "{move_:?} reads what is written");
        }
        self.bytes.insert(key, content);
    }

    fn get(&self, tier: TierId, slot: Slot, layer: u16) -> Option<Content> {
        self.bytes.get(&self.key(tier, slot, layer)).cloned()
    }

    /// The slots of every lease are those that it had after its last call.
    fn check_slots(&mut self, raw: Raw) {
        for held in self.held.iter_mut().filter(|held| !held.suspended) {
            let (rows, table) = self.manager.slots(held.id, 0).unwrap();
            let now = table.chunks((table.len() / rows).max(1)).map(<[Slot]>::to_vec);
            let now: Vec<Vec<Slot>> = now.take(rows).collect();
            for (before, now) in held.known.iter().zip(&now) {
                assert!(
                    now.starts_with(before),
                    "after {raw:?}: lease {} had the slots {before:?}, now {now:?}",
                    held.id
                );
            }
            held.known = now;
        }
    }

    /// Every lease's path is resident, but for the blocks it has to compute.
    fn check_leases(&mut self, raw: Raw) {
        self.check_slots(raw);
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
            let written = Self::written(&Self::scope(held.scope), &held.tokens);
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
                    let wanted = &written[..(block + 1) * size];
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
        self.held[at].known.clear();
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
        self.held[at].known.clear();
        let Some(forks) = self.attempt("fork", |m, now| m.fork(id, n, now)) else { return };
        let known = self.manager.lease_tokens(id).unwrap();
        let tokens = self.held[at].tokens[..known].to_vec();
        let scope = self.held[at].scope;
        for id in forks {
            let tokens = tokens.clone();
            let (table, known, todo) = (Vec::new(), Vec::new(), Vec::new());
            self.held.push(Held { id, scope, tokens, suspended: false, table, known, todo });
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
        self.held[at].known.clear();
        if self.attempt("truncate", |m, now| m.truncate(id, to, now)).is_some() && to < known {
            self.held[at].tokens.truncate(to);
            self.held[at].todo.clear();
        }
    }

    fn suspend(&mut self, a: usize) {
        let Some(at) = self.pick(a) else { return };
        let id = self.held[at].id;
        self.held[at].known.clear();
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
        let computed = self.tally.computed(&self.manager, id);
        self.held[at].known.clear();
        if self.attempt("load", |m, now| m.load(id, layers, blocks, now)).is_some() {
            self.tally.loaded(&self.manager, id, computed);
        }
    }

    /// Sets the costs of blocks, some of which were removed since.
    fn price(&mut self, b: usize) {
        let priced = self.manager.settings().priced;
        let unpriced = self.attempt("unpriced", |m, _| m.unpriced(1 + b % 4));
        assert_eq!(unpriced.is_some(), priced);
        self.prices.extend(unpriced.into_iter().flatten().map(|known| known.block));
        let blocks = self.prices.split_off(self.prices.len().saturating_sub(1 + b / 4 % 4));
        let cost = [1.0, 0.001, 1e9, 17.0, -1.0, f64::NAN][b % 6];
        let costs = vec![cost; blocks.len()];
        self.attempt("price", |m, now| m.set_costs(&blocks, &costs, now));
    }

    fn flush(&mut self) {
        self.attempt("flush", Manager::flush);
    }
}

fn difference(before: &[u8], after: &[u8]) -> String {
    let (before, after) = (String::from_utf8_lossy(before), String::from_utf8_lossy(after));
    let changed = before.lines().zip(after.lines()).filter(|(a, b)| a != b).take(3);
    changed.flat_map(|(a, b)| ["- ", a, "\n+ ", b, "\n"]).collect()
}
