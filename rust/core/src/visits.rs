//! Counter of the entries of side tables that calls visit, for tests and debug builds.
//!
//! A call that goes through a list whose length other users decide (owners of a block, sessions that
//! end in one, tenants with a quota) counts the entries it visits, and a test bounds the number. Invariant: one count per thread, which only grows. Cost: an addition per
//! note; nothing in release builds, where a note is empty and nothing counts.

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

/// Result of `call`, and the number of entries that this thread visited during it.
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
