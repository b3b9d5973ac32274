//! Campaign of faults: every kind against random stores, with a table of the results.
//!
//! `cargo test -p kvtrie-store --test all faults:: -- --ignored --nocapture` runs `KVTRIE_FAULTS` cases
//! of each kind (2000); the test that is always run, a few.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use kvtrie_core::Layers;
use kvtrie_store::{Chance, Device, Durability, Fault, Faults, KeptBlock, Meta, Settings, Store};

use crate::rig::memory::{Memory, Power};
use crate::rig::{self, Block, Holds, Model, Random, behind, first, layer, read, write};

const SLOTS: u32 = 5;
const LAYER: usize = 600;

/// A fault during operation, or damage to the files afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Device(Fault),
    FlippedBit,
    Zeroed,
    CutSegment,
    CutManifest,
    Swapped,
    Foreign,
    PowerLoss,
}

impl Kind {
    fn all() -> Vec<Self> {
        let files = [
            Self::FlippedBit,
            Self::Zeroed,
            Self::CutSegment,
            Self::CutManifest,
            Self::Swapped,
            Self::Foreign,
            Self::PowerLoss,
        ];
        Fault::ALL.into_iter().map(Self::Device).chain(files).collect()
    }

    fn name(self) -> String {
        match self {
            Self::Device(fault) => format!("device: {}", fault.name()),
            other => format!("{other:?}"),
        }
    }
}

#[derive(Default)]
struct Tally {
    cases: u64,
    /// Calls that failed and stores that opened read-only: the fault was hit.
    met: u64,
    hits: u64,
    misses: u64,
    wrong: u64,
    reasons: u64,
}

fn settings(random: &mut Random) -> Settings {
    let durability = [Durability::None, Durability::Flush, Durability::Fsync];
    let durability = durability[usize::try_from(random.below(3)).unwrap()];
    rig::settings(SLOTS, LAYER, durability)
}

fn blocks() -> Vec<Block> {
    let mut all = vec![first(0)];
    for token in 0..6 {
        all.push(behind(&all[all.len() - 1], token));
    }
    all
}

/// Random writes, removals, saves and so on; the model holds the successful ones.
fn work(store: &Store, blocks: &[Block], model: &mut Model, random: &mut Random) -> u64 {
    let mut failed = 0;
    for version in 1..=14 {
        let slot = u32::try_from(random.below(SLOTS.into())).unwrap();
        let extends = |model: &Model, key, layers| {
            let holds = model.0.get(&slot);
            holds.is_some_and(|holds| holds.key == key && holds.layers().join(layers).is_some())
        };
        match random.below(13) {
            12 => {
                let every = |slot| blocks.iter().map(move |block| (slot, block));
                let named: Vec<(u32, &Block)> = (0..SLOTS).flat_map(every).collect();
                failed += u64::from(rig::note(store, &named, Meta::default(), 1).is_err());
            }
            0 => {
                // A removal that could not be made durable has happened in memory.
                let removed = store.remove(slot).is_ok();
                failed += u64::from(!removed);
                let held = |holds: &Holds| read(store, &holds.key, slot, holds.layers()).is_ok();
                let stored = model.0.get(&slot).is_some_and(held);
                assert!(!removed || !stored);
                if !stored {
                    model.0.remove(&slot);
                }
            }
            1 => failed += u64::from(store.sync().is_err()),
            2 => failed += u64::from(store.gc().is_err()),
            3 => {
                let kept = |&slot: &u32| model.0.contains_key(&slot);
                let kept =
                    (0..SLOTS).filter(kept).map(|slot| KeptBlock { slot, meta: Meta::default() });
                failed += u64::from(store.save(&kept.collect::<Vec<_>>(), 0).is_err());
            }
            _ => {
                let block = &blocks[usize::try_from(random.below(blocks.len() as u64)).unwrap()];
                let lo = u16::try_from(random.below(4)).unwrap();
                let hi = lo + 1 + u16::try_from(random.below(u64::from(4 - lo))).unwrap();
                let layers = Layers::new(lo, hi);
                let extended = extends(model, block.key, layers);
                if write(store, block, slot, layers, version).is_ok() {
                    model.write(&block.key, slot, layers, version);
                    continue;
                }
                failed += 1;
                // The slot is free, or unchanged.
                let left = model.0.get(&slot).cloned();
                let stored =
                    left.is_some_and(|holds| read(store, &holds.key, slot, holds.layers()).is_ok());
                assert!(stored || !extended || store.read_only());
                if !stored {
                    model.0.remove(&slot);
                }
            }
        }
    }
    failed
}

