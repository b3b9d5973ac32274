//! kvtrie._kvtrie: the core for Python. Conversions only, in a file per exposed class except for
//! plain records.
//!
//! ```text
//! manager, lease, event_batches, simulation, disk, kept, remote      classes with calls
//!     +--> tokens, scope, settings, hint, mark, matched      arguments
//!     +--> plan, moves, stats, histogram, event, miss, record, routing, index      results
//! shared --> error, number, text, arrays, memory, own_files      helpers of all conversions
//! ```
//!
//! Invariant: makes no decisions, and no panic crosses into Python. Cost: a conversion of arguments
//! and results per call.

#![expect(clippy::too_many_arguments, reason = "keyword arguments of Python are arguments here")]

mod arrays;
mod disk;
mod error;
mod event;
mod event_batches;
#[cfg(feature = "faults")]
mod faults;
mod hint;
mod histogram;
mod index;
mod kept;
mod kernels;
mod lease;
mod line;
mod manager;
mod mark;
mod matched;
mod memory;
mod miss;
mod moves;
mod number;
mod own_files;
mod plan;
mod record;
mod remote;
mod routing;
mod scope;
mod settings;
mod shared;
mod simulation;
mod stats;
mod text;
mod tokens;

/// Native classes of kvtrie. Import them from `kvtrie`.
#[pyo3::pymodule(gil_used = false)]
mod _kvtrie {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::{
        disk::DiskStore,
        event::Event,
        event_batches::EventBatches,
        hint::HintReply,
        histogram::Histogram,
        index::Index,
        kept::KeptFile,
        lease::Lease,
        line::HashLines,
        manager::BlockManager,
        matched::{Copy, Match, MatchedBlock},
        miss::{Miss, MissBranch},
        moves::{Move, Moves},
        plan::{Plan, Span},
        record::{Committed, Eviction, Explanation, Failed, GroupStats, Transmission, Unpriced},
        remote::{ValueFolder, ValueFormat},
        routing::locality,
        settings::page_bytes,
        simulation::Simulation,
        stats::{LaneStats, Stats, TierStats},
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("KERNELS", std::collections::BTreeMap::from(crate::kernels::KERNELS))?;
        #[cfg(feature = "faults")] // an attribute only: `__all__` is the same as in the wheel
        module.setattr("Faults", module.py().get_type::<crate::faults::Faults>())?;
        crate::own_files::close_locks_in_forks(module.py())?;
        module.add("COMMIT", env!("KVTRIE_COMMIT"))?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
