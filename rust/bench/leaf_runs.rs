//! Cost of a victim if victims come in runs: a full pool of a million blocks, of which a
//! request wants thirty.
//!
//! Unrelated ends of thirty blocks branch off the blocks of one long trunk, at any depth, used once
//! to a few times, so that their costs differ. A request that asks for room alone is timed: it finds
//! the run that leaves first, takes its blocks out of tier and trie, remembers their uses and takes
//! their slots. Invariant: seeded, so that two runs do the same work; each request evicts exactly as
//! many blocks as it gets. Cost: about half a minute, most of it to fill the pool.

#![allow(dead_code, reason = "other benches use the rest of their pool and trace")]

#[path = "../core/benches/pool/mod.rs"]
mod pool;
#[path = "../core/benches/trace/mod.rs"]
mod trace;

use std::time::Duration;

use criterion::measurement::{Measurement, WallTime};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvtrie_core::{Acquire, LeaseId, Manager, Settings, Token};
use trace::Random;

const POOL: u32 = 1_000_000;
const RUN: usize = 30;
const BLOCK: usize = 16;
const TRUNK: usize = 1000;
const STEP: u64 = 1_000_000;
/// Requests that hold what they got until the next are timed.
const HELD: usize = 200;

struct Filled {
    manager: Manager,
    random: Random,
    trunk: Vec<Token>,
    now: u64,
}

impl Filled {
    fn new(epsilon: f64) -> Self {
        let settings = Settings { epsilon, ..pool::settings("retention", POOL, 1) };
        let manager = Manager::new(settings).expect("good settings");
        let mut random = Random::new(11);
        let trunk = random.tokens(TRUNK * BLOCK);
        let mut filled = Self { manager, random, trunk, now: 0 };
        while filled.free() >= TRUNK + RUN {
            filled.grow();
        }
        filled.room(filled.free());
        filled
    }

    fn free(&self) -> usize {
        usize::try_from(self.manager.occupancy(0).free).expect("below the pool's size")
    }

    /// Another end after some block of the trunk, used a few times.
    fn grow(&mut self) {
        let depth = usize::try_from(1 + self.random.below(TRUNK as u64)).expect("small");
        let mut tokens = self.trunk[..depth * BLOCK].to_vec();
        tokens.extend(self.random.tokens(RUN * BLOCK));
        for _ in 0..8 / (1 + self.random.below(8)) {
            self.now += STEP;
            let ask = Acquire { tokens: &tokens, ..Acquire::default() };
            let id = self.manager.acquire(&ask, self.now).expect("there is room");
            let matched = self.manager.lease(id).expect("held").matched();
            self.manager.commit(id, &tokens[matched..], self.now).expect("there is room");
            self.manager.release(id, self.now).expect("it is held");
        }
    }

    /// Room for `blocks` blocks.
    fn room(&mut self, blocks: usize) -> LeaseId {
        self.now += STEP;
        let ask = Acquire { reserve: blocks * BLOCK, ..Acquire::default() };
        self.manager.acquire(&ask, self.now).expect("there is room")
    }

    /// How long it takes until some requests have got their room; others fill it then.
    fn time_to_give_up(&mut self) -> Duration {
        let mut held = Vec::with_capacity(HELD);
        let begun = WallTime.start();
        held.extend((0..HELD).map(|_| self.room(RUN)));
        let took = WallTime.end(begun);
        for id in held {
            self.manager.release(id, self.now).expect("it is held");
            self.grow();
        }
        took
    }
}

fn victims(c: &mut Criterion) {
    let mut group = c.benchmark_group("victims in leaf runs of 30");
    group.throughput(Throughput::Elements((HELD * RUN) as u64));
    for (name, epsilon) in [("epsilon 0", 0.0), ("epsilon 1/64", 1.0 / 64.0)] {
        let mut filled = Filled::new(epsilon);
        group.bench_function(BenchmarkId::new(name, POOL), |b| {
            b.iter_custom(|times| (0..times).map(|_| filled.time_to_give_up()).sum());
        });
        filled.manager.audit().expect("every invariant holds");
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(600))
        .sample_size(20);
    targets = victims
}
criterion_main!(benches);
