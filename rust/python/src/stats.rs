//! Snapshot of a manager's counters.
//!
//! Invariant: immutable, and consistent, because all counters are read under one lock. Cost: a copy
//! of the counters and of 30 kB of histograms per tier.

mod lane;
mod tier;

use kvtrie_core::Manager;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyMappingProxy};

use crate::error::bad;
use crate::histogram::Histogram;

pub(crate) use lane::LaneStats;
pub(crate) use tier::TierStats;

/// Difference of two states of a counter.
trait Since: Sized {
    /// Return `None` if `before` is not an earlier state.
    fn since(&self, before: &Self) -> Option<Self>;
}

impl Since for u64 {
    fn since(&self, before: &Self) -> Option<Self> {
        self.checked_sub(*before)
    }
}

impl Since for Histogram {
    fn since(&self, before: &Self) -> Option<Self> {
        self.between(before)
    }
}

/// A name has no difference.
impl Since for String {
    fn since(&self, before: &Self) -> Option<Self> {
        (self == before).then(|| self.clone())
    }
}

impl<T: Since> Since for Vec<T> {
    fn since(&self, before: &Self) -> Option<Self> {
        let pairs = self.iter().zip(before);
        (self.len() == before.len()).then(|| pairs.map(|(now, then)| now.since(then)).collect())?
    }
}

/// Defines a class of numbers and histograms. `counters` only grow, `gauges` may shrink.
macro_rules! counted {
    (
        $(#[$meta:meta])* $name:ident;
        counters $($counter:ident)*;
        gauges $($gauge:ident)*;
        times $($(#[$doc:meta])* $time:ident)*;
        $($(#[$of:meta])* $field:ident: $type:ty),*
    ) => {
        $(#[$meta])*
        #[pyclass(frozen, module = "kvtrie")]
        #[derive(Clone)]
        pub(crate) struct $name {
            $(#[pyo3(get)] pub(super) $counter: u64,)*
            $(#[pyo3(get)] $gauge: u64,)*
            $($(#[$doc])* #[pyo3(get)] $time: $crate::histogram::Histogram,)*
            $($(#[$of])* pub(super) $field: $type,)*
        }

        impl $name {
            /// Numbers by name, and figures of the histograms.
            pub(super) fn numbers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                let numbers = PyDict::new(py);
                $(numbers.set_item(stringify!($counter), self.$counter)?;)*
                $(numbers.set_item(stringify!($gauge), self.$gauge)?;)*
                $(numbers.set_item(stringify!($time), self.$time.as_dict(py)?)?;)*
                Ok(numbers)
            }
        }

        impl $crate::stats::Since for $name {
            fn since(&self, before: &Self) -> Option<Self> {
                Some(Self {
                    $($counter: self.$counter.since(&before.$counter)?,)*
                    $($gauge: self.$gauge,)*
                    $($time: self.$time.since(&before.$time)?,)*
                    $($field: self.$field.since(&before.$field)?,)*
                })
            }
        }
    };
}

use counted;

/// Creates a value. Listed fields are copied from sources with the same field names.
macro_rules! filled {
    ($($from:ident { $($field:ident)* })*; $($given:tt)*) => {
        Self { $($($field: $from.$field,)*)* $($given)* }
    };
}

pub(crate) use filled;

counted! {
    /// Counters of requests, and current totals.
    Stats;
    counters requests refused blocks_wanted tokens_wanted inserted duplicates failed_lost clamped
        doubted;
    gauges blocks leases moves queued now;
    times;
    tiers: Vec<TierStats>, lanes: Vec<LaneStats>
}

/// Read-only dictionary.
fn entries<'py>(
    py: Python<'py>,
    items: impl IntoPyDict<'py>,
) -> PyResult<Bound<'py, PyMappingProxy>> {
    Ok(PyMappingProxy::new(py, items.into_py_dict(py)?.as_mapping()))
}

impl Stats {
    /// Read all counters.
    pub(crate) fn new(manager: &Manager) -> Self {
        let (blocks, leases, clamped) = manager.totals();
        let (queued, moves) = manager.pending();
        let requested = manager.requested();
        let mut missed = requested.blocks - requested.undecided;
        let tiers = manager.settings().tiers.len();
        let tier = |at| {
            missed -= manager.stats(at).hits;
            TierStats::new(manager, at, missed)
        };
        filled! {
            requested { requests refused inserted duplicates failed_lost };
            blocks_wanted: requested.blocks,
            tokens_wanted: requested.tokens,
            clamped,
            doubted: manager.doubted(),
            blocks: blocks as u64,
            leases: leases as u64,
            moves: moves as u64,
            queued: queued as u64,
            now: manager.now(),
            tiers: (0..tiers).map(tier).collect(),
            lanes: (0..manager.lanes().len()).map(|at| LaneStats::new(manager, at)).collect(),
        }
    }
}

#[pymethods]
impl Stats {
    /// Counters per tier, by kind.
    #[getter]
    fn tiers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMappingProxy>> {
        entries(py, self.tiers.iter().map(|tier| (&tier.kind, tier.clone())))
    }

    /// Counters per lane, by name.
    #[getter]
    fn lanes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMappingProxy>> {
        entries(py, self.lanes.iter().map(|lane| (&lane.name, lane.clone())))
    }

    /// Difference since `before`.
    fn since(&self, before: &Self) -> PyResult<Self> {
        Since::since(self, before).ok_or_else(|| {
            let (now, then) = (self.now, before.now);
            bad(format!("the counters of time {then} are no earlier ones of those of {now}"))
        })
    }

    /// Numbers as dictionaries, for JSON.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.numbers(py)?;
        let (tiers, lanes) = (PyDict::new(py), PyDict::new(py));
        for tier in &self.tiers {
            tiers.set_item(&tier.kind, tier.to_dict(py)?)?;
        }
        for lane in &self.lanes {
            lanes.set_item(&lane.name, lane.numbers(py)?)?;
        }
        stats.set_item("tiers", tiers)?;
        stats.set_item("lanes", lanes)?;
        Ok(stats)
    }

    fn __repr__(&self) -> String {
        let found: u64 = self.tiers.iter().map(|tier| tier.hits).sum();
        format!(
            "Stats(requests={}, hits={found} of {} blocks, blocks={}, leases={}, moves={})",
            self.requests, self.blocks_wanted, self.blocks, self.leases, self.moves
        )
    }
}
