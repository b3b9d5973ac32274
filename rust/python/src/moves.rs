//! Moves as columns, for the executor.
//!
//! Invariant: all columns have a row per move, in topological order or in the order of a selection.
//! Cost: each array is created at its first use, so a step without moves costs nothing.

mod row;
mod wire;

use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyIterator, PyList, PyTuple, PyType};

use crate::arrays;
use crate::error::bad;
use crate::memory::claimed;
use crate::number::{Layer, shown};

use row::{COPY, LOAD, STORE, columns};
pub(crate) use row::{Move, number_of};

/// Limit of moves in a selection.
const LIST: usize = 1 << 16;

/// Value of a column, with its array type.
trait Cell: Sized {
    type Array;

    fn array(py: Python<'_>, cells: Vec<Self>) -> PyResult<Py<Self::Array>>;
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Cell for $number {
            type Array = PyArray1<Self>;

            fn array(py: Python<'_>, cells: Vec<Self>) -> PyResult<Py<Self::Array>> {
                Ok(cells.into_pyarray(py).unbind())
            }
        }
    )*};
}

numbers!(u8 u16 u32 u64);

impl Cell for [u8; 32] {
    type Array = PyArray2<u8>;

    fn array(py: Python<'_>, cells: Vec<Self>) -> PyResult<Py<Self::Array>> {
        let shape = [cells.len(), 32];
        cells.into_flattened().into_pyarray(py).reshape(shape).map(Bound::unbind)
    }
}

