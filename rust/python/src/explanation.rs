//! Explanation of a block's rank.

use kvtrie_core::manager;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Price of a block on a tier at a time.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Explanation(manager::Explanation);

impl From<manager::Explanation> for Explanation {
    fn from(explanation: manager::Explanation) -> Self {
        Self(explanation)
    }
}

#[pymethods]
impl Explanation {
    /// The product of all terms and weights.
    #[getter]
    fn cost(&self) -> f64 {
        self.0.terms.cost
    }

    /// `base`, the cost of computing a token of the block again, and `uses`, its discounted number
    /// of uses. Terms that the policy does not use are 1.
    #[getter]
    fn terms<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let terms = PyDict::new(py);
        terms.set_item("base", self.0.terms.base)?;
        terms.set_item("uses", f64::from(self.0.terms.uses))?;
        Ok(terms)
    }

    /// `layer` and `position`; 1 if the policy does not use them.
    #[getter]
    fn weights<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let weights = PyDict::new(py);
        weights.set_item("layer", self.0.terms.layer_weight)?;
        weights.set_item("position", self.0.terms.position_weight)?;
        Ok(weights)
    }

    /// Nanoseconds since the last use.
    #[getter]
    fn idle(&self) -> u64 {
        self.0.idle
    }

    /// Retention value: cost per second of idle time; infinite at zero idle time.
    #[getter]
    fn value(&self) -> f64 {
        self.0.value
    }

    /// Its priority on the tier, 35 without a hint; lower ones are evicted first.
    #[getter]
    fn priority(&self) -> u8 {
        self.0.priority
    }

    /// Number of entries of the tier evicted before it; None while it cannot be a victim.
    #[getter]
    fn rank(&self) -> Option<usize> {
        self.0.rank
    }

    /// The layers that would be evicted next, as `(first, one behind the last)`.
    #[getter]
    fn layers(&self) -> (u16, u16) {
        (self.0.layers.lo, self.0.layers.hi)
    }

    /// The value in words, under a policy that learns it; None under any other.
    #[getter]
    fn words(&self) -> Option<&str> {
        self.0.words.as_deref()
    }

    fn __repr__(&self) -> String {
        let manager::Explanation { terms, idle, value, priority, rank, layers, .. } = &self.0;
        let rank = rank.map_or_else(|| "None".to_owned(), |rank| rank.to_string());
        format!(
            "Explanation(cost={}, idle={idle}, value={value}, priority={priority}, rank={rank}, \
             layers={layers})",
            terms.cost
        )
    }
}
