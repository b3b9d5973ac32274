//! Folders that are held open: what their paths lead to later changes nothing.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kvtrie_core::Layers;
use kvtrie_store::{Durability, Error, KeptBlock, Meta, Settings, Store, System};

use crate::rig::{Block, behind, bytes, first, note, read, settings, write};

const ALL: Layers = Layers::new(0, 4);

fn open(folder: &Path, settings: &Settings) -> Store {
    Store::open(Arc::new(System::default()), folder, settings.clone()).unwrap()
}

fn blocks() -> [Block; 2] {
    [first(0), behind(&first(0), 1)]
}

/// The files below a folder, with their bytes.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect();
    all.sort();
    all
}

/// Every call that writes.
fn every_write(store: &Store, block: &Block) -> Vec<Result<(), Error>> {
    let meta = Meta::default();
    vec![
        write(store, block, 1, ALL, 1),
        note(store, &[(0, &first(0))], meta, 5).map(drop),
        store.save(&[KeptBlock { slot: 0, meta }], 5),
        store.remove(0),
        store.gc().map(drop),
    ]
}

#[test]
fn a_store_whose_folder_was_removed_or_replaced_stops_writing_and_says_so_once() {
    for change in ["removed", "renamed", "replaced by a store", "replaced by a link"] {
        let home = tempfile::tempdir().unwrap();
        let stores = home.path().join("stores");
        let settings = settings(4, 700, Durability::Fsync);
        let [one, two] = blocks();
        let store = open(&stores, &settings);
        write(&store, &one, 0, ALL, 1).unwrap();
        let moved = home.path().join("moved");
        fs::rename(&stores, &moved).unwrap();
        let mut newer = None;
        match change {
            "removed" => fs::remove_dir_all(&moved).unwrap(),
            "replaced by a store" => newer = Some(open(&stores, &settings)),
            "replaced by a link" => {
                let fresh = home.path().join("fresh");
                fs::create_dir_all(&fresh).unwrap();
                std::os::unix::fs::symlink(&fresh, &stores).unwrap();
            }
            _ => {}
        }
        if let Some(newer) = &newer {
            write(newer, &two, 3, ALL, 7).unwrap();
        }
        let part = stores.join(settings.folder_name());
        let before = newer.as_ref().map(|_| files(&part));
        for written in every_write(&store, &two) {
            let message = written.unwrap_err().to_string();
            assert!(message.contains("removed or replaced"), "{change}: {message}");
        }
        assert!(store.read_only());
        let said = store.reasons();
        assert_eq!(said.len(), 1, "{change}: {said:?}");
        assert!(said[0].contains("nothing more is written"), "{said:?}");
        // The bytes are still there in the files that are open.
        assert_eq!(read(&store, &one.key, 0, ALL).unwrap(), bytes(&settings, &one, ALL, 1));
        store.sync().unwrap();
        store.close().unwrap();
        if let Some(newer) = newer {
            assert_eq!(files(&part), before.unwrap(), "{change}");
            assert_eq!(read(&newer, &two.key, 3, ALL).unwrap(), bytes(&settings, &two, ALL, 7));
        }
    }
}

#[test]
fn a_reader_reads_the_folder_that_it_opened() {
    let home = tempfile::tempdir().unwrap();
    let (path, moved) = (home.path().join("stores"), home.path().join("moved"));
    let settings = settings(4, 700, Durability::Flush);
    let [one, two] = blocks();
    let writer = open(&path, &settings);
    write(&writer, &one, 0, ALL, 1).unwrap();
    let reader = open(&path, &settings);
    assert!(reader.read_only());
    drop(writer);
    fs::rename(&path, &moved).unwrap();
    let other = open(&path, &settings);
    write(&other, &two, 0, ALL, 2).unwrap();
    assert_eq!(read(&reader, &one.key, 0, ALL).unwrap(), bytes(&settings, &one, ALL, 1));
    assert_eq!(read(&other, &two.key, 0, ALL).unwrap(), bytes(&settings, &two, ALL, 2));
}

#[test]
fn a_store_whose_lock_was_removed_stops_writing_and_the_next_one_writes() {
    let home = tempfile::tempdir().unwrap();
    let settings = settings(4, 700, Durability::Fsync);
    let [one, two] = blocks();
    let store = open(home.path(), &settings);
    write(&store, &one, 0, ALL, 1).unwrap();
    let lock = store.folder().join("lock");
    fs::remove_file(&lock).unwrap();
    let newer = open(home.path(), &settings);
    assert!(!newer.read_only());
    write(&newer, &two, 1, ALL, 2).unwrap();
    let before = files(newer.folder());
    for result in every_write(&store, &two) {
        assert!(matches!(result, Err(Error::ReadOnly(_))), "{result:?}");
    }
    let refusal = store.refusal().unwrap().to_string();
    assert!(refusal.contains(&lock.display().to_string()), "{refusal}");
    assert_eq!(store.reasons().len(), 1);
    store.close().unwrap();
    assert_eq!(files(newer.folder()), before);
    assert_eq!((newer.blocks(), newer.read_only()), (2, false));
}
