//! Metadata noted while a store runs: it is found after a kill, costs no block whatever is lost of
//! it, and leaves the manifest bounded.

use std::sync::Arc;

use kvtrie_core::{Layers, Record};
use kvtrie_store::{
    Chance, Device, Durability, Error, Fault, Faults, Meta, Settings, Store, System, UsedBlock,
};

use crate::rig::memory::Memory;
use crate::rig::{self, Block, behind, first, note, read, write};

const ALL: Layers = Layers::new(0, 4);
const DURABILITIES: [Durability; 3] = [Durability::None, Durability::Flush, Durability::Fsync];

fn settings(durability: Durability) -> Settings {
    rig::settings(3, 600, durability)
}

fn blocks() -> Vec<Block> {
    let mut all = vec![first(0)];
    for token in 0..3 {
        all.push(behind(&all[all.len() - 1], token));
    }
    all
}

fn used(uses: u32) -> Meta {
    Meta { uses, age: 5, ..Meta::default() }
}

/// Uses by slot.
fn uses(store: &Store) -> Vec<(u32, u32)> {
    let mut all: Vec<_> =
        store.rows(0).unwrap().iter().map(|row| (row.slot, row.meta.uses)).collect();
    all.sort_unstable();
    all
}

/// A store of two blocks of the three slots, each used once.
fn two(device: &Arc<dyn Device>, settings: &Settings, blocks: &[Block]) -> Store {
    let store = rig::open(device, settings);
    for slot in 0..2 {
        write(&store, &blocks[slot as usize], slot, ALL, 1).unwrap();
    }
    note(&store, &[(0, &blocks[0]), (1, &blocks[1])], used(1), 0).unwrap();
    store
}

#[test]
fn what_was_noted_outlives_a_kill() {
    let blocks = blocks();
    for durability in [Durability::Flush, Durability::Fsync] {
        let memory = Memory::default();
        let settings = settings(durability);
        let store = two(&memory.device(), &settings, &blocks);
        assert_eq!(note(&store, &[(1, &blocks[1])], used(7), 100).unwrap(), 1);
        std::mem::forget(store);
        let store = rig::open(&memory.copy().device(), &settings);
        let rows = store.rows(130).unwrap();
        let found: Vec<_> =
            rows.iter().map(|row| (row.slot, row.meta.uses, row.meta.age)).collect();
        assert_eq!(found, [(0, 1, 5 + 130), (1, 7, 5 + 30)]);
        assert_eq!(store.reasons(), Vec::<String>::new());
        for slot in 0..2 {
            read(&store, &blocks[slot as usize].key, slot, ALL).unwrap();
        }
    }
}

#[test]
fn only_the_block_that_is_there_is_noted() {
    let blocks = blocks();
    let memory = Memory::default();
    let store = two(&memory.device(), &settings(Durability::Flush), &blocks);
    let named = [(0, &blocks[1]), (1, &blocks[1]), (2, &blocks[2]), (1, &blocks[0])];
    assert_eq!(note(&store, &named, used(9), 0).unwrap(), 1);
    assert_eq!(uses(&store), [(0, 1), (1, 9)]);
    // A later block in the slot keeps what came with it, and has the layers that it has.
    write(&store, &blocks[3], 1, Layers::new(2, 4), 1).unwrap();
    assert_eq!(note(&store, &[(1, &blocks[1])], used(3), 0).unwrap(), 0);
    assert_eq!(note(&store, &[(1, &blocks[3])], used(4), 0).unwrap(), 1);
    assert_eq!(uses(&store), [(0, 1), (1, 4)]);
    let rows = store.rows(0).unwrap();
    assert_eq!(rows.iter().find(|row| row.slot == 1).unwrap().layers, Layers::new(2, 4));
}

#[test]
fn wrong_calls_note_nothing() {
    let blocks = blocks();
    let memory = Memory::default();
    let settings = settings(Durability::Flush);
    let store = two(&memory.device(), &settings, &blocks);
    let error = note(&store, &[(0, &blocks[0]), (3, &blocks[1])], used(9), 0).unwrap_err();
    assert!(matches!(&error, Error::Config(why) if why == "slot 3, there are 3"), "{error}");
    let mut record = Record::decode(&blocks[1].record).unwrap();
    record.digests = vec![(0, vec![1; settings.record_bytes()])];
    let first = Record::decode(&blocks[0].record).unwrap();
    let given = [(0, &first), (1, &record)];
    let given = given.map(|(slot, record)| UsedBlock { slot, record, meta: used(9) });
    let error = store.note_uses(&given, 0).unwrap_err();
    assert!(matches!(&error, Error::Config(why) if why.contains("at most 1040")), "{error}");
    assert_eq!(uses(&store), [(0, 1), (1, 1)]);
    let reader = rig::open(&memory.device(), &settings);
    let error = note(&reader, &[(0, &blocks[0])], used(9), 0).unwrap_err();
    assert!(matches!(error, Error::ReadOnly(_)), "{error}");
}

