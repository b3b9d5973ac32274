//! Moves as columns: what the executor is asked to copy.
//!
//! Arrays are made when first asked for, so that a step without moves costs nothing. As bytes
//! (all numbers little-endian): the magic `kvtrmove`, version `u32` = 1, zero `u32`, count `u64`,
//! then the columns one behind the other in the order of [`Columns`], without padding.
//! Invariant: `from_bytes(to_bytes())` gives equal columns. Cost: one pass per column.

use kvtrie_core::manager::{self, MoveKind};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyIterator, PyList, PyTuple, PyType};

use crate::error::bad;
use crate::number::small;

/// Stands for the block of a move of a partial block, which is in no trie.
const NO_BLOCK: u64 = u64::MAX;
const MAGIC: &[u8; 8] = b"kvtrmove";
const VERSION: u32 = 1;
const HEADER: usize = 24;
const ROW: usize = 8 * 4 + 32 + 4 * 3 + 2 * 2 + 4;

/// One move: copy `layer_lo..layer_hi` of a block from slot to slot.
#[pyclass(frozen, get_all, eq, skip_from_py_object, module = "kvtrie")]
#[derive(Clone, PartialEq)]
pub(crate) struct Move {
    /// Its id, never used twice.
    id: u64,
    /// 0 load (towards a faster tier), 1 store (towards a slower one), 2 copy (within the first).
    kind: u8,
    /// The lease that asked for it; 0 if none did.
    lease: u64,
    /// Handle of the block; 2**64 - 1 for a partial one.
    block: u64,
    /// Content hash of the block, 32 bytes; zeros unless a disk or remote tier takes part.
    key: [u8; 32],
    /// Index of the tier to read.
    src: u8,
    /// Index of the tier to write.
    dst: u8,
    /// Slot to read.
    src_slot: u32,
    /// Slot to write.
    dst_slot: u32,
    /// Layer group.
    group: u8,
    /// First layer.
    layer_lo: u16,
    /// One behind the last layer.
    layer_hi: u16,
    /// The move that must have completed before this one starts; 0 if none.
    after: u64,
    /// Tokens of the block that are valid.
    tokens: u32,
}

impl From<&manager::Move> for Move {
    fn from(given: &manager::Move) -> Self {
        let tier = |tier: usize| u8::try_from(tier).unwrap_or(u8::MAX);
        Self {
            id: given.id,
            kind: match given.kind {
                MoveKind::Load => 0,
                MoveKind::Store => 1,
                MoveKind::Copy => 2,
            },
            lease: given.lease,
            block: given.block.map_or(NO_BLOCK, |block| block.0),
            key: given.key,
            src: tier(given.src),
            dst: tier(given.dst),
            src_slot: given.src_slot,
            dst_slot: given.dst_slot,
            group: 0,
            layer_lo: given.layers.lo,
            layer_hi: given.layers.hi,
            after: given.after,
            tokens: given.tokens,
        }
    }
}

#[pymethods]
impl Move {
    fn __repr__(&self) -> String {
        let kind = ["load", "store", "copy"][usize::from(self.kind)];
        format!(
            "Move(id={}, {kind}, tier {} slot {} -> tier {} slot {}, layers={}..{}, after={})",
            self.id,
            self.src,
            self.src_slot,
            self.dst,
            self.dst_slot,
            self.layer_lo,
            self.layer_hi,
            self.after
        )
    }
}

struct Columns {
    id: Py<PyArray1<u64>>,
    kind: Py<PyArray1<u8>>,
    lease: Py<PyArray1<u64>>,
    block: Py<PyArray1<u64>>,
    key: Py<PyArray2<u8>>,
    src: Py<PyArray1<u8>>,
    dst: Py<PyArray1<u8>>,
    src_slot: Py<PyArray1<u32>>,
    dst_slot: Py<PyArray1<u32>>,
    group: Py<PyArray1<u8>>,
    layer_lo: Py<PyArray1<u16>>,
    layer_hi: Py<PyArray1<u16>>,
    after: Py<PyArray1<u64>>,
    tokens: Py<PyArray1<u32>>,
}

/// Moves in topological order, as columns of equal length.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Moves {
    rows: Vec<Move>,
    columns: PyOnceLock<Columns>,
}

impl From<Vec<Move>> for Moves {
    fn from(rows: Vec<Move>) -> Self {
        Self { rows, columns: PyOnceLock::new() }
    }
}

