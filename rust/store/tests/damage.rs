//! Damaged files: never a wrong block, always a reason, and the other blocks are found.

use std::path::Path;
use std::sync::Arc;

use kvtrie_core::Layers;
use kvtrie_store::{Device, Durability, Error, Settings, Store};
use xxhash_rust::xxh3::xxh3_64;

use crate::rig::memory::Memory;
use crate::rig::{self, Block, Random, behind, bytes, first, read, write};

const ALL: Layers = Layers::new(0, 4);
const BACK: Layers = Layers::new(2, 4);
const SEGMENT: &str = "segment-00000";
const MANIFEST: &str = "manifest";
/// Two header pages and four layers of one page.
const SLOT: usize = 6 * 4096;
const HEAD: usize = 96 + 24;

fn settings() -> Settings {
    rig::settings(4, 700, Durability::Flush)
}

fn blocks() -> [Block; 3] {
    let root = first(0);
    let next = behind(&root, 1);
    let last = behind(&next, 2);
    [root, next, last]
}

/// Slot 0 is written at once, slot 1 in two steps, slot 2 without its first layer.
fn filled() -> (Memory, [Block; 3]) {
    let memory = Memory::default();
    let blocks = blocks();
    let store = rig::open(&memory.device(), &settings());
    write(&store, &blocks[0], 0, ALL, 1).unwrap();
    write(&store, &blocks[1], 1, BACK, 1).unwrap();
    write(&store, &blocks[1], 1, Layers::new(0, 2), 1).unwrap();
    write(&store, &blocks[2], 2, Layers::new(1, 4), 1).unwrap();
    store.close().unwrap();
    (memory, blocks)
}

fn look(memory: &Memory) -> Store {
    let folder = Path::new("/stores").join(settings().folder_name());
    Store::inspect(memory.device(), &folder).unwrap()
}

fn right(store: &Store, block: &Block, slot: u32, layers: Layers) {
    let found = read(store, &block.key, slot, layers).unwrap();
    assert!(found == bytes(store.settings(), block, layers, 1), "slot {slot}, layers {layers}");
}

fn bad(store: &Store, block: &Block, slot: u32, layers: Layers) -> String {
    match read(store, &block.key, slot, layers) {
        Err(Error::Bad { slot: named, reason }) => {
            assert_eq!(named, slot);
            assert!(!reason.is_empty());
            reason
        }
        other => panic!("slot {slot}: {:?}", other.map(|found| found.len())),
    }
}

fn flip(memory: &Memory, file: &str, bit: usize) {
    memory.alter(file, |bytes| bytes[bit / 8] ^= 1 << (bit % 8));
}

#[test]
fn every_bit_of_both_header_pages_is_guarded() {
    let (memory, blocks) = filled();
    let store = look(&memory);
    for slot in 0..2 {
        for bit in 0..2 * 4096 * 8 {
            let place = slot as usize * SLOT * 8 + bit;
            flip(&memory, SEGMENT, place);
            let block = &blocks[slot as usize];
            // Slot 0 has its header in page A; slot 1 was extended, and its newest is in page B.
            if (bit < 4096 * 8) == (slot == 0) {
                bad(&store, block, slot, ALL);
            } else {
                right(&store, block, slot, ALL);
            }
            if slot == 1 {
                right(&store, block, slot, BACK);
            }
            flip(&memory, SEGMENT, place);
        }
        right(&store, &blocks[slot as usize], slot, ALL);
    }
    right(&store, &blocks[2], 2, Layers::new(1, 4));
}

