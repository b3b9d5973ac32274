//! Cost of the restore plan of 256 blocks, some of them holes; `make bench-core` reads it.
//!
//! Invariant: two runs do the same work. Cost: a few seconds.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use kvtrie_core::internals::{Source, Step, solve};

fn plans(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan of 256 blocks");
    let steps = |holes: u64| -> Vec<Step> {
        (0..256_u64)
            .map(|at| Step {
                compute: 100_000 + at * 150,
                source: if at % holes == 0 {
                    Source::Missing
                } else {
                    Source::Load { lane: 0, time: 60_000, from: 0 }
                },
            })
            .collect()
    };
    for (name, holes) in [("every eighth a hole", 8), ("every third", 3)] {
        let steps = steps(holes);
        assert!(solve(&steps, &[0]).exact);
        group.bench_function(name, |b| b.iter(|| solve(black_box(&steps), &[0])));
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500))
        .sample_size(20);
    targets = plans
}
criterion_main!(benches);
