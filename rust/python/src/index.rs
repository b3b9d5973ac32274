//! Index of a tier: rows from which a later manager restores its blocks.
//!
//! Invariant: rows are immutable. The loading manager verifies each of them. Cost: a copy of a row
//! per conversion.

use kvtrie_core::{Label, Layers, Row};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList};

use crate::arrays::column;
use crate::error::bad;
use crate::memory::{items, vector};
use crate::number::{shown, small};
use crate::record::record;

/// Limit of rows.
const MOST: usize = u32::MAX as usize;

/// Number of rows between two checks of free memory.
const CHECKED: usize = 1 << 16;

/// Minimum bytes of a label.
const ROW: usize = 256;

/// `(label, slot, layer_lo, layer_hi)`, followed by the group if not 0.
type Fields<'py> = (Bound<'py, PyBytes>, u32, u16, u16);

/// Description of a row.
const SHAPE: &str = "a row of an index is (label as bytes, slot, layer_lo, layer_hi)";

/// Decode a block's label.
pub(crate) fn label(bytes: &[u8]) -> PyResult<Label> {
    Label::decode(bytes)
        .ok_or_else(|| bad(format!("{} bytes are no label of a block", bytes.len())))
}

fn read(row: &Bound<'_, PyAny>) -> PyResult<Row> {
    type Given<'py, T = Bound<'py, PyAny>> = (Bound<'py, PyBytes>, T, T, T);
    type Grouped<'py, T = Bound<'py, PyAny>> = (Bound<'py, PyBytes>, T, T, T, T);
    let ((label, slot, lo, hi), group) = match row.extract::<Grouped<'_>>() {
        Ok((label, slot, lo, hi, group)) => {
            ((label, slot, lo, hi), small(&group, "group", u8::MAX)?)
        }
        Err(_) => (row.extract::<Given<'_>>().map_err(|_| bad(SHAPE))?, 0),
    };
    let label = self::label(label.as_bytes())?;
    let layers = Layers::new(small(&lo, "layer_lo", u16::MAX)?, small(&hi, "layer_hi", u16::MAX)?);
    Ok(Row { label, slot: small(&slot, "slot", u32::MAX - 1)?, layers, group })
}

record! {
    /// Blocks of a tier, parents before their children.
    Index(Vec<Row>) |rows, py| {
        key: PyResult<Bound<'py, PyArray2<u8>>> = {
            let keys: Vec<u8> = rows.iter().flat_map(|row| row.label.record.key()).collect();
            keys.into_pyarray(py).reshape([rows.len(), 32])
        };
        slot: Bound<'py, PyArray1<u32>> = column(py, rows, |row| row.slot);
        layer_lo: Bound<'py, PyArray1<u16>> = column(py, rows, |row| row.layers.lo);
        layer_hi: Bound<'py, PyArray1<u16>> = column(py, rows, |row| row.layers.hi);
        group: Bound<'py, PyArray1<u8>> = column(py, rows, |row| row.group);
        age: Bound<'py, PyArray1<u64>> = column(py, rows, |row| row.label.usage.age);
        uses: Bound<'py, PyArray1<u32>> = column(py, rows, |row| row.label.usage.uses);
        session_blocks: Bound<'py, PyArray1<u32>> =
            column(py, rows, |row| row.label.usage.session_blocks);
    }
    repr format!("Index({} blocks)", rows.len());

    /// Convert tuples `(label, slot, layer_lo, layer_hi)`.
    #[new]
    #[pyo3(signature = (rows=None))]
    fn new(rows: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(rows) = rows else { return Ok(Self::from(Vec::new())) };
        if rows.try_iter().is_err() {
            return Err(bad(format!("rows are {}, a sequence of rows wanted", shown(rows))));
        }
        items(rows, MOST, "rows", |at, row| {
            if at % CHECKED == 0 && at > 0 {
                // A row's label is a separate allocation.
                vector::<[u8; ROW]>(at, "rows")?;
            }
            read(&row)
        })
        .map(Self::from)
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// Concatenate two indexes.
    fn __add__(&self, other: &Self) -> Self {
        Self::from([&self.0[..], &other.0].concat())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let rows = self.0.iter().map(|row| {
            let label = PyBytes::new(py, &row.label.encode());
            let row: (Fields<'_>, u8) = ((label, row.slot, row.layers.lo, row.layers.hi), row.group);
            match row {
                (fields, 0) => fields.into_bound_py_any(py),
                ((label, slot, lo, hi), group) => {
                    (label, slot, lo, hi, group).into_bound_py_any(py)
                }
            }
        });
        PyList::new(py, rows.collect::<PyResult<Vec<_>>>()?)?.try_iter()
    }
}
