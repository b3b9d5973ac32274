//! Folders: one writer, read-only folders, a full disk, a hanging device.

mod rig;

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtrie_core::Layers;
use kvtrie_store::{
    Call, Chance, Device, Durability, Error, Fault, Faults, KeptBlock, Meta, Settings, Store,
    System, stores,
};
use rig::memory::Memory;
use rig::{Block, behind, bytes, first, once_free, open, read, settings, write};

const ALL: Layers = Layers::new(0, 4);

fn path(count: u32) -> Vec<Block> {
    let mut all = vec![first(0)];
    for token in 1..count {
        all.push(behind(&all[all.len() - 1], token));
    }
    all
}

fn system(folder: &Path, settings: &Settings) -> Result<Store, Error> {
    Store::open(Arc::new(System::default()), folder, settings.clone())
}

#[test]
fn one_writes_and_the_others_read() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(4, 700, Durability::Flush);
    let block = first(0);
    let writer = system(folder.path(), &settings).unwrap();
    write(&writer, &block, 0, ALL, 1).unwrap();
    let reader = system(folder.path(), &settings).unwrap();
    assert!(reader.read_only() && !writer.read_only());
    assert_eq!(read(&reader, &block.key, 0, ALL).unwrap(), bytes(&settings, &block, ALL, 1));
    let message = write(&reader, &block, 1, ALL, 1).unwrap_err().to_string();
    assert!(message.contains(&format!("process {} writes here", std::process::id())), "{message}");
    // A reader removes no block, not even a damaged one.
    let segment = folder.path().join(settings.folder_name()).join("segment-00000");
    let whole = std::fs::read(&segment).unwrap();
    let mut damaged = whole.clone();
    damaged[8200] ^= 1;
    std::fs::write(&segment, &damaged).unwrap();
    assert!(matches!(read(&reader, &block.key, 0, ALL), Err(Error::Bad { .. })));
    assert_eq!(reader.verify(|_| {}).len(), 1);
    assert_eq!(std::fs::read(&segment).unwrap(), damaged);
    std::fs::write(&segment, &whole).unwrap();
    writer.close().unwrap();
    let writer = system(folder.path(), &settings).unwrap();
    assert!(!writer.read_only());
    assert_eq!(read(&writer, &block.key, 0, ALL).unwrap(), bytes(&settings, &block, ALL, 1));
}

#[test]
fn a_folder_lists_its_stores() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(stores(&System::default(), &folder.path().join("none")).unwrap().len(), 0);
    let one = settings(4, 700, Durability::Flush);
    let two = Settings { identity: [0xfe; 32], about: "other".into(), ..one.clone() };
    drop(system(folder.path(), &one).unwrap());
    drop(system(folder.path(), &two).unwrap());
    std::fs::create_dir(folder.path().join("ffffffffffffffff")).unwrap();
    std::fs::create_dir(folder.path().join("else")).unwrap();
    let found = stores(&System::default(), folder.path()).unwrap();
    assert_eq!(found.len(), 3);
    assert_eq!(found[0].settings.as_ref().unwrap(), &one);
    assert_eq!(found[1].settings.as_ref().unwrap(), &two);
    assert!(found[2].settings.is_err());
    let store = Store::inspect(Arc::new(System::default()), &found[1].folder).unwrap();
    assert_eq!(store.settings().about, "other");
    assert!(matches!(store.remove(0), Err(Error::ReadOnly(why)) if why.contains("looking")));
}

#[test]
fn a_smaller_budget_keeps_the_remaining_slots() {
    let folder = tempfile::tempdir().unwrap();
    let large = settings(8, 700, Durability::Flush);
    let small = settings(3, 700, Durability::Flush);
    let blocks = path(8);
    let store = system(folder.path(), &large).unwrap();
    for slot in 0..8 {
        write(&store, &blocks[slot as usize], slot, ALL, 1).unwrap();
    }
    drop(store);
    let store = system(folder.path(), &small).unwrap();
    assert_eq!(store.reasons().len(), 5);
    assert_eq!(store.verify(|_| {}), vec![]);
    assert_eq!(store.rows(0).unwrap().len(), 3);
    assert!(store.disk_bytes().unwrap() <= small.bytes_for(3));
    drop(store);
    let store = system(folder.path(), &large).unwrap();
    assert_eq!(store.reasons(), Vec::<String>::new());
    assert_eq!(store.rows(0).unwrap().len(), 3);
    write(&store, &blocks[7], 7, ALL, 1).unwrap();
    assert_eq!(store.verify(|_| {}), vec![]);
}

