//! Blocks that await a price by the user.
//!
//! Invariant: all arrays have one entry per block, in one order. Cost: one copy per array.

use kvtrie_core::manager;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

/// Blocks without a price, as a struct of arrays.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Unpriced(Vec<manager::Unpriced>);

impl From<Vec<manager::Unpriced>> for Unpriced {
    fn from(blocks: Vec<manager::Unpriced>) -> Self {
        Self(blocks)
    }
}

impl Unpriced {
    fn column<'py, T: numpy::Element>(
        &self,
        py: Python<'py>,
        of: impl Fn(&manager::Unpriced) -> T,
    ) -> Bound<'py, PyArray1<T>> {
        self.0.iter().map(of).collect::<Vec<T>>().into_pyarray(py)
    }
}

#[pymethods]
impl Unpriced {
    /// The blocks' handles.
    #[getter]
    fn id<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        self.column(py, |known| known.block.0)
    }

    /// Tokens before each block.
    #[getter]
    fn context<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        self.column(py, |known| known.context)
    }

    /// Each block's index in its sequence.
    #[getter]
    fn index<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.column(py, |known| known.index)
    }

    /// Number of uses of each.
    #[getter]
    fn uses<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.column(py, |known| known.uses)
    }

    /// Number of blocks of each one's session.
    #[getter]
    fn session_blocks<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.column(py, |known| known.session_blocks)
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("Unpriced({} blocks)", self.0.len())
    }
}
