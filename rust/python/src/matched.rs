//! Match: the result of a lookup.
//!
//! The call only finds the matching blocks. Their details are read at the first use, so a lookup
//! for the length is fast. Invariant: reading pins and refreshes no block. Cost: O(blocks) at the
//! first read.

mod block;
mod copy;

use kvtrie_core::Handle;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::arrays::handles;
use crate::error::bad;
use crate::number;
use crate::shared::Shared;

pub(crate) use block::{MatchedBlock, handle};
pub(crate) use copy::Copy;

/// Longest usable prefix of a sequence.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Match {
    shared: Shared,
    found: Vec<Handle>,
    /// Number of covered tokens.
    #[pyo3(get)]
    tokens: usize,
    now: u64,
    blocks: PyOnceLock<Py<PyTuple>>,
}

impl Match {
    pub(crate) fn new(shared: &Shared, found: Vec<Handle>, tokens: usize, now: u64) -> Self {
        Self { shared: shared.clone(), found, tokens, now, blocks: PyOnceLock::new() }
    }
}

#[pymethods]
impl Match {
    /// Handles of its blocks in logical order, `uint64[n]`.
    #[getter]
    fn handles<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        handles(py, &self.found)
    }

    /// Its blocks in logical order, as of the first read. A block evicted before has no tokens and
    /// no copies.
    #[getter]
    fn blocks(&self, py: Python<'_>) -> PyResult<Py<PyTuple>> {
        let read = || {
            let blocks = self.shared.call(py, |manager| {
                let with_slots = |block: kvtrie_core::MatchedBlock| {
                    let slots = |copy| manager.copy_slots(block.block, copy);
                    let slots: Vec<_> = block.copies.iter().map(slots).collect();
                    (block, slots)
                };
                let found = manager.describe(&self.found, self.now);
                Ok(found.into_iter().map(with_slots).collect::<Vec<_>>())
            })?;
            let blocks =
                blocks.into_iter().map(|(block, slots)| MatchedBlock::new(py, block, slots));
            Ok(PyTuple::new(py, blocks.collect::<PyResult<Vec<_>>>()?)?.unbind())
        };
        self.blocks.get_or_try_init(py, read).map(|blocks| blocks.clone_ref(py))
    }

    /// Current number of consecutive blocks after the first `skip`, complete on a tier.
    #[pyo3(signature = (tier, *, skip=0))]
    fn resident(
        &self,
        tier: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::skip)] skip: usize,
    ) -> PyResult<usize> {
        let (py, tier, count) = (tier.py(), self.shared.tier(tier)?, self.found.len());
        let wrong = || bad(format!("skip is {skip}, of a match of {count} blocks"));
        let found = self.found.get(skip..).ok_or_else(wrong)?;
        self.shared.call(py, |manager| Ok(manager.resident_blocks(found, tier)))
    }

    /// Current number of blocks after the first `skip`, up to the last border resumable from a
    /// tier.
    #[pyo3(signature = (tier, *, skip=0))]
    fn resumable(
        &self,
        tier: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::skip)] skip: usize,
    ) -> PyResult<usize> {
        let (py, tier, count) = (tier.py(), self.shared.tier(tier)?, self.found.len());
        if skip > count {
            return Err(bad(format!("skip is {skip}, of a match of {count} blocks")));
        }
        self.shared.call(py, |manager| Ok(manager.resumable_blocks(&self.found, skip, tier)))
    }

    fn __repr__(&self) -> String {
        format!("Match(tokens={}, blocks={})", self.tokens, self.found.len())
    }
}
