//! Costs of the manager: lookup, whole requests, eviction under every policy, decoding, plans.
//!
//! Invariant: seeded, so that two runs do the same work. Cost: about a minute and a half.

mod pool;
mod trace;

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvtrie_core::block::{Departure, Layers, LeaseId, Token};
use kvtrie_core::cost::CostModel;
use kvtrie_core::eviction::EvictionIndex;
use kvtrie_core::hint::Band;
use kvtrie_core::manager::{Acquire, Manager};
use kvtrie_core::plan::{self, Source, Step};
use kvtrie_core::policy::{Entry, Facts, LastUse, NAMES, Reload, by_name};
use kvtrie_core::scope::Scope;
use kvtrie_core::trie::Query;
use pool::manager;
use trace::{Random, Request, Trace};

const POOL: u32 = 100_000;
const LEAVES: u32 = 50_000;
const RUNNING: usize = 64;

/// A manager in the middle of a trace, with requests in flight.
struct Played {
    manager: Manager,
    running: Vec<LeaseId>,
    now: u64,
}

impl Played {
    /// A pool that the trace has filled.
    fn new(trace: &mut Trace) -> Self {
        let manager = manager("retention", POOL);
        let mut played = Self { manager, running: Vec::new(), now: 0 };
        while played.manager.occupancy(0).free > 0 {
            played.serve(&trace.take_next());
        }
        played
    }

    /// Lookup, pin and room; the prompt and then the answer; the oldest request ends.
    fn serve(&mut self, request: &Request) {
        self.now += 1_000_000;
        let tokens = &request.tokens[..request.prompt];
        let reserve = request.tokens.len() - request.prompt;
        let ask = Acquire { tokens, keep: 1, reserve, ..Acquire::default() };
        let id = self.manager.acquire(&ask, self.now).expect("there is room");
        let matched = self.manager.lease(id).expect("held").matched();
        let prompt = &request.tokens[matched..request.prompt];
        self.manager.commit(id, prompt, self.now).expect("there is room");
        let answer = &request.tokens[request.prompt..];
        self.manager.commit(id, answer, self.now).expect("there is room");
        self.running.push(id);
        if self.running.len() > RUNNING {
            let oldest = self.running.remove(0);
            self.manager.release(oldest, self.now).expect("it is held");
        }
    }
}

fn requests(c: &mut Criterion) {
    let mut trace = Trace::new(1234);
    let mut played = Played::new(&mut trace);
    let mut group = c.benchmark_group("trace");
    group.bench_function("whole request", |b| {
        b.iter_batched(
            || trace.take_next(),
            |request| played.serve(&request),
            BatchSize::PerIteration,
        );
    });
    let served = |_| {
        let request = trace.take_next();
        played.serve(&request);
        request.tokens[..request.prompt].to_vec()
    };
    let prompts: Vec<Vec<Token>> = (0..1000).map(served).collect();
    let (scope, now, mut turn) = (Scope::default(), played.now, 0);
    group.bench_function("lookup", |b| {
        b.iter(|| {
            turn = (turn + 1) % prompts.len();
            played
                .manager
                .probe(Query::Tokens(black_box(&prompts[turn])), &scope, 1)
                .expect("a good lookup")
        });
    });
    group.bench_function("lookup with a report of every block", |b| {
        b.iter(|| {
            turn = (turn + 1) % prompts.len();
            played.manager.lookup(black_box(&prompts[turn]), now, &scope, 1).expect("good")
        });
    });
    group.finish();
    played.manager.audit().expect("every invariant holds");
}

