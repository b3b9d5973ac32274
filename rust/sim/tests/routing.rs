//! Choice of machines, knowledge of the directory, and the cost of a wrong answer.

use kvtrie_core::{
    BlockEvent, BlockEventKind, BlockKey, BlockTokens, Group, GroupKind, Groups, Handle, Kind,
    Layers, Settings, Write, keys_of, scope_key,
};
use kvtrie_sim::decision::{Choice, Decision};
use kvtrie_sim::directory::{Directory, EventMap, Learning};
use kvtrie_sim::engine::Wait;
use kvtrie_sim::network::PeerSpec;
use kvtrie_sim::record::Record;
use kvtrie_sim::request::{Prompt, Request};
use kvtrie_sim::router::{Locality, RATIO_ONE, Router, Score};
use kvtrie_sim::simulation::{Config, Simulation};

use crate::rig::{config, play, requests, settings, tier, ttft, two_tiers};

const A: u32 = 1;
const B: u32 = 2;

fn locality() -> Box<dyn Router> {
    Box::new(Locality { ratio: 2 * RATIO_ONE })
}

fn score() -> Box<dyn Router> {
    Box::new(Score { hit_weight: 1, load_weight: 1 })
}

/// Plays requests; the records and the decisions, each with `others` others.
fn decide(config: Config, requests: Vec<Request>, others: usize) -> (Vec<Record>, Vec<Decision>) {
    let mut simulation = Simulation::new(config).expect("settings");
    simulation.report_decisions(Some(others));
    let (mut records, mut decisions) = (Vec::new(), Vec::new());
    let tell = |record| {
        records.push(record);
        Ok(())
    };
    let on_decision = |decision| {
        decisions.push(decision);
        Ok(())
    };
    simulation.run_deciding(requests.into_iter().map(Ok), tell, on_decision).expect("a run");
    (records, decisions)
}

fn machines(records: &[Record]) -> Vec<usize> {
    records.iter().map(|record| record.machine).collect()
}

/// B's machine computes 16 tokens of each, until it has five requests to the other's two, this one
/// counted.
#[test]
fn locality_follows_hits_until_the_load_differs() {
    let trace = requests(&[(A, 0), (B, 0), (A, 9), (B, 9), (B, 9), (B, 9), (B, 9), (B, 9)]);
    for directory in [Learning::Exact, Learning::Events(0), Learning::Events(1000)] {
        let mut config = config(two_tiers(), 2, Wait::All);
        (config.router, config.directory) = (locality(), directory);
        let (records, _) = play(config, trace.clone());
        assert_eq!(machines(&records), [0, 1, 0, 1, 1, 1, 1, 0], "{directory:?}");
        let waits = [64_000, 64_000, 16_000, 16_000, 32_000, 48_000, 64_000, 80_000];
        assert_eq!(ttft(&records), waits, "{directory:?}");
    }
    // A directory that learns too late knows no hits: the least loaded in turn.
    let mut config = config(two_tiers(), 2, Wait::All);
    (config.router, config.directory) = (locality(), Learning::Events(9_000_000));
    assert_eq!(machines(&play(config, trace).0), [0, 1, 0, 1, 0, 1, 0, 1]);
}

/// The third B would wait for two prompts of 64 tokens, with 16 to compute; the other machine has
/// one such prompt and 64 to compute. It takes 80 µs there, of which 16 are A's, instead of 48.
#[test]
fn score_weighs_hits_against_queued_tokens() {
    let trace = requests(&[(A, 0), (B, 0), (A, 9), (B, 9), (B, 9), (B, 9)]);
    let mut config = config(two_tiers(), 2, Wait::All);
    config.router = score();
    let (records, decisions) = decide(config, trace, 1);
    assert_eq!(machines(&records), [0, 1, 0, 1, 1, 0]);
    let choice = |machine, hit, queued, cost| Choice { machine, hit, queued, cost };
    let decision = |id, arrival, chosen, other, regret| Decision {
        id,
        arrival,
        chosen,
        others: vec![other],
        regret,
    };
    let wanted = [
        decision(0, 0, choice(0, 0, 0, 64_000), choice(1, 0, 0, 64_000), 0),
        decision(1, 0, choice(1, 0, 0, 64_000), choice(0, 0, 64, 128_000), 0),
        decision(2, 9_000_000, choice(0, 48, 0, 16_000), choice(1, 0, 0, 64_000), 0),
        decision(3, 9_000_000, choice(1, 48, 0, 16_000), choice(0, 0, 64, 80_000), 0),
        decision(4, 9_000_000, choice(1, 48, 64, 32_000), choice(0, 0, 64, 80_000), 0),
        decision(5, 9_000_000, choice(0, 0, 64, 80_000), choice(1, 48, 128, 48_000), 32_000),
    ];
    assert_eq!(decisions, wanted);
    assert_eq!(ttft(&records)[5], 80_000);
}