#[test]
fn every_layer_is_guarded_and_damage_is_removed() {
    let mut random = Random(1);
    for layer in 0..4_u16 {
        for _ in 0..50 {
            let (memory, blocks) = filled();
            let within = usize::try_from(random.below(700 * 8)).unwrap();
            flip(&memory, SEGMENT, (SLOT + (2 + usize::from(layer)) * 4096) * 8 + within);
            let store = rig::open(&memory.device(), &settings());
            assert_eq!(store.reasons(), Vec::<String>::new());
            for other in (0..4).filter(|&other| other != layer) {
                right(&store, &blocks[1], 1, Layers::new(other, other + 1));
            }
            let reason = bad(&store, &blocks[1], 1, ALL);
            assert!(reason.contains(&format!("layer {layer} has checksum")), "{reason}");
            assert!(store.reasons()[0].contains("removed"));
            assert!(bad(&store, &blocks[1], 1, ALL).contains("nothing"));
            assert_eq!(store.rows(0).unwrap().len(), 2);
            assert!(memory.bytes(SEGMENT)[SLOT..SLOT + 8192].iter().all(|&byte| byte == 0));
            drop(store);
            let store = rig::open(&memory.device(), &settings());
            assert_eq!(store.rows(0).unwrap().len(), 2);
            right(&store, &blocks[0], 0, ALL);
            right(&store, &blocks[2], 2, Layers::new(1, 4));
            write(&store, &blocks[1], 1, ALL, 1).unwrap();
            right(&store, &blocks[1], 1, ALL);
        }
    }
}

#[test]
fn rewriting_a_damaged_block_repairs_it() {
    let damaged = || {
        let (memory, blocks) = filled();
        flip(&memory, SEGMENT, (SLOT + 3 * 4096) * 8);
        let store = rig::open(&memory.device(), &settings());
        (store, blocks)
    };
    let (store, blocks) = damaged();
    write(&store, &blocks[1], 1, ALL, 1).unwrap();
    right(&store, &blocks[1], 1, ALL);
    // Writing a part of it is not enough: the other layers are unproved.
    let (store, blocks) = damaged();
    let refused = write(&store, &blocks[1], 1, Layers::new(1, 3), 1).unwrap_err();
    assert!(matches!(&refused, Error::Bad { slot: 1, .. }), "{refused}");
    assert!(bad(&store, &blocks[1], 1, ALL).contains("nothing"));
    write(&store, &blocks[1], 1, Layers::new(1, 3), 1).unwrap();
    right(&store, &blocks[1], 1, Layers::new(1, 3));
}

#[test]
fn verify_finds_the_damaged_blocks_only() {
    let (memory, blocks) = filled();
    flip(&memory, SEGMENT, (2 * SLOT + 3 * 4096) * 8);
    let store = rig::open(&memory.device(), &settings());
    let findings = store.verify(|_| {});
    assert_eq!(findings.len(), 1);
    assert_eq!((findings[0].slot, findings[0].key), (2, blocks[2].key));
    assert!(findings[0].reason.contains("layer 1 has checksum"), "{:?}", findings[0]);
    assert_eq!(store.verify(|_| {}), vec![]);
    assert_eq!(store.blocks(), 2);
}

/// Offsets of the frames of a manifest, and its end.
fn frames(memory: &Memory) -> Vec<usize> {
    let bytes = memory.bytes(MANIFEST);
    let mut at = vec![HEAD];
    while *at.last().unwrap() < bytes.len() {
        let start = *at.last().unwrap();
        let length = u32::from_le_bytes(bytes[start + 4..start + 8].try_into().unwrap());
        at.push(start + length as usize);
    }
    assert_eq!(at.last(), Some(&bytes.len()));
    at
}

#[test]
fn every_bit_of_a_frame_is_guarded() {
    let (memory, blocks) = filled();
    let at = frames(&memory);
    assert_eq!(at.len(), 5);
    for frame in 0..4 {
        for bit in 8 * at[frame]..8 * at[frame + 1] {
            let memory = memory.copy();
            flip(&memory, MANIFEST, bit);
            let store = rig::open(&memory.device(), &settings());
            assert_eq!(store.reasons().len(), 1);
            let found: Vec<u32> = (0..3)
                .filter(|&slot| store.rows(0).unwrap().iter().any(|row| row.slot == slot))
                .collect();
            match frame {
                0 => assert_eq!(found, [1, 2]),
                3 => assert_eq!(found, [0, 1]),
                _ => assert_eq!(found, [0, 1, 2]),
            }
            if frame == 2 {
                bad(&store, &blocks[1], 1, ALL);
            }
            if frame > 0 {
                right(&store, &blocks[0], 0, ALL);
            }
            if frame < 3 {
                right(&store, &blocks[2], 2, Layers::new(1, 4));
            }
            right(&store, &blocks[1], 1, BACK);
        }
    }
}

