//! The core's manager behind one mutex, and what every call through it has in common.
//!
//! Invariant: no Python object is touched while the mutex is held, so that waiting for it never
//! waits for the interpreter; a panic of the core poisons the manager and becomes an
//! `InvariantError`. Cost: one uncontended lock per call.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvtrie_core::error::{Error, Result};
use kvtrie_core::manager::Manager;
use kvtrie_core::tier::Kind;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyString;

use crate::error::{bad, raise};
use crate::number::small;

/// A manager that several Python objects hold.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Inner>);

struct Inner {
    manager: Mutex<Manager>,
    /// Kind and layer slots of each tier, which never change.
    tiers: Vec<(Kind, bool)>,
}

impl Shared {
    pub(crate) fn new(manager: Manager) -> Self {
        let tiers = manager.settings().tiers.iter();
        let tiers = tiers.map(|tier| (tier.kind, tier.layer_slots)).collect();
        Self(Arc::new(Inner { manager: Mutex::new(manager), tiers }))
    }

    /// A tier's index, from its index or its kind.
    pub(crate) fn tier(&self, given: &Bound<'_, PyAny>) -> PyResult<usize> {
        let tiers = &self.0.tiers;
        let Ok(name) = given.cast::<PyString>() else {
            return Ok(usize::from(small(given, "tier", last(tiers))?));
        };
        let name = name.to_str()?;
        tiers.iter().position(|(kind, _)| kind.name() == name).ok_or_else(|| {
            let known: Vec<&str> = tiers.iter().map(|(kind, _)| kind.name()).collect();
            bad(format!("there is no tier '{name}', only {}", known.join(", ")))
        })
    }

    /// How many tiers there are.
    pub(crate) fn tiers(&self) -> usize {
        self.0.tiers.len()
    }

    /// Whether a slot of that tier holds one layer.
    pub(crate) fn layer_slots(&self, tier: usize) -> bool {
        self.0.tiers[tier].1
    }

    /// Runs a call of a few microseconds, during which this thread keeps the interpreter.
    pub(crate) fn call<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Manager) -> Result<T>,
    ) -> PyResult<T> {
        let guard = self.0.manager.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        guarded(guard, work).map_err(raise)
    }

    /// Runs a call that may take long, during which other threads run Python.
    pub(crate) fn long<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Manager) -> Result<T> + Send,
    ) -> PyResult<T> {
        let run = || guarded(self.0.manager.lock().unwrap_or_else(PoisonError::into_inner), work);
        py.detach(run).map_err(raise)
    }
}

fn last(tiers: &[(Kind, bool)]) -> u8 {
    u8::try_from(tiers.len() - 1).unwrap_or(u8::MAX)
}

fn guarded<T>(
    mut manager: MutexGuard<'_, Manager>,
    work: impl FnOnce(&mut Manager) -> Result<T>,
) -> Result<T> {
    catch_unwind(AssertUnwindSafe(|| work(&mut manager))).unwrap_or_else(|panic| {
        let reason = format!("the core panicked: {}", text(panic.as_ref()));
        manager.poison(&reason);
        Err(Error::invariant(reason))
    })
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
