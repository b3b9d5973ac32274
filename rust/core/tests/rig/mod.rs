//! Rig: a manager with a clock and an executor without bytes, for scripted tests.
//!
//! Invariant: every call is followed by an audit, and a failed call has left the snapshot
//! unchanged. Cost: O(everything) per call.

#![allow(dead_code, reason = "each test binary uses a part")]

use kvtrie_core::{
    Acquire, Committed, CostModel, DropOrder, Error, Event, Handle, Kind, LaneSpec, Layers,
    LeaseId, LoadMode, Manager, Mark, Move, MoveId, Nanos, Outcome, Owner, Result, Retain, Scope,
    Settings, Slot, Structure, Target, TierId, TierSpec, Token, Write,
};

/// Tokens of one block, unless a test says otherwise.
pub(crate) const SIZE: usize = 4;

/// Layers of the model, unless a test says otherwise.
pub(crate) const LAYERS: u16 = 4;

/// All of them.
pub(crate) const ALL: Layers = Layers::new(0, LAYERS);

/// Number of cases of a slow property: an eighth of `all`, or all under `make test-deep`.
pub(crate) fn share(all: u32) -> u32 {
    if std::env::var_os("KVTRIE_DEEP").is_some() { all } else { all.div_ceil(8) }
}

/// The first tier.
pub(crate) const GPU: TierId = 0;

/// The second tier.
pub(crate) const HOST: TierId = 1;

/// The third tier.
pub(crate) const DISK: TierId = 2;

/// The fourth tier.
pub(crate) const REMOTE: TierId = 3;

/// A write-back tier of `blocks` blocks with separate lanes.
pub(crate) fn tier(kind: Kind, blocks: u32) -> TierSpec {
    let lane = |way: &str| LaneSpec {
        name: format!("{} {way}", kind.name()),
        bytes_per_s: 1_000_000_000,
        latency_ns: 10,
        shares: None,
    };
    TierSpec {
        kind,
        blocks,
        owner: Owner::Kvtrie,
        write: Write::Back,
        admit_after: 1,
        free_low: 0.0,
        growth_reserve: 0.0,
        retained_share: 0.5,
        layer_slots: false,
        kept: false,
        policy: None,
        read: lane("up"),
        store: lane("down"),
    }
}

/// A tier with one slot per layer.
pub(crate) fn layered(kind: Kind, blocks: u32) -> TierSpec {
    TierSpec { layer_slots: true, ..tier(kind, blocks) }
}

/// Four layers, four tokens per block, leaf-only, least recently used first.
pub(crate) fn settings(tiers: Vec<TierSpec>) -> Settings {
    Settings {
        fingerprint: "rig".to_owned(),
        layers: LAYERS,
        layer_bytes: 100,
        block_tokens: 4,
        token_weight: 1,
        tiers,
        policy: "lru".to_owned(),
        reuse: true,
        epsilon: 0.0,
        cost: CostModel::default_curve(1000.0).expect("good numbers"),
        priced: false,
        structure: Structure::LeafOnly,
        drop_order: DropOrder::Shallow,
        ranks: 1,
        events: 10_000,
        block_events: 0,
        eviction_log: 0,
        groups: None,
        explain: false,
        producer_key: None,
    }
}

/// The same settings with holes.
pub(crate) fn holes(tiers: Vec<TierSpec>) -> Settings {
    Settings { structure: Structure::Holes, ..settings(tiers) }
}

/// `blocks` full blocks that share none with another stem.
pub(crate) fn tokens(stem: u32, blocks: usize) -> Vec<Token> {
    (0..).take(blocks * SIZE).map(|at| stem * 1000 + at).collect()
}

/// A request for all of `tokens` that keeps none and loads all that it can.
pub(crate) fn all_of(tokens: &[Token]) -> Acquire<'_> {
    Acquire { tokens, load: LoadMode::All, ..Acquire::default() }
}

