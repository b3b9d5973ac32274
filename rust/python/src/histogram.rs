//! Histogram of times.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::bad;
use crate::number::nanos;

/// Histogram of times in nanoseconds.
#[pyclass(frozen, eq, module = "kvtrie")]
#[derive(Clone, PartialEq)]
pub(crate) struct Histogram(Arc<kvtrie_core::Histogram>);

impl Histogram {
    pub(crate) fn new(times: &kvtrie_core::Histogram) -> Self {
        Self(Arc::new(times.clone()))
    }

    /// Times recorded since `before`.
    pub(crate) fn between(&self, before: &Self) -> Option<Self> {
        self.0.since(&before.0).map(|times| Self(Arc::new(times)))
    }
}

#[pymethods]
impl Histogram {
    /// Number of recorded times.
    #[getter]
    fn count(&self) -> u64 {
        self.0.count()
    }

    /// Sum of the times in nanoseconds.
    #[getter]
    fn sum(&self) -> u128 {
        self.0.sum()
    }

    /// Quantile of a share.
    fn quantile(&self, share: f64) -> PyResult<u64> {
        if (0.0..=1.0).contains(&share) {
            Ok(self.0.quantile(share))
        } else {
            Err(bad(format!("share is {share}, 0 to 1 wanted")))
        }
    }

    /// Number of times up to each bound.
    fn up_to(&self, bounds: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
        let bounds: Vec<u64> =
            bounds.try_iter()?.map(|bound| nanos(&bound?, "bound")).collect::<PyResult<_>>()?;
        if let Some(at) = bounds.windows(2).position(|pair| pair[0] >= pair[1]) {
            let (low, high) = (bounds[at], bounds[at + 1]);
            return Err(bad(format!("bound {} is {high}, more than {low} wanted", at + 1)));
        }
        Ok(self.0.up_to(&bounds))
    }

    /// Times recorded since `before`.
    fn since(&self, before: &Self) -> PyResult<Self> {
        self.between(before).ok_or_else(|| {
            let (now, then) = (self.0.count(), before.0.count());
            bad(format!("{then} times are no earlier state of these {now}"))
        })
    }

    /// Figures as a dictionary: `count`, `sum`, `p50`, `p90`, `p99` and `max`.
    pub(crate) fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let figures = PyDict::new(py);
        figures.set_item("count", self.0.count())?;
        figures.set_item("sum", self.0.sum())?;
        for (name, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)] {
            figures.set_item(name, self.0.quantile(share))?;
        }
        Ok(figures)
    }

    fn __repr__(&self) -> String {
        let [p50, p99] = [0.5, 0.99].map(|share| self.0.quantile(share));
        format!("Histogram(count={}, p50={p50}, p99={p99})", self.0.count())
    }
}