#[test]
fn a_closed_store_is_unlocked_while_processes_start() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(4, 700, Durability::Flush);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Between fork and exec each process has the descriptor of the lock.
        scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                assert!(Command::new("true").status().unwrap().success());
            }
        });
        let refusals: Vec<String> = (0..500)
            .filter_map(|_| system(folder.path(), &settings).unwrap().refusal().map(str::to_owned))
            .collect();
        ended.store(true, Ordering::Release);
        assert_eq!(refusals, Vec::<String>::new());
    });
}

#[test]
fn ages_grow_by_the_wall_clock_and_never_shrink() {
    let memory = Memory::default();
    let settings = settings(4, 700, Durability::Flush);
    let store = open(&memory.device(), &settings);
    let block = first(0);
    let meta = Meta { age: 10, uses: 3, session_blocks: 4, cost: 2.5, ttl: 100, priority: 81 };
    let data = bytes(&settings, &block, ALL, 1);
    store.write(&block.key, 2, ALL, &block.record, meta, &data, 1000).unwrap();
    let seen = |store: &Store, now| store.rows(now).unwrap()[0].meta;
    assert_eq!(seen(&store, 1000), meta);
    assert_eq!(seen(&store, 1030), Meta { age: 40, ttl: 70, ..meta });
    assert_eq!(seen(&store, 5000), Meta { age: 4010, ttl: 0, ..meta });
    assert_eq!(seen(&store, 900), meta);
    let kept = KeptBlock { slot: 2, meta: Meta { age: 1, ttl: u64::MAX, ..meta } };
    store.save(&[kept, KeptBlock { slot: 3, ..kept }], 2000).unwrap();
    drop(store);
    let store = open(&memory.device(), &settings);
    assert_eq!(seen(&store, 2007), Meta { age: 8, ttl: u64::MAX, ..meta });
}

#[test]
fn bad_arguments_change_nothing_and_name_the_numbers() {
    let memory = Memory::default();
    let settings = settings(4, 700, Durability::Flush);
    let store = open(&memory.device(), &settings);
    let block = first(0);
    write(&store, &block, 0, ALL, 1).unwrap();
    let image = memory.bytes("manifest");
    let error_of = |found: Result<(), Error>| match found {
        Err(Error::Config(message)) => message,
        other => panic!("{other:?}"),
    };
    let put = |key, slot, layers, record: &[u8], length: usize| {
        let data = vec![0; length];
        error_of(store.write(key, slot, layers, record, Meta::default(), &data, 0))
    };
    let (key, record) = (&block.key, &block.record[..]);
    assert_eq!(put(key, 4, ALL, record, 2800), "slot 4, there are 4");
    assert_eq!(put(key, 1, Layers::new(2, 5), record, 2100), "layers 2..5, a block has 0..4");
    assert_eq!(put(key, 1, Layers::new(2, 2), record, 0), "layers 2..2, a block has 0..4");
    let message = put(key, 1, ALL, record, 2799);
    assert_eq!(message, "2799 bytes for layers 0..4 of 700 bytes each, 2800 wanted");
    assert_eq!(put(key, 1, ALL, &[0; 1041], 2800), "a record of 1041 bytes, at most 1040");
    assert!(put(&[7; 32], 1, ALL, record, 2800).contains("does not give the key 0707070707070707"));
    assert!(put(key, 1, ALL, &record[1..], 2800).contains("does not give the key"));
    let kept = KeptBlock { slot: 0, meta: Meta::default() };
    assert_eq!(error_of(store.save(&[kept, kept], 0)), "slot 0 is given twice");
    assert_eq!(error_of(store.save(&[KeptBlock { slot: 9, ..kept }], 0)), "slot 9, there are 4");
    assert_eq!(error_of(store.remove(4)), "slot 4, there are 4");
    assert_eq!(memory.bytes("manifest"), image);
    for (wrong, message) in [
        (Settings { layers: 0, ..settings.clone() }, "layers is 0, at least 1"),
        (Settings { blocks: u32::MAX, ..settings.clone() }, "blocks is 4294967295, at most"),
        (Settings { layer_bytes: 1 << 41, ..settings.clone() }, "layer_bytes is 2199023255552"),
        (Settings { about: "x".repeat(20_000), ..settings.clone() }, "about is 20000, at most"),
    ] {
        let found = Store::open(memory.device(), Path::new("/stores"), wrong);
        assert!(matches!(&found, Err(Error::Config(text)) if text.contains(message)), "{found:?}");
    }
}

