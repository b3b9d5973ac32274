//! Time of a restart: `cargo test --release -p kvtrie-store --test all opening:: -- --ignored
//! --nocapture`.

use std::io::{self, IoSlice, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtrie_core::{Layers, Record};
use kvtrie_store::{Access, Device, Durability, File, Item, Meta, Settings, Size, Store, System};

use crate::rig;

/// A device that discards the bytes of segments, so that only the manifest costs time.
#[derive(Debug, Default)]
struct Hollow(System);

#[derive(Debug)]
struct Nothing;

impl Device for Hollow {
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        let segment = path.file_name().is_some_and(|name| name.to_string_lossy().contains("seg"));
        if segment { Ok(Arc::new(Nothing)) } else { self.0.open(path, access) }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.remove(path)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.0.make_folder(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.0.sync_folder(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Item>> {
        self.0.list(path)
    }
}

impl File for Nothing {
    fn read_at(&self, _buffer: &mut [u8], _at: u64) -> io::Result<usize> {
        Ok(0)
    }

    fn write_at(&self, buffers: &[IoSlice<'_>], _at: u64) -> io::Result<usize> {
        Ok(buffers.iter().map(|buffer| buffer.len()).sum())
    }

    fn set_len(&self, _len: u64) -> io::Result<()> {
        Ok(())
    }

    fn size(&self) -> io::Result<Size> {
        Ok(Size::default())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch(&self, _at: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    fn try_lock(&self) -> io::Result<bool> {
        Ok(true)
    }
}

/// CPU time of this thread in nanoseconds, if the system reports it.
fn busy() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|time| time.parse().ok()).unwrap_or(0)
}

/// Opens a store of `blocks` blocks of 16 tokens, in paths of 1000.
fn restart(blocks: u32, out: &mut dyn Write) {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        layers: 1,
        layer_bytes: 1,
        block_tokens: 16,
        ..rig::settings(blocks, 1, Durability::Flush)
    };
    let store = Store::open(Arc::<Hollow>::default(), folder.path(), settings.clone()).unwrap();
    let mut last = [0; 32];
    for slot in 0..blocks {
        let tenant = slot.to_le_bytes().to_vec();
        let owner = kvtrie_core::ScopeOwner { tenant, lora: String::new(), structure: None };
        let scope = (slot % 1000 == 0).then(|| Box::new(owner));
        let tokens = vec![slot; 16];
        let record = Record { parent: last, scope, tokens, ..Record::default() };
        last = record.key();
        let bytes = record.encode();
        let layer = Layers::new(0, 1);
        store.write(&last, slot, layer, &bytes, Meta::default(), &[7], 0).unwrap();
    }
    store.close().unwrap();
    let (start, began) = (Instant::now(), busy());
    let store = Store::open(Arc::<Hollow>::default(), folder.path(), settings).unwrap();
    let opened = start.elapsed();
    let rows = store.rows(0).unwrap();
    let listed = start.elapsed();
    assert_eq!(rows.len(), blocks as usize);
    assert!(rows.iter().all(|row| row.rooted));
    let busy = Duration::from_nanos(busy() - began);
    writeln!(
        out,
        "{blocks} blocks: opened in {opened:?}, all rows proved in {listed:?}, of which this thread \
         was at work for {busy:?}"
    )
    .unwrap();
}

#[test]
fn a_long_manifest_is_read_completely() {
    restart(30_000, &mut io::sink());
}

#[test]
#[ignore = "seconds; prints how long opening takes"]
fn a_million_blocks_are_restored() {
    restart(1_000_000, &mut io::stdout());
}
