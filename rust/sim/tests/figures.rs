//! Runs whose figures can be worked out by hand.

use kvtrie_core::{Kind, Write};
use kvtrie_sim::engine::Wait;
use kvtrie_sim::network::PeerSpec;
use kvtrie_sim::record::Record;
use kvtrie_sim::request::Request;
use kvtrie_sim::transfer::Mode;

use crate::rig::{config, lane, play, requests, settings, tier, ttft, two_tiers};

const A: u32 = 1;
const B: u32 = 2;

/// The third request finds three of its four blocks on the host: 3 ms of loads, 16 tokens to compute.
#[test]
fn a_prompt_comes_back_from_the_host() {
    let trace = requests(&[(A, 0), (B, 1000), (A, 2000)]);
    let (records, simulation) = play(config(two_tiers(), 1, Wait::All), trace.clone());
    assert_eq!(ttft(&records), [64_000, 64_000, 3_016_000]);
    assert_eq!(records[2].hits, [0, 48]);
    assert_eq!((records[2].computed, records[2].end), (16, records[2].first_token));
    let lanes = simulation.lanes();
    let carried = |name: &str| (lanes[name].bytes, lanes[name].busy);
    assert_eq!(carried("host read"), (3 << 14, 3_000_000));
    assert_eq!(carried("host store"), (8 << 14, 8_000_000));
    assert_eq!(records[2].saved, [0, 48_000, 0]);
    let (records, _) = play(config(two_tiers(), 1, Wait::Layer), trace);
    assert_eq!(ttft(&records), [64_000, 64_000, 3_004_000]);
}

/// The last layer comes after 3 ms however fast the others are computed, and computing 12 ms hides all
/// but the first layer's load.
#[test]
fn layers_are_computed_while_others_load() {
    let trace = requests(&[(A, 0), (B, 1000), (A, 2000)]);
    for (ns_per_token, first, last) in
        [(1000, 64_000, 3_004_000), (750_000, 48_000_000, 12_750_000)]
    {
        let mut config = config(two_tiers(), 1, Wait::Layer);
        let base = ns_per_token << kvtrie_sim::cost::PART_BITS;
        config.service.cost = std::sync::Arc::new(kvtrie_sim::cost::Affine { base, slope: 0 });
        assert_eq!(ttft(&play(config, trace.clone()).0), [first, first, last]);
    }
}

/// Three loads together pay the latency once; one by one they pay it each.
#[test]
fn a_transmission_pays_its_latency_once() {
    let trace = requests(&[(A, 0), (B, 1000), (A, 2000)]);
    for (moves_per_job, latencies) in [(64, 1), (2, 2), (1, 3)] {
        let mut settings = two_tiers();
        settings.tiers[1].read = lane("host read", 16_384_000, 100_000);
        let mut config = config(settings, 1, Wait::All);
        config.transfer.moves_per_job = moves_per_job;
        let (records, _) = play(config, trace.clone());
        assert_eq!(ttft(&records)[2], 3_016_000 + latencies * 100_000);
    }
}

/// A queued request waits for the whole request before it: 64 tokens and 3 more of the answer,
/// whose last token is never fed back.
#[test]
fn requests_wait_for_the_one_before() {
    let mut trace = requests(&[(A, 0), (B, 0)]);
    for request in &mut trace {
        request.output = 4;
    }
    let settings = settings(vec![tier(Kind::Gpu, 5, Write::Back)]);
    let (records, _) = play(config(settings, 1, Wait::All), trace);
    assert_eq!(ttft(&records), [64_000, 67_000 + 64_000]);
    assert_eq!(records[1].end, Some(2 * 67_000));
}

#[test]
fn what_does_not_fit_is_refused_and_the_next_one_runs() {
    let mut trace = requests(&[(A, 0), (B, 0), (A, 1)]);
    trace[1].output = 2;
    let settings = settings(vec![tier(Kind::Gpu, 4, Write::Back)]);
    let (records, _) = play(config(settings, 1, Wait::All), trace);
    assert_eq!(records[1], Record { id: 1, ..Record::default() });
    assert_eq!((records[2].first_token, &records[2].hits[..]), (Some(1_016_000), &[48][..]));
}