impl Moves {
    fn column<'py, T: numpy::Element>(
        &self,
        py: Python<'py>,
        of: impl Fn(&Move) -> T,
    ) -> Py<PyArray1<T>> {
        self.rows.iter().map(of).collect::<Vec<T>>().into_pyarray(py).unbind()
    }

    fn columns(&self, py: Python<'_>) -> PyResult<&Columns> {
        self.columns.get_or_try_init(py, || {
            let keys: Vec<u8> = self.rows.iter().flat_map(|row| row.key).collect();
            Ok(Columns {
                id: self.column(py, |row| row.id),
                kind: self.column(py, |row| row.kind),
                lease: self.column(py, |row| row.lease),
                block: self.column(py, |row| row.block),
                key: keys.into_pyarray(py).reshape([self.rows.len(), 32])?.unbind(),
                src: self.column(py, |row| row.src),
                dst: self.column(py, |row| row.dst),
                src_slot: self.column(py, |row| row.src_slot),
                dst_slot: self.column(py, |row| row.dst_slot),
                group: self.column(py, |row| row.group),
                layer_lo: self.column(py, |row| row.layer_lo),
                layer_hi: self.column(py, |row| row.layer_hi),
                after: self.column(py, |row| row.after),
                tokens: self.column(py, |row| row.tokens),
            })
        })
    }

    fn encode(&self) -> Vec<u8> {
        let rows = &self.rows;
        let mut out = Vec::with_capacity(HEADER + rows.len() * ROW);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&0_u32.to_le_bytes());
        out.extend_from_slice(&(rows.len() as u64).to_le_bytes());
        out.extend(rows.iter().flat_map(|row| row.id.to_le_bytes()));
        out.extend(rows.iter().map(|row| row.kind));
        out.extend(rows.iter().flat_map(|row| row.lease.to_le_bytes()));
        out.extend(rows.iter().flat_map(|row| row.block.to_le_bytes()));
        out.extend(rows.iter().flat_map(|row| row.key));
        out.extend(rows.iter().map(|row| row.src));
        out.extend(rows.iter().map(|row| row.dst));
        out.extend(rows.iter().flat_map(|row| row.src_slot.to_le_bytes()));
        out.extend(rows.iter().flat_map(|row| row.dst_slot.to_le_bytes()));
        out.extend(rows.iter().map(|row| row.group));
        out.extend(rows.iter().flat_map(|row| row.layer_lo.to_le_bytes()));
        out.extend(rows.iter().flat_map(|row| row.layer_hi.to_le_bytes()));
        out.extend(rows.iter().flat_map(|row| row.after.to_le_bytes()));
        out.extend(rows.iter().flat_map(|row| row.tokens.to_le_bytes()));
        out
    }

    fn decode(data: &[u8]) -> PyResult<Vec<Move>> {
        let whole = |what: &str| bad(format!("{} bytes are no moves: {what}", data.len()));
        let (header, body) =
            data.split_at_checked(HEADER).ok_or_else(|| whole("the header is cut short"))?;
        let mut header = Bytes(header);
        if header.take::<8>() != *MAGIC {
            return Err(whole("they do not start with the magic"));
        }
        let version = u32::from_le_bytes(header.take());
        if version != VERSION || u32::from_le_bytes(header.take()) != 0 {
            return Err(whole(&format!("their version is {version}, {VERSION} wanted")));
        }
        let count = u64::from_le_bytes(header.take());
        if u64::try_from(body.len()).ok() != count.checked_mul(ROW as u64) {
            return Err(whole(&format!(
                "{count} moves take {HEADER} + {count} * {ROW} bytes"
            )));
        }
        let mut body = Bytes(body);
        let empty = Move {
            id: 0, kind: 0, lease: 0, block: 0, key: [0; 32], src: 0, dst: 0, src_slot: 0,
            dst_slot: 0, group: 0, layer_lo: 0, layer_hi: 0, after: 0, tokens: 0,
        };
        let mut rows = vec![empty; body.0.len() / ROW];
        rows.iter_mut().for_each(|row| row.id = u64::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.kind = u8::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.lease = u64::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.block = u64::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.key = body.take());
        rows.iter_mut().for_each(|row| row.src = u8::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.dst = u8::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.src_slot = u32::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.dst_slot = u32::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.group = u8::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.layer_lo = u16::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.layer_hi = u16::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.after = u64::from_le_bytes(body.take()));
        rows.iter_mut().for_each(|row| row.tokens = u32::from_le_bytes(body.take()));
        let wrong = |row: &Move| row.id == 0 || row.kind > 2 || row.layer_lo >= row.layer_hi;
        match rows.iter().position(wrong) {
            Some(at) => Err(whole(&format!(
                "move {at} has id {}, kind {} and layers {}..{}",
                rows[at].id, rows[at].kind, rows[at].layer_lo, rows[at].layer_hi
            ))),
            None => Ok(rows),
        }
    }
}

