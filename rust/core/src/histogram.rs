//! Histogram of times with logarithmic classes, each at most a sixteenth wide.
//!
//! Invariant: `count` is the sum over all classes, and `sum` is exact. All classes exist from the
//! start, so recording allocates nothing. Cost: a few integer operations per value, 6 kB per
//! histogram.

use hdrhistogram::Histogram as Classes;

use crate::time::Nanos;

/// Longest distinguished time, 13 days. Longer times are clamped to it.
const LONGEST: Nanos = (1 << 50) - 1;

/// Histogram of times.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    classes: Classes<u64>,
    sum: u128,
}

impl Default for Histogram {
    fn default() -> Self {
        let classes = Classes::new_with_bounds(1, LONGEST, 1).expect("these bounds are good");
        Self { classes, sum: 0 }
    }
}

impl Histogram {
    /// Records a time `often` times.
    pub(crate) fn record(&mut self, time: Nanos, often: u64) {
        self.classes.saturating_record_n(time, often);
        self.sum += u128::from(time) * u128::from(often);
    }

    /// Number of recorded times.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.classes.len()
    }

    /// Sum of the recorded times in nanoseconds.
    #[must_use]
    pub fn sum(&self) -> u128 {
        self.sum
    }

    /// Quantile, with an error of at most the width of its class. 0 if no time was recorded.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Nanos {
        self.classes.value_at_quantile(share)
    }

    /// Cumulative counts at each of the ascending `bounds`. A class containing a bound counts as
    /// below it.
    #[must_use]
    pub fn up_to(&self, bounds: &[Nanos]) -> Vec<u64> {
        let mut counts = vec![0; bounds.len()];
        for class in self.classes.iter_recorded() {
            let least = self.classes.lowest_equivalent(class.value_iterated_to());
            let at = bounds.partition_point(|&bound| bound < least);
            if let Some(count) = counts.get_mut(at) {
                *count += class.count_at_value();
            }
        }
        let mut below = 0;
        for count in &mut counts {
            below += *count;
            *count = below;
        }
        counts
    }

    /// Difference to an earlier state `before`. `None` if `before` is not an earlier state.
    #[must_use]
    pub fn since(&self, before: &Self) -> Option<Self> {
        let mut classes = self.classes.clone();
        classes.subtract(&before.classes).ok()?;
        Some(Self { classes, sum: self.sum.checked_sub(before.sum)? })
    }
}

#[cfg(test)]
mod tests {
    use super::{Histogram, LONGEST};
    use crate::time::NEVER;

    #[test]
    fn quantiles_are_at_most_a_sixteenth_off() {
        let mut times = Histogram::default();
        assert_eq!((times.count(), times.sum(), times.quantile(0.5)), (0, 0, 0));
        for time in 1..=100_000 {
            times.record(time, 1);
        }
        assert_eq!((times.count(), times.sum()), (100_000, 5_000_050_000));
        for percent in 1..=100_u32 {
            let (found, exact) = (times.quantile(f64::from(percent) / 100.0), percent * 1000);
            assert!(found >= u64::from(exact) && found <= u64::from(exact + exact / 16 + 1));
        }
    }

    #[test]
    fn times_beyond_the_last_class_count_too() {
        let mut times = Histogram::default();
        times.record(0, 2);
        times.record(NEVER, 3);
        assert_eq!((times.count(), times.sum()), (5, 3 * u128::from(NEVER)));
        assert_eq!((times.quantile(0.0), times.quantile(1.0)), (0, LONGEST));
        assert_eq!(times.up_to(&[0, 1, NEVER]), [2, 2, 5]);
    }

    #[test]
    fn bounds_count_the_times_below_them() {
        let mut times = Histogram::default();
        for (time, often) in [(5, 1), (10, 2), (20, 4), (1_000_000, 8)] {
            times.record(time, often);
        }
        assert_eq!(times.up_to(&[4, 5, 9, 10, 30, 999_999, 2_000_000]), [0, 1, 1, 3, 7, 15, 15]);
        assert_eq!(times.up_to(&[]), []);
    }

    #[test]
    fn a_difference_has_the_times_between() {
        let mut times = Histogram::default();
        times.record(7, 2);
        let before = times.clone();
        times.record(9, 1);
        let between = times.since(&before).unwrap();
        assert_eq!((between.count(), between.sum(), between.quantile(1.0)), (1, 9, 9));
        assert_eq!(before.since(&times), None);
    }
}
