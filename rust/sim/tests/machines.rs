//! Machines whose hardware differs, what they share, and what several of them cannot have.

use std::sync::Arc;

use kvtrie_core::{CostModel, Kind, Write};
use kvtrie_sim::cost::{Affine, PART_BITS};
use kvtrie_sim::engine::Wait;
use kvtrie_sim::network::PeerSpec;
use kvtrie_sim::simulation::{Config, Hardware, Simulation};
use kvtrie_sim::transfer::Mode;

use crate::rig::{config, play, requests, settings, tier, ttft, two_tiers};

const A: u32 = 1;
const B: u32 = 2;
const C: u32 = 3;

/// A machine with a GPU of `blocks` blocks, and nanoseconds of a token.
fn hardware(blocks: u32, ns: u32) -> Hardware {
    let cost = CostModel::affine(0.0, 1.0, 0.0, f64::from(ns)).expect("a cost");
    Hardware {
        tiers: vec![tier(Kind::Gpu, blocks, Write::Through), tier(Kind::Host, 64, Write::Back)],
        price: Arc::new(Affine { base: u64::from(ns) << PART_BITS, slope: 0 }),
        cost,
    }
}

fn refused(change: impl FnOnce(&mut Config)) -> String {
    let mut config = config(two_tiers(), 2, Wait::All);
    change(&mut config);
    Simulation::new(config).expect_err("refused").to_string()
}

/// The second machine computes a token in 500 ns and keeps two prompts on its GPU; the first one
/// takes 1000 ns and loads the three blocks of a prompt that has left in 3 ms.
#[test]
fn each_machine_has_its_own_tiers_and_times() {
    let trace = [(A, 0), (A, 0), (B, 10), (B, 10), (A, 20), (A, 20)];
    let mut config = config(two_tiers(), 2, Wait::All);
    config.hardware = vec![hardware(4, 1000), hardware(8, 500)];
    let (records, simulation) = play(config, requests(&trace));
    let at = records.iter().map(|record| record.machine).collect::<Vec<_>>();
    assert_eq!(at, [0, 1, 0, 1, 0, 1]);
    assert_eq!(ttft(&records), [64_000, 32_000, 64_000, 32_000, 3_016_000, 8_000]);
    let rooms: Vec<_> = simulation
        .machines()
        .map(|machine| machine.calls.manager().settings().tiers[0].blocks)
        .collect();
    assert_eq!(rooms, [4, 8]);
}

/// The second machine fetches the three blocks of A from the first one at 20 ms, which loads the same
/// three from its host at 21 ms. Apart, both take 3 ms, and the second machine loads for 3 ms more. In
/// one queue the first machine's load waits 2 ms for the network and ends at 26 ms, and the second
/// machine's load waits for that from 23 ms on.
#[test]
fn a_tier_and_the_network_contend_for_a_lane_of_one_name() {
    let trace = requests(&[(A, 0), (B, 0), (C, 10), (A, 20), (A, 21)]);
    let waits = |tier: Option<&str>, peers: Option<&str>| {
        let mut config = config(two_tiers(), 2, Wait::All);
        config.settings.tiers[1].read.shares = tier.map(String::from);
        let shares = peers.map(String::from);
        config.peers = Some(PeerSpec { bytes_per_s: 16_384_000, latency_ns: 0, shares });
        let (records, simulation) = play(config, trace.clone());
        let waited = simulation.lanes().values().map(|lane| lane.waited).sum::<u64>();
        (ttft(&records)[3..].to_vec(), waited)
    };
    let apart = (vec![6_016_000, 3_016_000], 0);
    assert_eq!(waits(None, None), apart);
    assert_eq!(waits(Some("nic"), Some("other")), apart);
    assert_eq!(waits(Some("nic"), None), apart);
    // A lane without `shares` has the queue of its own name.
    for tier in [Some("nic"), None] {
        let shared = waits(tier, Some(tier.unwrap_or("host read")));
        assert_eq!(shared, (vec![9_016_000, 5_016_000], 5_000_000), "{tier:?}");
    }
}

#[test]
fn machines_that_do_not_go_together_are_refused() {
    let few = refused(|config| config.hardware = vec![hardware(4, 1000)]);
    assert!(few.contains("machines is 2, and the hardware of 1 is given"), "{few}");
    let other = refused(|config| {
        config.hardware = vec![hardware(4, 1000), hardware(4, 1000)];
        config.hardware[1].tiers.pop();
    });
    assert!(other.contains(r#"machine 1 has tiers ["gpu"]: those of all machines"#), "{other}");
    let peers = PeerSpec { bytes_per_s: 1, latency_ns: 0, shares: Some("host store".into()) };
    let predicted = refused(|config| {
        (config.peers, config.transfer.mode) = (Some(peers), Mode::Predicted);
    });
    assert!(
        predicted.contains("share host store with the network or other machines, and predicted"),
        "{predicted}"
    );
}

/// Each machine would have a store that the others do not see.
#[test]
fn a_remote_tier_belongs_to_one_machine() {
    let tiers = || {
        let kinds = [Kind::Gpu, Kind::Host, Kind::Remote];
        settings(kinds.map(|kind| tier(kind, 8, Write::Back)).into())
    };
    Simulation::new(config(tiers(), 1, Wait::All)).expect("one machine");
    let two = Simulation::new(config(tiers(), 2, Wait::All)).expect_err("refused").to_string();
    assert!(two.contains("machines is 2, and a tier is 'remote'"), "{two}");
}