/// A pool full of unrelated sequences of four blocks: each step evicts four and inserts four.
fn evict_and_insert(c: &mut Criterion) {
    let mut group = c.benchmark_group("evict 4 insert 4");
    for policy in NAMES {
        let mut manager = manager(policy, 4 * LEAVES);
        let mut random = Random::new(5);
        let mut now = 0;
        let mut step = |manager: &mut Manager, tokens: &[Token]| {
            now += 1000;
            let ask = Acquire { tokens, ..Acquire::default() };
            let id = manager.acquire(&ask, now).expect("there is room");
            manager.commit(id, tokens, now).expect("there is room");
            manager.release(id, now).expect("it is held");
        };
        for _ in 0..LEAVES {
            step(&mut manager, &random.tokens(64));
        }
        group.bench_function(*policy, |b| {
            b.iter_batched(
                || random.tokens(64),
                |tokens| step(&mut manager, &tokens),
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

/// 256 requests that each write one token per step; room for 1024 at a time is part of the cost.
fn decode(c: &mut Criterion) {
    const REQUESTS: usize = 256;
    const TOKENS: usize = 1024;
    let renew = |manager: &mut Manager, ids: &mut Vec<LeaseId>, now: u64| {
        for id in ids.drain(..) {
            manager.release(id, now).expect("it is held");
        }
        for first in (0_u32..).take(REQUESTS) {
            let ask = Acquire { tokens: &[first], reserve: TOKENS, ..Acquire::default() };
            let id = manager.acquire(&ask, now).expect("there is room");
            manager.commit(id, &[first], now).expect("there is room");
            ids.push(id);
        }
    };
    let mut group = c.benchmark_group("decode one token");
    group.throughput(Throughput::Elements(REQUESTS as u64));
    let (mut one, mut ids, mut now) = (manager("retention", POOL), Vec::new(), 0_u64);
    group.bench_function("commit", |b| {
        b.iter(|| {
            if now.is_multiple_of(TOKENS as u64) {
                renew(&mut one, &mut ids, now);
            }
            now += 1;
            let token = u32::try_from(now % 50_000).expect("small");
            for &id in &ids {
                one.commit(id, &[token], now).expect("there is room");
            }
        });
    });
    let (mut one, mut ids, mut now) = (manager("retention", POOL), Vec::new(), 0_u64);
    group.bench_function("commit_many", |b| {
        b.iter(|| {
            if now.is_multiple_of(TOKENS as u64) {
                renew(&mut one, &mut ids, now);
            }
            now += 1;
            let token = [u32::try_from(now % 50_000).expect("small")];
            let batch: Vec<(LeaseId, &[Token])> =
                ids.iter().map(|&id| (id, token.as_slice())).collect();
            one.commit_many(&batch, now).expect("there is room")
        });
    });
    group.finish();
}

fn plans(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan of 256 blocks");
    let steps = |holes: u64| -> Vec<Step> {
        (0..256_u64)
            .map(|at| Step {
                compute: 100_000 + at * 150,
                source: if holes > 0 && at % holes == 0 {
                    Source::Missing
                } else {
                    Source::Load { lane: 0, time: 60_000, from: 0 }
                },
            })
            .collect()
    };
    for (name, holes) in [("all cached", 0), ("every eighth a hole", 8), ("every third", 3)] {
        let steps = steps(holes);
        assert!(plan::solve(&steps, &[0]).exact);
        group.bench_function(name, |b| b.iter(|| plan::solve(black_box(&steps), &[0])));
    }
    group.finish();
}

/// A block somewhere in a conversation, used a few times.
fn some_facts(random: &mut Random) -> Facts {
    let block = u32::try_from(random.below(120)).expect("small");
    Facts {
        id: 0,
        access: 0,
        context: u64::from(block) * 16,
        arrival: 0,
        block,
        session_blocks: block + 1 + u32::try_from(random.below(60)).expect("small"),
        uses: 1 + u32::try_from(random.below(6)).expect("small"),
        layers: Layers::new(0, 32),
        model_layers: 32,
        layer: None,
        departure: Departure::Drop,
        price: None,
        reload: Reload { tokens: 16, here: 0, below: None },
        last_use: LastUse::default(),
    }
}

/// Among 100 000 entries: the victim, and evicting it for a new entry.
fn victims(c: &mut Criterion) {
    let cost = CostModel::default_curve(100_000.0).expect("good numbers");
    let mut group = c.benchmark_group("exact victim of 100 000");
    for policy in NAMES {
        let make = || by_name(policy, true).expect("one of the names");
        let rule = make();
        let mut index = EvictionIndex::new(make(), 1.0 / 64.0);
        let (mut random, mut now) = (Random::new(9), 0);
        let mut entry = |id, place| {
            let class = rule.class(&some_facts(&mut random), &cost);
            Entry { class, place, tie: 0, id }
        };
        for id in 0..100_000 {
            now += 1000;
            index.link(entry(id, now), Band::NORMAL);
        }
        group.bench_function(format!("{policy}: find"), |b| {
            b.iter(|| index.victim(black_box(now)));
        });
        group.bench_function(format!("{policy}: replace"), |b| {
            b.iter(|| {
                now += 1000;
                let victim = index.victim(now).expect("there are entries");
                index.unlink(victim.id);
                index.link(entry(victim.id, now), Band::NORMAL);
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500))
        .sample_size(20);
    targets = requests, evict_and_insert, decode, plans, victims
}
criterion_main!(benches);
