//! Files of a disk tier, for Python.
//!
//! Invariant: bytes go directly between files and the caller's array, without the interpreter's
//! lock. A store belongs to the process that opened it. Cost: the store's operation, plus a shared
//! reference.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtrie_core::{BlockKey, Label, Layers, Row, Usage, Wanted, sound_price};
use kvtrie_store::{
    BlockRead, BlockWrite, Device, Durability, Error, KeptBlock, Meta, QueueKind, Settings, Store,
    System, UsedBlock,
};
use numpy::{PyReadonlyArray2, PyReadwriteArray2};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{TransferError, bad};
use crate::index::{Index, label};
use crate::number;
use crate::own_files::OwnFiles;
use crate::text::chosen;

/// Row of a listing: slot, key, first layer, end layer, age in nanoseconds, uses, and whether all
/// preceding blocks are stored.
type Listed<'py> = (u32, Bound<'py, PyBytes>, u16, u16, u64, u32, bool);

/// A block with failed verification: slot, key, reason.
type Finding<'py> = (u32, Bound<'py, PyBytes>, String);

/// A block to read: key, slot, layers, memory.
type Reading<'py> = (Vec<u8>, u32, (u16, u16), PyReadwriteArray2<'py, u8>);

/// A block to write: key, slot, layers, memory, label.
type Writing<'py> = (Vec<u8>, u32, (u16, u16), PyReadonlyArray2<'py, u8>, Vec<u8>);

/// Error of each block of a call, or `None`.
type Messages = Vec<Option<String>>;

/// Files of a store.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct DiskStore {
    store: OwnFiles<Store>,
    refusal: Option<String>,
    #[pyo3(get)]
    folder: PathBuf,
    #[pyo3(get)]
    about: String,
    #[pyo3(get)]
    layers: u16,
    #[pyo3(get)]
    layer_bytes: usize,
    #[pyo3(get)]
    block_tokens: u32,
    #[pyo3(get)]
    slots: u32,
    #[pyo3(get)]
    slot_bytes: u64,
}

impl DiskStore {
    fn of(store: Store) -> Self {
        let slot_bytes = store.settings().slot_bytes();
        let Settings { about, layers, layer_bytes, block_tokens, blocks, .. } =
            store.settings().clone();
        Self {
            folder: store.folder().to_owned(),
            about,
            layers,
            layer_bytes,
            block_tokens,
            slots: blocks,
            slot_bytes,
            refusal: store.refusal().map(str::to_string),
            store: OwnFiles::new(store.folder().to_owned(), store.lock_descriptor(), store),
        }
    }

    pub(crate) fn open(
        py: Python<'_>,
        device: Arc<dyn Device>,
        folder: &Path,
        settings: Settings,
    ) -> PyResult<Self> {
        py.detach(|| Store::open(device, folder, settings)).map(Self::of).map_err(raise)
    }

    /// Run a call on the files without the interpreter's lock.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Store) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let store = self.store.get()?;
        py.detach(|| work(&store)).map_err(raise)
    }
}

pub(crate) fn raise(error: Error) -> PyErr {
    match error {
        Error::Config(message) => bad(message),
        other => TransferError::new_err(other.to_string()),
    }
}

/// Rows of a layer group.
fn of_group<'a>(index: &'a Bound<'_, Index>, group: u8) -> impl Iterator<Item = &'a Row> {
    index.get().0.iter().filter(move |row| row.group == group)
}

/// Parse the name of an I/O queue.
pub(crate) fn queue(name: &str) -> PyResult<QueueKind> {
    chosen(name, "queue", &[("best", QueueKind::Best), ("threads", QueueKind::Threads)])
}

pub(crate) fn settings(
    identity: &[u8],
    about: String,
    layers: u16,
    layer_bytes: usize,
    block_tokens: u32,
    blocks: u32,
    durability: &str,
) -> PyResult<Settings> {
    let identity = key(identity)?;
    let (none, flush, fsync) = (Durability::None, Durability::Flush, Durability::Fsync);
    let durability =
        chosen(durability, "durability", &[("none", none), ("flush", flush), ("fsync", fsync)])?;
    Ok(Settings { identity, about, layers, layer_bytes, block_tokens, blocks, durability })
}

