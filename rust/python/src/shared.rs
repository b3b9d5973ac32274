//! The locked manager, shared by several Python objects.
//!
//! Invariant: no Python object is touched under the mutex, so waiting for it never waits for the
//! interpreter. Cost: an uncontended lock per call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtrie_core::{Kind, Locked, Manager, Result};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyString;

use crate::error::{bad, raise};
use crate::number::small;
use crate::text::text;

/// Manager shared by several Python objects.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Inner>);

struct Inner {
    manager: Arc<Locked>,
    /// Kind and layer slots of each tier. Constant.
    tiers: Vec<(Kind, bool)>,
    /// Whether an object publishes the events.
    published: AtomicBool,
}

impl Shared {
    pub(crate) fn new(manager: Manager) -> Self {
        let tiers = manager.settings().tiers.iter();
        let tiers = tiers.map(|tier| (tier.kind, tier.layer_slots)).collect();
        Self(Arc::new(Inner {
            manager: Arc::new(Locked::new(manager)),
            tiers,
            published: AtomicBool::new(false),
        }))
    }

    /// Manager for a simulation.
    pub(crate) fn manager(&self) -> Arc<Locked> {
        Arc::clone(&self.0.manager)
    }

    /// Index of a tier, from an index or a kind.
    pub(crate) fn tier(&self, given: &Bound<'_, PyAny>) -> PyResult<usize> {
        let tiers = &self.0.tiers;
        if !given.is_instance_of::<PyString>() {
            let last = u8::try_from(tiers.len() - 1).unwrap_or(u8::MAX);
            return Ok(usize::from(small(given, "tier", last)?));
        }
        let name = text(given, "tier")?;
        tiers.iter().position(|(kind, _)| kind.name() == name).ok_or_else(|| {
            let known: Vec<&str> = tiers.iter().map(|(kind, _)| kind.name()).collect();
            bad(format!("there is no tier '{name}', only {}", known.join(", ")))
        })
    }

    /// Start publishing. False if an object already publishes.
    pub(crate) fn publish(&self) -> bool {
        !self.0.published.swap(true, Ordering::AcqRel)
    }

    /// End publishing.
    pub(crate) fn end_publishing(&self) {
        self.0.published.store(false, Ordering::Release);
    }

    /// Number of tiers.
    pub(crate) fn tiers(&self) -> usize {
        self.0.tiers.len()
    }

    /// Whether slots of a tier hold single layers.
    pub(crate) fn layer_slots(&self, tier: usize) -> bool {
        self.0.tiers[tier].1
    }

    /// Run a call of a few microseconds with the interpreter's lock.
    pub(crate) fn call<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Manager) -> Result<T>,
    ) -> PyResult<T> {
        self.0.manager.call_by(|mutex| mutex.lock_py_attached(py), work).map_err(raise)
    }

    /// Run a possibly long call without the interpreter's lock.
    pub(crate) fn long<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Manager) -> Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.0.manager.call(work)).map_err(raise)
    }
}