#[test]
fn every_bit_of_the_manifests_header_is_guarded_and_repaired() {
    let (memory, blocks) = filled();
    for bit in 0..8 * HEAD {
        let memory = memory.copy();
        flip(&memory, MANIFEST, bit);
        let store = rig::open(&memory.device(), &settings());
        assert!(!store.reasons().is_empty());
        assert_eq!(store.rows(0).unwrap().len(), 3);
        right(&store, &blocks[1], 1, ALL);
        drop(store);
        let store = rig::open(&memory.device(), &settings());
        assert_eq!(store.reasons(), Vec::<String>::new());
        assert_eq!(store.rows(0).unwrap().len(), 3);
    }
}

#[test]
fn a_truncated_manifest_keeps_its_complete_frames() {
    let (memory, blocks) = filled();
    let at = frames(&memory);
    let cuts = at.iter().copied().chain(at[3]..at[4]).chain(0..HEAD);
    for cut in cuts {
        let memory = memory.copy();
        memory.alter(MANIFEST, |bytes| bytes.truncate(cut));
        let whole = at.iter().skip(1).filter(|&&end| end <= cut).count();
        let store = rig::open(&memory.device(), &settings());
        assert_eq!(store.reasons().is_empty(), at.contains(&cut), "cut at {cut}");
        assert_eq!(store.blocks(), [0, 1, 2, 2, 3][whole]);
        if whole > 0 {
            right(&store, &blocks[0], 0, ALL);
        }
        if whole == 2 {
            right(&store, &blocks[1], 1, BACK);
        }
        write(&store, &blocks[2], 3, ALL, 1).unwrap();
        drop(store);
        let store = rig::open(&memory.device(), &settings());
        assert_eq!(store.reasons(), Vec::<String>::new(), "cut at {cut}");
        right(&store, &blocks[2], 3, ALL);
    }
}

#[test]
fn a_tail_without_frames_is_truncated() {
    let (memory, _) = filled();
    let whole = memory.bytes(MANIFEST);
    memory.alter(MANIFEST, |bytes| bytes.extend([7; 5000]));
    let reader = look(&memory);
    assert_eq!((reader.blocks(), reader.reasons().len()), (3, 1));
    assert_eq!(memory.bytes(MANIFEST).len(), whole.len() + 5000);
    let store = rig::open(&memory.device(), &settings());
    assert_eq!((store.blocks(), store.reasons().len()), (3, 1));
    assert_eq!(memory.bytes(MANIFEST), whole);
}

#[test]
fn a_manifest_is_read_up_to_the_length_that_its_slots_can_need() {
    let (memory, blocks) = filled();
    let whole = memory.bytes(MANIFEST);
    let at = frames(&memory);
    // A valid frame beyond the longest manifest of this number of slots.
    memory.alter(MANIFEST, |bytes| {
        bytes.resize(1 << 20, 7);
        bytes.extend_from_within(at[0]..at[1]);
    });
    let store = rig::open(&memory.device(), &settings());
    let reasons = store.reasons();
    assert!(reasons.iter().any(|reason| reason.contains("the rest was not read")), "{reasons:?}");
    assert_eq!(store.blocks(), 3);
    right(&store, &blocks[1], 1, ALL);
    assert_eq!(memory.bytes(MANIFEST), whole);
}

