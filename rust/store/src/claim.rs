//! Claims: per-slot mutual exclusion.
//!
//! Invariant: at most one call has a slot's claim, and later calls wait. No lock is held during
//! I/O. Cost: one short lock per call.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Lock a mutex, even if poisoned: no holder panics halfway, so its data is consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Consecutive slots of a segment.
pub(crate) type Slots = Range<u32>;

/// Table of the slots in use by calls.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    busy: Mutex<BTreeSet<u32>>,
    given: Condvar,
}

/// Claim on slots, until dropped.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    claims: &'a Claims,
    slots: Slots,
}

impl Claims {
    /// Claim a slot. Waits while it is claimed.
    pub(crate) fn one(&self, slot: u32) -> Claim<'_> {
        let busy = lock(&self.busy);
        let taken = |busy: &mut BTreeSet<u32>| busy.contains(&slot);
        let mut busy = self.given.wait_while(busy, taken).unwrap_or_else(PoisonError::into_inner);
        busy.insert(slot);
        Claim { claims: self, slots: slot..slot + 1 }
    }

    /// Claim a slot if it is unclaimed.
    pub(crate) fn now(&self, slot: u32) -> Option<Claim<'_>> {
        self.all(slot..slot + 1)
    }

    /// Claim all of `slots`, or none if any is claimed.
    pub(crate) fn all(&self, slots: Slots) -> Option<Claim<'_>> {
        let mut busy = lock(&self.busy);
        if slots.clone().any(|slot| busy.contains(&slot)) {
            return None;
        }
        busy.extend(slots.clone());
        Some(Claim { claims: self, slots })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut busy = lock(&self.claims.busy);
        for slot in self.slots.clone() {
            busy.remove(&slot);
        }
        // Waiters wait for different slots, so all must wake up.
        self.claims.given.notify_all();
    }
}
