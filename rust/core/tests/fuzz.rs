//! The long run of `make fuzz`: millions of operations over every shape of manager.
//!
//! `KVTRIE_FUZZ_OPS` sets how many, `KVTRIE_FUZZ_SEED` the first world. The first ten million are
//! checked after every operation, the others after every 64th.

use std::time::Instant;

use kvtrie_core::{POLICIES, Settings};

use crate::group_story::shared::above_shared;
use crate::group_story::{Step, Story, drawn};
use crate::world::{Mix, Raw, World, engines, mixed, settings, shared};

const OPS_PER_WORLD: u64 = 200;

/// A run of this length must have reached every count below.
const FULL: u64 = 6_000_000;

/// Up to here each operation is audited, and the state compared after a refused one.
const THOROUGH: u64 = 10_000_000;

/// From then on one in `SELDOM` is.
const SELDOM: u64 = 64;

/// Interval of the progress reports.
const TOLD: u64 = 1_000_000;

/// Minimum of each count in a full run.
const WANTED: u64 = 1000;

/// The counts.
const HAPPENINGS: [&str; 39] = [
    "no space",
    "config error",
    "closed error",
    "failed move",
    "hung move",
    "lease replanned",
    "skipped after a failure",
    "acquire",
    "commit",
    "reserve",
    "release",
    "fork",
    "truncate",
    "suspend",
    "resume",
    "mark",
    "appear",
    "index",
    "load index",
    "found again",
    "commit many",
    "price",
    "load",
    "hole computed",
    "complete",
    "complete again",
    "bind",
    "hint",
    "hint accepted",
    "hint clipped",
    "hint deferred",
    "hint rejected",
    "pending hint applied",
    "ranks compared",
    "generation stood",
    "handed out ahead",
    "taken over",
    "drop ahead",
    "given up",
];

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Plays a story of several groups, and names its shape.
fn play_groups(world_seed: u64, drawn_from: u64, state: &mut u64) -> &'static str {
    let mut settings = drawn::drawn(drawn_from);
    if drawn_from.is_multiple_of(3) && settings.tiers.len() > 1 {
        settings = above_shared(settings);
    }
    let groups = settings.groups.as_ref().map_or(0, |groups| groups.groups.len());
    let number = |bits: u8, n: usize| usize::from(bits) % n;
    let steps: Vec<Step> = (0..OPS_PER_WORLD)
        .map(|_| {
            let bits = mixed(state).to_le_bytes();
            let stem = u32::from(bits[1] % 4);
            (bits[0] % 19, stem, number(bits[2], 7), 1 + number(bits[3], 8), number(bits[4], 9))
        })
        .collect();
    let shown = settings.clone();
    let run = std::panic::catch_unwind(|| {
        if let Some(mut story) = Story::new(settings) {
            story.play(&steps);
        }
    });
    assert!(
        run.is_ok(),
        "world {world_seed} failed; KVTRIE_FUZZ_SEED={world_seed} KVTRIE_FUZZ_OPS={OPS_PER_WORLD} \
         runs it alone: {shown:?}"
    );
    ["one group", "one group", "two groups", "three groups", "four groups"][groups]
}

/// The parts of a shape: policy, structure, owner of the slots.
fn drawn(settings: &Settings) -> [&'static str; 3] {
    let policy = POLICIES.iter().find(|name| **name == settings.policy);
    let structure = settings.structure.name();
    let layered = settings.tiers.iter().any(|tier| tier.layer_slots);
    let slots = if layered { "slots of layers" } else { "slots of blocks" };
    [policy.expect("it is registered"), structure, slots]
}

#[test]
#[ignore = "minutes long; run by make fuzz"]
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the mix is what the run is for")]
#[expect(clippy::disallowed_methods, reason = "how long the run takes, not the time of a manager")]
fn millions_of_operations() {
    let wanted = number("KVTRIE_FUZZ_OPS", FULL);
    let mut world_seed = number("KVTRIE_FUZZ_SEED", 1);
    let mut mix = Mix::new();
    let mut tiers = [0_u64; 4];
    let mut shapes = Mix::new();
    let mut ops = 0;
    let start = Instant::now();
    while ops < wanted {
        let mut state = world_seed;
        let drawn_from = mixed(&mut state);
        // Each of its steps is audited.
        if world_seed % if ops < THOROUGH { 8 } else { 64 } == 2 {
            let groups = play_groups(world_seed, drawn_from, &mut state);
            *shapes.entry(groups).or_default() += OPS_PER_WORLD;
            ops += OPS_PER_WORLD;
            world_seed += 1;
            continue;
        }
        *shapes.entry("one group").or_default() += OPS_PER_WORLD;
        let settings = match world_seed % 8 {
            0 => engines(drawn_from),
            4 => shared(drawn_from),
            _ => settings(drawn_from),
        };
        tiers[settings.tiers.len() - 1] += OPS_PER_WORLD;
        for kind in drawn(&settings) {
            *shapes.entry(kind).or_default() += OPS_PER_WORLD;
        }
        let list: Vec<Raw> = (0..OPS_PER_WORLD)
            .map(|_| {
                let bits = mixed(&mut state).to_le_bytes();
                let wide = |at: usize| u16::from_le_bytes([bits[at], bits[at + 1]]);
                (bits[0], wide(1), wide(3))
            })
            .collect();
        let shown = settings.clone();
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(settings);
            world.every = if ops < THOROUGH { 1 } else { SELDOM };
            for &raw in &list {
                world.step(raw);
            }
            world.drain();
            world.mix
        });
        let seen = run.unwrap_or_else(|_| {
            panic!(
                "world {world_seed} failed after {ops} operations; KVTRIE_FUZZ_SEED={world_seed} \
                 KVTRIE_FUZZ_OPS={OPS_PER_WORLD} runs it alone: {shown:?}"
            )
        });
        for (what, times) in seen {
            *mix.entry(what).or_default() += times;
        }
        ops += OPS_PER_WORLD;
        world_seed += 1;
        if ops.is_multiple_of(TOLD) {
            let rate = u128::from(ops) * 1000 / start.elapsed().as_millis().max(1);
            eprintln!("{:>6} of {} million, {rate}/s", ops / TOLD, wanted.div_ceil(TOLD));
        }
    }
    let (worlds, seconds) = (ops / OPS_PER_WORLD, start.elapsed().as_secs());
    println!("{ops} operations in {worlds} worlds up to {world_seed}, {seconds} s");
    for (count, times) in (1..).zip(tiers) {
        println!("{times:>10}  with {count} tiers");
        assert!(ops < FULL || times >= WANTED, "{count} tiers only {times} times");
    }
    for (what, times) in &shapes {
        println!("{times:>10}  under {what}");
        assert!(ops < FULL || *times >= WANTED, "{what} only {times} times");
    }
    for name in POLICIES {
        assert!(ops < FULL || shapes.contains_key(name), "no world under {name}");
    }
    for (what, times) in &mix {
        println!("{times:>10}  {what}");
    }
    for what in HAPPENINGS {
        let times = mix.get(what).copied().unwrap_or(0);
        assert!(ops < FULL || times >= WANTED, "'{what}' happened only {times} times");
    }
}
