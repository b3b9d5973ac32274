//! Counters of one tier, and present totals.

use kvtrie_core::manager::{self, Cause, Manager};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMappingProxy};

use super::lane::Name;
use super::{Since, counted};
use crate::histogram::Histogram;

counted! {
    /// Counters of one tier, and present totals.
    #[pyclass(frozen, module = "kvtrie")]
    #[derive(Clone)]
    TierStats;
    counters hits misses tokens_hit evicted evicted_clean evicted_dirty dropped demoted promoted
        bytes_freed bytes_read bytes_written moves failed move_ns compared regrets;
    gauges slots free coming evictable copies clean retained;
    kind: Name, policy: Name, evictions: Evictions, times: Times
}

/// Evictions by cause.
#[derive(Clone)]
struct Evictions([u64; Cause::ALL.len()]);

impl Since for Evictions {
    fn since(&self, before: &Self) -> Option<Self> {
        let mut left = self.0;
        for (now, then) in left.iter_mut().zip(before.0) {
            *now = now.checked_sub(then)?;
        }
        Some(Self(left))
    }
}

/// Histograms with their names.
#[derive(Clone)]
struct Times([(&'static str, Histogram); 5]);

impl Times {
    fn new(times: &manager::TierTimes) -> Self {
        let manager::TierTimes { hit_age, evict_age, load, store, copy } = times;
        Self([
            ("hit_age", Histogram::new(hit_age)),
            ("evict_age", Histogram::new(evict_age)),
            ("load_time", Histogram::new(load)),
            ("store_time", Histogram::new(store)),
            ("copy_time", Histogram::new(copy)),
        ])
    }
}

impl Since for Times {
    fn since(&self, before: &Self) -> Option<Self> {
        let mut left = self.clone();
        for ((_, now), (_, then)) in left.0.iter_mut().zip(&before.0) {
            *now = now.between(then)?;
        }
        Some(left)
    }
}

impl TierStats {
    /// Counters of a tier on which `misses` blocks were not found.
    pub(super) fn new(manager: &Manager, at: usize, misses: u64) -> Self {
        let stats = manager.stats(at);
        let now = manager.occupancy(at);
        let settings = manager.settings();
        let spec = &settings.tiers[at];
        Self {
            hits: stats.hits,
            misses,
            tokens_hit: stats.tokens_hit,
            evicted: stats.evicted.iter().sum(),
            evicted_clean: stats.evicted_clean,
            evicted_dirty: stats.evicted_dirty,
            dropped: stats.dropped,
            demoted: stats.demoted,
            promoted: stats.promoted,
            bytes_freed: stats.bytes_freed,
            bytes_read: stats.bytes_read,
            bytes_written: stats.bytes_written,
            moves: stats.moves,
            failed: stats.failed,
            move_ns: stats.move_ns,
            compared: stats.compared,
            regrets: stats.regrets,
            slots: now.slots,
            free: now.free,
            coming: now.coming,
            evictable: now.evictable,
            copies: stats.copies,
            clean: stats.clean,
            retained: stats.retained,
            kind: Name(spec.kind.name().to_owned()),
            policy: Name(spec.policy.as_ref().unwrap_or(&settings.policy).clone()),
            evictions: Evictions(stats.evicted),
            times: Times::new(manager.times(at)),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.kind.0
    }

    pub(super) fn found(&self) -> u64 {
        self.hits
    }

    pub(super) fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tier = PyDict::new(py);
        tier.set_item("policy", &self.policy.0)?;
        for (name, value) in self.numbers() {
            tier.set_item(name, value)?;
        }
        tier.set_item("dirty", self.dirty())?;
        tier.set_item("evictions", self.by_cause(py)?)?;
        for (name, times) in &self.times.0 {
            tier.set_item(name, times.to_dict(py)?)?;
        }
        Ok(tier)
    }

    fn by_cause<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let causes = PyDict::new(py);
        for (cause, count) in Cause::ALL.iter().zip(self.evictions.0) {
            causes.set_item(cause.name(), count)?;
        }
        Ok(causes)
    }
}

#[pymethods]
impl TierStats {
    /// The tier's kind.
    #[getter]
    fn kind(&self) -> &str {
        &self.kind.0
    }

    /// The eviction policy.
    #[getter]
    fn policy(&self) -> &str {
        &self.policy.0
    }

    /// Copies whose eviction needs a write-back, or loses the last copy.
    #[getter]
    fn dirty(&self) -> u64 {
        self.copies - self.clean
    }

    /// Evictions by cause.
    #[getter]
    fn evictions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMappingProxy>> {
        Ok(PyMappingProxy::new(py, self.by_cause(py)?.as_mapping()))
    }

    /// Ages at hits: nanoseconds since the last use.
    #[getter]
    fn hit_age(&self) -> Histogram {
        self.times.0[0].1.clone()
    }

    /// Ages at eviction: nanoseconds since the last use.
    #[getter]
    fn evict_age(&self) -> Histogram {
        self.times.0[1].1.clone()
    }

    /// Latencies of loads out of this tier, from being handed out to the end.
    #[getter]
    fn load_time(&self) -> Histogram {
        self.times.0[2].1.clone()
    }

    /// Latencies of stores into this tier.
    #[getter]
    fn store_time(&self) -> Histogram {
        self.times.0[3].1.clone()
    }

    /// Latencies of copies within this tier.
    #[getter]
    fn copy_time(&self) -> Histogram {
        self.times.0[4].1.clone()
    }

    fn __repr__(&self) -> String {
        format!(
            "TierStats({}: {}/{} free, hits={}, misses={}, evicted={})",
            self.kind.0, self.free, self.slots, self.hits, self.misses, self.evicted
        )
    }
}