/// A read from disk goes through host: the second lane is entered when the last byte has left the
/// first.
#[test]
fn a_prompt_comes_back_from_disk() {
    let tiers = vec![
        tier(Kind::Gpu, 4, Write::Through),
        tier(Kind::Host, 5, Write::Through),
        tier(Kind::Disk, 64, Write::Back),
    ];
    let trace = requests(&[(A, 0), (B, 1000), (3, 2000), (A, 3000)]);
    let (records, _) = play(config(settings(tiers), 1, Wait::All), trace);
    let last = &records[3];
    assert_eq!(last.hits[0], 0);
    assert_eq!(last.hits[1] + last.hits[2], 48);
    // Blocks leave the disk one by one, and each then takes a millisecond more to the GPU.
    let disk = last.hits[2] / 16;
    assert!(disk > 0, "{last:?}");
    assert_eq!(ttft(&records)[3], if disk == 3 { 4_016_000 } else { 3_016_000 });
}

/// If moves end as predicted, hand figures are the same: nothing waits here.
#[test]
fn predictions_are_right_where_nothing_waits() {
    let trace = requests(&[(A, 1), (B, 1000), (A, 2000)]);
    let mut config = config(two_tiers(), 1, Wait::All);
    (config.transfer.mode, config.service.gap) = (Mode::Predicted, 1);
    assert_eq!(ttft(&play(config, trace).0), [64_000, 64_000, 3_016_000]);
}

#[test]
fn time_runs_forwards_and_may_pause_for_days() {
    const DAY: u64 = 86_400_000;
    let trace = requests(&[(A, 0), (B, 3 * DAY), (A, 9 * DAY)]);
    let (records, _) = play(config(two_tiers(), 1, Wait::All), trace);
    assert_eq!(ttft(&records), [64_000, 64_000, 3_016_000]);
    let back: Vec<Request> = requests(&[(A, 5), (B, 4)]);
    let mut simulation =
        kvtrie_sim::simulation::Simulation::new(config(two_tiers(), 1, Wait::All)).expect("fine");
    let error = simulation.run(back.into_iter().map(Ok), |_| Ok(())).expect_err("backwards");
    assert!(error.to_string().contains("4000000 ns, before the 5000000 ns"), "{error}");
}

#[test]
fn equal_runs_give_equal_records_and_logs() {
    let run = || {
        let trace: Vec<_> = (0..200).map(|at| (at * 7919 % 13, u64::from(at) * 3)).collect();
        let mut config = config(two_tiers(), 3, Wait::Layer);
        config.logged = true;
        let (records, simulation) = play(config, requests(&trace));
        (records, (0..3).map(|machine| simulation.log(machine).to_vec()).collect::<Vec<_>>())
    };
    assert_eq!(run(), run());
}

/// A and B, then B and A on two machines: each finds the other's three blocks in its host, 2 ms each
/// over the network, 1 ms each to the GPU.
#[test]
fn a_prompt_comes_from_another_machine() {
    let trace = requests(&[(A, 0), (B, 0), (B, 1000), (A, 1000)]);
    for (shares, last) in [(Some("net"), 15_016_000), (None, 9_016_000)] {
        let mut config = config(two_tiers(), 2, Wait::All);
        let shares = shares.map(String::from);
        config.peers = Some(PeerSpec { bytes_per_s: 8_192_000, latency_ns: 0, shares });
        let (records, simulation) = play(config, trace.clone());
        assert_eq!(ttft(&records), [64_000, 64_000, 9_016_000, last]);
        assert_eq!((records[2].peer, &records[2].hits[..]), (48, &[0, 0][..]));
        let carried = simulation.lanes()["peers"];
        let waited = if last == 15_016_000 { 6_000_000 } else { 0 };
        assert_eq!((carried.bytes, carried.busy, carried.waited), (6 << 14, 12_000_000, waited));
    }
}

/// Blocks on a peer's disk take its disk lane first, without a slot in its host.
#[test]
fn a_prompt_comes_from_another_machines_disk() {
    let tiers = vec![
        tier(Kind::Gpu, 4, Write::Through),
        tier(Kind::Host, 5, Write::Through),
        tier(Kind::Disk, 64, Write::Back),
    ];
    let trace = requests(&[(A, 0), (3, 0), (B, 1000), (4, 1000), (5, 2000), (A, 2000)]);
    let mut config = config(settings(tiers), 2, Wait::All);
    config.peers = Some(PeerSpec { bytes_per_s: 8_192_000, latency_ns: 0, shares: None });
    let (records, _) = play(config, trace);
    assert_eq!(records[5].peer, 48);
    // Three blocks leave the disk in 3 ms, or two of them in 2 where the host still holds one.
    let wait = ttft(&records)[5];
    assert!([11_016_000, 12_016_000].contains(&wait), "{wait}");
}
