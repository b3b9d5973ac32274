//! Properties of any queue and any lane: theory, conservation, and one thing changed at a time.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "times are far below 2^52 ns"
)]

use kvtrie_core::{Kind, LoadMode, MoveKind, Settings, Write};
use kvtrie_sim::call::Call;
use kvtrie_sim::engine::{Limits, Wait};
use kvtrie_sim::record::Record;
use kvtrie_sim::request::Request;
use kvtrie_sim::router::Hash;
use kvtrie_sim::simulation::Config;

use crate::rig::{
    self, Dice, config, drawn, play, requests, settings, tier, together, ttft, two_tiers,
};

/// Poisson arrivals at one serial engine that takes S for each: the mean wait is
/// load * S / (2 * (1 - load)), within 2 %.
#[test]
fn a_serial_engine_is_an_m_d_1_queue() {
    const SERVICE: f64 = 16_000.0;
    for (load, seed) in [(0.5_f64, 1), (0.7, 2)] {
        let (mut dice, mut clock) = (Dice(seed), 0.0_f64);
        let requests = (0..200_000).map(|id| {
            let uniform = (f64::from(dice.below(u32::MAX)) + 1.0) / f64::from(u32::MAX);
            clock -= uniform.ln() * SERVICE / load;
            // No prompt comes twice: each takes 16 us.
            let first = u32::try_from(id).expect("few") * 16;
            let tokens = (first..first + 16).collect();
            let arrival = clock as u64;
            Request { id, arrival, tokens, input: 16, output: 1, ..Request::default() }
        });
        let settings = settings(vec![tier(Kind::Gpu, 4, Write::Never)]);
        let (records, _) = play(config(settings, 1, Wait::All), requests.collect());
        let waits = ttft(&records).into_iter().map(|ttft| ttft - 16_000).sum::<u64>();
        let mean = waits as f64 / 200_000.0;
        let theory = load * SERVICE / (2.0 * (1.0 - load));
        assert!((mean / theory - 1.0).abs() < 0.02, "{mean} at {load}, in theory {theory}");
    }
}

/// Every engine with every kind of wait on drawn requests.
fn runs(seed: u64, machines: usize) -> (Vec<Config>, Vec<Request>) {
    let (settings, limits, trace) = drawn(seed);
    let configs = [Wait::All, Wait::Layer].into_iter().flat_map(|wait| {
        [
            config(settings.clone(), machines, wait),
            together(settings.clone(), machines, limits, wait),
        ]
    });
    (configs.collect(), trace)
}

/// Little's law: the time that requests spend adds up to how many there are at each time.
#[test]
fn the_requests_in_a_system_are_rate_times_sojourn() {
    for seed in 0..20 {
        let (configs, trace) = runs(seed, 2);
        for config in configs {
            let (records, _) = play(config, trace.clone());
            let served = || records.iter().filter_map(|record| Some((record, record.end?)));
            let sojourn: u64 = served().map(|(record, end)| end - record.arrival).sum();
            let mut steps: Vec<(u64, i64)> =
                served().flat_map(|(record, end)| [(record.arrival, 1), (end, -1)]).collect();
            steps.sort_unstable();
            let (mut area, mut inside, mut last) = (0, 0_i64, 0);
            for (at, step) in steps {
                area += u64::try_from(inside).expect("none leaves before it came") * (at - last);
                (inside, last) = (inside + step, at);
            }
            assert_eq!((area, inside), (sojourn, 0), "seed {seed}");
            assert!(sojourn > 0);
            for (record, end) in served() {
                let first = record.first_token.expect("served");
                // A token takes a microsecond, and none of one request comes with another.
                assert!(first >= record.arrival + 1_000 * record.computed, "{record:?}");
                assert!(end >= first + 1_000 * record.output.saturating_sub(1), "{record:?}");
                let found = record.hits.iter().sum::<u64>() + record.peer;
                assert_eq!(found + record.computed, trace[record.id as usize].input);
            }
        }
    }
}

