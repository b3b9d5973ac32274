//! A manager protected by a mutex, for engines with several threads.
//!
//! Invariant: each call is a single critical section, so concurrent calls are linearizable. A panic
//! of the core poisons the manager and becomes an error. Cost: one uncontended lock per call.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};
use crate::manager::Manager;

use super::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// A manager for several threads.
#[derive(Debug)]
pub struct Locked(Mutex<Manager>);

impl Locked {
    /// Wraps a manager.
    #[must_use]
    pub fn new(manager: Manager) -> Self {
        Self(Mutex::new(manager))
    }

    /// Locks the manager for inspection.
    pub fn lock(&self) -> MutexGuard<'_, Manager> {
        // A poisoned mutex is usable: the manager poisons itself after a panic and refuses calls.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on the manager under the lock.
    ///
    /// # Errors
    /// The errors of `work`. [`Error::Invariant`] if `work` panics, and in all later calls.
    pub fn call<T>(&self, work: impl FnOnce(&mut Manager) -> Result<T>) -> Result<T> {
        self.call_by(Mutex::lock, work)
    }

    /// [`call`](Self::call) with a custom wait for the mutex.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn call_by<'a, T>(
        &'a self,
        lock: impl FnOnce(&'a Mutex<Manager>) -> LockResult<MutexGuard<'a, Manager>>,
        work: impl FnOnce(&mut Manager) -> Result<T>,
    ) -> Result<T> {
        // A poisoned mutex is usable: the manager poisons itself after a panic and refuses calls.
        let mut manager = lock(&self.0).unwrap_or_else(PoisonError::into_inner);
        catch_unwind(AssertUnwindSafe(|| work(&mut manager))).unwrap_or_else(|panic| {
            let reason = format!("the core panicked: {}", text(panic.as_ref()));
            manager.poison(&reason);
            Err(Error::invariant(reason))
        })
    }
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
