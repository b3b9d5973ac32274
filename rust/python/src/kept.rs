//! Table of a kept host pool, for Python.
//!
//! Invariant: the pool's bytes are the caller's arrays. Checksums are computed without the
//! interpreter's lock. A file belongs to the process that opened it. Cost: the table's operation.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvtrie_core::{Label, Layers, Row, Usage, Wanted, sound_price};
use kvtrie_store::{Error, Found, KeptFile as Table, Meta, Opened, Settings, Unsealed, UsedBlock};
use numpy::{PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::disk::{contiguous, key, meta, raise, settings};
use crate::index::{Index, label};
use crate::number;
use crate::own_files::OwnFiles;

/// Row of a listing, as in `DiskStore`.
type Listed<'py> = (u32, Bound<'py, PyBytes>, u16, u16, u64, u32, bool);

/// A slot to seal: slot, generation, layers, memory, label.
type Sealing<'py> = (u32, u64, (u16, u16), PyReadonlyArray2<'py, u8>, Vec<u8>);

/// A slot ready to seal: slot, generation, layers.
type Sealable = (u32, u64, (u16, u16));

/// Slot table of a host pool in a memory file.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct KeptFile {
    table: OwnFiles<Table>,
    #[pyo3(get)]
    path: PathBuf,
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
    identity: [u8; 32],
    /// Start of the pool in the file, and length of the file.
    #[pyo3(get)]
    pool: (u64, u64),
    /// Whether usable blocks were found. `cold` is the reason for unusable blocks.
    #[pyo3(get)]
    found: bool,
    #[pyo3(get)]
    cold: Option<String>,
}

impl KeptFile {
    fn of(table: Table) -> Self {
        let Settings { identity, about, layers, layer_bytes, block_tokens, blocks, .. } =
            table.settings().clone();
        let cold = match table.found() {
            Found::Cold(reason) => Some(reason.clone()),
            Found::Blocks | Found::Nothing => None,
        };
        Self {
            path: table.path().to_owned(),
            about,
            layers,
            layer_bytes,
            block_tokens,
            slots: blocks,
            identity,
            pool: table.pool(),
            found: *table.found() == Found::Blocks,
            cold,
            table: OwnFiles::new(table.path().to_owned(), table.lock_descriptor(), table),
        }
    }
}

/// Renumber a slot. Slots without a number are left out.
fn renumbered(slot: u32, numbers: Option<&[i64]>) -> Option<u32> {
    let Some(numbers) = numbers else { return Some(slot) };
    numbers.get(slot as usize).and_then(|&number| u32::try_from(number).ok())
}

fn array<'a>(numbers: Option<&'a PyReadonlyArray1<'_, i64>>) -> PyResult<Option<&'a [i64]>> {
    numbers.map(|numbers| numbers.as_slice().map_err(|_| contiguous())).transpose()
}

