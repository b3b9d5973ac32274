//! Estimator of reuse rates by class of touch and age, from counts of lifetimes; `learned` uses it too.
//!
//! A class with few lifetimes is shrunk towards its group, a group towards all. Invariant: rates are finite, and no
//! hazard is above 0.98. Cost: O(buckets^2) per class, at most once
//! every 128 requests.

/// One for each (turn, hits, blocks added), and one for the last block of a prompt by turn.
pub(super) const CLASSES: usize = TURNS * (HITS * SIZES + 1);

/// Ages of requests, two buckets to the octave.
pub(in crate::policy) const BUCKETS: usize = 28;

const TURNS: usize = 4;
const HITS: usize = 5;
const SIZES: usize = 4;

/// Classes of one turn that differ in the blocks added only; the last block of a prompt is its own.
const GROUPS: usize = TURNS * (HITS + 1);

/// Weight of the wider class's estimate, in lifetimes.
const PRIOR: f64 = 128.0;

const MOST_HAZARD: f64 = 0.98;

/// One number per bucket of age.
pub(in crate::policy) type Rates = [f64; BUCKETS];

/// Lifetimes by age: how many reached it, and how many ended there by another touch.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::policy) struct Counts {
    pub(in crate::policy) reached: Rates,
    pub(in crate::policy) ended: Rates,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        for b in 0..BUCKETS {
            self.reached[b] += other.reached[b];
            self.ended[b] += other.ended[b];
        }
    }

    /// Halves the counts, so that recent lifetimes weigh more than old ones.
    pub(in crate::policy) fn halve(&mut self) {
        for count in self.reached.iter_mut().chain(&mut self.ended) {
            *count /= 2.0;
        }
    }
}

/// The class of a touch: `turn`, earlier touches of the block, blocks added; and whether it is the
/// last one of a prompt.
pub(super) fn class_of(turn: u32, hits: u8, added: u32, last: bool) -> u8 {
    let size = (added.max(1).ilog2() / 2).min(3);
    let kind = if last { 20 } else { u32::from(hits.min(4)) * 4 + size };
    u8::try_from(turn.min(3) * 21 + kind).expect("84 classes")
}

fn group_of(class: usize) -> usize {
    class / 21 * (HITS + 1) + class % 21 / SIZES
}

/// The bucket of an age.
pub(in crate::policy) fn bucket(age: u16) -> usize {
    let age = u64::from(age.max(1));
    let octave = age.ilog2();
    let upper = (age * age) >> (2 * octave + 1);
    (2 * octave as usize + usize::from(upper > 0)).min(BUCKETS - 1)
}

/// First age of every bucket, and of one more.
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
pub(in crate::policy) fn start(bucket: usize) -> u64 {
    STARTS[bucket]
}

/// Reuse rate of every class at every age.
pub(super) fn learn(classes: &[Counts]) -> Vec<Rates> {
    let estimates = Estimates::new(classes, GROUPS, group_of, PRIOR);
    (0..classes.len()).map(|class| estimates.rates(class, group_of(class))).collect()
}

/// Estimates of classes in groups, with the weight `prior` of the wider class's estimate.
#[derive(Clone, Debug)]
pub(in crate::policy) struct Estimates {
    classes: Vec<Counts>,
    groups: Vec<Counts>,
    all: Counts,
    prior: f64,
}

impl Estimates {
    /// Of these counts by class, where `group_of` says the group of `number` that a class belongs to.
    pub(in crate::policy) fn new(
        classes: &[Counts],
        number: usize,
        group_of: impl Fn(usize) -> usize,
        prior: f64,
    ) -> Self {
        let mut groups = vec![Counts::default(); number];
        let mut all = Counts::default();
        for (class, counts) in classes.iter().enumerate() {
            groups[group_of(class)].add(counts);
            all.add(counts);
        }
        Self { classes: classes.to_vec(), groups, all, prior }
    }