/// Settings with block sizes only.
fn geometry(layers: u16, layer_bytes: usize, block_tokens: u32) -> Settings {
    Settings {
        identity: BlockKey::default(),
        about: String::new(),
        layers,
        layer_bytes,
        block_tokens,
        blocks: 1,
        durability: Durability::default(),
    }
}

fn messages(results: Vec<Result<(), Error>>) -> Messages {
    results.into_iter().map(|result| result.err().map(|error| error.to_string())).collect()
}

pub(crate) fn contiguous() -> PyErr {
    bad("memory of layers is contiguous")
}

pub(crate) fn meta(usage: Usage) -> Meta {
    let Usage { age, uses, session_blocks, wanted, cost } = usage;
    let (priority, ttl) = Wanted::encode(wanted);
    Meta { age, uses, session_blocks, priority, ttl, cost: cost.unwrap_or(f64::NAN) }
}

pub(crate) fn key(bytes: &[u8]) -> PyResult<BlockKey> {
    bytes.try_into().map_err(|_| bad(format!("a key has 32 bytes, not {}", bytes.len())))
}

#[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted, not lent")]
#[pymethods]
impl DiskStore {
    /// Open a store in a folder, or create it. Read-only if a different process has its lock.
    #[new]
    #[pyo3(signature = (
        folder, *, identity, about, layers, layer_bytes, block_tokens, blocks,
        durability="flush", io="direct", queue="best"
    ))]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        identity: &[u8],
        about: String,
        #[pyo3(from_py_with = number::layer)] layers: u16,
        layer_bytes: usize,
        block_tokens: u32,
        blocks: u32,
        durability: &str,
        io: &str,
        queue: &str,
    ) -> PyResult<Self> {
        let settings =
            settings(identity, about, layers, layer_bytes, block_tokens, blocks, durability)?;
        let direct = chosen(io, "io", &[("direct", true), ("buffered", false)])?;
        let device = Arc::new(System::new(direct, self::queue(queue)?));
        Self::open(py, device, &folder, settings)
    }

    /// Open the store of a folder with the settings of its manifest, for tools.
    #[staticmethod]
    fn inspect(py: Python<'_>, folder: PathBuf) -> PyResult<Self> {
        py.detach(|| Store::inspect(Arc::new(System::default()), &folder))
            .map(Self::of)
            .map_err(raise)
    }

    /// List the stores in a folder: the path of each, and the reason if it cannot be read.
    #[staticmethod]
    fn stores(py: Python<'_>, folder: PathBuf) -> PyResult<Vec<(PathBuf, Option<String>)>> {
        let listed =
            py.detach(|| kvtrie_store::stores(&System::default(), &folder)).map_err(raise)?;
        let reason = |settings: Result<_, Error>| settings.err().map(|error| error.to_string());
        Ok(listed.into_iter().map(|store| (store.folder, reason(store.settings))).collect())
    }

    /// Number of blocks in a budget of bytes.
    #[staticmethod]
    fn blocks_in(budget: u64, layers: u16, layer_bytes: usize, block_tokens: u32) -> u32 {
        geometry(layers, layer_bytes, block_tokens).blocks_in(budget)
    }

    /// Maximum bytes of all files for this number of blocks.
    #[staticmethod]
    fn bytes_for(blocks: u32, layers: u16, layer_bytes: usize, block_tokens: u32) -> u64 {
        geometry(layers, layer_bytes, block_tokens).bytes_for(blocks)
    }

    #[getter]
    fn read_only(&self) -> bool {
        self.refusal().is_some()
    }

    /// Current reason for being read-only, if any. A folder may be removed while in use.
    #[getter]
    fn refusal(&self) -> Option<String> {
        let found = self.store.get().ok().and_then(|store| store.refusal().map(str::to_string));
        found.or_else(|| self.refusal.clone())
    }

    /// Transfer path: whether direct I/O is used, the queue, and reasons for fallbacks.
    #[getter]
    fn travel(&self, py: Python<'_>) -> PyResult<(bool, &'static str, Vec<String>)> {
        let travel = self.run(py, |store| Ok(store.travel()))?;
        Ok((travel.direct, travel.queue, travel.reasons))
    }

    #[getter]
    fn disk_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, Store::disk_bytes)
    }

    /// Read layers of a block into an array `(layer_hi - layer_lo, layer_bytes)` and verify them.
    fn read(
        &self,
        py: Python<'_>,
        key: &[u8],
        slot: u32,
        layers: (u16, u16),
        mut memory: PyReadwriteArray2<'_, u8>,
    ) -> PyResult<()> {
        let (key, layers) = (self::key(key)?, Layers::new(layers.0, layers.1));
        let bytes = memory.as_slice_mut().map_err(|_| contiguous())?;
        self.run(py, |store| store.read(&key, slot, layers, bytes))
    }

    /// Write layers of a block from an array `(layer_hi - layer_lo, layer_bytes)`.
    fn write(
        &self,
        py: Python<'_>,
        key: &[u8],
        slot: u32,
        layers: (u16, u16),
        memory: PyReadonlyArray2<'_, u8>,
        label: &[u8],
        wall: u64,
    ) -> PyResult<()> {
        self.store.check_process()?;
        let (key, layers) = (self::key(key)?, Layers::new(layers.0, layers.1));
        let bytes = memory.as_slice().map_err(|_| contiguous())?;
        let label = self::label(label)?;
        let record = label.record.encode();
        let meta = meta(label.usage);
        self.run(py, |store| store.write(&key, slot, layers, &record, meta, bytes, wall))
    }

    /// Read several blocks, up to `depth` at once. Returns an error or None for each.
    #[pyo3(signature = (blocks, *, depth=8))]
    fn read_many(
        &self,
        py: Python<'_>,
        mut blocks: Vec<Reading<'_>>,
        depth: usize,
    ) -> PyResult<Messages> {
        let keys: Vec<BlockKey> =
            blocks.iter().map(|block| key(&block.0)).collect::<PyResult<_>>()?;
        let wanted = keys.iter().zip(&mut blocks).map(|(key, (_, slot, layers, memory))| {
            let out = memory.as_slice_mut().map_err(|_| contiguous())?;
            let layers = Layers::new(layers.0, layers.1);
            Ok(BlockRead { key, slot: *slot, layers, out })
        });
        let wanted = wanted.collect::<PyResult<Vec<_>>>()?;
        self.run(py, |store| Ok(messages(store.read_many(wanted, depth))))
    }

    /// Write several blocks, up to `depth` at once. Returns an error or None for each.
    #[pyo3(signature = (blocks, wall, *, depth=8))]
    fn write_many(
        &self,
        py: Python<'_>,
        blocks: Vec<Writing<'_>>,
        wall: u64,
        depth: usize,
    ) -> PyResult<Messages> {
        self.store.check_process()?;
        let known = blocks.iter().map(|block| Ok((key(&block.0)?, label(&block.4)?)));
        let known: Vec<(BlockKey, Label)> = known.collect::<PyResult<_>>()?;
        let records: Vec<Vec<u8>> = known.iter().map(|(_, label)| label.record.encode()).collect();
        let given = known.iter().zip(&records).zip(&blocks);
        let given = given.map(|(((key, label), record), (_, slot, layers, memory, _))| {
            let bytes = memory.as_slice().map_err(|_| contiguous())?;
            let layers = Layers::new(layers.0, layers.1);
            Ok(BlockWrite { key, slot: *slot, layers, record, meta: meta(label.usage), bytes })
        });
        let given = given.collect::<PyResult<Vec<_>>>()?;
        self.run(py, |store| Ok(messages(store.write_many(given, wall, depth))))
    }

    /// Index of the store, for a starting manager. `wall` is the wall clock in nanoseconds, and
    /// `group` the layer group of all rows.
    #[pyo3(signature = (wall, *, group=0))]
    fn index(&self, py: Python<'_>, wall: u64, group: u8) -> PyResult<Index> {
        let row = |row: kvtrie_store::StoredBlock| {
            let Meta { age, uses, session_blocks, priority, ttl, cost } = row.meta;
            let wanted = Wanted::found((priority, ttl));
            let usage = Usage { age, uses, session_blocks, wanted, cost: sound_price(cost) };
            let label = Label { record: row.record, usage };
            Row { label, slot: row.slot, layers: row.layers, group }
        };
        self.run(py, |store| store.rows_as(wall, row)).map(Index::from)
    }

    /// Keep exactly the blocks of an index in a group, with their ages and uses. Frees every
    /// remaining slot.
    #[pyo3(signature = (index, wall, *, group=0))]
    fn save(&self, py: Python<'_>, index: &Bound<'_, Index>, wall: u64, group: u8) -> PyResult<()> {
        let kept = |row: &Row| KeptBlock { slot: row.slot, meta: meta(row.label.usage) };
        let kept: Vec<KeptBlock> = of_group(index, group).map(kept).collect();
        self.run(py, |store| store.save(&kept, wall))
    }

    /// Save the ages and uses of the blocks of an index in a group. Returns the number of stored
    /// blocks among them.
    #[pyo3(signature = (index, wall, *, group=0))]
    fn note_uses(
        &self,
        py: Python<'_>,
        index: &Bound<'_, Index>,
        wall: u64,
        group: u8,
    ) -> PyResult<usize> {
        let rows: Vec<&Row> = of_group(index, group).collect();
        self.run(py, |store| {
            let used = rows.iter().map(|row| UsedBlock {
                slot: row.slot,
                record: &row.label.record,
                meta: meta(row.label.usage),
            });
            store.note_uses(&used.collect::<Vec<_>>(), wall)
        })
    }

    /// All blocks as readable rows.
    fn blocks<'py>(&self, py: Python<'py>, wall: u64) -> PyResult<Vec<Listed<'py>>> {
        let rows = self.run(py, |store| store.rows(wall))?;
        let listed = rows.into_iter().map(|row| {
            let (lo, hi) = (row.layers.lo, row.layers.hi);
            let key = PyBytes::new(py, &row.key);
            (row.slot, key, lo, hi, row.meta.age, row.meta.uses, row.rooted)
        });
        Ok(listed.collect())
    }

    /// Verify every block. Calls `progress` with the numbers of done and all blocks.
    #[pyo3(signature = (progress=None))]
    fn verify<'py>(
        &self,
        py: Python<'py>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Finding<'py>>> {
        let mut failed = Ok(());
        let tell = |at: kvtrie_store::Progress| {
            if let (Some(progress), true) = (&progress, failed.is_ok()) {
                failed = Python::attach(|py| {
                    py.check_signals()?;
                    progress.call1(py, (at.done, at.total)).map(drop)
                });
            }
        };
        let findings = self.run(py, |store| Ok(store.verify(tell)))?;
        failed?;
        let found = findings.into_iter();
        Ok(found.map(|f| (f.slot, PyBytes::new(py, &f.key), f.reason)).collect())
    }

    /// Return the space of free slots and dead frames to the device. Returns the number of bytes.
    fn gc(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, Store::gc)
    }

    /// Free the slots from `first` to before `end`, and return their space to the device.
    fn clear(&self, py: Python<'_>, first: u32, end: u32) -> PyResult<()> {
        self.run(py, |store| store.clear(first..end))
    }

    /// Free a slot.
    fn remove(&self, py: Python<'_>, slot: u32) -> PyResult<()> {
        self.run(py, |store| store.remove(slot))
    }

    /// Make all writes durable.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, Store::sync)
    }

    /// Take the reasons for blocks skipped or removed since the last call.
    fn reasons(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.run(py, |store| Ok(store.reasons()))
    }

    /// Write pending frames and release the lock. Closing twice has no effect.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(store) = self.store.take()? else { return Ok(()) };
        // With a call still running in a second thread, the end of the call closes the store.
        py.detach(|| Arc::try_unwrap(store).map_or(Ok(()), Store::close)).map_err(raise)
    }

    fn __repr__(&self) -> String {
        let mode = if self.read_only() { ", read-only" } else { "" };
        format!("DiskStore({}, {} slots{mode})", self.folder.display(), self.slots)
    }
}
