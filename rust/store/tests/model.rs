//! Model test: random operations compared with a naive model; written blocks are found and right,
//! also after reopening, and no others.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use kvtrie_core::Layers;
use kvtrie_store::{
    Device, Durability, Error, KeptBlock, Meta, QueueKind, Settings, Store, System,
};
use proptest::prelude::*;

use crate::rig::memory::Memory;
use crate::rig::{self, Block, Model, behind, bytes, first, read};

const SLOTS: u32 = 6;

#[derive(Clone, Debug)]
enum Op {
    Write { block: usize, slot: u32, lo: u16, hi: u16, uses: u32 },
    Read { slot: u32, lo: u16, hi: u16 },
    Remove { slot: u32 },
    Clear { first: u32, end: u32 },
    Reopen { tick: u64 },
    Save { slots: u8, age: u64 },
    Note { slots: u8, block: usize, uses: u32 },
    Sync,
    Gc,
    Verify,
}

fn ops() -> impl Strategy<Value = Op> {
    let range = || (0..4_u16, 1..=4_u16).prop_map(|(lo, length)| (lo, (lo + length).min(4)));
    prop_oneof![
        8 => (0..8_usize, 0..SLOTS, range(), 0..9_u32).prop_map(|(block, slot, (lo, hi), uses)| {
            Op::Write { block, slot, lo, hi, uses }
        }),
        6 => (0..SLOTS, range()).prop_map(|(slot, (lo, hi))| Op::Read { slot, lo, hi }),
        2 => (0..SLOTS).prop_map(|slot| Op::Remove { slot }),
        1 => (0..SLOTS, 1..=SLOTS).prop_map(|(first, end)| Op::Clear { first, end }),
        2 => (0..99_u64).prop_map(|tick| Op::Reopen { tick }),
        1 => (any::<u8>(), 0..99_u64).prop_map(|(slots, age)| Op::Save { slots, age }),
        3 => (any::<u8>(), 0..8_usize, 0..9_u32).prop_map(|(slots, block, uses)| {
            Op::Note { slots, block, uses }
        }),
        1 => Just(Op::Sync),
        1 => Just(Op::Gc),
        1 => Just(Op::Verify),
    ]
}

/// Two paths of four blocks each.
fn blocks() -> Vec<Block> {
    let mut all: Vec<Block> = Vec::new();
    for scope in 0..2 {
        let mut last = first(scope);
        for token in 0..3 {
            let next = behind(&last, token);
            all.push(std::mem::replace(&mut last, next));
        }
        all.push(last);
    }
    all
}

struct World {
    device: Arc<dyn Device>,
    folder: std::path::PathBuf,
    settings: Settings,
    store: Option<Store>,
    model: Model,
    meta: BTreeMap<u32, (Meta, u64)>,
    blocks: Vec<Block>,
    version: u64,
    now: u64,
}

impl World {
    fn new(device: Arc<dyn Device>, folder: &Path, settings: Settings) -> Self {
        let store = Store::open(Arc::clone(&device), folder, settings.clone()).unwrap();
        let folder = folder.to_path_buf();
        let (model, meta) = (Model::default(), BTreeMap::new());
        let blocks = blocks();
        Self {
            device,
            folder,
            settings,
            store: Some(store),
            model,
            meta,
            blocks,
            version: 0,
            now: 1,
        }
    }