#[test]
fn an_old_frame_after_a_newer_one_does_not_count() {
    let (memory, blocks) = filled();
    let at = frames(&memory);
    // Slot 1 as it was before its extension.
    memory.alter(MANIFEST, |bytes| bytes.extend_from_within(at[1]..at[2]));
    let store = rig::open(&memory.device(), &settings());
    right(&store, &blocks[1], 1, ALL);
    assert_eq!(store.reasons(), Vec::<String>::new());
}

#[test]
fn a_truncated_segment_keeps_its_remaining_layers() {
    let (memory, blocks) = filled();
    let end = memory.bytes(SEGMENT).len();
    let places = [0, 0, SLOT, SLOT, 2 * SLOT];
    for cut in (0..=end).step_by(512).chain([end - 1, SLOT - 1, SLOT + 1, 2 * SLOT - 3397]) {
        let memory = memory.copy();
        memory.alter(SEGMENT, |bytes| bytes.truncate(cut));
        let store = rig::open(&memory.device(), &settings());
        for (slot, layers) in [(0, ALL), (1, ALL), (2, Layers::new(1, 4))] {
            let last = places[2 * slot as usize] + 5 * 4096 + 700;
            let block = &blocks[slot as usize];
            if last <= cut {
                right(&store, block, slot, layers);
            } else {
                assert!(bad(&store, block, slot, layers).contains("ends at"));
                assert!(bad(&store, block, slot, layers).contains("holds nothing"));
            }
        }
    }
}

#[test]
fn a_missing_segment_is_a_miss() {
    let (memory, blocks) = filled();
    let folder = Path::new("/stores").join(settings().folder_name());
    memory.device().remove(&folder.join(SEGMENT)).unwrap();
    let store = rig::open(&memory.device(), &settings());
    assert!(bad(&store, &blocks[0], 0, ALL).contains("segment-00000 is missing"));
    write(&store, &blocks[0], 0, ALL, 1).unwrap();
    right(&store, &blocks[0], 0, ALL);
}

#[test]
fn swapped_slots_are_misses() {
    let (memory, blocks) = filled();
    memory.alter(SEGMENT, |bytes| {
        let (one, two) = bytes.split_at_mut(SLOT);
        one.swap_with_slice(&mut two[..SLOT]);
    });
    let store = rig::open(&memory.device(), &settings());
    assert!(bad(&store, &blocks[0], 0, ALL).contains("header of slot 1"));
    assert!(bad(&store, &blocks[1], 1, ALL).contains("header of slot 0"));
    right(&store, &blocks[2], 2, Layers::new(1, 4));
}

#[test]
fn files_of_another_identity_are_misses_and_stay() {
    let (memory, blocks) = filled();
    let stranger = Memory::default();
    let other = Settings { identity: [9; 32], ..settings() };
    let store = rig::open(&stranger.device(), &other);
    for slot in 0..3 {
        write(&store, &blocks[slot as usize], slot, ALL, 2).unwrap();
    }
    store.close().unwrap();

    let mixed = memory.copy();
    mixed.alter(SEGMENT, |bytes| *bytes = stranger.bytes(SEGMENT));
    let store = rig::open(&mixed.device(), &settings());
    assert!(bad(&store, &blocks[0], 0, ALL).contains("identity 0909090909090909"));

    let mixed = memory.copy();
    mixed.alter(MANIFEST, |bytes| *bytes = stranger.bytes(MANIFEST));
    let store = rig::open(&mixed.device(), &settings());
    assert_eq!(store.blocks(), 0);
    assert_eq!(store.reasons(), ["manifest: of identity 0909090909090909"]);
    assert_eq!(mixed.bytes("manifest.0909090909090909"), stranger.bytes(MANIFEST));
    bad(&store, &blocks[0], 0, ALL);

    // Another identity's frames after our own are no valid frames.
    let mixed = memory.copy();
    mixed.alter(MANIFEST, |bytes| bytes.extend(&stranger.bytes(MANIFEST)[HEAD..]));
    let store = rig::open(&mixed.device(), &settings());
    assert_eq!(store.blocks(), 3);
    assert_eq!(store.reasons().len(), 1);
    right(&store, &blocks[1], 1, ALL);
}

