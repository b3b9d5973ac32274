//! Counter of visited side table entries, for tests and debug builds.
//!
//! Calls that scan a list with a length controlled by other users (owners of a block, sessions
//! ending in a block, tenants with a quota) count the visited entries, and a test bounds the
//! number. Invariant: a count per thread, never decreasing. Cost: an addition per note. Release
//! builds compile it to nothing.

#[cfg(any(test, debug_assertions))]
use std::cell::Cell;

#[cfg(any(test, debug_assertions))]
std::thread_local! {
    static LOOKED_AT: Cell<u64> = const { Cell::new(0) };
}

/// Counts `entries` visited entries.
#[cfg(any(test, debug_assertions))]
pub(crate) fn note(entries: usize) {
    LOOKED_AT.set(LOOKED_AT.get() + entries as u64);
}

/// Counts nothing in release builds.
#[cfg(not(any(test, debug_assertions)))]
#[inline]
pub(crate) fn note(_entries: usize) {}

/// Result of `call`, and the number of entries visited by this thread during it.
#[cfg(any(test, debug_assertions))]
pub fn during<R>(call: impl FnOnce() -> R) -> (R, u64) {
    let before = LOOKED_AT.get();
    let given = call();
    (given, LOOKED_AT.get() - before)
}

#[cfg(test)]
mod tests {
    use super::{during, note};

    #[test]
    fn visits_during_a_call_are_counted() {
        note(5);
        let (((), inner), outer) = during(|| {
            note(2);
            during(|| note(3))
        });
        assert_eq!((inner, outer), (3, 5));
    }
}