#[test]
fn whatever_is_lost_of_it_is_no_block() {
    let blocks = blocks();
    let memory = Memory::default();
    let settings = settings(Durability::Flush);
    let store = two(&memory.device(), &settings, &blocks);
    let before = memory.bytes("manifest").len();
    assert_eq!(note(&store, &[(0, &blocks[0]), (1, &blocks[1])], used(7), 0).unwrap(), 2);
    std::mem::forget(store);
    let after = memory.bytes("manifest").len();
    let mut seen = [0; 2];
    let mut check = |change: &dyn Fn(&mut Vec<u8>)| {
        let memory = memory.copy();
        memory.alter("manifest", change);
        let store = rig::open(&memory.device(), &settings);
        let found = uses(&store);
        assert_eq!(found.iter().map(|&(slot, _)| slot).collect::<Vec<_>>(), [0, 1]);
        for (slot, uses) in found {
            assert!(uses == 1 || uses == 7, "{uses}");
            seen[usize::from(uses == 7)] += 1;
            read(&store, &blocks[slot as usize].key, slot, ALL).unwrap();
        }
        // The next note is found again too.
        assert_eq!(note(&store, &[(0, &blocks[0])], used(8), 0).unwrap(), 1);
        drop(store);
        assert_eq!(uses(&rig::open(&memory.device(), &settings))[0], (0, 8));
    };
    for at in before..=after {
        check(&|bytes| bytes.truncate(at));
    }
    for at in before..after {
        for bit in 0..8 {
            check(&|bytes| bytes[at] ^= 1 << bit);
        }
    }
    assert!(seen.iter().all(|&number| number > (after - before) / 2), "{seen:?}");
}

#[test]
fn a_device_that_fails_loses_no_block() {
    let blocks = blocks();
    let named = [(0, &blocks[0]), (1, &blocks[1])];
    for durability in DURABILITIES {
        for fault in [Fault::Write, Fault::ShortWrite, Fault::NoSpace, Fault::Sync] {
            for after in 0..4 {
                let memory = Memory::default();
                let faults = Arc::new(Faults::new(memory.device(), 0));
                let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
                let settings = settings(durability);
                let store = two(&device, &settings, &blocks);
                faults.inject(fault, Chance::After(after));
                // So often that the manifest is rewritten.
                let failed = (0..400).filter(|_| note(&store, &named, used(7), 0).is_err()).count();
                faults.heal();
                assert!(failed <= 1, "{failed}");
                assert_eq!(note(&store, &named, used(8), 0).unwrap(), 2);
                drop(store);
                let store = rig::open(&memory.device(), &settings);
                assert_eq!(uses(&store), [(0, 8), (1, 8)]);
                for slot in 0..2 {
                    read(&store, &blocks[slot as usize].key, slot, ALL).unwrap();
                }
            }
        }
    }
}

#[test]
fn a_million_notes_leave_the_manifest_bounded() {
    const BLOCKS: u32 = 500;
    let folder = tempfile::tempdir().unwrap();
    let settings = rig::settings(BLOCKS, 1, Durability::Flush);
    let device: Arc<dyn Device> = Arc::new(System::default());
    let store = Store::open(Arc::clone(&device), folder.path(), settings.clone()).unwrap();
    let manifest = folder.path().join(settings.folder_name()).join("manifest");
    let length = || std::fs::metadata(&manifest).unwrap().len();
    let blocks: Vec<Block> = (0..BLOCKS).map(first).collect();
    for (slot, block) in (0..).zip(&blocks) {
        write(&store, block, slot, Layers::new(0, 1), 1).unwrap();
    }
    let (live, named) = (length(), (0..).zip(&blocks).collect::<Vec<_>>());
    let mut longest = 0;
    for round in 1..=2000 {
        assert_eq!(note(&store, &named, used(round), 0).unwrap(), 500);
        longest = longest.max(length());
    }
    // Live frames, as many dead ones, and what a manifest may always have of them.
    assert!(longest <= 2 * live + (64 << 10), "{longest} bytes, {live} of them live");
    assert!(longest > live + (64 << 10), "{longest}");
    std::mem::forget(store);
    let store = Store::inspect(device, manifest.parent().unwrap()).unwrap();
    assert_eq!(uses(&store), (0..BLOCKS).map(|slot| (slot, 2000)).collect::<Vec<_>>());
}
