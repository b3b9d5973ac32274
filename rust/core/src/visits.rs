//! How many entries of side tables calls look at: a counter for tests and debug builds.
//!
//! Where a call goes through a list whose length a stranger decides (owners of a block, sessions
//! that end in one, tenants with a quota), it notes how many entries it looked at, and a test asks
//! how many a call took. Invariant: one count per thread, which only grows. Cost: an addition per
//! note; nothing in release builds, where a note is empty and nothing counts.

#[cfg(any(test, debug_assertions))]
use std::cell::Cell;

#[cfg(any(test, debug_assertions))]
std::thread_local! {
    static LOOKED_AT: Cell<u64> = const { Cell::new(0) };
}

/// Notes that so many entries were looked at.
#[cfg(any(test, debug_assertions))]
pub fn note(entries: usize) {
    LOOKED_AT.set(LOOKED_AT.get() + entries as u64);
}

/// Notes nothing in release builds.
#[cfg(not(any(test, debug_assertions)))]
#[inline]
pub fn note(_entries: usize) {}

/// What `call` gives, and how many entries this thread looked at meanwhile.
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
    fn what_is_noted_during_a_call_is_counted() {
        note(5);
        let (((), inner), outer) = during(|| {
            note(2);
            during(|| note(3))
        });
        assert_eq!((inner, outer), (3, 5));
    }
}
