//! Counters of a tier, and current totals.

use kvtrie_core::{Cause, GroupSlots, Manager};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyMappingProxy};

use super::{Since, counted, entries, filled};
use crate::histogram::Histogram;
use crate::record::GroupStats;

counted! {
    /// Counters of a tier, and current totals.
    TierStats;
    counters hits misses tokens_hit evicted evicted_clean evicted_dirty dropped demoted promoted
        bytes_freed bytes_read bytes_written moves failed stores_dropped move_ns compared regrets;
    gauges slots free coming evictable copies clean retained dirty;
    times
        /// Ages at hits: nanoseconds since the last use.
        hit_age
        /// Ages at eviction: nanoseconds since the last use.
        evict_age
        /// Latencies of loads out of this tier, from issue to completion.
        load_time
        /// Latencies of stores into this tier.
        store_time
        /// Latencies of copies within this tier.
        copy_time;
    /// The tier's kind.
    #[pyo3(get)]
    kind: String,
    /// The eviction policy.
    #[pyo3(get)]
    policy: String,
    causes: Vec<u64>,
    slots_of: Vec<GroupSlots>
}

/// A gauge has no difference.
impl Since for GroupSlots {
    fn since(&self, _before: &Self) -> Option<Self> {
        Some(*self)
    }
}

impl TierStats {
    /// Counters of a tier with `misses` blocks not found.
    pub(super) fn new(manager: &Manager, at: usize, misses: u64) -> Self {
        let (stats, times) = (manager.stats(at), manager.times(at));
        let now = manager.occupancy(at);
        let settings = manager.settings();
        let spec = &settings.tiers[at];
        filled! {
            stats {
                hits tokens_hit evicted_clean evicted_dirty dropped demoted promoted bytes_freed
                bytes_read bytes_written moves failed stores_dropped move_ns compared regrets copies
                clean retained
            }
            now { slots free coming evictable };
            misses,
            evicted: stats.evicted.iter().sum(),
            // Copies needing a write-back, or losing the last copy, at eviction.
            dirty: stats.copies - stats.clean,
            hit_age: Histogram::new(&times.hit_age),
            evict_age: Histogram::new(&times.evict_age),
            load_time: Histogram::new(&times.load),
            store_time: Histogram::new(&times.store),
            copy_time: Histogram::new(&times.copy),
            kind: spec.kind.name().to_owned(),
            policy: spec.policy.as_ref().unwrap_or(&settings.policy).clone(),
            causes: stats.evicted.to_vec(),
            slots_of: manager.group_slots(at),
        }
    }

    pub(super) fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tier = self.numbers(py)?;
        tier.set_item("policy", &self.policy)?;
        tier.set_item("evictions", self.by_cause().into_py_dict(py)?)?;
        let groups = self
            .slots_of
            .iter()
            .map(|slots| [("held", slots.held), ("released", slots.released)].into_py_dict(py));
        tier.set_item("groups", groups.collect::<PyResult<Vec<_>>>()?)?;
        Ok(tier)
    }

    fn by_cause(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Cause::ALL.map(Cause::name).into_iter().zip(self.causes.iter().copied())
    }
}

#[pymethods]
impl TierStats {
    /// Evictions by cause.
    #[getter]
    fn evictions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMappingProxy>> {
        entries(py, self.by_cause())
    }

    /// Slots of each layer group, or empty if the manager has a single group.
    #[getter]
    fn groups(&self) -> Vec<GroupStats> {
        self.slots_of.iter().map(|&slots| slots.into()).collect()
    }

    fn __repr__(&self) -> String {
        format!(
            "TierStats({}: {}/{} free, hits={}, misses={}, evicted={})",
            self.kind, self.free, self.slots, self.hits, self.misses, self.evicted
        )
    }
}
