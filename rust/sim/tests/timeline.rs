//! Records of a watched run: spans of steps and transmissions, and samples of tiers.

use kvtrie_core::Nanos;
use kvtrie_sim::engine::Wait;
use kvtrie_sim::simulation::Simulation;
use kvtrie_sim::timeline::{Sample, Track};

use crate::rig::{config, play, requests, two_tiers};

const MS: Nanos = 1_000_000;

/// Prompts 0, 1 and 0 again: two of 64 µs whose four blocks are stored, in 1 ms each, then three
/// blocks come back in 3 ms and 16 tokens are computed.
#[test]
fn spans_and_samples_of_a_prompt_that_comes_back() {
    let trace = requests(&[(0, 0), (1, 1000), (0, 2000)]);
    let (plain, _) = play(config(two_tiers(), 1, Wait::All), trace.clone());
    let mut simulation = Simulation::new(config(two_tiers(), 1, Wait::All)).expect("fine");
    simulation.watch(true, 500 * MS);
    let mut records = Vec::new();
    let tell = |record| {
        records.push(record);
        Ok(())
    };
    simulation.run(trace.into_iter().map(Ok), tell).expect("fine");
    assert_eq!(records, plain);
    let spans = simulation.spans();
    let of = |track: Track| {
        let kept = spans.iter().filter(|span| span.track == track);
        kept.map(|span| (span.start, span.end, span.bytes)).collect::<Vec<_>>()
    };
    let steps: Vec<_> = [(0, 64_000), (1000 * MS, 64_000), (2003 * MS, 16_000)]
        .map(|(start, takes)| (start, start + takes, 0))
        .into();
    assert_eq!(of(Track::Step), steps);
    let lanes = simulation.lanes();
    let carried: u64 = spans.iter().map(|span| span.bytes).sum();
    assert_eq!(carried, lanes.values().map(|lane| lane.bytes).sum::<u64>());
    let busy: Nanos = spans.iter().map(|span| span.end - span.start).sum();
    let computed: Nanos = steps.iter().map(|step| step.1 - step.0).sum();
    assert_eq!(busy - computed, lanes.values().map(|lane| lane.busy).sum::<Nanos>());
    assert!(spans.iter().any(|span| (span.start, span.end) == (2000 * MS, 2003 * MS)));
    let sample = |at, resident: [u64; 2]| Sample { at, machine: 0, resident: resident.into() };
    // Nothing happens between 4 ms and 1 s, so the sample of 0.5 s is not taken.
    assert_eq!(simulation.samples(), [sample(1000 * MS, [4, 4]), sample(2000 * MS, [4, 8])]);
}
