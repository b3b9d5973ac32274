//! Cost of an exact victim of a million: found and taken out, each at a different time; and the same
//! followed by a newcomer, so that the number stays. `make bench-core` reads it; `leaf_runs` measures
//! victims that come in runs.
//!
//! Invariant: seeded, so that two runs do the same work; newcomers are used now. Cost: half a minute.

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::{Measurement, WallTime};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvtrie_core::internals::{Band, Departure, EvictionIndex, Facts, LastUse, Reload, by_name};
use kvtrie_core::{CostModel, Layers};

const SIZE: u32 = 1_000_000;
/// Victims that are timed together: the clock takes as long as one of them.
const TIMED: usize = 30;
const STEP: u64 = 1_000_000;

/// Small, seeded, and good enough.
struct Random(u64);

impl Random {
    /// A number below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

/// Entries of conversations of up to 32 000 tokens, most of them used a few times.
struct Filled {
    eviction: EvictionIndex,
    cost: CostModel,
    random: Random,
    now: u64,
}

impl Filled {
    fn new(epsilon: f64) -> Self {
        let rule = by_name("retention", true).expect("a known name");
        let mut filled = Self {
            eviction: EvictionIndex::new(rule, epsilon),
            cost: CostModel::default_curve(100_000.0).expect("good numbers"),
            random: Random(7),
            now: 0,
        };
        for id in 0..SIZE {
            filled.now += STEP;
            filled.link(id);
        }
        filled
    }

    fn link(&mut self, id: u32) {
        let block = u32::try_from(self.random.below(2000)).expect("small");
        let uses = 32 / u32::try_from(1 + self.random.below(32)).expect("small");
        let facts = Facts {
            id,
            context: u64::from(block) * 16,
            arrival: 0,
            block,
            session_blocks: block + 1,
            uses,
            access: self.now,
            layers: Layers::new(0, 32),
            model_layers: 32,
            layer: None,
            departure: Departure::Drop,
            price: None,
            reload: Reload { tokens: 16, own_tier: 0, below: None },
            last_use: LastUse::default(),
        };
        let entry = self.eviction.entry(&facts, u32::MAX - block, &self.cost);
        self.eviction.link(entry, Band::NORMAL);
    }

    /// The victim of the next step leaves. Returns its block.
    fn give_up(&mut self) -> u32 {
        self.now += STEP;
        let victim = self.eviction.victim(black_box(self.now)).expect("there are entries");
        self.eviction.unlink(victim.id);
        victim.id
    }

    /// How long it takes until some have left; as many come then.
    fn time_to_give_up(&mut self) -> Duration {
        let begun = WallTime.start();
        let gone = [(); TIMED].map(|()| self.give_up());
        let took = WallTime.end(begun);
        for id in gone {
            self.link(id);
        }
        took
    }
}

fn victims(c: &mut Criterion) {
    for (name, epsilon) in [("retention, epsilon 1/64", 1.0 / 64.0), ("retention, epsilon 0", 0.0)]
    {
        let mut group = c.benchmark_group(name);
        let mut filled = Filled::new(epsilon);
        let classes = filled.eviction.classes();
        group.throughput(Throughput::Elements(TIMED as u64));
        let alone = BenchmarkId::new(format!("in time, alone, {classes} classes"), SIZE);
        group.bench_function(alone, |b| {
            b.iter_custom(|times| (0..times).map(|_| filled.time_to_give_up()).sum());
        });
        group.throughput(Throughput::Elements(1));
        let both = BenchmarkId::new(format!("in time, with a newcomer, {classes} classes"), SIZE);
        group.bench_function(both, |b| {
            b.iter(|| {
                let id = filled.give_up();
                filled.link(id);
            });
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_millis(1500))
        .sample_size(20);
    targets = victims
}
criterion_main!(benches);
