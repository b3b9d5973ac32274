//! I/O paths: direct or through the page cache, by `io_uring` or threads. Bytes written one way are
//! read the other, whatever the memory, the depth and the short transfers.

use std::io;
use std::path::Path;
use std::sync::Arc;

use kvtrie_core::Layers;
use kvtrie_store::{
    Access, BlockRead, BlockWrite, Bytes, Chance, Device, Durability, Error, Fault, Faults, Meta,
    Op, Pages, QueueKind, Settings, Store, System, Work,
};

use crate::rig::{self, Block, Random, behind, bytes, first};

const ALL: Layers = Layers::new(0, 4);
const SLOTS: u32 = 12;
const WAYS: [(bool, QueueKind); 4] = [
    (true, QueueKind::Best),
    (true, QueueKind::Threads),
    (false, QueueKind::Best),
    (false, QueueKind::Threads),
];

fn system((direct, queue): (bool, QueueKind)) -> Arc<dyn Device> {
    Arc::new(System::new(direct, queue))
}

fn blocks() -> Vec<Block> {
    let mut all = vec![first(0)];
    for token in 1..SLOTS {
        all.push(behind(&all[all.len() - 1], token));
    }
    all
}

fn open(device: &Arc<dyn Device>, folder: &Path, settings: &Settings) -> Store {
    Store::open(Arc::clone(device), folder, settings.clone()).unwrap()
}

/// Writes all blocks in one call, from memory that starts `shift` bytes after a page boundary.
fn write_all(store: &Store, blocks: &[Block], version: u64, depth: usize, shift: usize) {
    let failed = try_write_all(store, blocks, version, depth, shift);
    assert!(failed.iter().all(Result::is_ok), "{failed:?}");
}

fn try_write_all(
    store: &Store,
    blocks: &[Block],
    version: u64,
    depth: usize,
    shift: usize,
) -> Vec<Result<(), Error>> {
    let length = store.settings().bytes_of(ALL);
    let memory: Vec<Pages> = blocks
        .iter()
        .map(|block| {
            let mut pages = Pages::new(length + shift);
            let data = bytes(store.settings(), block, ALL, version);
            pages[shift..shift + length].copy_from_slice(&data);
            pages
        })
        .collect();
    let given = blocks.iter().zip(0..).zip(&memory).map(|((block, slot), pages)| BlockWrite {
        key: &block.key,
        slot,
        layers: ALL,
        record: &block.record,
        meta: Meta::default(),
        bytes: &pages[shift..shift + length],
    });
    store.write_many(given.collect(), 0, depth)
}

/// Reads all blocks in one call; each result is right or an error.
fn read_all(
    store: &Store,
    blocks: &[Block],
    version: u64,
    depth: usize,
    shift: usize,
) -> Vec<Result<(), Error>> {
    let length = store.settings().bytes_of(ALL);
    let mut memory: Vec<Pages> = blocks.iter().map(|_| Pages::new(length + shift)).collect();
    let wanted = blocks.iter().zip(0..).zip(&mut memory).map(|((block, slot), pages)| BlockRead {
        key: &block.key,
        slot,
        layers: ALL,
        out: &mut pages[shift..shift + length],
    });
    let results = store.read_many(wanted.collect(), depth);
    for ((block, pages), result) in blocks.iter().zip(&memory).zip(&results) {
        let right = bytes(store.settings(), block, ALL, version);
        assert!(result.is_err() || pages[shift..shift + length] == right);
    }
    results
}

