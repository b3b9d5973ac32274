//! Time as an argument: integer nanoseconds, monotone by construction.
//!
//! Invariant: the clock never runs backwards. Threads race, so a `now` below the last one is
//! clamped to it and counted. Cost: one comparison.

/// Nanoseconds on the caller's monotone clock.
pub type Nanos = u64;

/// A time that never comes: the ready time of what cannot be predicted.
pub const NEVER: Nanos = Nanos::MAX;

/// A time as it is kept of a use: it may lie before the clock's zero, up to 146 years.
///
/// A use that another manager saw, before this machine or process started, keeps its age.
pub type Stamp = u64;

/// The clock's zero among the stamps.
const ZERO: Stamp = 1 << 62;

/// The stamp of a time of the clock.
#[must_use]
pub fn stamp(now: Nanos) -> Stamp {
    now.saturating_add(ZERO)
}

/// The last time seen, and how often a caller was behind it.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    last: Nanos,
    clamped: u64,
}

impl Clock {
    /// Takes the caller's `now` and returns the time to use.
    pub fn advance(&mut self, now: Nanos) -> Nanos {
        if now < self.last {
            self.clamped += 1;
        } else {
            self.last = now;
        }
        self.last
    }

    /// The latest time seen.
    #[must_use]
    pub fn last(&self) -> Nanos {
        self.last
    }

    /// How many calls came with a time below the latest one.
    #[must_use]
    pub fn clamped(&self) -> u64 {
        self.clamped
    }
}

#[cfg(test)]
mod tests {
    use super::{Clock, stamp};

    #[test]
    fn a_time_that_runs_backwards_is_clamped_and_counted() {
        let mut clock = Clock::default();
        assert_eq!(clock.advance(7), 7);
        assert_eq!(clock.advance(3), 7);
        assert_eq!(clock.advance(9), 9);
        assert_eq!((clock.last(), clock.clamped()), (9, 1));
    }

    #[test]
    fn what_was_used_before_the_clocks_zero_keeps_its_order() {
        let year = 365 * 24 * 3600 * 1_000_000_000;
        let uses = [100 * year, 2, 1, 0].map(|age| stamp(1) - age);
        assert!(uses.is_sorted_by(|a, b| a < b));
        assert_eq!(stamp(9) - uses[1], 10);
    }
}
