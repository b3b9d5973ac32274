//! Clock of integer nanoseconds, fed by the caller and always monotone.
//!
//! Invariant: the clock never runs backwards. Threads race, so a `now` below the last value is
//! clamped to it and counted. A single call advances it by at most a day, because a wrong `now`
//! would clamp all later calls. Cost: two comparisons.

/// Nanoseconds on the caller's monotone clock.
pub type Nanos = u64;

/// Infinite time: the ready time of unpredictable transfers.
pub const NEVER: Nanos = Nanos::MAX;

/// Stored time of a use, up to 146 years before the clock's zero.
///
/// A use recorded by a previous manager, before this machine or process started, keeps its age.
pub(crate) type Stamp = u64;

/// The clock's zero among the stamps.
const ZERO: Stamp = 1 << 62;

/// The stamp of a time of the clock.
#[must_use]
pub(crate) fn stamp(now: Nanos) -> Stamp {
    now.saturating_add(ZERO)
}

/// Maximum step forward of a single call.
pub const DAY: Nanos = 24 * 3600 * 1_000_000_000;

/// Latest time, with counts of calls with an earlier time or a time far ahead.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    last: Nanos,
    /// Times up to here are accepted at once.
    until: Nanos,
    /// Rejected time of the previous call, if any.
    doubt: Option<Nanos>,
    clamped: u64,
    doubted: u64,
}

/// Accepts any time in the first call.
impl Default for Clock {
    fn default() -> Self {
        Self { last: 0, until: Nanos::MAX, doubt: None, clamped: 0, doubted: 0 }
    }
}

impl Clock {
    /// Advances to the caller's `now` and returns the time to use.
    ///
    /// Returns the latest time if `now` is earlier, or if it is more than a day later and not
    /// confirmed by the previous call.
    pub(crate) fn advance(&mut self, now: Nanos) -> Nanos {
        if now > self.until && !self.borne_out(now) {
            self.doubt = Some(now);
            self.doubted += 1;
        } else if now < self.last {
            self.doubt = None;
            self.clamped += 1;
        } else {
            // A call at the latest time, for example without a time argument, settles no doubt.
            if now > self.last {
                self.doubt = None;
            }
            self.last = now;
            self.until = now.saturating_add(DAY);
        }
        self.last
    }

    /// Result of [`Clock::advance`] without a change, for read-only calls.
    #[must_use]
    pub(crate) fn read(&self, now: Nanos) -> Nanos {
        let believed = now <= self.until || self.borne_out(now);
        if believed { now.max(self.last) } else { self.last }
    }

    /// Whether the previous call had about the same time.
    fn borne_out(&self, now: Nanos) -> bool {
        self.doubt.is_some_and(|doubt| now.abs_diff(doubt) <= DAY)
    }

    /// Resets the time, but not the counters. The next call is accepted again.
    pub(crate) fn reset(&mut self) {
        let Self { clamped, doubted, .. } = *self;
        *self = Self { clamped, doubted, ..Self::default() };
    }

    /// The latest time seen.
    #[must_use]
    pub(crate) fn last(&self) -> Nanos {
        self.last
    }

    /// Number of calls with a time below the latest.
    #[must_use]
    pub(crate) fn clamped(&self) -> u64 {
        self.clamped
    }

    /// Number of calls with a rejected time.
    #[must_use]
    pub(crate) fn doubted(&self) -> u64 {
        self.doubted
    }
}

#[cfg(test)]
mod tests {
    use super::{Clock, DAY, Nanos, stamp};

    #[test]
    fn a_time_that_runs_backwards_is_clamped_and_counted() {
        let mut clock = Clock::default();
        assert_eq!(clock.advance(7), 7);
        assert_eq!(clock.advance(3), 7);
        assert_eq!(clock.advance(9), 9);
        assert_eq!((clock.last(), clock.clamped()), (9, 1));
    }

    /// Times used for the calls.
    fn served<const N: usize>(clock: &mut Clock, calls: [Nanos; N]) -> [Nanos; N] {
        calls.map(|now| {
            let read = clock.read(now);
            let at = clock.advance(now);
            assert_eq!(read, at, "a call that changes nothing is served at the same time");
            at
        })
    }

    #[test]
    fn one_wrong_time_moves_no_later_call() {
        let (mut clock, wrong) = (Clock::default(), 40 * DAY);
        assert_eq!(served(&mut clock, [7, wrong, 8, 9, wrong, 10]), [7, 7, 8, 9, 9, 10]);
        assert_eq!(served(&mut clock, [Nanos::MAX, 3, wrong, 11]), [10, 10, 10, 11]);
        assert_eq!((clock.doubted(), clock.clamped()), (4, 1));
    }

    #[test]
    fn a_jump_that_the_next_call_bears_out_is_believed() {
        for (first, second) in [(3 * DAY, 3 * DAY + 5), (3 * DAY, 2 * DAY), (2 * DAY, 3 * DAY)] {
            let mut clock = Clock::default();
            let said = [7, first, second, second + DAY];
            assert_eq!(served(&mut clock, said), [7, 7, second, second + DAY]);
            assert_eq!(clock.doubted(), 1);
        }
        // A call without a time argument comes between.
        assert_eq!(served(&mut Clock::default(), [7, 3 * DAY, 7, 3 * DAY]), [7, 7, 7, 3 * DAY]);
    }

    #[test]
    fn times_up_to_a_day_ahead_and_the_first_one_are_believed_at_once() {
        let (mut clock, first) = (Clock::default(), 900 * DAY);
        assert_eq!(served(&mut clock, [first, first + DAY]), [first, first + DAY]);
        assert_eq!(served(&mut Clock::default(), [0, DAY + 1]), [0, 0]);
        clock.advance(0);
        clock.reset();
        assert_eq!(served(&mut clock, [5]), [5]);
        assert_eq!((clock.doubted(), clock.clamped()), (0, 1));
    }

    #[test]
    fn uses_before_the_clocks_zero_keep_their_order() {
        let year = 365 * 24 * 3600 * 1_000_000_000;
        let uses = [100 * year, 2, 1, 0].map(|age| stamp(1) - age);
        assert!(uses.is_sorted_by(|a, b| a < b));
        assert_eq!(stamp(9) - uses[1], 10);
    }
}
