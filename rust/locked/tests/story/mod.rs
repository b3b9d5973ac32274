//! Story: three threads over one manager, with checks of everything that they did.
//!
//! Each call is logged under the lock that it runs under. Invariant: whatever the schedule, the
//! logged calls repeated by one thread give the same answers and the same state, byte for byte;
//! every move is handed out once and ends once; a call fails for a closed manager only after
//! `close`. The manager is audited after every call. Cost: O(state) per call.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use kvtrie_core::{
    Acquire, CostModel, DropOrder, Error, Kind, LaneSpec, Lease, LeaseId, LoadMode, Manager,
    MoveId, Outcome, Owner, POLICIES, Result, Settings, Structure, TierSpec, Token, Write,
};

use super::locked::Locked;
use super::thread;

const SIZE: usize = 2;

/// One call.
#[derive(Clone, Debug)]
enum Op {
    Acquire(Vec<Token>),
    Commit(LeaseId, Vec<Token>),
    Release(LeaseId),
    Moves(usize),
    Complete(MoveId, bool),
    Close,
}

/// Answer of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reply {
    Lease(LeaseId, usize),
    Moves(Vec<MoveId>),
    Ended(usize),
    Nothing,
    NoSpace,
    Refused,
    Closed,
}

/// Time at which a call is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// In the critical section that it runs in.
    Inside,
    /// In a second critical section after it: the bug of a lock released too early.
    Behind,
}

/// The manager and the log of its calls.
struct Stage {
    locked: Locked,
    /// Never contended: it is taken only under the manager's lock.
    history: Mutex<Vec<(Op, Reply)>>,
    written: Written,
    /// How to wait for the manager, see [`play`].
    call: Call,
}

/// Runs a piece of work on the manager.
pub(crate) type Call = fn(&Locked, &mut dyn FnMut(&mut Manager) -> Result<()>) -> Result<()>;

/// Counts of answers per call.
pub(crate) type Mix = BTreeMap<String, u64>;