#[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted, not lent")]
#[pymethods]
impl KeptFile {
    /// Open a file for its only writer, or allocate it. None if a different process has its lock,
    /// with the id of the process, if known, and whether it has died.
    #[staticmethod]
    #[pyo3(signature = (
        path, *, identity, about, layers, layer_bytes, block_tokens, blocks, replace=false
    ))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        identity: &[u8],
        about: String,
        #[pyo3(from_py_with = number::layer)] layers: u16,
        layer_bytes: usize,
        block_tokens: u32,
        blocks: u32,
        replace: bool,
    ) -> PyResult<(Option<Self>, Option<u32>, bool)> {
        let settings =
            settings(identity, about, layers, layer_bytes, block_tokens, blocks, "none")?;
        let opened = py.detach(|| Table::open(&path, settings, replace)).map_err(raise)?;
        Ok(match opened {
            Opened::Kept(table) => (Some(Self::of(*table)), None, false),
            Opened::Busy(owner) => {
                (None, owner.map(|owner| owner.process), owner.is_some_and(|owner| owner.dead()))
            }
        })
    }

    /// Open a file without its lock, with the settings of its header, for tools.
    #[staticmethod]
    fn inspect(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| Table::inspect(&path)).map(Self::of).map_err(raise)
    }

    /// Descriptor to map.
    #[getter]
    fn descriptor(&self) -> PyResult<i32> {
        Ok(self.table.get()?.descriptor())
    }

    /// Number of slots usable by the next process.
    #[getter]
    fn sealed(&self) -> PyResult<u32> {
        Ok(self.table.get()?.sealed())
    }

    /// Number of slots of earlier processes neither verified nor overwritten yet.
    #[getter]
    fn unverified(&self) -> PyResult<u32> {
        Ok(self.table.get()?.unverified())
    }

    /// Number of lost blocks by reason.
    #[getter]
    fn lost(&self) -> PyResult<BTreeMap<&'static str, u64>> {
        Ok(self.table.get()?.lost())
    }

    /// Mark slots as being written, before the first byte of these layers of the blocks. Returns an
    /// error or None for each.
    fn begin(
        &self,
        slots: Vec<u32>,
        keys: Vec<Vec<u8>>,
        layers: (u16, u16),
    ) -> PyResult<Vec<Option<String>>> {
        let (table, layers) = (self.table.get()?, Layers::new(layers.0, layers.1));
        let begin = |(slot, key): (u32, Vec<u8>)| {
            let key = self::key(&key)?;
            Ok(table.begin(slot, &key, layers).err().map(|error| error.to_string()))
        };
        slots.into_iter().zip(keys).map(begin).collect()
    }

    /// Record the end of copies into slots. Returns the slots ready to seal.
    fn finish(&self, slots: Vec<u32>, keys: Vec<Vec<u8>>, ok: bool) -> PyResult<Vec<Sealable>> {
        let table = self.table.get()?;
        let mut sealable = Vec::new();
        for (slot, key) in slots.into_iter().zip(keys) {
            if let Some(Unsealed { generation, layers }) = table.finish(slot, &self::key(&key)?, ok)
            {
                sealable.push((slot, generation, (layers.lo, layers.hi)));
            }
        }
        Ok(sealable)
    }

    /// Seal slots, given with the memory of their layers. Returns the number of sealed slots.
    fn seal(&self, py: Python<'_>, slots: Vec<Sealing<'_>>, wall: u64) -> PyResult<usize> {
        let table = self.table.get()?;
        let given = slots.iter().map(|(slot, generation, layers, memory, label)| {
            let Label { record, usage } = self::label(label)?;
            let layers = Layers::new(layers.0, layers.1);
            let unsealed = Unsealed { generation: *generation, layers };
            let bytes = memory.as_slice().map_err(|_| contiguous())?;
            Ok((*slot, unsealed, bytes, record, meta(usage)))
        });
        let given = given.collect::<PyResult<Vec<_>>>()?;
        let sealed = py.detach(|| -> Result<usize, Error> {
            let mut sealed = 0;
            for (slot, unsealed, bytes, record, meta) in given {
                sealed += usize::from(table.seal(slot, unsealed, bytes, &record, &meta, wall)?);
            }
            Ok(sealed)
        });
        sealed.map_err(raise)
    }

    /// Layers to verify in a slot before its first use, or None.
    fn layers_to_verify(&self, slot: u32) -> PyResult<Option<(u16, u16)>> {
        let layers = self.table.get()?.layers_to_verify(slot).map_err(raise)?;
        Ok(layers.map(|layers| (layers.lo, layers.hi)))
    }

    /// Prove the block of an earlier process in a slot, with the memory of its layers.
    fn verify_block(
        &self,
        py: Python<'_>,
        slot: u32,
        key: &[u8],
        memory: PyReadonlyArray2<'_, u8>,
    ) -> PyResult<()> {
        let (table, key) = (self.table.get()?, self::key(key)?);
        let bytes = memory.as_slice().map_err(|_| contiguous())?;
        py.detach(|| table.verify_block(slot, &key, bytes)).map_err(raise)
    }

    /// Index of the stored blocks. `slots` renumbers them, and leaves out negative numbers.
    #[pyo3(signature = (wall, slots=None))]
    fn index(
        &self,
        py: Python<'_>,
        wall: u64,
        slots: Option<PyReadonlyArray1<'_, i64>>,
    ) -> PyResult<Index> {
        let (table, slots) = (self.table.get()?, array(slots.as_ref())?);
        let rows = py.detach(|| {
            let row = |row: kvtrie_store::StoredBlock| {
                let Meta { age, uses, session_blocks, priority, ttl, cost } = row.meta;
                let wanted = Wanted::found((priority, ttl));
                let usage = Usage { age, uses, session_blocks, wanted, cost: sound_price(cost) };
                let label = Label { record: row.record, usage };
                Some(Row {
                    label,
                    slot: renumbered(row.slot, slots)?,
                    layers: row.layers,
                    group: 0,
                })
            };
            table.rows(wall).into_iter().filter_map(row).collect::<Vec<_>>()
        });
        Ok(Index::from(rows))
    }

    /// Save the ages and uses of the blocks of an index. `slots` renumbers the slots of the index.
    /// Returns the number of stored blocks among them.
    #[pyo3(signature = (index, wall, slots=None))]
    fn note_uses(
        &self,
        py: Python<'_>,
        index: &Bound<'_, Index>,
        wall: u64,
        slots: Option<PyReadonlyArray1<'_, i64>>,
    ) -> PyResult<usize> {
        let (table, slots, rows) = (self.table.get()?, array(slots.as_ref())?, &index.get().0);
        py.detach(|| {
            let used = rows.iter().filter_map(|row| {
                let slot = renumbered(row.slot, slots)?;
                Some(UsedBlock { slot, record: &row.label.record, meta: meta(row.label.usage) })
            });
            let used: Vec<_> = used.collect();
            table.note_uses(&used, wall)
        })
        .map_err(raise)
    }

    /// All blocks as readable rows.
    fn blocks<'py>(&self, py: Python<'py>, wall: u64) -> PyResult<Vec<Listed<'py>>> {
        let table = self.table.get()?;
        let rows = py.detach(|| table.rows(wall));
        let listed = rows.into_iter().map(|row| {
            let (lo, hi) = (row.layers.lo, row.layers.hi);
            let key = PyBytes::new(py, &row.key);
            (row.slot, key, lo, hi, row.meta.age, row.meta.uses, row.rooted)
        });
        Ok(listed.collect())
    }

    /// Read a slot through the file and verify it as the block of a key, for tools.
    fn verify(&self, py: Python<'_>, slot: u32, key: &[u8]) -> PyResult<()> {
        let (table, key) = (self.table.get()?, self::key(key)?);
        py.detach(|| {
            let Some(layers) = table.layers_to_verify(slot)? else { return Ok(()) };
            table.verify_block(slot, &key, &table.read(slot, layers)?)
        })
        .map_err(raise)
    }

    /// Release the lock after the last running call. Closing twice has no effect.
    fn close(&self) -> PyResult<()> {
        self.table.take().map(drop)
    }

    fn __repr__(&self) -> String {
        format!("KeptFile({}, {} slots)", self.path.display(), self.slots)
    }
}
