//! Loss of power at every sync of a random workload, with any part of the unsynced writes lost:
//! under `Fsync` every completed write is found and right; wrong bytes are never read.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvtrie_core::{BlockKey, Layers};
use kvtrie_store::{Chance, Device, Durability, Fault, Faults, KeptBlock, Meta, Settings};

use crate::rig::memory::{Image, Memory, Op, Power};
use crate::rig::{self, Block, Model, Random, behind, first, layer, long, read, write};

const SLOTS: u32 = 3;
const ALL: Layers = Layers::new(0, 4);

fn settings(durability: Durability) -> Settings {
    rig::settings(SLOTS, 600, durability)
}

/// A call: its begin and end, the slots it might touch, and the model after it.
struct LoggedCall {
    began: usize,
    ended: usize,
    /// Slots whose block this call may remove.
    removable: Vec<u32>,
    after: Model,
}

struct Run {
    memory: Memory,
    start: Image,
    steps: Vec<LoggedCall>,
}

/// The versions of each layer of a block that were ever written.
type Versions = BTreeMap<BlockKey, u64>;

fn blocks() -> Vec<Block> {
    let root = first(0);
    let next = long(&root, 1);
    vec![next.clone(), behind(&next, 2), root]
}

/// A random workload on the files of `start`, whose blocks are those of `model`.
fn work(
    start: Image,
    mut model: Model,
    settings: &Settings,
    fails: bool,
    versions: &mut Versions,
    random: &mut Random,
) -> Run {
    let memory = Memory::from_image(start.clone());
    let faults = Arc::new(Faults::new(memory.device(), random.next()));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    let store = rig::open(&device, settings);
    let blocks = blocks();
    let mut steps = Vec::new();
    for _ in 0..12 {
        let began = memory.clock();
        if fails && random.below(2) == 0 {
            let fault = [Fault::Write, Fault::Sync, Fault::ShortWrite, Fault::NoSpace]
                [usize::try_from(random.below(4)).unwrap()];
            faults.inject(fault, Chance::After(random.below(6)));
        }
        let slot = u32::try_from(random.below(SLOTS.into())).unwrap();
        let mut removable = vec![slot];
        match random.below(12) {
            0 => {
                if store.remove(slot).is_ok() {
                    model.0.remove(&slot);
                }
            }
            1 => {
                let kept: Vec<KeptBlock> = (0..SLOTS)
                    .filter(|slot| random.next() >> slot & 1 == 1)
                    .map(|slot| KeptBlock { slot, meta: Meta::default() })
                    .collect();
                let stays = |slot: &u32| kept.iter().any(|kept| kept.slot == *slot);
                removable = (0..SLOTS).filter(|slot| !stays(slot)).collect();
                if store.save(&kept, 0).is_ok() {
                    model.0.retain(|slot, _| stays(slot));
                }
            }
            2 => {
                removable.clear();
                let _ = store.gc();
            }
            3 => {
                removable.clear();
                let _ = store.sync();
            }
            4 | 5 => {
                // Of all slots, whatever is there: new metadata endangers no block.
                removable.clear();
                let every = |slot| blocks.iter().map(move |block| (slot, block));
                let named: Vec<(u32, &Block)> = (0..SLOTS).flat_map(every).collect();
                let meta = Meta { uses: 9, ..Meta::default() };
                let noted = rig::note(&store, &named, meta, 1);
                assert!(fails || noted.unwrap() == model.0.len());
            }
            _ => {
                let block = &blocks[usize::try_from(random.below(3)).unwrap()];
                let lo = u16::try_from(random.below(4)).unwrap();
                let hi = lo + 1 + u16::try_from(random.below(u64::from(4 - lo))).unwrap();
                let layers = Layers::new(lo, hi);
                let version = versions.entry(block.key).or_default();
                *version += 1;
                let extends = model.0.get(&slot).is_some_and(|holds| {
                    holds.key == block.key && holds.layers().join(layers).is_some()
                });
                if extends {
                    removable.clear();
                }
                if write(&store, block, slot, layers, *version).is_ok() {
                    model.write(&block.key, slot, layers, *version);
                }
            }
        }
        faults.heal();
        // A slot that a failed call might free holds its old block, or none.
        model.0.retain(|slot, holds| {
            !removable.contains(slot) || read(&store, &holds.key, *slot, holds.layers()).is_ok()
        });
        for (&slot, holds) in &model.0 {
            let found = read(&store, &holds.key, slot, holds.layers()).unwrap();
            assert!(found == holds.bytes(600), "slot {slot}");
        }
        steps.push(LoggedCall { began, ended: memory.clock(), removable, after: model.clone() });
    }
    // Power is lost: no close.
    std::mem::forget(store);
    Run { memory, start, steps }
}