#[test]
fn bytes_written_one_way_are_read_the_other() {
    let blocks = blocks()[..5].to_vec();
    for (at, writing) in WAYS.into_iter().enumerate() {
        for reading in WAYS {
            // Layers of full pages and others; of one operation and of several.
            for layer_bytes in [4096, 700, 320 << 10] {
                let folder = tempfile::tempdir().unwrap();
                let settings = rig::settings(SLOTS, layer_bytes, Durability::Flush);
                let version = at as u64;
                for shift in [0, 64] {
                    let store = open(&system(writing), folder.path(), &settings);
                    write_all(&store, &blocks, version, 4, shift);
                    store.close().unwrap();
                    let store = open(&system(reading), folder.path(), &settings);
                    for depth in [1, 3] {
                        let results = read_all(&store, &blocks, version, depth, shift);
                        assert!(results.iter().all(Result::is_ok), "{results:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_slot_twice_in_one_call_is_written_in_order() {
    for way in WAYS {
        for durability in [Durability::Flush, Durability::Fsync] {
            let folder = tempfile::tempdir().unwrap();
            let settings = rig::settings(SLOTS, 4096, durability);
            let store = open(&system(way), folder.path(), &settings);
            let blocks = blocks();
            let data: Vec<Vec<u8>> =
                blocks.iter().map(|block| bytes(&settings, block, ALL, 1)).collect();
            let given = blocks.iter().zip(&data).map(|(block, data)| BlockWrite {
                key: &block.key,
                slot: 0,
                layers: ALL,
                record: &block.record,
                meta: Meta::default(),
                bytes: data,
            });
            let results = store.write_many(given.collect(), 0, 4);
            assert!(results.iter().all(Result::is_ok), "{results:?}");
            // The last one stays.
            let results = read_all(&store, &blocks, 1, 4, 0);
            assert!(results.iter().all(Result::is_err));
            let last = &blocks[blocks.len() - 1];
            let mut out = vec![0; settings.bytes_of(ALL)];
            store.read(&last.key, 0, ALL, &mut out).unwrap();
            assert_eq!(out, data[data.len() - 1]);
        }
    }
}

#[test]
fn faults_below_the_queue_fail_their_operations_only() {
    let blocks = blocks();
    for way in WAYS {
        let mut met = 0;
        for seed in 0..8 {
            let faults = Arc::new(Faults::new(system(way), seed));
            let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
            let folder = tempfile::tempdir().unwrap();
            let settings = rig::settings(SLOTS, 64 << 10, Durability::Flush);
            let store = open(&device, folder.path(), &settings);
            for fault in [Fault::ShortRead, Fault::ShortWrite] {
                faults.inject(fault, Chance::PerMille(500));
            }
            write_all(&store, &blocks, 1, 4, 0);
            let results = read_all(&store, &blocks, 1, 4, 0);
            assert!(results.iter().all(Result::is_ok), "{results:?}");
            faults.inject(Fault::Read, Chance::PerMille(100));
            let results = read_all(&store, &blocks, 1, 4, 0);
            let io = |result: &Result<(), Error>| matches!(result, Ok(()) | Err(Error::Io { .. }));
            assert!(results.iter().all(io), "{results:?}");
            met += results.iter().filter(|result| result.is_err()).count();
            faults.inject(Fault::Write, Chance::PerMille(100));
            faults.inject(Fault::NoSpace, Chance::PerMille(30));
            // Other blocks in the same slots, one further.
            let mut others = blocks.clone();
            others.rotate_left(1);
            let wrote = try_write_all(&store, &others, 2, 4, 0);
            faults.heal();
            let read = read_all(&store, &others, 2, 4, 0);
            for (wrote, read) in wrote.iter().zip(&read) {
                assert_eq!(wrote.is_ok(), read.is_ok(), "{wrote:?}, {read:?}");
            }
            met += wrote.iter().filter(|result| result.is_err()).count();
            assert!(faults.injected(Fault::ShortRead) > 0);
        }
        assert!(met > 20, "{met}");
    }
}

/// Reads one file in pieces, every other one at an offset that is no page boundary.
struct Pieces<'a> {
    file: Arc<dyn kvtrie_store::File>,
    left: Vec<(u64, &'a mut [u8])>,
    panics: bool,
    done: usize,
}

impl<'a> Work<'a> for Pieces<'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        let (at, out) = self.left.pop()?;
        Some(Op::new(Arc::clone(&self.file), at, Bytes::Into(out), 0, Layers::NONE))
    }

    fn done(&mut self, op: Op<'a>, moved: io::Result<usize>) {
        assert_eq!(moved.unwrap(), op.all().len());
        self.done += 1;
        assert!(!self.panics, "as requested");
    }
}

#[test]
fn unaligned_offsets_work_and_a_panic_waits_for_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let mut random = Random(1);
    let content: Vec<u8> = (0..1 << 20).map(|_| random.next().to_le_bytes()[0]).collect();
    std::fs::write(&path, &content).unwrap();
    for way in WAYS {
        for panics in [false, true] {
            let device = system(way);
            let file = device.open_bulk(&path, Access::Read).unwrap();
            let mut memory = Pages::new(1 << 20);
            let left = memory.chunks_mut(4096).enumerate();
            let at = |at: usize| (at as u64 * 4096).saturating_sub(at as u64 % 2);
            let left = left.map(|(piece, out)| (at(piece), out)).collect();
            let mut pieces = Pieces { file, left, panics, done: 0 };
            let run = std::panic::AssertUnwindSafe(|| device.run(&mut pieces));
            assert_eq!(std::panic::catch_unwind(run).is_err(), panics);
            let done = pieces.done;
            drop(pieces);
            if panics {
                assert_eq!(done, 1);
                continue;
            }
            for (piece, read) in memory.chunks(4096).enumerate() {
                let at = usize::try_from(at(piece)).unwrap();
                assert!(*read == content[at..at + 4096], "piece {piece}");
            }
        }
    }
}

#[test]
fn a_store_reports_its_io_path() {
    let folder = tempfile::tempdir().unwrap();
    let settings = rig::settings(SLOTS, 4096, Durability::Flush);
    let buffered = System::new(false, QueueKind::Threads);
    let store = Store::open(Arc::new(buffered), folder.path(), settings.clone()).unwrap();
    let travel = store.travel();
    assert!(!travel.direct && travel.queue == "threads" && travel.reasons.is_empty());
    drop(store);
    let store = Store::open(Arc::new(System::default()), folder.path(), settings).unwrap();
    let travel = store.travel();
    // Either the requested path, or a reason.
    let asked = travel.direct && travel.queue == "io_uring";
    assert!(asked == travel.reasons.is_empty(), "{travel:?}");
}
