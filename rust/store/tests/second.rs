//! Two folders: both have blocks, both devices work concurrently, and a restart finds all blocks or
//! refuses with a reason; a refused store is complete once the folders are right.

mod rig;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtrie_core::block::Layers;
use kvtrie_store::{
    BlockRead, BlockWrite, Device, Durability, Error, Faults, Meta, QueueKind, Settings, Store,
    System,
};
use rig::{Block, Random, behind, bytes, first, read, write};

const ALL: Layers = Layers::new(0, 4);
const SLOTS: u32 = 8;

fn settings(second: Option<PathBuf>) -> Settings {
    Settings { second, ..rig::settings(SLOTS, 4096, Durability::Flush) }
}

fn blocks(count: u32) -> Vec<Block> {
    let mut all = vec![first(0)];
    for token in 1..count {
        all.push(behind(&all[all.len() - 1], token));
    }
    all
}

struct TwoFolders {
    _root: tempfile::TempDir,
    one: PathBuf,
    two: PathBuf,
}

impl TwoFolders {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        Self { _root: folder, one, two }
    }

    fn open(&self) -> Result<Store, Error> {
        open(&self.one, Some(&self.two))
    }

    /// With a block in each slot, closed.
    fn filled(version: u64) -> Self {
        let folders = Self::new();
        let store = folders.open().unwrap();
        for (block, slot) in blocks(SLOTS).iter().zip(0..) {
            write(&store, block, slot, ALL, version).unwrap();
        }
        store.close().unwrap();
        folders
    }

    fn half(&self) -> PathBuf {
        self.two.join(format!("{}.second", settings(None).folder_name()))
    }

    fn main(&self) -> PathBuf {
        self.one.join(settings(None).folder_name())
    }
}

fn open(one: &Path, two: Option<&Path>) -> Result<Store, Error> {
    Store::open(Arc::new(System::default()), one, settings(two.map(Path::to_path_buf)))
}

fn all_right(store: &Store, version: u64) {
    for (block, slot) in blocks(SLOTS).iter().zip(0..) {
        let right = bytes(store.settings(), block, ALL, version);
        assert_eq!(read(store, &block.key, slot, ALL).unwrap(), right);
    }
    assert_eq!(store.rows(0).unwrap().len(), SLOTS as usize);
    assert_eq!(store.reasons(), Vec::<String>::new());
}

fn refused(store: Result<Store, Error>, says: &str) {
    let Err(Error::Config(message)) = store else { panic!("{store:?}") };
    assert!(message.contains(says), "{message}");
}

#[test]
fn every_other_slot_is_in_the_second_folder() {
    let folders = TwoFolders::filled(1);
    let size = |path: PathBuf| fs::metadata(path).unwrap().len();
    let half = u64::from(SLOTS / 2) * settings(None).slot_bytes();
    assert_eq!(size(folders.main().join("segment-00000")), half);
    assert_eq!(size(folders.half().join("segment-00001")), half);
    let store = folders.open().unwrap();
    assert!(!store.read_only());
    all_right(&store, 1);
    // A second process reads both, and the tools find the second folder by the manifest.
    let second = folders.open().unwrap();
    assert!(second.read_only());
    all_right(&second, 1);
    let looked = Store::inspect(Arc::new(System::default()), &folders.main()).unwrap();
    assert_eq!(looked.settings().second.as_deref(), Some(&*folders.two));
    all_right(&looked, 1);
}

#[test]
fn both_devices_work_concurrently() {
    let folders = TwoFolders::new();
    for queue in [QueueKind::Best, QueueKind::Threads] {
        let faults = Arc::new(Faults::new(Arc::new(System::new(true, queue)), 1));
        let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
        let settings = settings(Some(folders.two.clone()));
        let store = Store::open(device, &folders.one, settings.clone()).unwrap();
        let blocks = blocks(SLOTS);
        let data: Vec<_> = blocks.iter().map(|block| bytes(&settings, block, ALL, 1)).collect();
        let given = blocks.iter().zip(&data).zip(0..).map(|((block, bytes), slot)| BlockWrite {
            key: &block.key,
            slot,
            layers: ALL,
            record: &block.record,
            meta: Meta::default(),
            bytes,
        });
        let results = store.write_many(given.collect(), 0, 4);
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        let (operations, files) = faults.most_at_once();
        assert!(operations >= 4 && files == 2, "{operations} in {files}");
        let mut memory = data.clone();
        for bytes in &mut memory {
            bytes.fill(0);
        }
        let wanted = blocks
            .iter()
            .zip(&mut memory)
            .zip(0..)
            .map(|((block, out), slot)| BlockRead { key: &block.key, slot, layers: ALL, out });
        let results = store.read_many(wanted.collect(), 4);
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        assert_eq!(memory, data);
        let (operations, files) = faults.most_at_once();
        assert!(operations >= 4 && files == 2, "{operations} in {files}");
        for slot in 0..SLOTS {
            store.remove(slot).unwrap();
        }
    }
}

#[test]
fn the_order_of_the_folders_does_not_matter() {
    let folders = TwoFolders::filled(1);
    for _ in 0..2 {
        let store = open(&folders.two, Some(&folders.one)).unwrap();
        assert_eq!(store.folder(), folders.main());
        all_right(&store, 1);
        store.close().unwrap();
        all_right(&folders.open().unwrap(), 1);
    }
}