#[test]
fn another_layout_is_not_found_and_not_touched() {
    let (memory, blocks) = filled();
    let before = memory.bytes(MANIFEST);
    let other = Settings { identity: [9; 32], ..settings() };
    let store = rig::open(&memory.device(), &other);
    assert_eq!(store.blocks(), 0);
    drop(store);
    let store = rig::open(&memory.device(), &settings());
    right(&store, &blocks[1], 1, ALL);
    drop(store);
    for wrong in [
        Settings { layers: 5, ..settings() },
        Settings { layer_bytes: 701, ..settings() },
        Settings { block_tokens: 5, ..settings() },
    ] {
        let found = Store::open(memory.device(), Path::new("/stores"), wrong);
        assert!(matches!(found, Err(Error::Config(_))), "{found:?}");
    }
    let named = memory.image().names.into_iter();
    let mut ours = named.filter(|(path, _)| path.ends_with("0102030405060708/manifest"));
    let file = ours.next_back().unwrap().1;
    assert_eq!(memory.image().files[&file], before);
}

#[test]
fn another_version_is_refused_and_untouched() {
    let (memory, _) = filled();
    memory.alter(MANIFEST, |bytes| {
        bytes[16] = 2;
        let sum = xxh3_64(&bytes[16..HEAD]).to_le_bytes();
        bytes[8..16].copy_from_slice(&sum);
    });
    let before = memory.bytes(MANIFEST);
    let found = Store::open(memory.device(), Path::new("/stores"), settings());
    assert!(found.unwrap_err().to_string().contains("format 2"));
    assert_eq!(memory.bytes(MANIFEST), before);
}

#[test]
fn any_manifest_opens_without_a_wrong_block() {
    let (memory, blocks) = filled();
    let mut random = Random(3);
    for _ in 0..2000 {
        let memory = memory.copy();
        memory.alter(MANIFEST, |bytes| {
            for _ in 0..=random.below(9) {
                let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
                let end = (at + usize::try_from(random.below(40)).unwrap()).min(bytes.len());
                match random.below(3) {
                    0 => bytes[at..end].fill(0),
                    1 => drop(bytes.drain(at..end)),
                    _ => bytes[at] = u8::try_from(random.below(256)).unwrap(),
                }
                bytes.push(0);
            }
        });
        let store = rig::open(&memory.device(), &settings());
        for row in store.rows(0).unwrap() {
            right(&store, &blocks[row.slot as usize], row.slot, row.layers);
        }
    }
}

#[test]
fn a_reader_misses_blocks_that_the_writer_replaced() {
    let (memory, blocks) = filled();
    let device: Arc<dyn Device> = memory.device();
    let writer = rig::open(&device, &settings());
    let reader = rig::open(&device, &settings());
    assert!(!writer.read_only() && reader.read_only());
    right(&reader, &blocks[0], 0, ALL);
    write(&writer, &blocks[2], 0, ALL, 1).unwrap();
    bad(&reader, &blocks[0], 0, ALL);
    assert_eq!(reader.blocks(), 3);
    right(&writer, &blocks[2], 0, ALL);
    // The reader misses no block by an extension or a new manifest.
    write(&writer, &blocks[2], 2, Layers::new(0, 1), 1).unwrap();
    writer.gc().unwrap();
    right(&reader, &blocks[2], 2, Layers::new(1, 4));
    assert_eq!(reader.rows(0).unwrap().len(), 3);
    let refused = write(&reader, &blocks[0], 3, ALL, 1).unwrap_err();
    assert!(matches!(&refused, Error::ReadOnly(why) if why.contains("writes here")), "{refused}");
    let refusals = [reader.remove(0), reader.clear(0..2), reader.save(&[], 0)];
    for refused in refusals.into_iter().chain([reader.gc().map(drop)]) {
        assert!(matches!(refused, Err(Error::ReadOnly(_))));
    }
}
