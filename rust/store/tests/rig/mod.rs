//! Fixtures of the store's tests: small stores, blocks with known bytes, a naive model.

#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod memory;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use kvtrie_core::{BlockKey, Layers, Record, ScopeOwner, scope_key};
use kvtrie_store::{Device, Durability, Error, Meta, Settings, Store, UsedBlock};

/// Starts a copied program. A process that another test starts has the copy open for writing until
/// it runs itself.
pub(crate) fn once_free<T>(mut start: impl FnMut() -> io::Result<T>) -> T {
    loop {
        match start() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                std::thread::yield_now();
            }
            started => return started.unwrap(),
        }
    }
}

/// Seeded random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut draw = self.0;
        draw = (draw ^ (draw >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        draw = (draw ^ (draw >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        draw ^ (draw >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

pub(crate) fn settings(blocks: u32, layer_bytes: usize, durability: Durability) -> Settings {
    Settings {
        identity: std::array::from_fn(|at| u8::try_from(at + 1).unwrap()),
        about: "{\"model\": \"tiny\"}".into(),
        layers: 4,
        layer_bytes,
        block_tokens: 4,
        blocks,
        durability,
    }
}

/// A block: its key and its record.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) key: BlockKey,
    pub(crate) record: Vec<u8>,
}

/// The first block of the scope with the number `scope`.
pub(crate) fn first(scope: u32) -> Block {
    let tenant = scope.to_le_bytes().to_vec();
    let record = Record {
        parent: scope_key("tiny", 4, &tenant, ""),
        scope: Some(Box::new(ScopeOwner { tenant, lora: String::new(), structure: None })),
        tokens: vec![scope; 4],
        ..Record::default()
    };
    Block { key: record.key(), record: record.encode() }
}

/// The block after `parent` with the token `token`.
pub(crate) fn behind(parent: &Block, token: u32) -> Block {
    let record = Record { parent: parent.key, tokens: vec![token; 4], ..Record::default() };
    Block { key: record.key(), record: record.encode() }
}

/// A block after `parent` whose record is longer than a sector, so that its header page can tear.
pub(crate) fn long(parent: &Block, token: u32) -> Block {
    let digests = vec![(0, vec![9; 900])];
    let tokens = vec![token; 4];
    let record = Record { parent: parent.key, tokens, digests, ..Record::default() };
    Block { key: record.key(), record: record.encode() }
}

/// The bytes of one layer of a block in its `version`th computation.
pub(crate) fn layer(key: &BlockKey, layer: u16, version: u64, length: usize) -> Vec<u8> {
    let start = u64::from_le_bytes(std::array::from_fn(|at| key[at]));
    let mut random = Random(start ^ (u64::from(layer) << 48) ^ (version << 20));
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend(random.next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The bytes of some layers.
pub(crate) fn bytes(settings: &Settings, block: &Block, layers: Layers, version: u64) -> Vec<u8> {
    layers.iter().flat_map(|at| layer(&block.key, at, version, settings.layer_bytes)).collect()
}

pub(crate) fn open(device: &Arc<dyn Device>, settings: &Settings) -> Store {
    Store::open(Arc::clone(device), Path::new("/stores"), settings.clone()).unwrap()
}

pub(crate) fn write(
    store: &Store,
    block: &Block,
    slot: u32,
    layers: Layers,
    version: u64,
) -> Result<(), Error> {
    let data = bytes(store.settings(), block, layers, version);
    store.write(&block.key, slot, layers, &block.record, Meta::default(), &data, 0)
}

/// Notes uses of blocks, each believed in a slot; returns how many were there.
pub(crate) fn note(
    store: &Store,
    blocks: &[(u32, &Block)],
    meta: Meta,
    wall_now: u64,
) -> Result<usize, Error> {
    let decode = |&(_, block): &(u32, &Block)| Record::decode(&block.record).unwrap();
    let records: Vec<Record> = blocks.iter().map(decode).collect();
    let used = blocks.iter().zip(&records);
    let used = used.map(|(&(slot, _), record)| UsedBlock { slot, record, meta });
    store.note_uses(&used.collect::<Vec<_>>(), wall_now)
}

pub(crate) fn read(
    store: &Store,
    key: &BlockKey,
    slot: u32,
    layers: Layers,
) -> Result<Vec<u8>, Error> {
    let mut out = vec![0xa5; store.settings().bytes_of(layers)];
    store.read(key, slot, layers, &mut out).map(|()| out)
}

/// Expected contents of a slot: a block, and per layer the version that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holds {
    pub(crate) key: BlockKey,
    pub(crate) versions: BTreeMap<u16, u64>,
}

impl Holds {
    pub(crate) fn layers(&self) -> Layers {
        let lo = *self.versions.keys().next().unwrap();
        let hi = *self.versions.keys().next_back().unwrap() + 1;
        assert_eq!(usize::from(hi - lo), self.versions.len());
        Layers::new(lo, hi)
    }

    pub(crate) fn bytes(&self, length: usize) -> Vec<u8> {
        self.versions
            .iter()
            .flat_map(|(&at, &version)| layer(&self.key, at, version, length))
            .collect()
    }
}

/// Naive store: the contents of each slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Model(pub(crate) BTreeMap<u32, Holds>);

impl Model {
    /// Notes a successful write.
    pub(crate) fn write(&mut self, key: &BlockKey, slot: u32, layers: Layers, version: u64) {
        let meets = self
            .0
            .get(&slot)
            .is_some_and(|holds| holds.key == *key && holds.layers().join(layers).is_some());
        if !meets {
            self.0.insert(slot, Holds { key: *key, versions: BTreeMap::new() });
        }
        let holds = self.0.get_mut(&slot).unwrap();
        for layer in layers.iter() {
            holds.versions.entry(layer).or_insert(version);
        }
    }
}
