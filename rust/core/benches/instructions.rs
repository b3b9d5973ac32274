//! The same requests every time, for counting instructions instead of seconds.
//!
//! `benches/instructions.py` runs this under callgrind and reads the inclusive cost of every
//! function below whose name begins with `counted_`. Invariant: seeded, one thread. Cost: a few
//! seconds, half a minute under callgrind.

mod trace;

use std::hint::black_box;

use kvtrie_core::block::{LeaseId, Structure, Token};
use kvtrie_core::cost::CostModel;
use kvtrie_core::lane::LaneSpec;
use kvtrie_core::manager::{Acquire, DropOrder, Manager, Settings};
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::{Kind, Owner, TierSpec, Write};
use trace::{Random, Request, Trace};

const POOL: u32 = 30_000;
const RUNNING: usize = 64;
const COUNTED: usize = 1000;

fn main() {
    let mut trace = Trace::new(1234);
    let mut requests = || trace.take_next();
    let mut manager = manager(POOL);
    let mut running = Vec::new();
    let mut now = 0;
    while manager.occupancy(0).free > 0 {
        serve(&mut manager, &mut running, &requests(), &mut now);
    }
    for _ in 0..COUNTED {
        serve(&mut manager, &mut running, &requests(), &mut now);
    }
    decode(&mut manager, &mut running, now);
    manager.audit().expect("every invariant holds");

    let mut full = self::manager(40_000);
    let mut random = Random::new(5);
    for _ in 0..10_000 + COUNTED {
        now += 1_000_000;
        counted_evict_and_insert(&mut full, &random.tokens(64), now);
    }
}

/// One tier of `blocks` blocks of 16 tokens, leaf-only.
fn manager(blocks: u32) -> Manager {
    let lane = |name: &str| LaneSpec {
        name: name.to_owned(),
        bytes_per_s: 20_000_000_000,
        latency_ns: 10_000,
        shares: None,
    };
    let gpu = TierSpec {
        kind: Kind::Gpu,
        blocks,
        owner: Owner::Kvtrie,
        write: Write::Back,
        admit_after: 1,
        free_low: 0.0,
        growth_reserve: 0.0,
        layer_slots: false,
        policy: None,
        read: lane("up"),
        store: lane("down"),
    };
    Manager::new(Settings {
        fingerprint: "bench".to_owned(),
        layers: 32,
        layer_bytes: 65_536,
        block_tokens: 16,
        token_weight: 1,
        tiers: vec![gpu],
        policy: "retention".to_owned(),
        reuse: true,
        epsilon: 1.0 / 64.0,
        cost: CostModel::default_curve(100_000.0).expect("good numbers"),
        structure: Structure::LeafOnly,
        drop_order: DropOrder::Shallow,
        ranks: 1,
        events: 0,
    })
    .expect("good settings")
}

fn serve(manager: &mut Manager, running: &mut Vec<LeaseId>, request: &Request, now: &mut u64) {
    *now += 1_000_000;
    let prompt = &request.tokens[..request.prompt];
    black_box(counted_lookup(manager, prompt));
    let id = counted_acquire(manager, prompt, request.tokens.len() - request.prompt, *now);
    let matched = manager.lease(id).expect("held").matched();
    counted_commit(manager, id, &request.tokens[matched..request.prompt], *now);
    counted_commit(manager, id, &request.tokens[request.prompt..], *now);
    running.push(id);
    if running.len() > RUNNING {
        counted_release(manager, running.remove(0), *now);
    }
}

/// 64 requests that each write 64 tokens, one at a time.
fn decode(manager: &mut Manager, running: &mut Vec<LeaseId>, now: u64) {
    for id in running.drain(..) {
        manager.release(id, now).expect("it is held");
    }
    for first in (0_u32..).take(RUNNING) {
        let ask = Acquire { tokens: &[first], reserve: 64, ..Acquire::default() };
        running.push(manager.acquire(&ask, now).expect("there is room"));
    }
    for token in 0..64_u32 {
        let token = [token];
        let batch: Vec<(LeaseId, &[Token])> =
            running.iter().map(|&id| (id, token.as_slice())).collect();
        counted_decode(manager, &batch, now + u64::from(token[0]));
    }
}

#[inline(never)]
fn counted_lookup(manager: &Manager, prompt: &[Token]) -> usize {
    manager.matched(prompt, &Scope::default(), 1).expect("a good lookup")
}

#[inline(never)]
fn counted_acquire(manager: &mut Manager, tokens: &[Token], reserve: usize, now: u64) -> LeaseId {
    let ask = Acquire { tokens, keep: 1, reserve, ..Acquire::default() };
    manager.acquire(&ask, now).expect("there is room")
}

#[inline(never)]
fn counted_commit(manager: &mut Manager, id: LeaseId, tokens: &[Token], now: u64) {
    black_box(manager.commit(id, tokens, now).expect("there is room"));
}

#[inline(never)]
fn counted_release(manager: &mut Manager, id: LeaseId, now: u64) {
    black_box(manager.release(id, now).expect("it is held"));
}

#[inline(never)]
fn counted_decode(manager: &mut Manager, batch: &[(LeaseId, &[Token])], now: u64) {
    black_box(manager.commit_many(batch, now).expect("there is room"));
}

#[inline(never)]
fn counted_evict_and_insert(manager: &mut Manager, tokens: &[Token], now: u64) {
    let id = manager.acquire(&Acquire { tokens, ..Acquire::default() }, now).expect("room");
    manager.commit(id, tokens, now).expect("there is room");
    manager.release(id, now).expect("it is held");
}
