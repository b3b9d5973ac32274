//! What a lookup found, as it was at that moment.

use std::sync::Arc;

use kvtrie_core::manager;
use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;

/// One copy of a block.
#[pyclass(frozen, get_all, module = "kvtrie")]
pub(crate) struct Copy {
    /// Index of the tier.
    tier: usize,
    /// Its slot; with layer slots that of its first layer.
    slot: u32,
    /// First layer that is valid now.
    layer_lo: u16,
    /// One behind the last layer that is valid now.
    layer_hi: u16,
    /// First layer that will be valid at `ready`.
    coming_lo: u16,
    /// One behind the last layer that will be valid at `ready`.
    coming_hi: u16,
    /// When the first of the coming layers is expected, in nanoseconds; now if it is there.
    first: u64,
    /// When all of it is expected, in nanoseconds; now if it is there.
    ready: u64,
}

impl From<&manager::Copy> for Copy {
    fn from(copy: &manager::Copy) -> Self {
        let manager::Copy { tier, slot, layers, coming, first, ready } = *copy;
        Self {
            tier,
            slot,
            layer_lo: layers.lo,
            layer_hi: layers.hi,
            coming_lo: coming.lo,
            coming_hi: coming.hi,
            first,
            ready,
        }
    }
}

#[pymethods]
impl Copy {
    fn __repr__(&self) -> String {
        format!(
            "Copy(tier={}, slot={}, layers={}..{}, coming={}..{}, ready={})",
            self.tier,
            self.slot,
            self.layer_lo,
            self.layer_hi,
            self.coming_lo,
            self.coming_hi,
            self.ready
        )
    }
}

/// A block of a match.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct MatchedBlock {
    found: Arc<manager::Match>,
    at: usize,
}

impl MatchedBlock {
    fn inner(&self) -> &manager::MatchedBlock {
        &self.found.blocks[self.at]
    }
}

#[pymethods]
impl MatchedBlock {
    /// Its handle.
    #[getter]
    fn block(&self) -> u64 {
        self.inner().block.0
    }

    /// Its tokens, `uint32[block_tokens]`.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.inner().tokens.to_pyarray(py)
    }

    /// Its copies, fastest tier first; none for a hole.
    #[getter]
    fn copies(&self) -> Vec<Copy> {
        self.inner().copies.iter().map(Copy::from).collect()
    }

    fn __repr__(&self) -> String {
        let tiers: Vec<usize> = self.inner().copies.iter().map(|copy| copy.tier).collect();
        format!("MatchedBlock(block={:#x}, tiers={tiers:?})", self.block())
    }
}

/// The longest usable prefix of a sequence.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Match(Arc<manager::Match>);

impl From<manager::Match> for Match {
    fn from(found: manager::Match) -> Self {
        Self(Arc::new(found))
    }
}

#[pymethods]
impl Match {
    /// How many tokens of the sequence it covers.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.tokens
    }

    /// Its blocks in logical order.
    #[getter]
    fn blocks(&self) -> Vec<MatchedBlock> {
        let block = |at| MatchedBlock { found: Arc::clone(&self.0), at };
        (0..self.0.blocks.len()).map(block).collect()
    }

    fn __repr__(&self) -> String {
        format!("Match(tokens={}, blocks={})", self.0.tokens, self.0.blocks.len())
    }
}