/// Plays the story number `seed` once, and adds its counts to the mix.
///
/// # Panics
/// If a check fails.
pub(crate) fn play(seed: u64, written: Written, call: Call, mix: &Mutex<Mix>) {
    let manager = Manager::new(settings(seed)).expect("good settings");
    let (locked, history) = (Locked::new(manager), Mutex::new(Vec::new()));
    let stage = Arc::new(Stage { locked, history, written, call });
    stage.warm(seed);
    let parts: [fn(&Stage, u64); 3] = [serve, carry, serve_carry_and_close];
    let threads: Vec<_> = (seed..)
        .zip(parts)
        .map(|(seed, part)| {
            let stage = Arc::clone(&stage);
            thread::spawn(move || part(&stage, seed))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap_or_else(|_| panic!("a thread of story {seed} failed"));
    }
    stage.drain();
    stage.check(seed);
    stage.count(&mut mix.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Fails unless every kind of answer has occurred.
///
/// # Panics
/// If one has not.
pub(crate) fn seen(mix: &Mix) {
    for what in [
        "Acquire: Lease",
        "Acquire: NoSpace",
        "Acquire: Closed",
        "Commit: Nothing",
        "Commit: Refused",
        "Commit: Closed",
        "Release: Nothing",
        "Release: Closed",
        "Moves: Moves",
        "Moves: Closed",
        "Complete: Ended",
        "Complete: Closed",
        "Close: Nothing",
    ] {
        assert!(mix.contains_key(what), "'{what}' never happened: {mix:?}");
    }
}

/// Requests from start to end, whose prompts share prefixes.
fn serve(stage: &Stage, seed: u64) {
    for round in 0..2 {
        let prompt = prompt(seed + round);
        let Reply::Lease(id, matched) = stage.run(&Op::Acquire(prompt.clone())) else { continue };
        for _ in 0..3 {
            match stage.run(&Op::Commit(id, prompt[matched..].to_vec())) {
                Reply::Refused => thread::yield_now(), // its loads are under way
                _ => break,
            }
        }
        stage.run(&Op::Release(id));
        stage.run(&Op::Release(id));
    }
}

/// Takes moves and reports them, some as failed, and some that another thread took.
fn carry(stage: &Stage, seed: u64) {
    for round in 0..3 {
        if let Reply::Moves(ids) = stage.run(&Op::Moves(2)) {
            for id in ids {
                stage.run(&Op::Complete(id, !(seed + round + id).is_multiple_of(5)));
            }
        }
        for (id, ok) in stage.reported().into_iter().rev().take(2) {
            stage.run(&Op::Complete(id, ok));
        }
        thread::yield_now();
    }
}

/// Some of both, and in every other story the close of the manager.
fn serve_carry_and_close(stage: &Stage, seed: u64) {
    let prompt = prompt(seed / 2);
    if let Reply::Lease(id, _) = stage.run(&Op::Acquire(prompt)) {
        carry(stage, seed);
        stage.run(&Op::Release(id));
    }
    if seed.is_multiple_of(2) {
        stage.run(&Op::Close);
    }
}

impl Stage {
    /// Earlier requests, whose blocks fill the tiers.
    fn warm(&self, seed: u64) {
        for round in 0..4 {
            let prompt = prompt(seed + round);
            if let Reply::Lease(id, matched) = self.run(&Op::Acquire(prompt.clone())) {
                self.drain();
                self.run(&Op::Commit(id, prompt[matched..].to_vec()));
                self.run(&Op::Release(id));
                self.drain();
            }
        }
    }

    /// One call in one critical section, with an audit.
    fn run(&self, op: &Op) -> Reply {
        let mut reply = Reply::Nothing;
        self.alone(|manager| {
            reply = apply(manager, op);
            if self.written == Written::Inside {
                self.write(op.clone(), reply.clone());
            }
            manager.audit()
        });
        if self.written == Written::Behind {
            self.alone(|_| {
                self.write(op.clone(), reply.clone());
                Ok(())
            });
        }
        reply
    }

    fn alone(&self, mut work: impl FnMut(&mut Manager) -> Result<()>) {
        (self.call)(&self.locked, &mut work).expect("every invariant holds");
    }

    fn write(&self, op: Op, reply: Reply) {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).push((op, reply));
    }

    /// Every report so far, of all threads.
    fn reported(&self) -> Vec<(MoveId, bool)> {
        let mut reports = Vec::new();
        self.alone(|_| {
            let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
            reports.extend(history.iter().filter_map(|(op, _)| match op {
                Op::Complete(id, ok) => Some((*id, *ok)),
                _ => None,
            }));
            Ok(())
        });
        reports
    }

    /// Ends all moves; no other thread calls during it.
    fn drain(&self) {
        let mut left = 1;
        while left > 0 && self.run(&Op::Moves(usize::MAX)) != Reply::Closed {
            // A report before that of the move that it waits for was refused.
            for id in self.handed_out() {
                self.run(&Op::Complete(id, true));
            }
            self.alone(|manager| {
                left = manager.pending().1;
                Ok(())
            });
        }
    }

    fn handed_out(&self) -> Vec<MoveId> {
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = history.iter().filter_map(|(_, reply)| match reply {
            Reply::Moves(ids) => Some(ids.clone()),
            _ => None,
        });
        taken.flatten().collect()
    }

    fn count(&self, mix: &mut Mix) {
        let name = |shown: String| shown.split(['(', ' ']).next().unwrap_or_default().to_owned();
        for (op, reply) in self.history.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let (op, reply) = (name(format!("{op:?}")), name(format!("{reply:?}")));
            *mix.entry(format!("{op}: {reply}")).or_default() += 1;
        }
    }

    fn check(&self, seed: u64) {
        let taken = self.handed_out();
        let once: BTreeSet<MoveId> = taken.iter().copied().collect();
        assert_eq!(once.len(), taken.len(), "story {seed}: moves were handed out twice: {taken:?}");
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let end = history.iter().position(|(op, _)| matches!(op, Op::Close));
        let mut ended = 0;
        for (at, (op, reply)) in history.iter().enumerate() {
            let closed = end.is_some_and(|end| at > end);
            assert!(
                closed || *reply != Reply::Closed,
                "story {seed}: call {at}, {op:?}, found the manager closed before {end:?}"
            );
            if let Reply::Ended(times) = reply {
                ended += times;
            }
        }
        assert!(ended <= once.len(), "story {seed}: {ended} ends of {} moves", once.len());
        let mut alone = Manager::new(settings(seed)).expect("good settings");
        for (at, (op, reply)) in history.iter().enumerate() {
            assert_eq!(apply(&mut alone, op), *reply, "story {seed}: call {at}, {op:?}, alone");
        }
        let mut state = Vec::new();
        self.alone(|manager| {
            state = manager.snapshot();
            if end.is_none() {
                assert_eq!(manager.pending().1, 0, "story {seed}: moves are left");
                assert_eq!(manager.totals().1, 0, "story {seed}: leases are left");
            }
            Ok(())
        });
        assert!(state == alone.snapshot(), "story {seed}: the same calls gave another state");
    }
}

/// Makes a call and returns its answer. Time is fixed, so that only the order of calls matters.
fn apply(manager: &mut Manager, op: &Op) -> Reply {
    let reply = match op {
        Op::Acquire(tokens) => {
            let ask = Acquire { tokens, load: LoadMode::All, ..Acquire::default() };
            let matched = |manager: &Manager, id| manager.lease(id).map(Lease::matched);
            let id = manager.acquire(&ask, 1);
            id.and_then(|id| Ok(Reply::Lease(id, matched(manager, id)?)))
        }
        Op::Commit(id, tokens) => manager.commit(*id, tokens, 1).map(|_| Reply::Nothing),
        Op::Release(id) => manager.release(*id, 1).map(|_| Reply::Nothing),
        Op::Moves(limit) => {
            let ids = manager.moves(*limit).map(|all| all.iter().map(|one| one.id).collect());
            ids.map(Reply::Moves)
        }
        Op::Complete(id, ok) => {
            let outcome = Outcome { ok: *ok, ..Outcome::default() };
            manager.complete(&[*id], &outcome, 1).map(Reply::Ended)
        }
        Op::Close => {
            manager.close();
            Ok(Reply::Nothing)
        }
    };
    reply.unwrap_or_else(|error| match error {
        Error::NoSpace { .. } => Reply::NoSpace,
        Error::Config(_) => Reply::Refused,
        Error::Closed(_) => Reply::Closed,
        Error::Invariant(reason) => panic!("{op:?}: {reason}"),
    })
}

/// One to five blocks; prompts of neighbouring stories begin alike.
fn prompt(seed: u64) -> Vec<Token> {
    let stem = Token::try_from(seed / 3 % 3).unwrap_or_default() * 100;
    let shared = usize::try_from(seed % 4).unwrap_or_default() * SIZE;
    let len = shared + 1 + usize::try_from(seed % 3).unwrap_or_default();
    let own = Token::try_from(seed % 7).unwrap_or_default() + 10;
    (0..)
        .take(len)
        .map(|at: Token| if at as usize >= shared { stem + own + at } else { at })
        .collect()
}

/// One to three small tiers, so that every request needs room.
fn settings(seed: u64) -> Settings {
    let lane =
        |name: String| LaneSpec { name, bytes_per_s: 1_000_000, latency_ns: 1, shares: None };
    let kinds = [Kind::Gpu, Kind::Host, Kind::Disk];
    let tiers = 1 + usize::try_from(seed % 3).unwrap_or_default();
    let tier = |at: usize| TierSpec {
        kind: kinds[at],
        blocks: [6, 4, 5][at],
        owner: Owner::Kvtrie,
        write: if seed.is_multiple_of(4) { Write::Through } else { Write::Back },
        admit_after: 1,
        free_low: 0.0,
        growth_reserve: 0.0,
        retained_share: 0.5,
        layer_slots: false,
        kept: false,
        policy: None,
        read: lane(format!("up{at}")),
        store: lane(format!("down{at}")),
    };
    let names = POLICIES.len() as u64;
    Settings {
        fingerprint: "story".to_owned(),
        layers: 2,
        layer_bytes: 16,
        block_tokens: u32::try_from(SIZE).unwrap_or_default(),
        token_weight: 1,
        tiers: (0..tiers).map(tier).collect(),
        policy: POLICIES[usize::try_from(seed / 3 % names).unwrap_or_default()].to_owned(),
        reuse: true,
        epsilon: 0.0,
        cost: CostModel::default_curve(1000.0).expect("good numbers"),
        priced: false,
        structure: if seed.is_multiple_of(5) { Structure::Holes } else { Structure::LeafOnly },
        drop_order: DropOrder::Shallow,
        ranks: 1,
        events: 16,
        block_events: 0,
        eviction_log: 16,
        groups: None,
        explain: false,
        producer_key: None,
    }
}