/// Bytes that are long enough for what is taken of them.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let (front, rest) = self.0.split_at(N);
        taken.copy_from_slice(front);
        self.0 = rest;
        taken
    }
}

#[pymethods]
impl Moves {
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u64>>> {
        Ok(self.columns(py)?.id.clone_ref(py))
    }

    #[getter]
    fn kind(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u8>>> {
        Ok(self.columns(py)?.kind.clone_ref(py))
    }

    #[getter]
    fn lease(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u64>>> {
        Ok(self.columns(py)?.lease.clone_ref(py))
    }

    #[getter]
    fn block(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u64>>> {
        Ok(self.columns(py)?.block.clone_ref(py))
    }

    #[getter]
    fn key(&self, py: Python<'_>) -> PyResult<Py<PyArray2<u8>>> {
        Ok(self.columns(py)?.key.clone_ref(py))
    }

    #[getter]
    fn src(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u8>>> {
        Ok(self.columns(py)?.src.clone_ref(py))
    }

    #[getter]
    fn dst(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u8>>> {
        Ok(self.columns(py)?.dst.clone_ref(py))
    }

    #[getter]
    fn src_slot(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u32>>> {
        Ok(self.columns(py)?.src_slot.clone_ref(py))
    }

    #[getter]
    fn dst_slot(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u32>>> {
        Ok(self.columns(py)?.dst_slot.clone_ref(py))
    }

    #[getter]
    fn group(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u8>>> {
        Ok(self.columns(py)?.group.clone_ref(py))
    }

    #[getter]
    fn layer_lo(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u16>>> {
        Ok(self.columns(py)?.layer_lo.clone_ref(py))
    }

    #[getter]
    fn layer_hi(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u16>>> {
        Ok(self.columns(py)?.layer_hi.clone_ref(py))
    }

    #[getter]
    fn after(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u64>>> {
        Ok(self.columns(py)?.after.clone_ref(py))
    }

    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<Py<PyArray1<u32>>> {
        Ok(self.columns(py)?.tokens.clone_ref(py))
    }

    /// The moves that carry a layer, cut to it. Report them with `layers_done`.
    fn by_layer(&self, layer: &Bound<'_, PyAny>) -> PyResult<Self> {
        let layer = small(layer, "layer", u16::MAX - 1)?;
        let carries = |row: &&Move| row.layer_lo <= layer && layer < row.layer_hi;
        let cut = |row: &Move| Move { layer_lo: layer, layer_hi: layer + 1, ..row.clone() };
        Ok(Self::from(self.rows.iter().filter(carries).map(cut).collect::<Vec<_>>()))
    }

    /// The columns as bytes, for a worker process.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.encode())
    }

    /// What `to_bytes` gave.
    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        Self::decode(data).map(Self::from)
    }

    fn __len__(&self) -> usize {
        self.rows.len()
    }

    fn __getitem__(&self, index: isize) -> PyResult<Move> {
        let at = if index < 0 { index + self.rows.len().cast_signed() } else { index };
        let row = usize::try_from(at).ok().and_then(|at| self.rows.get(at));
        row.cloned().ok_or_else(|| {
            PyIndexError::new_err(format!("move {index} of {}", self.rows.len()))
        })
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyList::new(py, self.rows.iter().cloned())?.try_iter()
    }

    fn __reduce__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let from_bytes = PyType::new::<Self>(py).getattr("from_bytes")?;
        Ok((from_bytes, PyTuple::new(py, [self.to_bytes(py)])?))
    }

    fn __repr__(&self) -> String {
        let of = |kind| self.rows.iter().filter(|row| row.kind == kind).count();
        format!("Moves({}: load={}, store={}, copy={})", self.rows.len(), of(0), of(1), of(2))
    }
}
