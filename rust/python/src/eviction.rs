//! Entry of the eviction log.

use kvtrie_core::manager;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

/// Eviction of some layers of a block from a tier, with the terms of its rank.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Eviction(manager::Eviction);

impl From<manager::Eviction> for Eviction {
    fn from(entry: manager::Eviction) -> Self {
        Self(entry)
    }
}

#[pymethods]
impl Eviction {
    /// When, in nanoseconds.
    #[getter]
    fn at(&self) -> u64 {
        self.0.at
    }

    /// Handle of the block.
    #[getter]
    fn block(&self) -> u64 {
        self.0.block.0
    }

    /// Its index in its sequence, in blocks.
    #[getter]
    fn position(&self) -> u32 {
        self.0.position
    }

    /// The tenant's salt.
    #[getter]
    fn tenant<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.tenant)
    }

    /// The adapter's name.
    #[getter]
    fn lora(&self) -> &str {
        &self.0.lora
    }

    /// Index of the tier that they were on.
    #[getter]
    fn tier(&self) -> usize {
        self.0.tier
    }

    /// Index of the tier that they were moved to; None if to none.
    #[getter]
    fn to(&self) -> Option<usize> {
        self.0.to
    }

    /// The evicted layers, as `(first, one behind the last)`.
    #[getter]
    fn layers(&self) -> (u16, u16) {
        (self.0.layers.lo, self.0.layers.hi)
    }

    /// Cause of the eviction.
    #[getter]
    fn cause(&self) -> &'static str {
        self.0.cause.name()
    }

    /// Whether a copy remains: "clean", "demoted" or "dropped".
    #[getter]
    fn reason(&self) -> &'static str {
        self.0.reason.name()
    }

    /// Number of uses.
    #[getter]
    fn uses(&self) -> u32 {
        self.0.uses
    }

    /// Nanoseconds since its last use.
    #[getter]
    fn idle(&self) -> u64 {
        self.0.idle
    }

    /// The product of all terms.
    #[getter]
    fn cost(&self) -> f64 {
        self.0.terms.cost
    }

    /// `base`, `uses`, `layer` and `position`, as in `explain`.
    #[getter]
    fn terms<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let terms = PyDict::new(py);
        terms.set_item("base", self.0.terms.base)?;
        terms.set_item("uses", f64::from(self.0.terms.uses))?;
        terms.set_item("layer", self.0.terms.layer_weight)?;
        terms.set_item("position", self.0.terms.position_weight)?;
        Ok(terms)
    }

    /// Retention value: cost per second of idle time; infinite at zero idle time.
    #[getter]
    fn value(&self) -> f64 {
        self.0.value
    }

    /// Value of the copy that would have been evicted next; None if there was no other victim.
    #[getter]
    fn next_value(&self) -> Option<f64> {
        self.0.next
    }

    fn __repr__(&self) -> String {
        let manager::Eviction { at, block, position, tier, layers, idle, uses, value, .. } =
            &self.0;
        format!(
            "Eviction(at={at}, block={:#x}, position={position}, tier={tier}, layers={layers}, \
             cause='{}', reason='{}', uses={uses}, idle={idle}, value={value})",
            block.0,
            self.0.cause.name(),
            self.0.reason.name()
        )
    }
}