#[test]
fn a_missing_folder_is_reported_and_no_block_is_lost() {
    let folders = TwoFolders::filled(1);
    for (missing, says) in
        [(&folders.two, "is not there, where every other"), (&folders.one, "half of")]
    {
        let away = missing.with_extension("away");
        fs::rename(missing, &away).unwrap();
        refused(folders.open(), says);
        // A mount point without its device.
        fs::create_dir_all(missing).unwrap();
        refused(folders.open(), says);
        refused(open(&folders.two, Some(&folders.one)), says);
        fs::remove_dir_all(missing).unwrap();
        fs::rename(&away, missing).unwrap();
        all_right(&folders.open().unwrap(), 1);
    }
    refused(open(&folders.one, None), "lies in two folders");
    refused(open(&folders.two, None), "half of a store");
    all_right(&folders.open().unwrap(), 1);
}

#[test]
fn halves_of_two_stores_are_refused() {
    let (folders, others) = (TwoFolders::filled(1), TwoFolders::filled(2));
    refused(open(&folders.one, Some(&others.two)), "half of another store");
    refused(open(&others.two, Some(&folders.one)), "half of another store");
    refused(open(&folders.one, Some(&others.one)), "is not there");
    all_right(&folders.open().unwrap(), 1);
    all_right(&others.open().unwrap(), 2);
}

#[test]
fn a_store_of_one_folder_is_not_split() {
    let folders = TwoFolders::new();
    let store = open(&folders.one, None).unwrap();
    write(&store, &first(0), 3, ALL, 1).unwrap();
    store.close().unwrap();
    refused(folders.open(), "lies in one folder");
    let store = open(&folders.one, None).unwrap();
    read(&store, &first(0).key, 3, ALL).unwrap();
    // Without blocks no folder is needed.
    store.remove(3).unwrap();
    store.close().unwrap();
    let store = folders.open().unwrap();
    write(&store, &first(0), 3, ALL, 1).unwrap();
    store.close().unwrap();
    read(&folders.open().unwrap(), &first(0).key, 3, ALL).unwrap();
}

#[test]
fn an_interrupted_creation_is_repeated() {
    let folders = TwoFolders::new();
    folders.open().unwrap().close().unwrap();
    for (missing, path) in
        [folders.half(), folders.main()].map(|part| part.join("pair")).iter().enumerate()
    {
        fs::remove_file(path).unwrap();
        if missing == 0 {
            folders.open().unwrap().close().unwrap();
            assert!(path.exists());
        }
    }
    refused(folders.open(), "half of another store");
}

#[test]
fn blocks_lost_in_the_second_folder_are_misses() {
    let folders = TwoFolders::filled(1);
    fs::remove_file(folders.half().join("segment-00001")).unwrap();
    let store = folders.open().unwrap();
    for (block, slot) in blocks(SLOTS).iter().zip(0..) {
        let found = read(&store, &block.key, slot, ALL);
        match slot % 2 {
            0 => assert_eq!(found.unwrap(), bytes(store.settings(), block, ALL, 1)),
            _ => assert!(matches!(found, Err(Error::Bad { .. })), "{found:?}"),
        }
    }
    assert_eq!(store.blocks(), SLOTS as usize / 2);
    for (block, slot) in blocks(SLOTS).iter().zip(0..).skip(1).step_by(2) {
        write(&store, block, slot, ALL, 1).unwrap();
    }
    store.reasons();
    all_right(&store, 1);
}

#[test]
fn both_folders_share_one_budget_and_return_space() {
    let folders = TwoFolders::new();
    let settings = Settings {
        second: Some(folders.two.clone()),
        ..rig::settings(31, 16 << 10, Durability::Flush)
    };
    let open = |blocks: u32| {
        let settings = Settings { blocks, ..settings.clone() };
        Store::open(Arc::new(System::default()), &folders.one, settings).unwrap()
    };
    let store = open(31);
    let blocks = blocks(31);
    for (block, slot) in blocks.iter().zip(0..) {
        write(&store, block, slot, ALL, 1).unwrap();
    }
    let full = store.disk_bytes().unwrap();
    assert!(full <= settings.bytes_for(31), "{full} of {}", settings.bytes_for(31));
    let mut random = Random(1);
    let mut held: Vec<u32> = (0..31).collect();
    while held.len() > 10 {
        let at = usize::try_from(random.below(held.len() as u64)).unwrap();
        store.remove(held.remove(at)).unwrap();
    }
    let freed = store.gc().unwrap();
    assert!(freed >= 21 * settings.slot_bytes() * 9 / 10, "{freed} of {full}");
    assert_eq!(store.verify(|_| {}), vec![]);
    store.close().unwrap();
    // Fewer slots: everything beyond the last one is removed, in both folders.
    let store = open(5);
    assert!(store.disk_bytes().unwrap() <= settings.bytes_for(5));
    for (block, slot) in blocks.iter().zip(0..5) {
        assert_eq!(read(&store, &block.key, slot, ALL).is_ok(), held.contains(&slot));
    }
}