#[test]
fn a_disk_that_fills_up_loses_one_write_at_most() {
    for durability in [Durability::None, Durability::Flush, Durability::Fsync] {
        for after in 0..40 {
            let faults = Arc::new(Faults::new(Memory::default().device(), after));
            let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
            let settings = settings(4, 700, durability);
            let store = open(&device, &settings);
            let blocks = path(4);
            faults.inject(Fault::NoSpace, Chance::From(after));
            let mut good = Vec::new();
            for slot in 0..4 {
                match write(&store, &blocks[slot as usize], slot, ALL, 1) {
                    Ok(()) => good.push(slot),
                    Err(Error::Full(what)) => assert!(what.contains("space"), "{what}"),
                    Err(other) => panic!("{other}"),
                }
            }
            let holds = |store: &Store| {
                for &slot in &good {
                    read(store, &blocks[slot as usize].key, slot, ALL).unwrap();
                }
                assert_eq!(store.rows(0).unwrap().len(), good.len());
            };
            holds(&store);
            faults.heal();
            store.close().unwrap();
            let store = open(&device, &settings);
            holds(&store);
            for slot in 0..4 {
                write(&store, &blocks[slot as usize], slot, ALL, 1).unwrap();
            }
            assert_eq!(store.verify(|_| {}), vec![]);
        }
    }
}

#[test]
fn a_manifest_that_cannot_be_rewritten_grows_up_to_its_budget() {
    let memory = Memory::default();
    let faults = Arc::new(Faults::new(memory.device(), 0));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    let settings = settings(4, 700, Durability::Flush);
    let store = open(&device, &settings);
    let blocks = path(2);
    write(&store, &blocks[0], 0, ALL, 1).unwrap();
    let length = || memory.bytes("manifest").len();
    // From here on no new file can be created.
    faults.inject(Fault::Denied, Chance::From(0));
    let mut turn = 0;
    let failed = loop {
        turn += 1;
        if let Err(failed) = write(&store, &blocks[turn % 2], 1, ALL, 1) {
            break failed;
        }
    };
    assert!(matches!(&failed, Error::Io { .. }), "{failed}");
    assert!(faults.injected(Fault::Denied) > 10 && length() > 70_000, "{} bytes", length());
    read(&store, &blocks[0].key, 0, ALL).unwrap();
    faults.heal();
    write(&store, &blocks[1], 1, ALL, 1).unwrap();
    assert!(length() < 1000, "{} bytes", length());
    assert_eq!(store.verify(|_| {}), vec![]);
    assert_eq!(store.blocks(), 2);
}

