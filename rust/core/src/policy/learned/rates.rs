//! Estimator of reuse rates by class of use and age, from counts of lifetimes.
//!
//! For each class the counts are the numbers of lifetimes, from a use of a block to the next,
//! reaching an age and ending there. This rate of ending, the hazard, gives the best rate of reuse
//! over all times to wait (a Gittins index). A class with few lifetimes is shrunk towards its
//! group, and a group towards all classes. Invariant: rates are finite, and no hazard is above
//! 0.98. Cost: O(buckets) per class, at most once every 128 requests.

use crate::visits;

/// Number of age buckets, two per octave.
pub(super) const BUCKETS: usize = 28;

const MOST_HAZARD: f64 = 0.98;

/// A number per bucket of age.
pub(super) type Rates = [f64; BUCKETS];

/// Numbers of lifetimes by age: reaching the age, and ending there by reuse.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) reached: Rates,
    pub(super) ended: Rates,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        for b in 0..BUCKETS {
            self.reached[b] += other.reached[b];
            self.ended[b] += other.ended[b];
        }
    }

    /// Halves the counts to weigh recent lifetimes more.
    pub(super) fn halve(&mut self) {
        for count in self.reached.iter_mut().chain(&mut self.ended) {
            *count /= 2.0;
        }
    }
}

/// The bucket of an age.
pub(super) fn bucket(age: u16) -> usize {
    let age = u64::from(age.max(1));
    let octave = age.ilog2();
    let upper = (age * age) >> (2 * octave + 1);
    (2 * octave as usize + usize::from(upper > 0)).min(BUCKETS - 1)
}

/// First age of every bucket, and the end of the last bucket.
const STARTS: [u64; BUCKETS + 1] = {
    let mut starts = [0; BUCKETS + 1];
    let mut bucket = 0;
    while bucket <= BUCKETS {
        let square = 1_u64 << bucket;
        let root = square.isqrt();
        starts[bucket] = if root * root < square { root + 1 } else { root };
        bucket += 1;
    }
    starts
};

/// The first age of a bucket.
pub(super) fn start(bucket: usize) -> u64 {
    STARTS[bucket]
}

/// Estimates of classes in groups, with the weight `prior` of the wider class's estimate.
#[derive(Clone, Debug)]
pub(super) struct Estimates {
    classes: Vec<Counts>,
    groups: Vec<Counts>,
    all: Counts,
    prior: f64,
}

impl Estimates {
    /// Creates estimates from counts by class. `group_of` maps a class to its group, below
    /// `number`.
    pub(super) fn new(
        classes: &[Counts],
        number: usize,
        group_of: impl Fn(usize) -> usize,
        prior: f64,
    ) -> Self {
        let mut groups = vec![Counts::default(); number];
        let mut all = Counts::default();
        visits::note(classes.len());
        for (class, counts) in classes.iter().enumerate() {
            groups[group_of(class)].add(counts);
            all.add(counts);
        }
        Self { classes: classes.to_vec(), groups, all, prior }
    }

    /// The counts of a class.
    pub(super) fn counts(&self, class: usize) -> &Counts {
        &self.classes[class]
    }

    /// Reuse rate of a class of this group at every age.
    pub(super) fn rates(&self, class: usize, group: usize) -> Rates {
        let (own, group, all) = (&self.classes[class], &self.groups[group], &self.all);
        let hazard = |b: usize| {
            // The constants keep empty classes finite.
            let widest = (all.ended[b] + 0.5) / (all.reached[b] + all.ended[b].min(1.0) + 10.0);
            let wide = (group.ended[b] + self.prior * widest) / (group.reached[b] + self.prior);
            let hazard = (own.ended[b] + self.prior * wide) / (own.reached[b] + self.prior);
            hazard.min(MOST_HAZARD)
        };
        worth(&std::array::from_fn(hazard))
    }
}

