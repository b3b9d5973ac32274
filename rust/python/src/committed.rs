//! Result of a commit.

use kvtrie_core::manager;
use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;

use crate::arrays::handles;

/// Result of a commit.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Committed(manager::Committed);

impl From<manager::Committed> for Committed {
    fn from(committed: manager::Committed) -> Self {
        Self(committed)
    }
}

#[pymethods]
impl Committed {
    /// Handles of the blocks that entered the trie, `uint64[n]`.
    #[getter(new)]
    fn entered<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        handles(py, &self.0.new)
    }

    /// Private slots whose block another lease had committed already, `uint32[k]`; the lease keeps
    /// them until release.
    #[getter]
    fn duplicate<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.0.duplicate.to_pyarray(py)
    }

    /// Handles of the earlier blocks, one for each duplicate, `uint64[k]`.
    #[getter]
    fn canonical<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        handles(py, &self.0.canonical)
    }

    /// How many of the new blocks had been stored ahead: their copies were taken over.
    #[getter]
    fn ahead(&self) -> usize {
        self.0.ahead
    }

    fn __repr__(&self) -> String {
        format!("Committed(new={}, duplicate={})", self.0.new.len(), self.0.duplicate.len())
    }
}