/// If nothing else changes, lanes without end take from a wait exactly what it was stalled.
#[test]
fn bandwidth_without_end_spares_the_transmissions() {
    let names: Vec<_> = (0..40_u32).map(|at| (at * 7 % 5, u64::from(at) * 1000)).collect();
    let trace = requests(&names);
    let endless = |settings: &mut Settings| {
        for tier in &mut settings.tiers {
            (tier.read.bytes_per_s, tier.store.bytes_per_s) = (u64::MAX, u64::MAX);
        }
    };
    let limits =
        Limits { token_budget: 64, max_running: 8, token_by_token: false, cache_answers: false };
    for machine in [
        |settings, _| config(settings, 1, Wait::All),
        |settings, limits| together(settings, 1, limits, Wait::All),
    ] {
        let (slow, simulation) = play(machine(two_tiers(), limits), trace.clone());
        let mut fast = two_tiers();
        endless(&mut fast);
        let (fast, _) = play(machine(fast, limits), trace.clone());
        let stalled: Vec<u64> = slow.iter().map(|record| record.stalled).collect();
        assert!(fast.iter().all(|record| record.stalled <= 1), "{fast:?}");
        let spared: Vec<u64> =
            std::iter::zip(ttft(&slow), ttft(&fast)).map(|(a, b)| a - b).collect();
        let rest: Vec<u64> = fast.iter().map(|record| record.stalled).collect();
        let wanted: Vec<u64> = std::iter::zip(&stalled, &rest).map(|(a, b)| a - b).collect();
        assert_eq!(spared, wanted);
        assert_eq!(stalled.iter().sum::<u64>(), simulation.lanes()["host read"].busy);
        assert!(stalled.iter().sum::<u64>() > 100_000_000);
    }
}

/// A tier that nothing is worth reading from is none.
#[test]
fn a_tier_with_endless_reads_is_no_tier() {
    for seed in 0..20 {
        let (configs, trace) = runs(seed, 1);
        for mut config in configs {
            config.load = LoadMode::Plan;
            let mut alone = config.settings.clone();
            alone.tiers.truncate(1);
            // Writing down takes slots until it is done, so it is given no time.
            let tiers = &mut config.settings.tiers;
            tiers[1].read.latency_ns = 1 << 60;
            tiers[1].store.bytes_per_s = u64::MAX;
            tiers[0].write = Write::Never;
            alone.tiers[0].write = Write::Never;
            let wait = config.service.wait;
            let mut other = rig::config(alone, 1, wait);
            (other.service, other.load) = (config.service.clone(), config.load);
            let (far, simulation) = play(config, trace.clone());
            let (none, _) = play(other, trace.clone());
            assert_eq!(simulation.lanes()["host read"].bytes, 0);
            assert!(none.iter().any(|record| record.hits.first().is_some_and(|&hits| hits > 0)));
            let shorn = |record: &Record| Record {
                hits: record.hits.iter().take(1).copied().collect(),
                saved: Vec::new(),
                ..record.clone()
            };
            assert_eq!(
                far.iter().map(shorn).collect::<Vec<_>>(),
                none.iter().map(shorn).collect::<Vec<_>>()
            );
        }
    }
}

/// Bytes on lanes are those of the moves that were handed out, and at the end each slot is free or
/// holds a copy that could leave.
#[test]
fn bytes_and_slots_add_up() {
    for seed in 0..20 {
        let (configs, trace) = runs(seed, 2);
        for mut config in configs {
            config.logged = true;
            let layer = config.settings.layer_bytes;
            let (_, simulation) = play(config, trace.clone());
            let (mut up, mut down) = (0, 0);
            for machine in 0..2 {
                for call in simulation.log(machine) {
                    let Call::Moves(moves) = call else { continue };
                    for order in moves {
                        let bytes = layer * u64::from(order.layers.len());
                        match order.kind {
                            MoveKind::Load => up += bytes,
                            MoveKind::Store => down += bytes,
                            MoveKind::Copy => panic!("no request is forked"),
                        }
                    }
                }
            }
            let lanes = simulation.lanes();
            assert_eq!((lanes["host read"].bytes, lanes["host store"].bytes), (up, down));
            for machine in simulation.machines() {
                for tier in 0..2 {
                    let manager = machine.calls.manager();
                    let (held, stats) = (manager.occupancy(tier), manager.stats(tier));
                    assert_eq!(held.slots, held.free + stats.copies, "seed {seed}: {held:?}");
                    assert_eq!(held.coming, 0);
                }
            }
        }
    }
}

/// Machines that share nothing are as many runs of what is sent to each.
#[test]
fn machines_by_hash_are_runs_of_the_parts() {
    for seed in 0..20 {
        for which in 0..4 {
            let (mut configs, trace) = runs(seed, 3);
            let mut config = configs.swap_remove(which);
            config.router = Box::new(Hash { block_tokens: 16 });
            let (records, _) = play(config, trace.clone());
            for machine in 0..3 {
                let of_machine: Vec<&Record> =
                    records.iter().filter(|record| record.machine == machine).collect();
                let part = (0..).zip(&of_machine).map(|(id, record)| {
                    let request = trace[usize::try_from(record.id).expect("few")].clone();
                    Request { id, ..request }
                });
                let (alone, _) = play(runs(seed, 1).0.swap_remove(which), part.collect());
                for (one, record) in std::iter::zip(&alone, of_machine) {
                    assert_eq!(Record { id: record.id, machine, ..one.clone() }, *record);
                }
            }
        }
    }
}