/// A hint for a target's blocks, without an end.
pub(crate) fn retain(target: Target, priority: u8) -> Retain {
    Retain {
        target,
        start: 0,
        end: None,
        priority,
        ttl: None,
        decode_priority: None,
        decode_ttl: None,
        owner: None,
    }
}

/// A manager and the time.
pub(crate) struct Rig {
    pub(crate) manager: Manager,
    pub(crate) now: Nanos,
}

impl Rig {
    /// A rig at time 1000.
    pub(crate) fn new(settings: Settings) -> Self {
        Self { manager: Manager::new(settings).expect("good settings"), now: 1000 }
    }

    /// Makes a call, with the checks that follow every call.
    pub(crate) fn call<T>(
        &mut self,
        call: impl FnOnce(&mut Manager, Nanos) -> Result<T>,
    ) -> Result<T> {
        // Time passes whether the call goes through or not.
        if self.now > self.manager.now() {
            self.manager.hint(&[], self.now).ok();
        }
        let before = self.manager.snapshot();
        let result = call(&mut self.manager, self.now);
        self.manager.audit().expect("every invariant holds");
        if result.is_err() {
            let after = self.manager.snapshot();
            assert!(before == after, "a call that failed changed the state");
        }
        result
    }

    /// A call that must be refused with a text that contains `part`.
    pub(crate) fn refused<T>(
        &mut self,
        part: &str,
        call: impl FnOnce(&mut Manager, Nanos) -> Result<T>,
    ) {
        match self.call(call) {
            Err(Error::Config(text)) => {
                assert!(text.contains(part), "'{text}' lacks '{part}'");
            }
            Err(other) => panic!("not a config error: {other}"),
            Ok(_) => panic!("it was not refused"),
        }
    }

    /// A lease on all of `tokens`, see [`all_of`].
    pub(crate) fn acquire(&mut self, tokens: &[Token]) -> LeaseId {
        self.ask(&all_of(tokens)).expect("there is room")
    }

    /// Any request.
    pub(crate) fn ask(&mut self, ask: &Acquire<'_>) -> Result<LeaseId> {
        self.call(|manager, now| manager.acquire(ask, now))
    }

    /// Tokens whose KV is written.
    pub(crate) fn commit(&mut self, id: LeaseId, tokens: &[Token]) -> Committed {
        self.call(|manager, now| manager.commit(id, tokens, now)).expect("it can be committed")
    }

    /// Ends a lease.
    pub(crate) fn release(&mut self, id: LeaseId) -> Vec<MoveId> {
        self.call(|manager, now| manager.release(id, now)).expect("releasing never fails")
    }

    /// Hands out all pending moves.
    pub(crate) fn hand_out(&mut self) -> Vec<Move> {
        self.call(|manager, _| manager.moves(usize::MAX)).expect("handing out never fails")
    }

    /// Ends a move well on rank 0.
    pub(crate) fn done(&mut self, id: MoveId) {
        self.report(&[id], &Outcome::default()).expect("it was handed out");
    }

    /// Ends a move as failed.
    pub(crate) fn fail(&mut self, id: MoveId) {
        let outcome = Outcome { ok: false, error: Some("EIO"), ..Outcome::default() };
        self.report(&[id], &outcome).expect("it was handed out");
    }

    /// Any report.
    pub(crate) fn report(&mut self, ids: &[MoveId], outcome: &Outcome<'_>) -> Result<usize> {
        self.call(|manager, now| manager.complete(ids, outcome, now))
    }

    /// Hands out and ends every move, in order, and returns them.
    pub(crate) fn run(&mut self) -> Vec<Move> {
        let mut all = Vec::new();
        for _ in 0..500 {
            let moves = self.hand_out();
            if moves.is_empty() {
                return all;
            }
            for known in &moves {
                self.done(known.id);
            }
            all.extend(moves);
        }
        panic!("the moves never end");
    }