    fn step(&mut self, op: &Op) {
        let store = self.store.as_ref().unwrap();
        match *op {
            Op::Write { block, slot, lo, hi, uses } => {
                self.version += 1;
                let layers = Layers::new(lo, hi);
                let block = &self.blocks[block];
                let data = bytes(&self.settings, block, layers, self.version);
                let meta = Meta { uses, age: 5, ttl: 50, ..Meta::default() };
                let before = self.model.clone();
                store
                    .write(&block.key, slot, layers, &block.record, meta, &data, self.now)
                    .unwrap();
                self.model.write(&block.key, slot, layers, self.version);
                if before != self.model {
                    self.meta.insert(slot, (meta, self.now));
                }
            }
            Op::Read { slot, lo, hi } => self.check(slot, Layers::new(lo, hi)),
            Op::Remove { slot } => {
                store.remove(slot).unwrap();
                self.model.0.remove(&slot);
            }
            Op::Clear { first, end } => {
                store.clear(first..end).unwrap();
                self.model.0.retain(|slot, _| !(first..end).contains(slot));
            }
            Op::Reopen { tick } => {
                self.store.take().unwrap().close().unwrap();
                self.now += tick;
                let device = Arc::clone(&self.device);
                let store = Store::open(device, &self.folder, self.settings.clone()).unwrap();
                assert_eq!(store.reasons(), Vec::<String>::new());
                self.store = Some(store);
            }
            Op::Save { slots, age } => {
                let meta = Meta { age, uses: 7, cost: 1.5, ..Meta::default() };
                let kept: Vec<KeptBlock> = (0..SLOTS)
                    .filter(|slot| slots >> slot & 1 == 1)
                    .map(|slot| KeptBlock { slot, meta })
                    .collect();
                store.save(&kept, self.now).unwrap();
                self.model.0.retain(|slot, _| slots >> slot & 1 == 1);
                self.meta.values_mut().for_each(|entry| *entry = (meta, self.now));
            }
            Op::Note { slots, block, uses } => {
                // Of each slot the block that is there, and another one that mostly is not.
                let meta = Meta { age: 3, uses, ..Meta::default() };
                let held = |slot| self.model.0.get(&slot).map(|holds| holds.key);
                let mut named: Vec<(u32, &Block)> = Vec::new();
                for slot in (0..SLOTS).filter(|slot| slots >> slot & 1 == 1) {
                    let stored = self.blocks.iter().filter(|block| Some(block.key) == held(slot));
                    named.extend(stored.chain([&self.blocks[block]]).map(|block| (slot, block)));
                }
                let mut present = named.clone();
                present.retain(|&(slot, block)| held(slot) == Some(block.key));
                assert_eq!(rig::note(store, &named, meta, self.now).unwrap(), present.len());
                self.meta.extend(present.into_iter().map(|(slot, _)| (slot, (meta, self.now))));
            }
            Op::Sync => store.sync().unwrap(),
            Op::Gc => drop(store.gc().unwrap()),
            Op::Verify => {
                let mut seen = 0;
                assert_eq!(store.verify(|progress| seen = progress.done), vec![]);
                assert_eq!(seen, self.model.0.len());
            }
        }
        self.rows();
    }

    fn check(&self, slot: u32, layers: Layers) {
        let store = self.store.as_ref().unwrap();
        for block in &self.blocks {
            let holds = self.model.0.get(&slot).filter(|holds| holds.key == block.key);
            let holds = holds.filter(|holds| holds.layers().covers(layers));
            match (read(store, &block.key, slot, layers), holds) {
                (Ok(found), Some(holds)) => {
                    let each = self.settings.layer_bytes;
                    let skip = usize::from(layers.lo - holds.layers().lo) * each;
                    assert_eq!(found, holds.bytes(each)[skip..skip + found.len()]);
                }
                (Err(Error::Bad { slot: named, .. }), None) => assert_eq!(named, slot),
                (found, holds) => panic!("{:?}, but {holds:?}", found.map(|bytes| bytes.len())),
            }
        }
    }

    fn rows(&self) {
        let rows = self.store.as_ref().unwrap().rows(self.now).unwrap();
        assert_eq!(rows.len(), self.model.0.len());
        let mut seen = Vec::new();
        let mut broken = false;
        for row in rows {
            let holds = &self.model.0[&row.slot];
            assert_eq!((row.key, row.layers), (holds.key, holds.layers()));
            let (meta, stamp) = self.meta[&row.slot];
            let meta = meta.later(self.now - stamp);
            assert_eq!(format!("{:?}", row.meta), format!("{meta:?}"));
            let record = &row.record;
            let rooted = record.scope.is_some() || seen.contains(&record.parent);
            assert_eq!(rooted, row.rooted);
            broken |= !row.rooted;
            assert!(row.rooted != broken);
            if rooted {
                seen.push(row.key);
            }
        }
    }
}