#[test]
fn a_store_in_a_read_only_folder_opens_read_only() {
    let memory = Memory::default();
    let faults = Arc::new(Faults::new(memory.device(), 0));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    let settings = settings(4, 700, Durability::Flush);
    let block = first(0);
    faults.inject(Fault::Denied, Chance::PerMille(1000));
    let found = Store::open(Arc::clone(&device), Path::new("/stores"), settings.clone());
    assert!(matches!(found, Err(Error::Io { .. })), "{found:?}");
    faults.heal();
    write(&open(&device, &settings), &block, 0, ALL, 1).unwrap();
    for after in 0..2 {
        faults.inject(Fault::Denied, Chance::From(after));
        let store = open(&device, &settings);
        assert!(store.read_only());
        read(&store, &block.key, 0, ALL).unwrap();
        let refused = store.remove(0).unwrap_err().to_string();
        assert!(refused.contains("nothing may be written here"), "{refused}");
    }
}

const CHILD: &str = "KVTRIE_FOLDER_CHILD";

/// Runs one of the tests below in another process, with `folder` in its environment.
fn child(command: &mut Command, test: &str, folder: &Path) {
    command.env(CHILD, folder);
    let out = once_free(|| command.output());
    let output = String::from_utf8_lossy(&out.stdout).into_owned();
    let erred = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && output.contains("1 passed"), "{test}: {output}{erred}");
}

fn skip(why: &str) {
    use std::io::Write;
    let mut out = std::io::stderr();
    writeln!(out, "skipped: {why}").unwrap();
}

#[test]
fn child_reads_a_read_only_folder() {
    let Ok(folder) = std::env::var(CHILD) else { return };
    let store = system(Path::new(&folder), &settings(4, 700, Durability::Flush)).unwrap();
    assert!(store.read_only());
    let block = first(0);
    assert!(read(&store, &block.key, 0, ALL).unwrap() == bytes(store.settings(), &block, ALL, 1));
    let refused = write(&store, &block, 1, ALL, 1).unwrap_err();
    assert!(matches!(refused, Error::ReadOnly(_)));
}

#[test]
fn a_folder_without_write_permission_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(4, 700, Durability::Flush);
    write(&system(folder.path(), &settings).unwrap(), &first(0), 0, ALL, 1).unwrap();
    let own = folder.path().join(settings.folder_name());
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(folder.path(), 0o555);
    mode(&own, 0o555);
    let test = "child_reads_a_read_only_folder";
    // Root may write everywhere, so root runs a copy of this binary as another user.
    let binary = folder.path().join("test");
    std::fs::copy(std::env::current_exe().unwrap(), &binary).unwrap_or(0);
    let root = std::fs::metadata(&own).unwrap().uid() == 0 && binary.exists();
    let mut command = Command::new(if root { binary } else { std::env::current_exe().unwrap() });
    command.args(["--exact", test]);
    if root {
        command.uid(65_534).gid(65_534);
    }
    child(&mut command, test, folder.path());
    mode(folder.path(), 0o755);
    mode(&own, 0o755);
}

#[test]
fn child_fills_a_disk() {
    let Ok(folder) = std::env::var(CHILD) else { return };
    let settings = settings(200, 16 << 10, Durability::Flush);
    let blocks = path(200);
    let store = system(Path::new(&folder), &settings).unwrap();
    let good = |slot: &u32| write(&store, &blocks[*slot as usize], *slot, ALL, 1).is_ok();
    let written: Vec<u32> = (0..200).filter(good).collect();
    assert!((3..199).contains(&written.len()), "{}", written.len());
    let full = write(&store, &blocks[199], 199, ALL, 1).unwrap_err();
    assert!(matches!(full, Error::Full(_)), "{full}");
    drop(store);
    let store = system(Path::new(&folder), &settings).unwrap();
    assert_eq!(store.rows(0).unwrap().len(), written.len());
    assert_eq!(store.verify(|_| {}), vec![]);
    for &slot in written.iter().skip(1) {
        store.remove(slot).unwrap();
    }
    assert!(store.gc().unwrap() > 0);
    write(&store, &blocks[199], 199, ALL, 1).unwrap();
    assert_eq!(store.verify(|_| {}), vec![]);
}

