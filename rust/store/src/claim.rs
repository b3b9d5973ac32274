//! Claims: one call at a time for a slot, any number for different slots.
//!
//! Invariant: a slot is claimed by at most one call; a second one for it waits. No lock is held
//! while bytes move. Cost: one short lock per call.

use std::collections::BTreeSet;
use std::iter::StepBy;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A lock whose holder cannot leave it half-done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Slots of one segment, one behind another there.
pub(crate) type Slots = StepBy<Range<u32>>;

/// The slots from `first` on and below `end`, where so many folders take turns.
pub(crate) fn slots(first: u32, end: u32, turns: u32) -> Slots {
    (first..end).step_by(turns as usize)
}

/// The slots that calls work on.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    busy: Mutex<BTreeSet<u32>>,
    given: Condvar,
}

/// The right to work on some slots, until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    claims: &'a Claims,
    slots: Slots,
}

impl Claims {
    /// Claims a slot; waits while another call has it.
    pub(crate) fn one(&self, slot: u32) -> Claim<'_> {
        let busy = lock(&self.busy);
        let taken = |busy: &mut BTreeSet<u32>| busy.contains(&slot);
        let mut busy = self.given.wait_while(busy, taken).unwrap_or_else(PoisonError::into_inner);
        busy.insert(slot);
        Claim { claims: self, slots: slots(slot, slot + 1, 1) }
    }

    /// Claims a slot unless a call has it.
    pub(crate) fn now(&self, slot: u32) -> Option<Claim<'_>> {
        self.all(slots(slot, slot + 1, 1))
    }

    /// Claims all of `slots`, or none if a call has one of them.
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
        self.claims.given.notify_all();
    }
}
