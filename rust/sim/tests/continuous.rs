//! The continuous engine: figures by hand, and what its shortcuts may not change.

use kvtrie_core::{Kind, Settings, Write};
use kvtrie_sim::engine::{Limits, Wait};
use kvtrie_sim::record::Record;

use crate::rig::{drawn, play, requests, settings, tier, together, ttft, two_tiers};

const A: u32 = 1;
const B: u32 = 2;
const C: u32 = 3;
const LIMITS: Limits =
    Limits { token_budget: 64, max_running: 8, token_by_token: false, cache_answers: false };

/// A GPU that is large enough.
fn one_tier(blocks: u32) -> Settings {
    settings(vec![tier(Kind::Gpu, blocks, Write::Back)])
}

/// 64 tokens are a step; with a larger budget the second prefill goes into the first step.
#[test]
fn prefills_share_the_budget_in_the_order_of_arrival() {
    let trace = requests(&[(A, 0), (B, 0)]);
    for (token_budget, waits) in [
        (64, [64_000, 128_000]),
        // Steps of 96 and 32 tokens.
        (96, [96_000, 128_000]),
        (128, [128_000, 128_000]),
    ] {
        let limits = Limits { token_budget, ..LIMITS };
        let (records, _) = play(together(one_tier(64), 1, limits, Wait::All), trace.clone());
        assert_eq!(ttft(&records), waits);
    }
    let limits = Limits { token_budget: 128, max_running: 1, ..LIMITS };
    let (records, _) = play(together(one_tier(64), 1, limits, Wait::All), trace);
    assert_eq!(ttft(&records), [64_000, 128_000]);
    assert_eq!((records[0].queued, records[1].queued), (0, 64_000));
}

/// A decodes a token per step, and B's prefill has the other 63 places, then one more step.
#[test]
fn decodes_go_first() {
    let mut trace = requests(&[(A, 0), (B, 0)]);
    trace[0].output = 4;
    let (records, _) = play(together(one_tier(64), 1, LIMITS, Wait::All), trace.clone());
    // A: 64 tokens, then 1 + 63, then 1 + 1, then 1 alone.
    assert_eq!(records[0].first_token, Some(64_000));
    assert_eq!(records[1].first_token, Some(64_000 + 64_000 + 2_000));
    assert_eq!(records[0].end, Some(131_000));
    // B comes while A decodes its 30 tokens in one event, and begins with A's next token.
    (trace[0].output, trace[1].arrival) = (31, 66_500);
    let (records, _) = play(together(one_tier(64), 1, LIMITS, Wait::All), trace);
    assert_eq!(records[1].first_token, Some(67_000 + 64_000 + 2_000));
    assert_eq!(records[0].end, Some(64_000 + 30_000 + 64_000));
}

/// A comes back from the host in 3 ms; C, which came later, is computed during the load.
#[test]
fn loads_hold_nobody_back() {
    let trace = requests(&[(A, 0), (B, 500), (4, 1000), (A, 2000), (C, 2001)]);
    let mut settings = two_tiers();
    settings.tiers[0].blocks = 8;
    let (records, _) = play(together(settings, 1, LIMITS, Wait::All), trace);
    assert_eq!(records[3].hits, [0, 48]);
    assert_eq!(ttft(&records)[3..], [3_016_000, 64_000]);
    assert_eq!(records[3].stalled, 3_000_000);
}

/// The same load within the step that reads it: C, a millisecond later, waits for the step.
#[test]
fn a_step_waits_for_the_loads_that_it_reads() {
    let trace = requests(&[(A, 0), (B, 500), (4, 1000), (A, 2000), (C, 2001)]);
    let mut settings = two_tiers();
    settings.tiers[0].blocks = 8;
    let (records, _) = play(together(settings, 1, LIMITS, Wait::Step), trace);
    assert_eq!(records[3].hits, [0, 48]);
    assert_eq!(ttft(&records)[3..], [3_016_000, 3_016_000 - 1_000_000 + 64_000]);
    assert_eq!(records[3].stalled, 3_000_000);
}