#[test]
fn a_real_disk_fills_up() {
    let probe = ["-rm", "sh", "-c", "mount -t tmpfs -o size=4k none /tmp"];
    if !Command::new("unshare").args(probe).output().is_ok_and(|out| out.status.success()) {
        return skip("no right to mount a small file system (unshare -rm)");
    }
    let folder = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=2m none \"$KVTRIE_FOLDER_CHILD\" && exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", script]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "child_fills_a_disk"]);
    child(&mut command, "child_fills_a_disk", folder.path());
}

#[test]
fn a_hanging_write_blocks_no_other_slot() {
    let faults = Arc::new(Faults::new(Memory::default().device(), 0));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    let store = open(&device, &settings(4, 700, Durability::Flush));
    let blocks = path(3);
    write(&store, &blocks[0], 0, ALL, 1).unwrap();
    std::thread::scope(|scope| {
        faults.close_gate(&[Call::Write]);
        let hung = scope.spawn(|| write(&store, &blocks[1], 1, ALL, 1));
        faults.wait_for(1);
        assert_eq!(faults.hanging(), 1);
        read(&store, &blocks[0].key, 0, ALL).unwrap();
        assert_eq!(store.rows(0).unwrap().len(), 1);
        faults.open_gate();
        hung.join().unwrap().unwrap();
    });
    read(&store, &blocks[1].key, 1, ALL).unwrap();
}

#[test]
fn many_threads_write_read_and_verify_at_once() {
    for (durability, failing) in [
        (Durability::None, 0),
        (Durability::Flush, 0),
        (Durability::Fsync, 0),
        (Durability::Fsync, 100),
    ] {
        let memory = Memory::default();
        let faults = Arc::new(Faults::new(memory.device(), 5));
        let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
        let settings = settings(16, 700, durability);
        let store = open(&device, &settings);
        let blocks = path(32);
        faults.inject(Fault::Sync, Chance::PerMille(failing));
        let last: Vec<Option<(usize, u64)>> = std::thread::scope(|scope| {
            let worker = |thread: u32| {
                let (store, blocks) = (&store, &blocks);
                scope.spawn(move || {
                    let mut random = rig::Random(thread.into());
                    let mut holds: Vec<Option<(usize, u64)>> = vec![None; 4];
                    for version in 0..150 {
                        let at = usize::try_from(random.below(4)).unwrap();
                        let slot = 4 * thread + u32::try_from(at).unwrap();
                        // Another block each time, so that each write is a new block.
                        let was = holds[at].map_or(0, |(number, _)| number);
                        let number = (was + 1 + usize::try_from(random.below(30)).unwrap()) % 32;
                        let written = write(store, &blocks[number], slot, ALL, version);
                        holds[at] = written.is_ok().then_some((number, version));
                        if let Some((number, version)) = holds[at] {
                            let found = read(store, &blocks[number].key, slot, ALL).unwrap();
                            assert!(
                                found == bytes(store.settings(), &blocks[number], ALL, version)
                            );
                        } else {
                            assert!(read(store, &blocks[number].key, slot, ALL).is_err());
                            // The old block may still be there, if it could not be freed.
                            while store.remove(slot).is_err() {}
                        }
                    }
                    holds
                })
            };
            let workers: Vec<_> = (0..4).map(worker).collect();
            for _ in 0..5 {
                assert_eq!(store.verify(|_| {}), vec![]);
                store.rows(0).unwrap();
                store.gc().ok();
                store.sync().ok();
            }
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
        });
        assert_eq!(faults.injected(Fault::Sync) > 0, failing > 0);
        faults.heal();
        store.close().unwrap();
        let store = open(&device, &settings);
        assert_eq!(store.reasons(), Vec::<String>::new());
        for (slot, holds) in (0..).zip(&last) {
            if let &Some((number, version)) = holds {
                let found = read(&store, &blocks[number].key, slot, ALL).unwrap();
                assert!(found == bytes(&settings, &blocks[number], ALL, version));
            }
        }
        assert_eq!(store.verify(|_| {}), vec![]);
    }
}

