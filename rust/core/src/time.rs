//! Time as an argument: integer nanoseconds, monotone by construction.
//!
//! Invariant: the clock never runs backwards. Threads race, so a `now` below the last one is
//! clamped to it and counted. Cost: one comparison.

/// Nanoseconds on the caller's monotone clock.
pub type Nanos = u64;

/// A time that never comes: the ready time of what cannot be predicted.
pub const NEVER: Nanos = Nanos::MAX;

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
    use super::Clock;

    #[test]
    fn a_time_that_runs_backwards_is_clamped_and_counted() {
        let mut clock = Clock::default();
        assert_eq!(clock.advance(7), 7);
        assert_eq!(clock.advance(3), 7);
        assert_eq!(clock.advance(9), 9);
        assert_eq!((clock.last(), clock.clamped()), (9, 1));
    }
}
