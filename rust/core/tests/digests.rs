//! Digests of every move and eviction of seeded operations, per policy, structure and number of tiers.
//!
//! They prove that a change meant to keep all decisions does. `tests/digests.txt` has the recorded
//! ones: of the first 10⁴ operations, which `cargo test` plays, and of 10⁵, which `make test-deep`
//! plays. `KVTRIE_DIGESTS=record` records them again, only for a change that is meant to decide
//! differently; its commit says why.

use std::fmt::Write;
use std::path::Path;

use kvtrie_core::{Event, Group, GroupKind, Groups, Move, POLICIES, Settings, Structure};

use crate::world::{Raw, World, mixed, settings};

const OPS_PER_WORLD: usize = 200;
const FEW: usize = 10_000 / OPS_PER_WORLD;
const ALL: usize = 100_000 / OPS_PER_WORLD;
const STRUCTURES: [Structure; 2] = [Structure::LeafOnly, Structure::Holes];

/// A family of worlds with one recorded pair of digests.
#[derive(Clone, Copy)]
struct Family {
    policy: &'static str,
    structure: Structure,
    tiers: usize,
}

impl Family {
    fn all() -> impl Iterator<Item = Self> {
        POLICIES.iter().flat_map(|&policy| {
            STRUCTURES.into_iter().flat_map(move |structure| {
                (1..=4).map(move |tiers| Self { policy, structure, tiers })
            })
        })
    }

    fn name(self) -> String {
        format!("{} {} {}", self.policy, self.structure.name(), self.tiers)
    }

    /// The settings of the family's worlds, one after the other, with the seed of their operations.
    fn worlds(self) -> impl Iterator<Item = (u64, Settings)> {
        (1_u64..).filter_map(move |mut state| {
            let drawn = settings(mixed(&mut state));
            let (policy, structure) = (self.policy.to_owned(), self.structure);
            (drawn.tiers.len() == self.tiers)
                .then_some((state, Settings { policy, structure, ..drawn }))
        })
    }

    /// The digests of as many worlds as each of `counts` says, in ascending order.
    fn digests(self, counts: &[usize]) -> Vec<String> {
        self.digests_of(counts, |settings| settings)
    }

    /// The same with changed settings.
    fn digests_of(self, counts: &[usize], change: fn(Settings) -> Settings) -> Vec<String> {
        let mut hasher = blake3::Hasher::new();
        let mut digests = Vec::new();
        let last = *counts.last().expect("some are asked for");
        for (done, (mut state, settings)) in (1..=last).zip(self.worlds()) {
            let mut world = World::new(change(settings));
            world.every = u64::MAX;
            world.ahead = false;
            for _ in 0..OPS_PER_WORLD {
                let bits = mixed(&mut state).to_le_bytes();
                let wide = |at: usize| u16::from_le_bytes([bits[at], bits[at + 1]]);
                let raw: Raw = (bits[0], wide(1), wide(3));
                world.step(raw);
            }
            world.drain();
            let mut line = String::new();
            world.log.iter().for_each(|move_| write_move(&mut line, move_));
            world.evictions().iter().for_each(|event| write_event(&mut line, event));
            hasher.update(line.as_bytes());
            if counts.contains(&done) {
                digests.push(hasher.finalize().to_hex()[..16].to_owned());
            }
        }
        digests
    }
}

fn write_move(out: &mut String, m: &Move) {
    let block = m.block.map_or(0, |block| block.0);
    let (lo, hi) = (m.layers.lo, m.layers.hi);
    writeln!(
        out,
        "{} {:?} {} {block:x} {}:{} {}:{} {lo}..{hi} {} {} {} {}",
        m.id,
        m.kind,
        m.lease,
        m.src,
        m.src_slot,
        m.dst,
        m.dst_slot,
        m.after,
        m.tokens,
        m.first,
        m.ready
    )
    .expect("writing to a string does not fail");
}

fn write_event(out: &mut String, e: &Event) {
    let (lo, hi) = (e.layers.lo, e.layers.hi);
    writeln!(
        out,
        "{} {:x} {lo}..{hi} {} {:?} {:?} {:?} {}",
        e.at, e.block.0, e.tier, e.reason, e.cause, e.to, e.idle
    )
    .expect("writing to a string does not fail");
}

fn file() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/digests.txt")
}

/// The recorded digests of a family: of few worlds, of all.
fn recorded(text: &str, name: &str) -> [String; 2] {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    let line = line.unwrap_or_else(|| panic!("{name} is not on record"));
    let (few, all) = line.split_once(' ').expect("two digests");
    [few.to_owned(), all.to_owned()]
}

fn compare(at: usize, counts: &[usize]) {
    let text = std::fs::read_to_string(file()).expect("they are on record");
    let changed: Vec<String> = Family::all()
        .filter(|family| family.digests(counts)[0] != recorded(&text, &family.name())[at])
        .map(Family::name)
        .collect();
    assert!(
        changed.is_empty(),
        "moves or evictions have changed under {}. If that is meant: KVTRIE_DIGESTS=record \
         cargo test -p kvtrie-core --test all digests:: -- --ignored, and say why in the commit",
        changed.join(", ")
    );
}

/// Settings of the same model with one group of full attention.
fn of_one_group(settings: Settings) -> Settings {
    let slot_bytes = settings.layer_bytes * u64::from(settings.layers);
    let full = Group { kind: GroupKind::Full, slot_bytes, layers: settings.layers };
    let bytes = settings.tiers.iter().map(|tier| u64::from(tier.blocks) * slot_bytes).collect();
    let slots = vec![vec![slot_bytes]; settings.tiers.len()];
    let groups = Groups { groups: vec![full], bytes, slots, newest: 2, every: 3 };
    Settings { groups: Some(groups), ..settings }
}

#[test]
fn one_full_group_decides_as_a_model_without_groups() {
    for family in Family::all() {
        let plain = family.digests(&[6]);
        assert_eq!(plain, family.digests_of(&[6], of_one_group), "{}", family.name());
    }
}

#[test]
fn digests_of_ten_thousand_operations_equal_the_recorded() {
    compare(0, &[FEW]);
}

#[test]
#[ignore = "a minute; run by make test-deep"]
fn digests_of_a_hundred_thousand_operations_equal_the_recorded() {
    if std::env::var("KVTRIE_DIGESTS").is_ok_and(|what| what == "record") {
        let mut text = String::new();
        for family in Family::all() {
            let digests = family.digests(&[FEW, ALL]);
            writeln!(text, "{}: {}", family.name(), digests.join(" ")).expect("a string");
        }
        std::fs::write(file(), text).expect("the file is ours");
        return;
    }
    compare(1, &[ALL]);
}
