//! Event: layers of a block were evicted from a tier.

use kvtrie_core::manager;
use pyo3::prelude::*;

/// Eviction of some layers of a block from a tier.
#[pyclass(frozen, get_all, module = "kvtrie")]
pub(crate) struct Event {
    /// When, in nanoseconds.
    at: u64,
    /// Handle of the block.
    block: u64,
    /// First evicted layer.
    layer_lo: u16,
    /// One behind the last evicted layer.
    layer_hi: u16,
    /// Index of the tier that they were on.
    tier: usize,
    /// Whether a copy remains: "clean", "demoted" or "dropped".
    reason: &'static str,
    /// Cause of the eviction.
    cause: &'static str,
    /// Index of the tier that they were moved to; None if to none.
    to: Option<usize>,
    /// Nanoseconds since its last use.
    idle: u64,
}

impl From<manager::Event> for Event {
    fn from(event: manager::Event) -> Self {
        let manager::Event { at, block, layers, tier, reason, cause, to, idle } = event;
        Self {
            at,
            block: block.0,
            layer_lo: layers.lo,
            layer_hi: layers.hi,
            tier,
            reason: reason.name(),
            cause: cause.name(),
            to,
            idle,
        }
    }
}

#[pymethods]
impl Event {
    fn __repr__(&self) -> String {
        let to = self.to.map_or_else(|| "None".to_owned(), |to| to.to_string());
        format!(
            "Event(at={}, block={:#x}, layers={}..{}, tier={}, reason='{}', to={to}, idle={})",
            self.at, self.block, self.layer_lo, self.layer_hi, self.tier, self.reason, self.idle
        )
    }
}