/// Any router's decisions can be reported, also of one that looks at nothing, with the best few others.
#[test]
fn decisions_are_told_of_every_router() {
    let config = config(two_tiers(), 4, Wait::All);
    let (_, decisions) = decide(config, requests(&[(A, 0), (B, 0), (A, 9)]), 2);
    let last = decisions.last().expect("three");
    assert_eq!((last.chosen.machine, last.chosen.cost, last.regret), (2, 64_000, 48_000));
    assert_eq!(last.others.iter().map(|one| one.machine).collect::<Vec<_>>(), [0, 1]);
}

/// A's blocks have left the first machine for C's when the second one asks it for them. A machine
/// that learns that late asks, and waits for the refusal; one that has learned nothing yet, or
/// learns at once, does not.
#[test]
fn a_stale_answer_costs_its_latency() {
    let tiers = vec![tier(Kind::Gpu, 4, Write::Through), tier(Kind::Host, 4, Write::Back)];
    let trace = requests(&[(A, 0), (B, 0), (3, 1000), (4, 1000), (5, 2000), (A, 2500)]);
    let wait = |directory, latency_ns| {
        let mut config = config(settings(tiers.clone()), 2, Wait::All);
        config.peers = Some(PeerSpec { bytes_per_s: 8_192_000, latency_ns, shares: None });
        config.directory = directory;
        let (records, _) = play(config, trace.clone());
        assert_eq!((records[5].machine, records[5].peer, records[5].computed), (1, 0, 64));
        ttft(&records)[5]
    };
    let second = 1_000_000_000;
    assert_eq!(wait(Learning::Exact, 5_000), 64_000);
    assert_eq!(wait(Learning::Events(0), 5_000), 64_000);
    assert_eq!(wait(Learning::Events(2 * second), 5_000), 69_000);
    assert_eq!(wait(Learning::Events(2 * second), 0), 64_000);
    assert_eq!(wait(Learning::Events(3 * second), 5_000), 64_000);
}

/// Prompts of one to six blocks that share prefixes, in random order.
fn random(seed: u64, count: u64) -> Vec<Request> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut draw = move |most: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let mut arrival = 0;
    let mut request = |id| {
        arrival += draw(40) * 100_000;
        let (stem, branch, blocks) = (draw(3), draw(4), 1 + draw(6));
        let token =
            |at: u64| if at < 32 { stem * 1000 + at } else { stem * 1000 + branch * 100 + at };
        let tokens = (0..blocks * 16 + draw(3)).map(|at| token(at).try_into().expect("small"));
        let tokens: Vec<u32> = tokens.collect();
        let input = tokens.len() as u64;
        Request { id, arrival, tokens, input, output: 1 + draw(9), ..Request::default() }
    };
    (0..count).map(&mut request).collect()
}

fn world(seed: u64, directory: Learning) -> Config {
    let few = u32::try_from(seed % 5).expect("small");
    let mut tiers = vec![
        tier(Kind::Gpu, 7 + few, Write::Through),
        tier(Kind::Host, 9 + 2 * few, Write::Through),
    ];
    if seed.is_multiple_of(2) {
        tiers.push(tier(Kind::Disk, 30, Write::Back));
    }
    // Layers of a copy may leave one by one.
    tiers[0].layer_slots = seed.is_multiple_of(3);
    let settings: Settings = settings(tiers);
    let wait = if seed.is_multiple_of(7) { Wait::Layer } else { Wait::All };
    let mut config = config(settings, 3, wait);
    config.router = if seed.is_multiple_of(5) { score() } else { locality() };
    let peers = PeerSpec { bytes_per_s: 16_384_000, latency_ns: 30_000, shares: None };
    config.peers = (!seed.is_multiple_of(4)).then_some(peers);
    config.directory = directory;
    config
}