/// Best rate of reuse per request over all times to keep a block, for each bucket.
///
/// Goes from the last bucket to the first. A waiting time absorbs the next as long as the next has
/// a higher rate. The remaining waiting times have falling rates, and the first is the best for the
/// bucket.
fn worth(hazard: &Rates) -> Rates {
    let mut best = [0.0; BUCKETS];
    // Expected uses and requests of a waiting time, and the share of blocks outliving it.
    let mut waits = [(0.0, 1.0, 1.0); BUCKETS];
    let mut number = 0;
    for b in (0..BUCKETS).rev() {
        // Two of the lowest buckets have the same first age, so the first of them is empty.
        let width = start(b + 1) - start(b);
        if width > 0 {
            let h = hazard[b];
            let (mut uses, mut time, mut alive) = (h, (1.0 - h / 2.0) * real(width), 1.0 - h);
            while let Some(&(more, longer, outlive)) = waits[..number].last()
                && more * time > uses * longer
            {
                (uses, time) = (uses + alive * more, time + alive * longer);
                alive *= outlive;
                number -= 1;
            }
            waits[number] = (uses, time, alive);
            number += 1;
        }
        if let Some(&(uses, time, _)) = waits[..number].last() {
            best[b] = uses / time;
        }
    }
    best
}

#[expect(clippy::cast_precision_loss, reason = "small numbers")]
pub(super) fn real(width: u64) -> f64 {
    width as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{BUCKETS, Counts, Estimates, bucket, real, start, worth};

    #[test]
    fn there_are_two_buckets_to_the_octave() {
        for b in 0..BUCKETS {
            let first = u16::try_from(start(b)).expect("ages below 2^14");
            // No age is between 2^0.5 and 2.
            let expected = if b == 1 { 2 } else { b };
            assert_eq!(bucket(first), expected);
            assert!(first == 1 || bucket(first - 1) < expected);
        }
        assert_eq!([0, 1, 2, 3, 90, 91, u16::MAX].map(bucket), [0, 0, 2, 3, 12, 13, 27]);
    }

    #[test]
    fn the_worth_is_the_best_rate_of_waiting() {
        // No ends until age 16, then half of the rest at once.
        let mut hazard = [0.0; BUCKETS];
        hazard[8] = 0.5;
        let worth = worth(&hazard);
        let width = 23.0 - 16.0;
        assert!((worth[8] - 0.5 / (0.75 * width)).abs() < 1e-12);
        assert!((worth[0] - 0.5 / (15.0 + 0.75 * width)).abs() < 1e-12);
        assert!(worth[9] < 1e-12);
    }

    proptest! {
        /// Compares the rates with the best of all waiting times by exhaustive search.
        #[test]
        fn the_worth_is_the_best_of_all_waits(
            hazard in prop::array::uniform28(prop_oneof![Just(0.0), 0.0..0.01, 0.0..0.98]),
        ) {
            let found = worth(&hazard);
            for (from, found) in found.into_iter().enumerate() {
                let (mut alive, mut uses, mut time, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
                for (b, h) in hazard.iter().enumerate().skip(from) {
                    let width = start(b + 1) - start(b);
                    if width > 0 {
                        uses += alive * h;
                        time += alive * (1.0 - h / 2.0) * real(width);
                        alive *= 1.0 - h;
                        best = best.max(uses / time);
                    }
                }
                prop_assert!((found - best).abs() <= 1e-12 * best.max(1e-9), "{} {}", found, best);
            }
        }
    }

    /// All lifetimes of class 0 end at age 4, and lifetimes of class 2 never end. Classes 0 and 1
    /// are a group, 2 and 3 another.
    #[test]
    fn a_class_that_comes_back_is_worth_more() {
        let mut classes = vec![Counts::default(); 4];
        for b in 0..BUCKETS {
            classes[0].reached[b] = if b <= 4 { 1000.0 } else { 0.0 };
            classes[2].reached[b] = 1000.0;
        }
        classes[0].ended[4] = 1000.0;
        let group_of = |class: usize| class / 2;
        let estimates = Estimates::new(&classes, 2, group_of, 128.0);
        let worth = [0, 1, 2, 3].map(|class| estimates.rates(class, group_of(class)));
        assert!(worth[0][0] > 10.0 * worth[2][0]);
        // A class without lifetimes is between the two, nearer to its group.
        assert!(worth[0][4] > worth[1][4] && worth[1][4] > worth[3][4]);
        assert!(worth[3][4] > worth[2][4]);
    }
}
