//! Prompts computed on one machine, answers made on another.

use kvtrie_core::{Kind, Write};
use kvtrie_sim::call::Call;
use kvtrie_sim::engine::{self, Limits, Wait};
use kvtrie_sim::network::PeerSpec;
use kvtrie_sim::simulation::{Config, Simulation};

use crate::rig::{drawn, play, requests, settings, tier, together, ttft};

const A: u32 = 1;
const B: u32 = 2;
const LIMITS: Limits =
    Limits { token_budget: 64, max_running: 8, token_by_token: false, cache_answers: false };

/// A block takes 2 ms from one machine to another.
fn apart(mut config: Config, prefill: usize) -> Config {
    let limits = config.service.kind.limits().expect("steps");
    config.service.kind = engine::Kind::Disaggregated(limits, prefill);
    config.network = Some(PeerSpec { bytes_per_s: 8_192_000, latency_ns: 0, shares: None });
    config.logged = true;
    config
}

/// Four blocks take 8 ms, then three tokens are made. When the prompt comes back the machine of the
/// prefill computes 16 tokens, and the other one pulls a block.
#[test]
fn what_the_other_machine_lacks_is_pulled() {
    let mut trace = requests(&[(A, 0), (A, 1000), (B, 2000)]);
    (trace[0].output, trace[1].output) = (4, 4);
    let settings = settings(vec![tier(Kind::Gpu, 8, Write::Never)]);
    let config = apart(together(settings, 2, LIMITS, Wait::All), 1);
    let (records, simulation) = play(config, trace);
    assert_eq!(ttft(&records), [64_000, 16_000, 64_000]);
    let whole: Vec<u64> =
        records.iter().map(|one| one.end.expect("served") - one.arrival).collect();
    assert_eq!(whole, [64_000 + 8_000_000 + 3_000, 16_000 + 2_000_000 + 3_000, 64_000]);
    assert_eq!((records[1].machine, &records[1].hits[..], records[1].computed), (0, &[48][..], 16));
    let carried = simulation.lanes()["peers"];
    assert_eq!((carried.bytes, carried.busy), (5 << 14, 10_000_000));
    // The first machine keeps its blocks until they were pulled, and no longer.
    let ends = |machine| -> Vec<u64> {
        let end = |call: &Call| if let Call::Release(_, now) = call { Some(*now) } else { None };
        simulation.log(machine).iter().filter_map(end).collect()
    };
    assert_eq!(ends(0), [8_064_000, 1_002_016_000, 2_000_064_000]);
    assert_eq!(ends(1), [8_067_000, 1_002_019_000]);
}

/// The machine that decodes holds five blocks: B waits there until A has ended, and on the first
/// machine its blocks wait for it.
#[test]
fn a_request_waits_where_it_was_computed_for_room() {
    let mut trace = requests(&[(A, 0), (B, 0)]);
    (trace[0].output, trace[1].output) = (17, 2);
    let settings = settings(vec![tier(Kind::Gpu, 5, Write::Never)]);
    let config = apart(together(settings.clone(), 2, LIMITS, Wait::All), 1);
    let (records, _) = play(config, trace.clone());
    // The first machine has no room for B either, until A was pulled at 8 064 us.
    assert_eq!(ttft(&records), [64_000, 8_064_000 + 64_000]);
    assert_eq!(records[0].end, Some(8_064_000 + 16_000));
    assert_eq!(records[1].end, Some(8_128_000 + 8_000_000 + 1_000));
    // With two machines that decode nothing waits but for the first one's room.
    let config = apart(together(settings, 3, LIMITS, Wait::All), 1);
    assert_eq!(play(config, trace).0, records);
}

/// Everything drawn ends, on every machine, and jumps change nothing.
#[test]
fn all_requests_end_however_little_room_there_is() {
    let mut handed = 0;
    for seed in 0..100 {
        let (settings, limits, trace) = drawn(seed);
        let run = |token_by_token| {
            let limits = Limits { token_by_token, ..limits };
            let wait = if seed % 3 == 0 { Wait::Layer } else { Wait::All };
            play(apart(together(settings.clone(), 3, limits, wait), 1), trace.clone())
        };
        let ((records, simulation), (steps, _)) = (run(false), run(true));
        assert_eq!(records.len(), trace.len(), "seed {seed}");
        assert_eq!(records, steps, "seed {seed}");
        handed += simulation.lanes()["peers"].bytes;
        for machine in simulation.machines() {
            let manager = machine.calls.manager();
            for tier in 0..2 {
                let held = manager.occupancy(tier);
                assert_eq!(held.slots, held.free + manager.stats(tier).copies);
            }
        }
    }
    assert!(handed > 1 << 26, "{handed}");
}

#[test]
fn both_kinds_of_machines_and_a_network_are_wanted() {
    let refused = |change: fn(&mut Config)| {
        let settings = settings(vec![tier(Kind::Gpu, 8, Write::Never)]);
        let mut config = apart(together(settings, 2, LIMITS, Wait::All), 1);
        change(&mut config);
        Simulation::new(config).expect_err("refused").to_string()
    };
    let prefill = refused(|config| config.service.kind = engine::Kind::Disaggregated(LIMITS, 2));
    assert!(prefill.contains("prefill is 2 of 2 machines"), "{prefill}");
    let network = refused(|config| config.network = None);
    assert!(network.contains("no network"), "{network}");
}