fn run(device: Arc<dyn Device>, folder: &Path, settings: Settings, ops: &[Op]) {
    let mut world = World::new(device, folder, settings);
    for op in ops {
        world.step(op);
    }
    world.step(&Op::Reopen { tick: 1 });
    for slot in 0..SLOTS {
        for lo in 0..4 {
            world.check(slot, Layers::new(lo, 4));
        }
    }
}

const DURABILITIES: [Durability; 3] = [Durability::None, Durability::Flush, Durability::Fsync];

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_store_in_memory_holds_what_the_model_holds(
        list in prop::collection::vec(ops(), 1..60),
        layer_bytes in prop_oneof![Just(1_usize), Just(700), Just(4096), Just(5000)],
        durability in 0..3_usize,
    ) {
        let settings = rig::settings(SLOTS, layer_bytes, DURABILITIES[durability]);
        run(Memory::default().device(), Path::new("/stores"), settings, &list);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_store_on_disk_holds_what_the_model_holds(
        list in prop::collection::vec(ops(), 1..40),
        layer_bytes in prop_oneof![Just(700_usize), Just(4096)],
        durability in 0..3_usize,
        direct in any::<bool>(),
        queue in prop_oneof![Just(QueueKind::Best), Just(QueueKind::Threads)],
    ) {
        let folder = tempfile::tempdir().unwrap();
        let settings = rig::settings(SLOTS, layer_bytes, DURABILITIES[durability]);
        run(Arc::new(System::new(direct, queue)), folder.path(), settings, &list);
    }
}

#[test]
fn slots_span_several_segments() {
    // Slots of 342 MiB: three per segment, all sparse but for one layer.
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { layers: 64, ..rig::settings(7, 5 << 20, Durability::Flush) };
    assert_eq!(settings.per_segment(), 3);
    let device: Arc<dyn Device> = Arc::new(System::default());
    let blocks = blocks();
    {
        let store = Store::open(Arc::clone(&device), folder.path(), settings.clone()).unwrap();
        for slot in 0..7 {
            let layer = u16::try_from(9 * slot).unwrap();
            rig::write(&store, &blocks[slot as usize], slot, Layers::new(layer, layer + 1), 1)
                .unwrap();
        }
    }
    let store = Store::open(device, folder.path(), settings.clone()).unwrap();
    for slot in 0..7 {
        let layer = u16::try_from(9 * slot).unwrap();
        let layers = Layers::new(layer, layer + 1);
        let block = &blocks[slot as usize];
        assert_eq!(
            read(&store, &block.key, slot, layers).unwrap(),
            bytes(&settings, block, layers, 1)
        );
    }
    for slot in 2..7 {
        store.remove(slot).unwrap();
    }
    assert!(store.gc().unwrap() >= 5 * (5 << 20));
    let layers = Layers::new(9, 10);
    assert_eq!(
        read(&store, &blocks[1].key, 1, layers).unwrap(),
        bytes(&settings, &blocks[1], layers, 1)
    );
    // With fewer slots the segments beyond them are removed.
    rig::write(&store, &blocks[6], 6, layers, 1).unwrap();
    let own = store.folder().to_path_buf();
    drop(store);
    let fewer = Settings { blocks: 2, ..settings.clone() };
    let store = Store::open(Arc::new(System::default()), folder.path(), fewer).unwrap();
    let reasons = store.reasons();
    assert!(reasons.len() == 1 && reasons[0].contains("slot 6, there are 2"), "{reasons:?}");
    assert!(own.join("segment-00000").exists());
    assert!(!own.join("segment-00001").exists() && !own.join("segment-00002").exists());
    let found = read(&store, &blocks[1].key, 1, layers).unwrap();
    assert_eq!(found, bytes(&settings, &blocks[1], layers, 1));
}