fn case(kind: Kind, seed: u64, tally: &mut Tally) {
    let mut random = Random(seed);
    let settings = settings(&mut random);
    let blocks = blocks();
    let memory = Memory::default();
    let mut model = Model::default();
    let faults = Arc::new(Faults::new(memory.device(), seed));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    let store = rig::open(&device, &settings);
    // Reads that may fail must not fail while the model is built.
    let later = matches!(kind, Kind::Device(Fault::Read));
    if let (Kind::Device(fault), false) = (kind, later) {
        let often = u32::try_from(random.below(200)).unwrap();
        faults.inject(fault, Chance::PerMille(often));
    }
    tally.met += work(&store, &blocks, &mut model, &mut random);
    if kind == Kind::PowerLoss {
        let log = memory.log();
        std::mem::forget(store);
        let mut power = Power::default();
        let end = usize::try_from(random.below(log.len() as u64)).unwrap();
        log[..end].iter().for_each(|op| power.step(op));
        let torn = usize::try_from(random.below(power.open().max(1) as u64)).unwrap();
        let names = usize::try_from(random.below(power.open_names() as u64 + 1)).unwrap();
        let image = power.lose(random.next(), Some(torn), names, &mut random);
        check(&Memory::from_image(image).device(), &settings, &blocks, None, tally);
        return;
    }
    if later {
        faults.inject(Fault::Read, Chance::PerMille(300));
        for _ in 0..20 {
            for (slot, holds) in &model.0 {
                if let Ok(found) = read(&store, &holds.key, *slot, holds.layers()) {
                    tally.wrong += u64::from(found != holds.bytes(LAYER));
                } else {
                    tally.met += 1;
                }
            }
        }
    }
    faults.heal();
    store.close().unwrap();
    let mut whole = Some(&model);
    if !matches!(kind, Kind::Device(_)) {
        damage(kind, &memory, &settings, &mut random);
        whole = None;
    }
    check(&device, &settings, &blocks, whole, tally);
}

fn damage(kind: Kind, memory: &Memory, settings: &Settings, random: &mut Random) {
    let segment = "segment-00000";
    let slot = usize::try_from(settings.slot_bytes()).unwrap();
    let named = |name: &str| memory.image().names.keys().any(|path| path.ends_with(name));
    let either = if random.below(2) == 0 && named(segment) { segment } else { "manifest" };
    let somewhere = |bytes: &[u8], random: &mut Random| {
        usize::try_from(random.below(bytes.len().max(1) as u64)).unwrap()
    };
    match kind {
        Kind::FlippedBit => memory.alter(either, |bytes| {
            let at = somewhere(bytes, random);
            // A segment may be truncated to nothing when its slots are freed.
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }),
        Kind::Zeroed => memory.alter(either, |bytes| {
            let at = somewhere(bytes, random) / 512 * 512;
            let end = (at + 512).min(bytes.len());
            bytes[at..end].fill(0);
        }),
        Kind::CutManifest => memory.alter("manifest", |bytes| {
            let at = somewhere(bytes, random);
            bytes.truncate(at);
        }),
        Kind::CutSegment if named(segment) => memory.alter(segment, |bytes| {
            let at = somewhere(bytes, random);
            bytes.truncate(at);
        }),
        Kind::Swapped if named(segment) => memory.alter(segment, |bytes| {
            bytes.resize(slot * SLOTS as usize, 0);
            let (one, two) = bytes.split_at_mut(slot * 2);
            one[..slot].swap_with_slice(&mut two[..slot]);
        }),
        Kind::Foreign => {
            let stranger = Memory::default();
            let other = Settings { identity: [9; 32], ..settings.clone() };
            let store = rig::open(&stranger.device(), &other);
            for slot in 0..SLOTS {
                write(&store, &first(0), slot, Layers::new(0, 4), 99).unwrap();
            }
            store.close().unwrap();
            memory.alter(either, |bytes| *bytes = stranger.bytes(either));
        }
        _ => {}
    }
}

