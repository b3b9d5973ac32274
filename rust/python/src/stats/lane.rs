//! Counters of a lane.

use kvtrie_core::Manager;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::counted;

counted! {
    /// Counters of a lane.
    LaneStats;
    counters busy_ns predicted_ns bytes;
    gauges free_at;
    times;
    name: String
}

impl LaneStats {
    pub(super) fn new(manager: &Manager, at: usize) -> Self {
        let lanes = manager.lanes();
        Self {
            busy_ns: lanes.seen(at),
            predicted_ns: lanes.predicted(at),
            bytes: lanes.bytes(at),
            free_at: lanes.free_at(at),
            name: lanes.spec(at).name.clone(),
        }
    }
}

#[pymethods]
impl LaneStats {
    fn __repr__(&self) -> String {
        format!("LaneStats(busy_ns={}, bytes={})", self.busy_ns, self.bytes)
    }
}
