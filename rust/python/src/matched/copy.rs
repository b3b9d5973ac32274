//! Copy of a block on one tier.

use kvtrie_core::manager;
use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;

/// Copy of a block on one tier.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Copy {
    pub(super) copy: manager::Copy,
    pub(super) slots: Vec<u32>,
}

#[pymethods]
impl Copy {
    /// Index of the tier.
    #[getter]
    fn tier(&self) -> usize {
        self.copy.tier
    }

    /// Its slot; with layer slots that of the first layer of `coming`.
    #[getter]
    fn slot(&self) -> u32 {
        self.copy.slot
    }

    /// Its slots: one, or with layer slots one for each layer of `coming`.
    #[getter]
    fn slots<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.slots.to_pyarray(py)
    }

    /// First layer that is valid now.
    #[getter]
    fn layer_lo(&self) -> u16 {
        self.copy.layers.lo
    }

    /// One behind the last layer that is valid now.
    #[getter]
    fn layer_hi(&self) -> u16 {
        self.copy.layers.hi
    }

    /// First layer that will be valid at `ready`.
    #[getter]
    fn coming_lo(&self) -> u16 {
        self.copy.coming.lo
    }

    /// One behind the last layer that will be valid at `ready`.
    #[getter]
    fn coming_hi(&self) -> u16 {
        self.copy.coming.hi
    }

    /// When the first of the coming layers is expected, in nanoseconds; now if it is resident.
    #[getter]
    fn first(&self) -> u64 {
        self.copy.first
    }

    /// When all of it is expected, in nanoseconds; now if it is resident.
    #[getter]
    fn ready(&self) -> u64 {
        self.copy.ready
    }

    /// Whether it is a victim: it stays valid until the store that reads it has ended.
    #[getter]
    fn leaving(&self) -> bool {
        self.copy.leaving
    }

    fn __repr__(&self) -> String {
        let manager::Copy { tier, slot, layers, coming, ready, .. } = self.copy;
        format!("Copy(tier={tier}, slot={slot}, layers={layers}, coming={coming}, ready={ready})")
    }
}