/// Opens the files left and reads everything; returns the blocks found.
fn look(image: Image, settings: &Settings, versions: &Versions) -> Model {
    let memory = Memory::from_image(image);
    let store = rig::open(&memory.device(), settings);
    let mut found = Model::default();
    let blocks = blocks();
    for row in store.rows(0).unwrap() {
        let known = blocks.iter().find(|block| block.key == row.key).unwrap();
        assert_eq!(known.record, row.record.encode());
        for at in row.layers.iter() {
            let bytes = match read(&store, &row.key, row.slot, Layers::new(at, at + 1)) {
                Ok(bytes) => bytes,
                // An unreadable row is a miss, but a broken promise.
                Err(error) if settings.durability == Durability::Fsync => panic!("{error}"),
                Err(_) => continue,
            };
            let version = (1..=versions[&row.key])
                .find(|&version| layer(&row.key, at, version, 600) == bytes)
                .unwrap_or_else(|| panic!("slot {}: wrong bytes in layer {at}", row.slot));
            let holds = found
                .0
                .entry(row.slot)
                .or_insert_with(|| rig::Holds { key: row.key, versions: BTreeMap::new() });
            holds.versions.insert(at, version);
        }
    }
    // A block that no row names is never a hit.
    for slot in 0..SLOTS {
        for block in &blocks {
            let listed = found.0.get(&slot).is_some_and(|holds| holds.key == block.key);
            assert!(listed || read(&store, &block.key, slot, ALL).is_err());
        }
    }
    found
}

/// The blocks that must be found after a power loss that follows `clock` operations.
fn owed(run: &Run, before: &Model, clock: usize) -> Model {
    let done = run.steps.iter().rfind(|step| step.ended <= clock);
    let mut owed = done.map_or(before, |step| &step.after).clone();
    if let Some(step) = run.steps.iter().find(|step| step.began < clock && clock < step.ended) {
        owed.0.retain(|slot, _| !step.removable.contains(slot));
    }
    owed
}

fn check(owed: &Model, found: &Model, clock: usize) {
    for (slot, holds) in &owed.0 {
        let slot_versions = found.0.get(slot).filter(|versions| versions.key == holds.key);
        for (layer, version) in &holds.versions {
            let read = slot_versions.and_then(|slot_versions| slot_versions.versions.get(layer));
            assert_eq!(read, Some(version), "slot {slot}, layer {layer}, after {clock} operations");
        }
    }
}

/// Returns the number of losses, and of those after which no block had to be found.
fn campaign(seeds: std::ops::Range<u64>, durability: Durability, fails: bool) -> (u64, u64) {
    let (mut losses, mut empty) = (0, 0);
    for seed in seeds {
        let mut random = Random(seed);
        let settings = settings(durability);
        let mut versions = Versions::new();
        let (mut image, mut model) = (Image::default(), Model::default());
        for _generation in 0..3 {
            let run = work(image, model.clone(), &settings, fails, &mut versions, &mut random);
            let log = run.memory.log();
            let mut power = Power::from_image(run.start.clone());
            let mut images = Vec::new();
            for (clock, op) in log.iter().enumerate() {
                if matches!(op, Op::Sync { .. } | Op::SyncFolder { .. }) {
                    let open = power.open();
                    let names = power.open_names() as u64 + 1;
                    let mut cases: Vec<(u64, Option<usize>)> = Vec::new();
                    if open <= 3 {
                        cases.extend((0..1 << open).map(|keep| (keep, None)));
                    }
                    for _ in 0..4 {
                        let torn = usize::try_from(random.below(open.max(1) as u64)).unwrap();
                        cases.push((random.next() | 1 << (torn % 64), Some(torn)));
                        cases.push((random.next(), None));
                    }
                    for (keep, torn) in cases {
                        let names = usize::try_from(random.below(names)).unwrap();
                        images.push((clock, power.lose(keep, torn, names, &mut random)));
                    }
                }
                power.step(op);
            }
            for (clock, image) in &images {
                let found = look(image.clone(), &settings, &versions);
                losses += 1;
                if durability == Durability::Fsync {
                    let owed = owed(&run, &model, *clock);
                    empty += u64::from(owed.0.is_empty());
                    check(&owed, &found, *clock);
                }
            }
            // The next generation continues after one of the losses.
            let last = usize::try_from(random.below(images.len() as u64)).unwrap();
            image = images.swap_remove(last).1;
            model = look(image.clone(), &settings, &versions);
            if durability != Durability::Fsync {
                (image, model) = (Image::default(), Model::default());
            }
        }
    }
    (losses, empty)
}

#[test]
fn fsync_survives_every_loss_of_power() {
    let (losses, empty) = campaign(0..25, Durability::Fsync, false);
    assert!(losses > 6_000 && empty < losses / 2, "{losses} losses, {empty} of nothing");
}

