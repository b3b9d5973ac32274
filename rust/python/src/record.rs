//! Record classes: immutable core values with named attributes. The plain classes are here.
//!
//! Invariant: an attribute is computed at each access, so creating a record copies nothing. Cost:
//! the core's value.

use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict};

use crate::arrays::{column, handles};

/// Defines a wrapper class of a core value: attributes, `repr` and further methods. With `equal as`
/// and a class name, instances compare and hash as their values.
macro_rules! record {
    (
        $(#[$meta:meta])*
        $class:ident($inner:ty) $(equal as $name:literal)? |$value:ident, $py:ident| {
            $($(#[$doc:meta])* $field:ident: $type:ty = $of:expr;)*
        }
        repr $repr:expr;
        $($method:tt)*
    ) => {
        $(#[$meta])*
        #[pyo3::pyclass(frozen, module = "kvtrie" $(, eq, hash, name = $name)?)]
        pub(crate) struct $class(pub(crate) $inner);

        impl From<$inner> for $class {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }

        #[allow(
            clippy::elidable_lifetime_names, clippy::new_ret_no_self, clippy::wrong_self_convention,
            reason = "names and lifetimes are those of the attributes"
        )]
        #[pyo3::pymethods]
        impl $class {
            $(
                $(#[$doc])*
                #[getter]
                fn $field<'py>(&self, $py: pyo3::Python<'py>) -> $type {
                    let ($value, _) = (&self.0, $py);
                    $of
                }
            )*

            fn __repr__(&self, $py: pyo3::Python<'_>) -> String {
                let ($value, _) = (&self.0, $py);
                $repr
            }

            $($method)*
        }
    };
}

pub(crate) use record;

record! {
    /// Result of a commit.
    Committed(kvtrie_core::Committed) |done, py| {
        /// Handles of new blocks in the trie, `uint64[n]`.
        new: Bound<'py, PyArray1<u64>> = handles(py, &done.new);
        /// Private slots with a block already committed by a different lease, `uint32[k]`. The
        /// lease keeps them until its release.
        duplicate: Bound<'py, PyArray1<u32>> = done.duplicate.to_pyarray(py);
        /// Handles of the earlier blocks, parallel to `duplicate`, `uint64[k]`.
        canonical: Bound<'py, PyArray1<u64>> = handles(py, &done.canonical);
        /// Number of new blocks stored ahead. The request takes over their copies.
        ahead: usize = done.ahead;
    }
    repr format!("Committed(new={}, duplicate={})", done.new.len(), done.duplicate.len());
}

record! {
    /// Slots of a layer group on a tier.
    GroupStats(kvtrie_core::GroupSlots) |slots, py| {
        /// Slots of blocks and states held by a resume point or a lease. For the first group, all
        /// slots in use.
        held: u64 = slots.held;
        /// Slots still found by lookups until reused, before any victim.
        released: u64 = slots.released;
    }
    repr format!("GroupStats(held={}, released={})", slots.held, slots.released);
}

record! {
    /// Eviction of layers of a block from a tier, with the terms of its rank.
    Eviction(kvtrie_core::Eviction) |entry, py| {
        /// Time in nanoseconds.
        at: u64 = entry.at;
        /// Handle of the block.
        block: u64 = entry.block.0;
        /// Index in its sequence, in blocks.
        position: u32 = entry.position;
        /// Salt of the tenant.
        tenant: Bound<'py, PyBytes> = PyBytes::new(py, &entry.tenant);
        /// Name of the adapter.
        lora: &str = &entry.lora;
        /// Index of the source tier.
        tier: usize = entry.tier;
        /// Index of the destination tier, or None.
        to: Option<usize> = entry.to;
        /// Evicted layers, as `(first, end)`.
        layers: (u16, u16) = (entry.layers.lo, entry.layers.hi);
        /// Cause of the eviction.
        cause: &'static str = entry.cause.name();
        /// Whether a copy remains: "clean", "demoted" or "dropped".
        reason: &'static str = entry.reason.name();
        /// Number of uses.
        uses: u32 = entry.uses;
        /// Nanoseconds since its last use.
        idle: u64 = entry.idle;
        /// Product of all terms.
        cost: f64 = entry.terms.cost;
        /// `base`, `uses`, `layer` and `position`, as in `explain`.
        terms: PyResult<Bound<'py, PyDict>> = [
            ("base", entry.terms.base),
            ("uses", f64::from(entry.terms.uses)),
            ("layer", entry.terms.layer_weight),
            ("position", entry.terms.position_weight),
        ].into_py_dict(py);
        /// Retention value: cost per second of idle time. Infinite at zero idle time.
        value: f64 = entry.value;
        /// Value of the next victim, or None.
        next_value: Option<f64> = entry.next;
    }
    repr format!(
        "Eviction(at={}, block={:#x}, position={}, tier={}, layers={}, cause='{}', reason='{}', \
         uses={}, idle={}, value={})",
        entry.at, entry.block.0, entry.position, entry.tier, entry.layers, entry.cause.name(),
        entry.reason.name(), entry.uses, entry.idle, entry.value
    );
}

record! {
    /// Price of a block on a tier at a time.
    Explanation(kvtrie_core::Explanation) |found, py| {
        /// Product of all terms and weights.
        cost: f64 = found.terms.cost;
        /// `base`, the recompute cost of a token of the block, and `uses`, its discounted number of
        /// uses. Terms not used by the policy are 1.
        terms: PyResult<Bound<'py, PyDict>> =
            [("base", found.terms.base), ("uses", f64::from(found.terms.uses))].into_py_dict(py);
        /// `layer` and `position`. Weights not used by the policy are 1.
        weights: PyResult<Bound<'py, PyDict>> = [
            ("layer", found.terms.layer_weight),
            ("position", found.terms.position_weight),
        ].into_py_dict(py);
        /// Nanoseconds since the last use.
        idle: u64 = found.idle;
        /// Retention value: cost per second of idle time. Infinite at zero idle time.
        value: f64 = found.value;
        /// Priority on the tier, 35 without a hint. Lower priorities are evicted first.
        priority: u8 = found.priority;
        /// Number of entries of the tier evicted before it. None while it cannot be a victim.
        rank: Option<usize> = found.rank;
        /// Next layers to evict, as `(first, end)`.
        layers: (u16, u16) = (found.layers.lo, found.layers.hi);
        /// Description of the value, under a learning policy. None otherwise.
        words: Option<&str> = found.words.as_deref();
    }
    repr format!(
        "Explanation(cost={}, idle={}, value={}, priority={}, rank={}, layers={})",
        found.terms.cost, found.idle, found.value, found.priority,
        found.rank.map_or_else(|| "None".to_owned(), |rank| rank.to_string()), found.layers
    );
}