#[test]
fn short_reads_and_writes_are_continued() {
    let faults = Arc::new(Faults::new(Memory::default().device(), 3));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    faults.inject(Fault::ShortRead, Chance::PerMille(800));
    faults.inject(Fault::ShortWrite, Chance::PerMille(800));
    for layer_bytes in [700, 4096] {
        let settings = settings(4, layer_bytes, Durability::Fsync);
        let settings =
            Settings { identity: [u8::try_from(layer_bytes % 251).unwrap(); 32], ..settings };
        let blocks = path(4);
        let store = open(&device, &settings);
        for slot in 0..4 {
            write(&store, &blocks[slot as usize], slot, Layers::new(2, 4), 1).unwrap();
            write(&store, &blocks[slot as usize], slot, Layers::new(0, 2), 1).unwrap();
        }
        drop(store);
        let store = open(&device, &settings);
        for slot in 0..4 {
            let block = &blocks[slot as usize];
            let found = read(&store, &block.key, slot, ALL).unwrap();
            assert!(found == bytes(&settings, block, ALL, 1));
        }
        assert_eq!(store.reasons(), Vec::<String>::new());
    }
    assert!(faults.injected(Fault::ShortRead) > 20 && faults.injected(Fault::ShortWrite) > 20);
}

#[test]
fn a_failed_read_removes_no_block() {
    let faults = Arc::new(Faults::new(Memory::default().device(), 3));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    let store = open(&device, &settings(4, 1 << 20, Durability::Flush));
    let block = first(0);
    write(&store, &block, 0, ALL, 1).unwrap();
    // One operation for the header pages and, at this size, one per layer.
    for after in 0..5 {
        faults.inject(Fault::Read, Chance::After(after));
        let failed = read(&store, &block.key, 0, ALL).unwrap_err();
        assert!(matches!(&failed, Error::Io { .. }), "{failed}");
        assert!(failed.to_string().contains("of slot 0 at"), "{failed}");
        read(&store, &block.key, 0, ALL).unwrap();
    }
    faults.inject(Fault::Read, Chance::After(0));
    assert_eq!(store.verify(|_| {}).len(), 1);
    assert_eq!(store.verify(|_| {}), vec![]);
    assert_eq!(store.reasons(), Vec::<String>::new());
}

#[test]
fn a_store_in_two_folders_is_refused_by_name() {
    let home = tempfile::tempdir().unwrap();
    let settings = settings(4, 700, Durability::Flush);
    let device: Arc<dyn Device> = Arc::new(System::default());
    let opened = || Store::open(Arc::clone(&device), home.path(), settings.clone());
    let own = opened().unwrap().folder().to_path_buf();
    let refused = |found: Result<Store, Error>, part: &Path| {
        let Err(Error::Config(message)) = found else { panic!("{found:?}") };
        let named = format!("{} is spread over two folders, which this version", part.display());
        assert!(message.starts_with(&named) && message.contains("RAID 0 or LVM"), "{message}");
    };
    // Both parts of such a store have a file `pair`.
    let second = own.with_extension("second");
    std::fs::create_dir(&second).unwrap();
    for part in [&own, &second] {
        std::fs::write(part.join("pair"), "0123456789abcdef").unwrap();
        refused(opened(), part);
        refused(Store::inspect(Arc::clone(&device), &own), part);
        std::fs::remove_file(part.join("pair")).unwrap();
    }
    opened().unwrap();
    // And the header of the manifest has the length of the second folder's path.
    let manifest = own.join("manifest");
    let mut bytes = std::fs::read(&manifest).unwrap();
    bytes[86] = 4;
    let sum = xxhash_rust::xxh3::xxh3_64(&bytes[16..]);
    bytes[8..16].copy_from_slice(&sum.to_le_bytes());
    std::fs::write(&manifest, &bytes).unwrap();
    refused(opened(), &own);
    refused(Store::inspect(Arc::clone(&device), &own), &own);
    let listed = stores(&*device, home.path()).unwrap();
    assert!(matches!(&listed[0].settings, Err(Error::Config(why)) if why.contains("RAID 0")));
    assert_eq!(std::fs::read(&manifest).unwrap(), bytes, "a refusal changes nothing");
}