/// Columns, each created at its first use, and the methods of `Moves`.
macro_rules! moves {
    ({ $($(#[$doc:meta])* $name:ident: $type:ty;)* } $($method:tt)*) => {
        struct Columns {
            $($name: PyOnceLock<Py<<$type as Cell>::Array>>,)*
            label: PyOnceLock<Py<PyList>>,
        }

        impl Columns {
            const fn unused() -> Self {
                Self { $($name: PyOnceLock::new(),)* label: PyOnceLock::new() }
            }
        }

        #[pymethods]
        impl Moves {
            $(
                #[getter]
                fn $name(&self, py: Python<'_>) -> PyResult<Py<<$type as Cell>::Array>> {
                    let made = || Cell::array(py, self.rows.iter().map(|row| row.$name).collect());
                    self.columns.$name.get_or_try_init(py, made).map(|made| made.clone_ref(py))
                }
            )*
            $($method)*
        }
    };
}

/// Kind, lease, tiers, group and layers of a move.
type MoveClass = (u8, u64, u8, u8, u8, u16, u16);

fn move_class(row: &Move) -> MoveClass {
    (row.kind, row.lease, row.src, row.dst, row.group, row.layer_lo, row.layer_hi)
}

/// Moves in topological order, as columns of equal length.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Moves {
    rows: Vec<Move>,
    columns: Columns,
}

impl From<Vec<Move>> for Moves {
    fn from(rows: Vec<Move>) -> Self {
        Self { rows, columns: Columns::unused() }
    }
}

impl Moves {
    fn row(&self, index: isize) -> PyResult<&Move> {
        let at = if index < 0 { index + self.rows.len().cast_signed() } else { index };
        let row = usize::try_from(at).ok().and_then(|at| self.rows.get(at));
        row.ok_or_else(|| PyIndexError::new_err(format!("move {index} of {}", self.rows.len())))
    }
}

columns! { moves
    /// Kind of a move to a faster tier.
    #[classattr]
    const LOAD: u8 = LOAD;
    /// Kind of a move to a slower tier.
    #[classattr]
    const STORE: u8 = STORE;
    /// Kind of a move within the first tier.
    #[classattr]
    const COPY: u8 = COPY;

    #[getter]
    fn label(&self, py: Python<'_>) -> PyResult<Py<PyList>> {
        let made = || {
            let labels = self.rows.iter().map(|row| PyBytes::new(py, &row.label));
            PyList::new(py, labels).map(Bound::unbind)
        };
        self.columns.label.get_or_try_init(py, made).map(|label| label.clone_ref(py))
    }

    /// Moves including a layer, restricted to it. Report them with `layers_done`.
    fn by_layer(&self, layer: Layer) -> Self {
        let layer = layer.0;
        let carries = |row: &&Move| row.layer_lo <= layer && layer < row.layer_hi;
        let restricted =
            |row: &Move| Move { layer_lo: layer, layer_hi: layer.saturating_add(1), ..row.clone() };
        Self::from(self.rows.iter().filter(carries).map(restricted).collect::<Vec<_>>())
    }

    /// Moves extended to all layers of a rank with `layers` layers.
    fn of_layers(&self, layers: Layer) -> PyResult<Self> {
        let layers = layers.0;
        if layers == 0 {
            return Err(bad("moves of 0 layers, at least 1 wanted"));
        }
        let whole = |row: &Move| Move { layer_lo: 0, layer_hi: layers, ..row.clone() };
        Ok(Self::from(self.rows.iter().map(whole).collect::<Vec<_>>()))
    }

    /// Split into independent moves between the given tiers, grouped by kind, lease, tiers and
    /// layers, and the remaining moves.
    fn together<'py>(
        slf: &Bound<'py, Self>,
        tiers: &Bound<'py, PyAny>,
    ) -> PyResult<(Vec<Bound<'py, Self>>, Bound<'py, Self>)> {
        let py = slf.py();
        let tiers = arrays::numbers(tiers, "tier", u64::from(u8::MAX))?;
        let among = |tier: u8| tiers.contains(&u64::from(tier));
        let mut parts: Vec<(MoveClass, Vec<Move>)> = Vec::new();
        let mut others = Vec::new();
        let rows = &slf.get().rows;
        if let Some(first) = rows.first().map(move_class)
            && rows.iter().all(|row| row.after == 0 && move_class(row) == first)
            && among(rows[0].src)
            && among(rows[0].dst)
        {
            return Ok((vec![slf.clone()], Bound::new(py, Self::from(others))?));
        }
        let mut last = 0;
        for row in rows {
            if row.after != 0 || !among(row.src) || !among(row.dst) {
                others.push(row.clone());
                continue;
            }
            let own = move_class(row);
            if parts.get(last).is_none_or(|(other, _)| *other != own) {
                last = parts.iter().position(|(other, _)| *other == own).unwrap_or_else(|| {
                    parts.push((own, Vec::new()));
                    parts.len() - 1
                });
            }
            parts[last].1.push(row.clone());
        }
        let parts = parts.into_iter().map(|(_, rows)| Bound::new(py, Self::from(rows)));
        Ok((parts.collect::<PyResult<_>>()?, Bound::new(py, Self::from(others))?))
    }

    /// Encode the columns as bytes, for a worker process.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &wire::encode(&self.rows))
    }

    /// Decode the result of `to_bytes`.
    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        wire::decode(data).map(Self::from)
    }

    fn __len__(&self) -> usize {
        self.rows.len()
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = index.py();
        if let Ok(index) = index.extract::<isize>() {
            return Ok(Bound::new(py, self.row(index)?.clone())?.into_any());
        }
        claimed(index, self.rows.len().max(LIST), "moves chosen")?;
        // A slice, a mask or indices: as numpy interprets it.
        let all: Vec<isize> = (0..self.rows.len().cast_signed()).collect();
        let chosen = all.into_pyarray(py).get_item(index)?;
        let Ok(chosen) = chosen.extract::<PyReadonlyArray1<'_, isize>>() else {
            return Err(PyIndexError::new_err(format!(
                "moves are chosen by an integer, a slice, a mask or integers, not {}",
                shown(index)
            )));
        };
        let chosen = chosen.as_array();
        let rows = chosen.iter().map(|&at| self.row(at).cloned());
        let part = Self::from(rows.collect::<PyResult<Vec<_>>>()?);
        Ok(Bound::new(py, part)?.into_any())
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
        let [load, store, copy] = [LOAD, STORE, COPY].map(of);
        format!("Moves({}: load={load}, store={store}, copy={copy})", self.rows.len())
    }
}