#[test]
fn fsync_survives_every_loss_of_power_on_a_failing_device() {
    let (losses, empty) = campaign(1000..1025, Durability::Fsync, true);
    assert!(losses > 6_000 && empty < losses / 2, "{losses} losses, {empty} of nothing");
}

#[test]
fn flush_and_none_never_read_wrong_bytes() {
    for durability in [Durability::Flush, Durability::None] {
        let (losses, _) = campaign(0..20, durability, false);
        assert!(losses > 300, "{losses} losses");
    }
}

/// The images after a loss of power at any sync: every choice of up to six writes, many of more.
fn every_loss(memory: &Memory, start: Image, mut take: impl FnMut(usize, Image)) {
    let mut random = Random(1);
    let mut power = Power::from_image(start);
    for (clock, op) in memory.log().iter().enumerate() {
        if matches!(op, Op::Sync { .. } | Op::SyncFolder { .. }) {
            let open = power.open();
            let some = open > 6;
            for case in 0..if some { 300 } else { 1 << open } {
                let keep = if some { random.next() } else { case };
                let torn = usize::try_from(case).unwrap() % (open + 1);
                for torn in [None, Some(torn)] {
                    take(clock, power.lose(keep, torn, power.open_names(), &mut random));
                }
            }
        }
        power.step(op);
    }
}

#[test]
fn a_failed_extension_never_endangers_durable_layers() {
    // The checksums of layers 45..60 span two sectors, where a header page can tear.
    let settings = Settings { layers: 64, ..rig::settings(SLOTS, 8, Durability::Fsync) };
    let (back, block) = (Layers::new(60, 64), &blocks()[0]);
    for fault in [Fault::Sync, Fault::Write] {
        for after in 0..4 {
            let memory = Memory::default();
            let faults = Arc::new(Faults::new(memory.device(), 0));
            let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
            let store = rig::open(&device, &settings);
            write(&store, block, 1, back, 1).unwrap();
            let durable = memory.clock();
            for (version, layers) in [(2, Layers::new(50, 60)), (3, Layers::new(45, 60))] {
                faults.inject(fault, Chance::After(after));
                let _ = write(&store, block, 1, layers, version);
                faults.heal();
            }
            write(&store, block, 1, Layers::new(40, 60), 4).unwrap();
            std::mem::forget(store);
            every_loss(&memory, Image::default(), |clock, image| {
                if clock > durable {
                    let store = rig::open(&Memory::from_image(image).device(), &settings);
                    let found = read(&store, &block.key, 1, back).unwrap();
                    assert!(found == rig::bytes(&settings, block, back, 1));
                }
            });
        }
    }
}

#[test]
fn no_header_of_an_earlier_block_outlives_a_new_write() {
    let memory = Memory::default();
    let faults = Arc::new(Faults::new(memory.device(), 0));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    let block = &blocks()[0];
    let store = rig::open(&device, &settings(Durability::Flush));
    write(&store, block, 1, Layers::new(2, 4), 1).unwrap();
    // Extensions that fail at their frame leave header pages of sequences without a frame.
    for version in 2..7 {
        faults.inject(Fault::Write, Chance::After(2));
        assert!(write(&store, block, 1, Layers::new(0, 2), version).is_err());
    }
    std::mem::forget(store);
    let memory = memory.copy();
    let store = rig::open(&memory.device(), &settings(Durability::Flush));
    assert!(read(&store, &block.key, 1, Layers::new(2, 4)).is_ok());
    store.remove(1).unwrap();
    write(&store, block, 1, ALL, 8).unwrap();
    let found = read(&store, &block.key, 1, ALL).unwrap();
    assert!(found == rig::bytes(store.settings(), block, ALL, 8));
}

#[test]
fn the_next_writer_syncs_the_names_of_segments() {
    let memory = Memory::default();
    let faults = Arc::new(Faults::new(memory.device(), 0));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    let block = &blocks()[0];
    let store = rig::open(&device, &settings(Durability::Fsync));
    faults.inject(Fault::Sync, Chance::After(0));
    assert!(write(&store, block, 1, ALL, 1).is_err());
    store.close().unwrap();
    let store = rig::open(&device, &settings(Durability::Fsync));
    write(&store, block, 1, ALL, 2).unwrap();
    std::mem::forget(store);
    let mut power = Power::default();
    memory.log().iter().for_each(|op| power.step(op));
    let image = power.lose(0, None, 0, &mut Random(0));
    let found = look(image, &settings(Durability::Fsync), &Versions::from([(block.key, 2)]));
    assert!(found.0[&1].versions.values().eq([2; 4].iter()));
}
