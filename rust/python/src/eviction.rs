//! Entry of the eviction log.

use kvtrie_core::manager;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict};

use crate::record::record;

record! {
    /// Eviction of some layers of a block from a tier, with the terms of its rank.
    Eviction(manager::Eviction) |entry, py| {
        /// When, in nanoseconds.
        at: u64 = entry.at;
        /// Handle of the block.
        block: u64 = entry.block.0;
        /// Its index in its sequence, in blocks.
        position: u32 = entry.position;
        /// The tenant's salt.
        tenant: Bound<'py, PyBytes> = PyBytes::new(py, &entry.tenant);
        /// The adapter's name.
        lora: &str = &entry.lora;
        /// Index of the tier that they were on.
        tier: usize = entry.tier;
        /// Index of the tier that they were moved to; None if to none.
        to: Option<usize> = entry.to;
        /// The evicted layers, as `(first, one behind the last)`.
        layers: (u16, u16) = (entry.layers.lo, entry.layers.hi);
        /// Cause of the eviction.
        cause: &'static str = entry.cause.name();
        /// Whether a copy remains: "clean", "demoted" or "dropped".
        reason: &'static str = entry.reason.name();
        /// Number of uses.
        uses: u32 = entry.uses;
        /// Nanoseconds since its last use.
        idle: u64 = entry.idle;
        /// The product of all terms.
        cost: f64 = entry.terms.cost;
        /// `base`, `uses`, `layer` and `position`, as in `explain`.
        terms: PyResult<Bound<'py, PyDict>> = [
            ("base", entry.terms.base),
            ("uses", f64::from(entry.terms.uses)),
            ("layer", entry.terms.layer_weight),
            ("position", entry.terms.position_weight),
        ].into_py_dict(py);
        /// Retention value: cost per second of idle time; infinite at zero idle time.
        value: f64 = entry.value;
        /// Value of the copy that would have been evicted next; None if there was no other victim.
        next_value: Option<f64> = entry.next;
    }
    repr format!(
        "Eviction(at={}, block={:#x}, position={}, tier={}, layers={}, cause='{}', reason='{}', \
         uses={}, idle={}, value={})",
        entry.at, entry.block.0, entry.position, entry.tier, entry.layers, entry.cause.name(),
        entry.reason.name(), entry.uses, entry.idle, entry.value
    );
}
