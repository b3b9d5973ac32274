//! Files of a disk tier, for Python.
//!
//! Invariant: bytes go straight between files and the caller's array, without the interpreter's
//! lock. A store belongs to the process that opened it. A fork has a copy whose locks may be held
//! forever, whose threads do not run and whose files are the parent's; calls there fail, and it is
//! never dropped. Cost: that of the store's operation, plus one shared reference.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::{mem, process};

use kvtrie_core::{BlockKey, Label, Layers, Row, Usage, Wanted, sound_price};
use kvtrie_store::{
    BlockRead, BlockWrite, Device, Durability, Error, KeptBlock, Meta, QueueKind, Settings, Store,
    System, UsedBlock,
};
use numpy::{PyReadonlyArray2, PyReadwriteArray2};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{ClosedError, TransferError, bad};
use crate::index::{Index, label};
use crate::number;
use crate::text::chosen;

/// Row of a listing: slot, key, first layer, one after the last, age in nanoseconds, uses, whether
/// all blocks before it are stored.
type Listed<'py> = (u32, Bound<'py, PyBytes>, u16, u16, u64, u32, bool);

/// A block that failed verification: slot, key, reason.
type Finding<'py> = (u32, Bound<'py, PyBytes>, String);

/// A block to read: key, slot, layers, memory.
type Reading<'py> = (Vec<u8>, u32, (u16, u16), PyReadwriteArray2<'py, u8>);

/// A block to write: key, slot, layers, memory, label.
type Writing<'py> = (Vec<u8>, u32, (u16, u16), PyReadonlyArray2<'py, u8>, Vec<u8>);

/// The error of each block of a call, if it failed.
type Messages = Vec<Option<String>>;

/// Files of one store.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct DiskStore {
    store: RwLock<Option<Arc<Store>>>,
    /// The process that opened it.
    pid: u32,
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
            store: RwLock::new(Some(Arc::new(store))),
            pid: process::id(),
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

    /// Fails in a fork of the process that opened the store.
    fn here(&self) -> PyResult<()> {
        let (pid, here) = (self.pid, process::id());
        if pid == here {
            return Ok(());
        }
        Err(bad(format!(
            "{}: process {pid} opened this, and process {here} is a fork of it that cannot use its \
             threads and its files: open the folder here",
            self.folder.display()
        )))
    }

    fn store(&self) -> PyResult<Arc<Store>> {
        self.here()?;
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        let closed = || ClosedError::new_err(format!("{} is closed", self.folder.display()));
        store.clone().ok_or_else(closed)
    }

    /// Runs a call on the files without the interpreter's lock.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Store) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let store = self.store()?;
        py.detach(|| work(&store)).map_err(raise)
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        if self.here().is_err() {
            let store = self.store.get_mut().unwrap_or_else(PoisonError::into_inner);
            mem::forget(store.take());
        }
    }
}

pub(crate) fn raise(error: Error) -> PyErr {
    match error {
        Error::Config(message) => bad(message),
        other => TransferError::new_err(other.to_string()),
    }
}

/// The rows of a group of layers.
fn of_group<'a>(index: &'a Bound<'_, Index>, group: u8) -> impl Iterator<Item = &'a Row> {
    index.get().0.iter().filter(move |row| row.group == group)
}

/// The I/O queue of a user-visible name.
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