/// A model with a window, a chunk or a state besides full attention, on machines without peers.
fn grouped(seed: u64, directory: Learning) -> Config {
    let kinds = [
        GroupKind::Sliding { window: 40, sinks: 0 },
        GroupKind::Sliding { window: 24, sinks: 16 },
        GroupKind::Chunked { chunk: 64 },
        GroupKind::State,
    ];
    let group = |kind| Group { kind, slot_bytes: 16_384, layers: 4 };
    let mut groups = vec![group(GroupKind::Full)];
    groups.extend((0..4).filter(|at| ((seed % 15 + 1) >> at) & 1 == 1).map(|at| group(kinds[at])));
    let mut config = world(seed, directory);
    let settings = &mut config.settings;
    for tier in &mut settings.tiers {
        tier.layer_slots = false;
    }
    let bytes = settings.tiers.iter().map(|tier| u64::from(tier.blocks) * 40_000).collect();
    let slots = vec![vec![16_384; groups.len()]; settings.tiers.len()];
    settings.groups = Some(Groups { groups, bytes, slots, newest: 2, every: 0 });
    config.peers = None;
    config
}

#[test]
fn events_without_delay_are_as_good_as_asking() {
    let mut hits = 0;
    for seed in 0..120 {
        for world in [world, grouped] {
            let run = |directory| decide(world(seed, directory), random(seed, 60), 2);
            let asked = run(Learning::Exact);
            assert_eq!(asked, run(Learning::Events(0)), "seed {seed}");
            hits += asked.1.iter().filter(|decision| decision.chosen.hit > 0).count();
        }
    }
    assert!(hits > 3000, "{hits} decisions for a machine that has something of the prompt");
}

/// Both machines have the prompt's full attention; one has lost the state after it, and counts for
/// nothing.
#[test]
fn a_machine_counts_up_to_the_deepest_border_with_all_groups() {
    let prompt = |tokens: &[u32]| Prompt { tokens: tokens.to_vec().leak(), keep: 1 };
    let mut settings = grouped(8, Learning::Exact).settings;
    let groups = settings.groups.as_mut().expect("groups");
    groups.groups.truncate(1);
    for kind in [GroupKind::Sliding { window: 17, sinks: 0 }, GroupKind::State] {
        groups.groups.push(Group { kind, slot_bytes: 16_384, layers: 4 });
    }
    let mut map = EventMap::new(&settings, 2, None);
    let tokens: Vec<u32> = (0..81).collect();
    let scope = scope_key(&settings.fingerprint, settings.block_tokens, &[], "");
    let keys: Vec<BlockKey> = keys_of(scope, &tokens, 16).collect();
    let event = |kind, block: usize, group| BlockEvent {
        number: 0,
        at: 0,
        kind,
        block: Handle(0),
        key: keys[block],
        parent: keys[block.max(1) - 1],
        first: block == 0,
        tokens: BlockTokens::new(),
        owner: None,
        private: false,
        tier: 1,
        group,
        layers: Layers::new(0, 4),
        whole: true,
    };
    let stored = |block, group| event(BlockEventKind::Stored, block, group);
    for machine in 0..2 {
        let full: Vec<BlockEvent> = (0..5).map(|block| stored(block, 0)).collect();
        map.update(machine, &full);
        map.update(machine, &[1, 2, 4].map(|block| stored(block, 1)));
        map.update(machine, &[1, 2, 4].map(|block| stored(block, 2)));
    }
    let count =
        |map: &EventMap| map.resident(prompt(&tokens), &mut std::iter::empty()).expect("counts");
    // A window of 17 tokens wants the block before the border, and 16 tokens of it.
    assert_eq!(count(&map), [5, 5]);
    map.update(1, &[event(BlockEventKind::Removed, 4, 2)]);
    assert_eq!(count(&map), [5, 3]);
    map.update(1, &[event(BlockEventKind::Removed, 2, 1)]);
    assert_eq!(count(&map), [5, 2]);
    map.update(1, &[event(BlockEventKind::Removed, 1, 0)]);
    assert_eq!(count(&map), [5, 0]);
}

#[test]
fn equal_runs_give_equal_decisions_however_late_the_directory_learns() {
    let mut differ = 0;
    for seed in 0..20 {
        let run = |delay| decide(world(seed, Learning::Events(delay)), random(seed, 60), 2);
        assert_eq!(run(30_000_000), run(30_000_000), "seed {seed}");
        differ += i32::from(run(30_000_000) != run(0));
    }
    assert!(differ > 10, "late events change decisions: {differ}");
}