/// Opens the store and requests every block and layer in every slot.
fn check(
    device: &Arc<dyn Device>,
    settings: &Settings,
    blocks: &[Block],
    whole: Option<&Model>,
    tally: &mut Tally,
) {
    let store = Store::open(Arc::clone(device), Path::new("/stores"), settings.clone()).unwrap();
    let listed = store.rows(0).unwrap();
    for slot in 0..SLOTS {
        for block in blocks {
            for at in 0..4 {
                let found = read(&store, &block.key, slot, Layers::new(at, at + 1));
                if let Ok(found) = &found {
                    tally.hits += 1;
                    let known =
                        (1..=14).any(|version| layer(&block.key, at, version, LAYER) == *found);
                    tally.wrong += u64::from(!known);
                }
                let row = listed.iter().find(|row| row.slot == slot && row.key == block.key);
                let row = row.is_some_and(|row| row.layers.contains(at));
                tally.misses += u64::from(row && found.is_err());
                if let Some(model) = whole {
                    let holds = model.0.get(&slot).filter(|holds| holds.key == block.key);
                    let version = holds.and_then(|holds| holds.versions.get(&at));
                    let wanted = version.map(|&version| layer(&block.key, at, version, LAYER));
                    tally.wrong += u64::from(wanted != found.ok());
                }
            }
        }
    }
    tally.cases += 1;
    tally.reasons += u64::from(!store.reasons().is_empty());
}

fn campaign(cases: u64, out: &mut dyn Write) {
    let head = ["kind", "cases", "calls failed", "layers right", "misses", "with reason", "wrong"];
    writeln!(
        out,
        "{:<22}{:>8}{:>14}{:>14}{:>9}{:>13}{:>7}",
        head[0], head[1], head[2], head[3], head[4], head[5], head[6]
    )
    .unwrap();
    for kind in Kind::all() {
        let mut tally = Tally::default();
        for seed in 0..cases {
            case(kind, seed, &mut tally);
        }
        let Tally { cases, met, hits, misses, wrong, reasons } = tally;
        let name = kind.name();
        writeln!(out, "{name:<22}{cases:>8}{met:>14}{hits:>14}{misses:>9}{reasons:>13}{wrong:>7}")
            .unwrap();
        assert_eq!(wrong, 0, "{name}");
        assert_eq!(hits == 0, kind == Kind::Foreign, "{name}");
        if let Kind::Device(fault) = kind {
            // A device that fails and recovers costs the failed calls only.
            assert_eq!(misses, 0, "{name}");
            let short = matches!(fault, Fault::ShortRead | Fault::ShortWrite);
            assert_eq!(met == 0, short, "{name}");
        }
    }
}

#[test]
fn a_few_cases_of_each_kind() {
    campaign(60, &mut std::io::sink());
}

#[test]
#[ignore = "minutes; KVTRIE_FAULTS says how many cases of each kind"]
fn many_cases_of_each_kind() {
    let cases = std::env::var("KVTRIE_FAULTS").map_or(2000, |cases| cases.parse().unwrap());
    campaign(cases, &mut std::io::stdout());
}