/// As for the serial engine: all but the last layer's work is hidden by loads.
#[test]
fn a_layer_is_computed_when_it_is_there() {
    let trace = requests(&[(A, 0), (B, 1000), (A, 2000)]);
    let waits = [(Wait::All, 3_016_000), (Wait::Step, 3_016_000), (Wait::Layer, 3_004_000)];
    for (wait, last) in waits {
        let (records, _) = play(together(two_tiers(), 1, LIMITS, wait), trace.clone());
        assert_eq!(ttft(&records), [64_000, 64_000, last]);
        assert_eq!(records[2].stalled, last - 16_000);
    }
}

/// 64 tokens and 63 more are eight blocks each, and there are ten: B, which came later, gives up its
/// blocks and goes on when A has ended.
#[test]
fn the_latest_arrival_is_suspended_and_goes_on() {
    let mut trace = requests(&[(A, 0), (B, 0)]);
    for request in &mut trace {
        request.output = 64;
    }
    let (records, simulation) = play(together(one_tier(10), 1, LIMITS, Wait::All), trace);
    assert_eq!((records[0].suspended, records[1].suspended), (0, 1));
    // A has three tokens and B its first at 130 us. 14 steps later A's 80 tokens fill five blocks, as
    // many as B has, and A makes the other 47 alone.
    assert_eq!(records[1].first_token, Some(130_000));
    assert_eq!(records[0].end, Some(130_000 + 14 * 2_000 + 47_000));
    // B had 15 tokens; all 64 + 15 are computed again, which makes the next one, and 48 are left.
    assert_eq!(records[1].end, Some(205_000 + 79_000 + 48_000));
    let manager = simulation.machines().next().expect("one").calls.manager();
    assert_eq!(manager.requested().refused, 0);
}

#[test]
fn what_never_fits_is_refused_and_what_fits_waits() {
    let mut trace = requests(&[(A, 0), (B, 0), (C, 0), (A, 0)]);
    trace[1].output = 18;
    let (records, _) = play(together(one_tier(5), 1, LIMITS, Wait::All), trace.clone());
    assert_eq!(records[1], Record { id: 1, ..Record::default() });
    // C leaves one of A's blocks.
    let waits: Vec<_> = [0, 2, 3].map(|at| records[at].first_token).to_vec();
    assert_eq!(waits, [Some(64_000), Some(128_000), Some(176_000)]);
    trace[1].output = 17;
    let (records, _) = play(together(one_tier(5), 1, LIMITS, Wait::All), trace);
    assert!(records.iter().all(|record| record.end.is_some()), "{records:?}");
}

/// Three prompts of four blocks fill the GPU. If the two blocks of B's answer stay cached, C evicts two
/// blocks of A.
#[test]
fn an_answer_stays_in_its_blocks_if_the_engine_caches_answers() {
    let mut trace = requests(&[(A, 0), (B, 1000), (C, 2000), (A, 3000)]);
    trace[1].output = 33;
    let found = |cache_answers| {
        let limits = Limits { cache_answers, ..LIMITS };
        let settings = one_tier(12);
        let (records, _) = play(together(settings, 1, limits, Wait::All), trace.clone());
        records[3].hits[0]
    };
    assert_eq!((found(false), found(true)), (48, 32));
}

/// Jumps over steps that only decode change no time, no hit and no call.
#[test]
fn jumps_are_steps_one_by_one() {
    let (mut suspended, mut refused) = (0, 0);
    for seed in 0..150 {
        let (settings, limits, trace) = drawn(seed);
        let run = |token_by_token| {
            let limits = Limits { token_by_token, ..limits };
            let wait = if seed % 3 == 0 { Wait::Layer } else { Wait::All };
            let mut config = together(settings.clone(), 1, limits, wait);
            // A price that is no whole number of nanoseconds.
            config.service.cost =
                std::sync::Arc::new(kvtrie_sim::cost::Affine { base: 1 << 41, slope: 1 << 30 });
            config.logged = true;
            let (records, simulation) = play(config, trace.clone());
            (records, simulation.log(0).to_vec())
        };
        let (jumps, steps) = (run(false), run(true));
        assert_eq!(jumps.0.len(), trace.len(), "seed {seed}");
        assert_eq!(jumps, steps, "seed {seed}");
        suspended += jumps.0.iter().map(|record| record.suspended).sum::<u64>();
        refused += jumps.0.iter().filter(|record| record.end.is_none()).count();
    }
    assert!(suspended > 100 && refused < 1500, "{suspended} {refused}");
}
