//! The same requests every time, for counting instructions instead of seconds.
//!
//! `benches/instructions.py` runs this under callgrind and reads the inclusive cost of every
//! function below whose name begins with `counted_`. Invariant: seeded, one thread. Cost: a few
//! seconds, half a minute under callgrind.

mod pool;
mod trace;

use std::hint::black_box;

use kvtrie_core::{Acquire, LeaseId, Manager, Mark, Scope, Token};
use trace::{Random, Request, Trace};

const POOL: u32 = 30_000;
const RUNNING: usize = 64;
const REQUESTS_TO_FILL: usize = 2000;
const COUNTED: usize = 1000;
const FLOOD: u32 = 4000;

/// Environment variable that names another policy than `retention`.
const POLICY: &str = "KVTRIE_POLICY";

fn main() {
    let policy = std::env::var(POLICY).unwrap_or_else(|_| "retention".to_owned());
    let mut trace = Trace::new(1234);
    let mut requests = || trace.take_next();
    let mut manager = pool::manager(&policy, POOL);
    let mut running = Vec::new();
    let mut now = 0;
    for _ in 0..REQUESTS_TO_FILL {
        serve::<false>(&mut manager, &mut running, &requests(), &mut now);
    }
    assert_eq!(manager.occupancy(0).free, 0, "the pool is full");
    for _ in 0..COUNTED {
        serve::<true>(&mut manager, &mut running, &requests(), &mut now);
    }
    decode(&mut manager, &mut running, now);
    manager.audit().expect("every invariant holds");

    let mut full = pool::manager(&policy, 40_000);
    let mut random = Random::new(5);
    for _ in 0..10_000 {
        now += 1_000_000;
        evict_and_insert(&mut full, &random.tokens(64), now);
    }
    assert_eq!(full.occupancy(0).free, 0, "the pool is full");
    for _ in 0..COUNTED {
        now += 1_000_000;
        counted_evict_and_insert(&mut full, &random.tokens(64), now);
    }

    flood(&policy, &mut random, now);
}

/// One prompt for which thousands of sequences leave, all after one head.
fn flood(policy: &str, random: &mut Random, mut now: u64) {
    let mut wide = pool::manager(policy, FLOOD + 1);
    let mut tokens = random.tokens(32);
    for last in 0..FLOOD {
        now += 1_000_000;
        tokens[16] = last;
        let mark = Mark {
            tokens: &tokens,
            scope: Scope::default(),
            tier: 0,
            present: true,
            ready: None,
            first: None,
        };
        wide.mark(&mark, now).expect("there is room");
    }
    counted_flood(&mut wide, &random.tokens(16 * FLOOD as usize), now);
    wide.audit().expect("every invariant holds");
}

/// Plays a request, counted or not.
fn serve<const COUNT: bool>(
    manager: &mut Manager,
    running: &mut Vec<LeaseId>,
    request: &Request,
    now: &mut u64,
) {
    *now += 1_000_000;
    let (prompt, answer) = request.tokens.split_at(request.prompt);
    let acquired = if COUNT {
        black_box(counted_lookup(manager, prompt));
        counted_acquire(manager, prompt, answer.len(), *now)
    } else {
        acquire(manager, prompt, answer.len(), *now)
    };
    let rest = &prompt[manager.lease(acquired).expect("held").matched()..];
    for tokens in [rest, answer] {
        if COUNT {
            counted_commit(manager, acquired, tokens, *now);
        } else {
            commit(manager, acquired, tokens, *now);
        }
    }
    running.push(acquired);
    if running.len() > RUNNING {
        let oldest = running.remove(0);
        if COUNT {
            counted_release(manager, oldest, *now);
        } else {
            release(manager, oldest, *now);
        }
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

fn acquire(manager: &mut Manager, tokens: &[Token], reserve: usize, now: u64) -> LeaseId {
    let ask = Acquire { tokens, keep: 1, reserve, ..Acquire::default() };
    manager.acquire(&ask, now).expect("there is room")
}

#[inline(never)]
fn counted_acquire(manager: &mut Manager, tokens: &[Token], reserve: usize, now: u64) -> LeaseId {
    acquire(manager, tokens, reserve, now)
}

fn commit(manager: &mut Manager, id: LeaseId, tokens: &[Token], now: u64) {
    black_box(manager.commit(id, tokens, now).expect("there is room"));
}

#[inline(never)]
fn counted_commit(manager: &mut Manager, id: LeaseId, tokens: &[Token], now: u64) {
    commit(manager, id, tokens, now);
}

fn release(manager: &mut Manager, id: LeaseId, now: u64) {
    black_box(manager.release(id, now).expect("it is held"));
}

#[inline(never)]
fn counted_release(manager: &mut Manager, id: LeaseId, now: u64) {
    release(manager, id, now);
}

#[inline(never)]
fn counted_decode(manager: &mut Manager, batch: &[(LeaseId, &[Token])], now: u64) {
    black_box(manager.commit_many(batch, now).expect("there is room"));
}

#[inline(never)]
fn counted_evict_and_insert(manager: &mut Manager, tokens: &[Token], now: u64) {
    evict_and_insert(manager, tokens, now);
}

fn evict_and_insert(manager: &mut Manager, tokens: &[Token], now: u64) {
    let id = manager.acquire(&Acquire { tokens, ..Acquire::default() }, now).expect("room");
    manager.commit(id, tokens, now).expect("there is room");
    manager.release(id, now).expect("it is held");
}

#[inline(never)]
fn counted_flood(manager: &mut Manager, tokens: &[Token], now: u64) {
    black_box(manager.acquire(&Acquire { tokens, ..Acquire::default() }, now).expect("room"));
}