    /// A complete request: computes and commits the missing blocks, ends all moves.
    pub(crate) fn serve(&mut self, tokens: &[Token]) {
        self.serve_as(None, tokens);
    }

    /// The same for a conversation.
    pub(crate) fn serve_as(&mut self, session: Option<&str>, tokens: &[Token]) {
        let id = self.ask(&Acquire { session, ..all_of(tokens) }).expect("there is room");
        self.end_request(id, tokens);
    }

    /// A complete request, if there is room. Returns whether there was.
    pub(crate) fn try_serve(&mut self, tokens: &[Token]) -> bool {
        let id = self.ask(&all_of(tokens));
        id.map(|id| self.end_request(id, tokens)).is_ok()
    }

    fn end_request(&mut self, id: LeaseId, tokens: &[Token]) {
        self.run();
        let held = self.manager.lease_tokens(id).expect("held");
        self.commit(id, &tokens[held..]);
        self.release(id);
        self.run();
        self.now += 1000;
    }

    /// Marks blocks as resident from now on.
    pub(crate) fn mark(&mut self, tokens: &[Token], tier: TierId) -> Vec<Handle> {
        let mark =
            Mark { tokens, scope: Scope::default(), tier, present: true, ready: None, first: None };
        self.call(|manager, now| manager.mark(&mark, now)).expect("there is room")
    }

    /// Has blocks copied down that are on no lower tier.
    pub(crate) fn flush(&mut self) {
        self.call(Manager::flush).expect("flushing never fails");
    }

    /// Marks blocks after the first `skip` in one group, or clears the mark.
    pub(crate) fn mark_group(
        &mut self,
        tokens: &[Token],
        (tier, group): (TierId, usize),
        (present, skip): (bool, usize),
    ) {
        let scope = Scope::default();
        let mark = Mark { tokens, scope, tier, present, ready: None, first: None };
        self.call(|m, now| m.mark_group(&mark, group, skip, now)).expect("there is room");
    }

    /// Clears a mark.
    pub(crate) fn unmark(&mut self, tokens: &[Token], tier: TierId) {
        let (scope, present) = (Scope::default(), false);
        let mark = Mark { tokens, scope, tier, present, ready: None, first: None };
        self.call(|manager, now| manager.mark(&mark, now)).expect("it was there");
    }

    /// The blocks of the longest usable prefix.
    pub(crate) fn blocks(&self, tokens: &[Token]) -> Vec<Handle> {
        let found = self.manager.lookup(tokens, self.now, &Scope::default(), 0);
        found.expect("a good lookup").blocks.iter().map(|known| known.block).collect()
    }

    /// Number of the tokens that a request would find.
    pub(crate) fn matched(&self, tokens: &[Token]) -> usize {
        self.manager.matched(tokens, &Scope::default(), 0).expect("a good lookup")
    }

    /// The resident layers of each block of the usable prefix on a tier.
    pub(crate) fn on(&self, tokens: &[Token], tier: TierId) -> Vec<Layers> {
        let found = self.manager.lookup(tokens, self.now, &Scope::default(), 0);
        let blocks = found.expect("a good lookup").blocks;
        let layers = |known: &kvtrie_core::MatchedBlock| {
            let known = known
                .copies
                .iter()
                .find(|copy| (copy.tier, copy.group) == (tier, 0) && !copy.leaving);
            known.map_or(Layers::NONE, |copy| copy.layers)
        };
        blocks.iter().map(layers).collect()
    }

    /// The lease's slots on the first tier, row by row.
    pub(crate) fn slots(&self, id: LeaseId) -> Vec<Slot> {
        self.manager.slots(id, GPU).expect("held").1
    }

    /// The moves that must end before the lease may continue.
    pub(crate) fn awaits(&self, id: LeaseId) -> Vec<MoveId> {
        self.manager.awaits(id).expect("held")
    }

    /// The evictions since the last call.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        self.call(|manager, _| manager.take_events()).expect("a log")
    }
}
