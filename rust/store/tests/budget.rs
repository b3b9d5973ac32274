//! The budget: whatever is written, all files of a store stay within `bytes_for`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtrie_core::{Layers, Record, scope_key};
use kvtrie_store::{
    Access, Device, Durability, Error, File, Item, KeptBlock, Meta, Settings, Store, System, Work,
};

use crate::rig::{self, Block, Random, bytes};

/// A device that measures the folder before each rename, when two manifests exist.
#[derive(Debug)]
struct Scale {
    files: System,
    folder: PathBuf,
    most: AtomicU64,
    renames: AtomicU64,
}

/// Bytes of all files, by their allocation or by their length, whichever is larger.
fn weigh(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files = || std::fs::read_dir(folder).unwrap().map(|item| item.unwrap().metadata().unwrap());
    let taken: u64 = files().map(|data| data.blocks() * 512).sum();
    let long: u64 = files().map(|data| data.len()).sum();
    taken.max(long)
}

impl Device for Scale {
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        self.files.open(path, access)
    }

    fn open_bulk(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        self.files.open_bulk(path, access)
    }

    fn run(&self, work: &mut dyn Work<'_>) {
        self.files.run(work);
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.most.fetch_max(weigh(&self.folder), Ordering::Relaxed);
        self.renames.fetch_add(1, Ordering::Relaxed);
        self.files.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.files.remove(path)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.files.make_folder(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.files.sync_folder(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Item>> {
        self.files.list(path)
    }
}

/// A block with the longest possible record.
fn longest(settings: &Settings, token: u32) -> Block {
    let mut record = Record {
        parent: scope_key("tiny", 4, b"", ""),
        tokens: vec![token; 4],
        digests: vec![(0, vec![])],
        ..Record::default()
    };
    let room = settings.record_bytes() - record.encode().len();
    record.digests[0].1 = vec![7; room];
    Block { key: record.key(), record: record.encode() }
}

fn fill(durability: Durability, layer_bytes: usize, blocks: u32) {
    let folder = tempfile::tempdir().unwrap();
    let about = "x".repeat(16 << 10);
    let settings = Settings { about, ..rig::settings(blocks, layer_bytes, durability) };
    let own = folder.path().join(settings.folder_name());
    let scale = Arc::new(Scale {
        files: System::default(),
        folder: own.clone(),
        most: 0.into(),
        renames: 0.into(),
    });
    let budget = settings.bytes_for(blocks);
    let store = Store::open(Arc::clone(&scale) as Arc<dyn Device>, folder.path(), settings.clone());
    let store = store.unwrap();
    let mut random = Random(1);
    let all = Layers::new(0, 4);
    for step in 0..12 * blocks {
        let slot = step % blocks;
        let block = longest(&settings, step);
        let data = bytes(&settings, &block, all, 1);
        store.write(&block.key, slot, all, &block.record, Meta::default(), &data, 0).unwrap();
        if step % 7 == 0 {
            assert!(weigh(&own) <= budget, "{} of {budget} after {step}", weigh(&own));
        }
        if random.below(50) == 0 {
            store.remove(u32::try_from(random.below(blocks.into())).unwrap()).unwrap();
        }
    }
    store.sync().unwrap();
    let kept: Vec<KeptBlock> = store
        .rows(0)
        .unwrap()
        .iter()
        .map(|row| KeptBlock { slot: row.slot, meta: row.meta })
        .collect();
    store.save(&kept, 0).unwrap();
    let renames = scale.renames.load(Ordering::Relaxed);
    assert!(renames > 4, "{renames} rewrites");
    let most = scale.most.load(Ordering::Relaxed).max(weigh(&own));
    assert!(most <= budget, "{most} of {budget}");
    // The bound is not loose either.
    assert!(most > budget / 3, "{most} of {budget}");
    for slot in 0..blocks {
        store.remove(slot).unwrap();
    }
    let full = store.disk_bytes().unwrap();
    let freed = store.gc().unwrap();
    assert!(freed >= u64::from(blocks) * settings.slot_bytes() * 9 / 10, "{freed} of {full}");
    assert_eq!(store.disk_bytes().unwrap(), full - freed);
}

#[test]
fn files_stay_within_the_budget() {
    for durability in [Durability::None, Durability::Flush] {
        for layer_bytes in [1, 4096, 10_000] {
            fill(durability, layer_bytes, 150);
        }
    }
    fill(Durability::Fsync, 4096, 60);
}

#[test]
fn gc_returns_the_space_of_free_slots() {
    let folder = tempfile::tempdir().unwrap();
    let settings = rig::settings(9, 64 << 10, Durability::Flush);
    let store = Store::open(Arc::new(System::default()), folder.path(), settings.clone()).unwrap();
    let all = Layers::new(0, 4);
    let blocks: Vec<Block> = (0..9).map(|token| longest(&settings, token)).collect();
    for slot in 0..9 {
        rig::write(&store, &blocks[slot as usize], slot, all, 1).unwrap();
    }
    for slot in [2, 3, 5, 7, 8] {
        store.remove(slot).unwrap();
    }
    let freed = store.gc().unwrap();
    assert!(freed >= 5 * settings.slot_bytes(), "{freed}");
    assert!(freed < 6 * settings.slot_bytes(), "{freed}");
    assert_eq!(store.verify(|_| {}), vec![]);
    for slot in [2, 8, 5] {
        rig::write(&store, &blocks[slot as usize], slot, all, 1).unwrap();
    }
    drop(store);
    let store = Store::open(Arc::new(System::default()), folder.path(), settings).unwrap();
    assert_eq!(store.blocks(), 7);
    assert_eq!(store.verify(|_| {}), vec![]);
}

#[test]
fn cleared_slots_give_their_space_back_at_once() {
    let folder = tempfile::tempdir().unwrap();
    for durability in [Durability::Flush, Durability::Fsync] {
        let settings = rig::settings(300, 1 << 20, durability);
        let path = folder.path().join(format!("{durability:?}"));
        let store = Store::open(Arc::new(System::default()), &path, settings.clone()).unwrap();
        let end = settings.per_segment() + 3; // slots of two segments
        for slot in end - 6..end {
            rig::write(&store, &longest(&settings, slot), slot, Layers::new(0, 1), 1).unwrap();
        }
        let full = store.disk_bytes().unwrap();
        store.clear(end - 5..end - 1).unwrap();
        let freed = full - store.disk_bytes().unwrap();
        assert!(freed >= 4 << 20, "{freed}");
        store.clear(end - 5..end - 1).unwrap();
        assert!(matches!(store.clear(299..301), Err(Error::Config(_))));
        assert_eq!(store.blocks(), 2);
        assert_eq!(store.verify(|_| {}), vec![]);
    }
}
