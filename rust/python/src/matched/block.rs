//! Block of a match.

use kvtrie_core::Handle;
use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::number::whole;

use super::Copy;

/// Block of a match.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct MatchedBlock {
    /// Block handle.
    #[pyo3(get)]
    block: u64,
    tokens: Vec<u32>,
    /// Copies, fastest tier first. Empty for a hole.
    #[pyo3(get)]
    copies: Py<PyTuple>,
}

impl MatchedBlock {
    pub(super) fn new(
        py: Python<'_>,
        found: kvtrie_core::MatchedBlock,
        slots: Vec<Vec<u32>>,
    ) -> PyResult<Self> {
        let copies = found.copies.into_iter().zip(slots);
        let copies: Vec<Copy> = copies.map(Copy).collect();
        let copies = PyTuple::new(py, copies)?.unbind();
        Ok(Self { block: found.block.0, tokens: found.tokens, copies })
    }
}

/// Parse a block's handle, or a block of a match.
pub(crate) fn handle(number: &Bound<'_, PyAny>) -> PyResult<Handle> {
    if let Ok(block) = number.cast::<MatchedBlock>() {
        return Ok(Handle(block.get().block));
    }
    whole(number, "block", u64::MAX).map(Handle)
}

#[pymethods]
impl MatchedBlock {
    /// Tokens, `uint32[block_tokens]`.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.tokens.to_pyarray(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "MatchedBlock(block={:#x}, copies={})",
            self.block,
            self.copies.bind(py).repr()?
        ))
    }
}
