//! Counters of one lane.

use kvtrie_core::manager::Manager;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{Since, counted};

counted! {
    /// Counters of one lane.
    #[pyclass(frozen, module = "kvtrie")]
    #[derive(Clone)]
    LaneStats;
    counters busy_ns predicted_ns bytes;
    gauges free_at;
    name: Name
}

/// A name has no difference: the later one stays.
#[derive(Clone, PartialEq)]
pub(super) struct Name(pub(super) String);

impl Since for Name {
    fn since(&self, before: &Self) -> Option<Self> {
        (self == before).then(|| self.clone())
    }
}

impl LaneStats {
    pub(super) fn new(manager: &Manager, at: usize) -> Self {
        let lanes = manager.lanes();
        Self {
            busy_ns: lanes.seen(at),
            predicted_ns: lanes.predicted(at),
            bytes: lanes.bytes(at),
            free_at: lanes.free_at(at),
            name: Name(lanes.spec(at).name.clone()),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name.0
    }

    pub(super) fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let lane = PyDict::new(py);
        for (name, value) in self.numbers() {
            lane.set_item(name, value)?;
        }
        Ok(lane)
    }
}

#[pymethods]
impl LaneStats {
    fn __repr__(&self) -> String {
        format!("LaneStats(busy_ns={}, bytes={})", self.busy_ns, self.bytes)
    }
}