/// Settings that say how large blocks are, and nothing else.
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
    /// Opens a store in a folder, or creates it; read-only if another process has its lock.
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

    /// Opens the store of a folder with the settings of its manifest; for tools.
    #[staticmethod]
    fn inspect(py: Python<'_>, folder: PathBuf) -> PyResult<Self> {
        py.detach(|| Store::inspect(Arc::new(System::default()), &folder))
            .map(Self::of)
            .map_err(raise)
    }

    /// The stores in a folder: each one's own folder, and why it cannot be read, if so.
    #[staticmethod]
    fn stores(py: Python<'_>, folder: PathBuf) -> PyResult<Vec<(PathBuf, Option<String>)>> {
        let listed =
            py.detach(|| kvtrie_store::stores(&System::default(), &folder)).map_err(raise)?;
        let reason = |settings: Result<_, Error>| settings.err().map(|error| error.to_string());
        Ok(listed.into_iter().map(|store| (store.folder, reason(store.settings))).collect())
    }

    /// Number of blocks whose files fit in a budget of bytes.
    #[staticmethod]
    fn blocks_in(budget: u64, layers: u16, layer_bytes: usize, block_tokens: u32) -> u32 {
        geometry(layers, layer_bytes, block_tokens).blocks_in(budget)
    }

    /// Bytes that all files for this number of blocks take at most.
    #[staticmethod]
    fn bytes_for(blocks: u32, layers: u16, layer_bytes: usize, block_tokens: u32) -> u64 {
        geometry(layers, layer_bytes, block_tokens).bytes_for(blocks)
    }

    #[getter]
    fn read_only(&self) -> bool {
        self.refusal().is_some()
    }

    /// Why the store is read-only, if it is; by now, since a folder may be removed while in use.
    #[getter]
    fn refusal(&self) -> Option<String> {
        let found = self.store().ok().and_then(|store| store.refusal().map(str::to_string));
        found.or_else(|| self.refusal.clone())
    }

    /// How bytes are transferred: by direct I/O or not, by which queue, and reasons for fallbacks.
    #[getter]
    fn travel(&self, py: Python<'_>) -> PyResult<(bool, &'static str, Vec<String>)> {
        let travel = self.run(py, |store| Ok(store.travel()))?;
        Ok((travel.direct, travel.queue, travel.reasons))
    }

    #[getter]
    fn disk_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, Store::disk_bytes)
    }

    /// Reads layers of a block into an array `(layer_hi - layer_lo, layer_bytes)` and verifies
    /// them.
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

    /// Writes layers of a block from an array `(layer_hi - layer_lo, layer_bytes)`.
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
        self.here()?;
        let (key, layers) = (self::key(key)?, Layers::new(layers.0, layers.1));
        let bytes = memory.as_slice().map_err(|_| contiguous())?;
        let label = self::label(label)?;
        let record = label.record.encode();
        let meta = meta(label.usage);
        self.run(py, |store| store.write(&key, slot, layers, &record, meta, bytes, wall))
    }

    /// Reads several blocks, up to `depth` at once; returns an error or None for each.
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

    /// Writes several blocks, up to `depth` at once; returns an error or None for each.
    #[pyo3(signature = (blocks, wall, *, depth=8))]
    fn write_many(
        &self,
        py: Python<'_>,
        blocks: Vec<Writing<'_>>,
        wall: u64,
        depth: usize,
    ) -> PyResult<Messages> {
        self.here()?;
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

    /// The index of the store, for a starting manager; `wall` is the wall clock in nanoseconds, and
    /// `group` that of all rows.
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

    /// Keeps exactly the blocks of an index in a group, with their ages and uses; frees every other
    /// slot.
    #[pyo3(signature = (index, wall, *, group=0))]
    fn save(&self, py: Python<'_>, index: &Bound<'_, Index>, wall: u64, group: u8) -> PyResult<()> {
        let kept = |row: &Row| KeptBlock { slot: row.slot, meta: meta(row.label.usage) };
        let kept: Vec<KeptBlock> = of_group(index, group).map(kept).collect();
        self.run(py, |store| store.save(&kept, wall))
    }

    /// Notes the ages and uses of the blocks of an index in a group, and leaves all others; returns how
    /// many of them are there.
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

    /// Every block as a readable row.
    fn blocks<'py>(&self, py: Python<'py>, wall: u64) -> PyResult<Vec<Listed<'py>>> {
        let rows = self.run(py, |store| store.rows(wall))?;
        let listed = rows.into_iter().map(|row| {
            let (lo, hi) = (row.layers.lo, row.layers.hi);
            let key = PyBytes::new(py, &row.key);
            (row.slot, key, lo, hi, row.meta.age, row.meta.uses, row.rooted)
        });
        Ok(listed.collect())
    }

    /// Verifies every block; calls `progress` with how many of how many are done.
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

    /// Returns the space of free slots and dead frames to the device; returns how many bytes.
    fn gc(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, Store::gc)
    }

    /// Frees the slots from `first` to before `end`, and returns their space to the device.
    fn clear(&self, py: Python<'_>, first: u32, end: u32) -> PyResult<()> {
        self.run(py, |store| store.clear(first..end))
    }

    /// Frees a slot.
    fn remove(&self, py: Python<'_>, slot: u32) -> PyResult<()> {
        self.run(py, |store| store.remove(slot))
    }

    /// Makes everything written durable.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, Store::sync)
    }

    /// Takes the reasons for which blocks were skipped or removed since the last call.
    fn reasons(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.run(py, |store| Ok(store.reasons()))
    }

    /// Writes pending frames and releases the lock. Closing twice has no effect.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.here()?;
        let taken = self.store.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(store) = taken else { return Ok(()) };
        // If another thread is still in a call, the end of that call closes the store.
        py.detach(|| Arc::try_unwrap(store).map_or(Ok(()), Store::close)).map_err(raise)
    }

    fn __repr__(&self) -> String {
        let mode = if self.read_only() { ", read-only" } else { "" };
        format!("DiskStore({}, {} slots{mode})", self.folder.display(), self.slots)
    }
}