record! {
    /// Planned tokens of a lease lost by a failed load.
    Failed(kvtrie_core::Failed) |failed, py| {
        /// Lease, or 0.
        lease: u64 = failed.lease;
        /// Handle of the block. None for a partial block.
        block: Option<u64> = failed.block.map(|block| block.0);
        /// First token in the lease's sequence.
        start: u64 = failed.start;
        /// End of the tokens, exclusive.
        stop: u64 = failed.stop;
        /// Message of the executor.
        reason: &str = &failed.reason;
    }
    repr format!(
        "Failed(lease={}, block={}, start={}, stop={}, reason={:?})",
        failed.lease,
        failed.block.map_or_else(|| "None".to_owned(), |block| format!("{:#x}", block.0)),
        failed.start, failed.stop, failed.reason
    );
}

record! {
    /// Arrival times of a transmission: layer `i` arrives at `first + i * per_layer`.
    #[derive(PartialEq, Eq, Hash)]
    Transmission(kvtrie_core::Transmission) equal as "Transmission" |sent, py| {
        /// Arrival of the last layer, in nanoseconds.
        end: u64 = sent.end;
        /// Arrival of the first layer, in nanoseconds.
        first: u64 = sent.first;
        /// Nanoseconds between two layers.
        per_layer: u64 = sent.per_layer;
    }
    repr format!(
        "Transmission(end={}, first={}, per_layer={})", sent.end, sent.first, sent.per_layer
    );
}

record! {
    /// Blocks without a price, as a struct of arrays.
    Unpriced(Vec<kvtrie_core::Unpriced>) |blocks, py| {
        /// Block handles.
        id: Bound<'py, PyArray1<u64>> = column(py, blocks, |known| known.block.0);
        /// Tokens before each block.
        context: Bound<'py, PyArray1<u64>> = column(py, blocks, |known| known.context);
        /// Index of each block in its sequence.
        index: Bound<'py, PyArray1<u32>> = column(py, blocks, |known| known.index);
        /// Number of uses of each block.
        uses: Bound<'py, PyArray1<u32>> = column(py, blocks, |known| known.uses);
        /// Number of blocks of each block's session.
        session_blocks: Bound<'py, PyArray1<u32>> =
            column(py, blocks, |known| known.session_blocks);
    }
    repr format!("Unpriced({} blocks)", blocks.len());

    fn __len__(&self) -> usize {
        self.0.len()
    }
}