    /// The counts of a class.
    pub(in crate::policy) fn counts(&self, class: usize) -> &Counts {
        &self.classes[class]
    }

    /// Reuse rate of a class of this group at every age.
    pub(in crate::policy) fn rates(&self, class: usize, group: usize) -> Rates {
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

/// Best rate of reuse per request over all times to keep a block, from each bucket on.
fn worth(hazard: &Rates) -> Rates {
    // By the bucket that is waited from: side by side, so that the compiler takes several at once.
    let (mut alive, mut uses, mut time) = ([1.0; BUCKETS], [0.0; BUCKETS], [0.0; BUCKETS]);
    let mut best = [0.0_f64; BUCKETS];
    for (b, h) in hazard.iter().enumerate() {
        // Two of the lowest buckets have the same first age, and one of them is empty.
        let width = start(b + 1) - start(b);
        if width > 0 {
            let width = real(width);
            for from in 0..=b {
                uses[from] += alive[from] * h;
                time[from] += alive[from] * (1.0 - h / 2.0) * width;
                alive[from] *= 1.0 - h;
                best[from] = best[from].max(uses[from] / time[from]);
            }
        }
    }
    best
}

#[expect(clippy::cast_precision_loss, reason = "widths are small")]
fn real(width: u64) -> f64 {
    width as f64
}

#[cfg(test)]
mod tests {
    use super::{
        BUCKETS, CLASSES, Counts, GROUPS, bucket, class_of, group_of, learn, start, worth,
    };

    #[test]
    fn there_are_two_buckets_to_the_octave() {
        for b in 0..BUCKETS {
            let first = u16::try_from(start(b)).expect("ages below 2^14");
            // No age lies between 2^0.5 and 2.
            let expected = if b == 1 { 2 } else { b };
            assert_eq!(bucket(first), expected);
            assert!(first == 1 || bucket(first - 1) < expected);
        }
        assert_eq!([0, 1, 2, 3, 90, 91, u16::MAX].map(bucket), [0, 0, 2, 3, 12, 13, 27]);
    }

    #[test]
    fn the_worth_is_the_best_rate_of_waiting() {
        // Nothing until age 16, then half of what is left at once.
        let mut hazard = [0.0; BUCKETS];
        hazard[8] = 0.5;
        let worth = worth(&hazard);
        let width = 23.0 - 16.0;
        assert!((worth[8] - 0.5 / (0.75 * width)).abs() < 1e-12);
        assert!((worth[0] - 0.5 / (15.0 + 0.75 * width)).abs() < 1e-12);
        assert!(worth[9] < 1e-12);
    }

    #[test]
    fn classes_fall_into_groups_of_one_turn_and_number_of_hits() {
        let mut sizes = [0; GROUPS];
        for class in 0..CLASSES {
            sizes[group_of(class)] += 1;
        }
        assert_eq!(sizes[..], [4, 4, 4, 4, 4, 1].repeat(4)[..]);
        let classes = [(0, 0, 0, false), (0, 1, 4, false), (1, 9, 99, false), (9, 2, 1, true)];
        assert_eq!(classes.map(|(a, b, c, d)| class_of(a, b, c, d)), [0, 5, 40, 83]);
    }

    /// All lifetimes of one class end at age 4, those of another never do.
    #[test]
    fn a_class_that_comes_back_is_worth_more() {
        let mut classes = vec![Counts::default(); CLASSES];
        for b in 0..BUCKETS {
            classes[0].reached[b] = if b <= 4 { 1000.0 } else { 0.0 };
            classes[50].reached[b] = 1000.0;
        }
        classes[0].ended[4] = 1000.0;
        let worth = learn(&classes);
        assert!(worth[0][0] > 10.0 * worth[50][0]);
        // A class without lifetimes lies between the two, nearer to its group.
        assert!(worth[0][4] > worth[1][4] && worth[1][4] > worth[51][4]);
        assert!(worth[51][4] > worth[50][4]);
    }
}
