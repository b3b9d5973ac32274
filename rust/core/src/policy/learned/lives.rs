//! Lives of sampled blocks, resident or not: a ring buffer of the latest uses, with counts by class
//! and age.
//!
//! A life goes from a use of a block to its next use. Invariant: each block's latest use is open
//! and in the chain of its hash as long as the ring holds it. Cost: O(1) per use. 20 bytes per use
//! in the ring, 4 of them in pages allocated at the first write.

use std::sync::Arc;

use prefetch_index::prefetch_index;

use super::rates::{BUCKETS, bucket, real, start};
use super::{CLASSES, Counts, Reuse};
use crate::paged_vec::{PAGE, PagedVec};
use crate::visits;

/// Maximum number of requests between two estimates.
const PERIOD: u64 = 128;

/// New estimates are made after this part of the ring is new, because uses dropped from the ring
/// earlier count at no age.
const PART: u64 = 4;

/// Weight of the wider class's estimate in the densest sample.
const PRIOR: f64 = 16.0;

/// Minimum length of the ring.
const LEAST_WINDOW: u64 = 8192;

/// Maximum length of the ring. Blocks of a sequence are used together, so a denser sample of a
/// large tier adds few independent lives.
const MOST_WINDOW: u64 = 4 * LEAST_WINDOW;

/// Length of an open life.
const OPEN: u16 = u16::MAX;

/// End of a chain.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Life {
    print: u32,
    /// The request, modulo 2^32.
    at: u32,
    /// The next life of the chain.
    next: u32,
    /// Its length in requests, or [`OPEN`].
    lasted: u16,
    class: u8,
}

/// Selection of sampled blocks, and the span of the ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampling {
    /// Sample 1 block in this number, a power of two.
    one_in: u64,
    /// Sampled uses covered by the ring.
    window: u64,
    /// Weight of the wider class's estimate, in sampled lives.
    prior: f64,
}

impl Sampling {
    /// For a tier of `capacity` blocks of a model with a single group or `several`.
    ///
    /// A resume point unused for long may still be worth its few bytes, so with several groups
    /// lives span twice as many uses in as much memory. A small tier has too few points to leave
    /// any out.
    #[must_use]
    pub(crate) fn new(capacity: u64, several: bool) -> Self {
        let (span, least) = match (several, capacity < 1024) {
            (false, _) => (11, 8),
            (true, true) => (22, 1),
            (true, false) => (22, 16),
        };
        let uses = capacity.saturating_mul(span) / 2;
        let one_in = uses.div_ceil(MOST_WINDOW).next_power_of_two().max(least);
        // A sparser sample has fewer lives, so the prior must weigh fewer of them.
        let prior = (PRIOR / real(one_in / least)).max(1.0);
        Self { one_in, window: (uses / one_in).max(LEAST_WINDOW), prior }
    }

    /// Whether a block with this hash is sampled.
    #[inline]
    #[must_use]
    pub(crate) fn samples(self, hash: u64) -> bool {
        hash & (self.one_in - 1) == 0
    }
}

/// Latest uses, and counts of their lives.
#[derive(Debug)]
pub(crate) struct Lives {
    /// Length of the ring.
    window: u32,
    /// Bits that are 0 in the prints of its blocks. Other tiers sample more blocks.
    skipped: u32,
    /// Weight of the wider class's estimate, in sampled lives.
    prior: f64,
    ring: PagedVec<Life>,
    /// Uses so far.
    uses: u64,
    /// By hash, in pages: first life of its chain plus 1, or 0 if the chain is empty.
    heads: Vec<Vec<u32>>,
    /// By bucket: the first use below its age at the last count.
    trails: [u64; BUCKETS],
    counts: Vec<Counts>,
    /// Period of requests of the last estimates.
    period: u64,
    /// Uses before the last estimates.
    counted: u64,
}

impl Lives {
    /// Creates an empty ring for the uses of all blocks sampled by `densest`. The ring skips blocks
    /// outside of its sample.
    #[must_use]
    pub(crate) fn new(sampling: Sampling, densest: Sampling) -> Self {
        let Sampling { one_in, window, prior } = sampling;
        let window = u32::try_from(window).expect("a short ring");
        let skipped = u32::try_from(one_in / densest.one_in - 1).unwrap_or(u32::MAX);
        Self { skipped, prior, ..Self::with_window(window) }
    }

    fn with_window(window: u32) -> Self {
        let vacant = Life { print: 0, at: 0, next: NONE, lasted: 0, class: 0 };
        Self {
            window,
            skipped: 0,
            prior: PRIOR,
            ring: PagedVec::new(vacant),
            uses: 0,
            heads: vec![Vec::new(); (window as usize).div_ceil(PAGE)],
            trails: [0; BUCKETS],
            counts: vec![Counts::default(); CLASSES],
            period: 0,
            counted: 0,
        }
    }

    /// Records a use of a block: its open life ends, and a life of this class begins. If not
    /// `counts`, the ended life reached its age but counts as no reuse.
    pub(crate) fn use_again(&mut self, print: u32, class: u8, request: u64, counts: bool) {
        if print & self.skipped != 0 {
            return;
        }
        let mut at = self.head(print);
        while at != NONE && self.ring[at].print != print {
            at = self.ring[at].next;
        }
        if at != NONE {
            let Life { at: then, class, .. } = self.ring[at];
            let lasted = age(then, request);
            // The same request again is no reuse.
            if lasted == 0 {
                return;
            }
            if counts {
                self.counts[usize::from(class)].ended[bucket(lasted)] += 1.0;
            }
            self.close(at, lasted);
        }
        let slot = self.slot(self.uses);
        if self.uses >= u64::from(self.window) && self.ring[slot].lasted == OPEN {
            // The ring is full, so an open life is forgotten.
            self.close(slot, OPEN);
        }
        let next = self.head(print);
        self.ring.put(slot, Life { print, at: low(request), next, lasted: OPEN, class });
        *self.head_mut(print) = slot + 1;
        self.uses += 1;
        if self.uses.is_multiple_of(u64::from(self.window)) {
            self.counts.iter_mut().for_each(Counts::halve);
        }
    }

    /// Removes a life from its chain and sets its length.
    fn close(&mut self, slot: u32, lasted: u16) {
        let Life { print, next, .. } = self.ring[slot];
        let mut at = self.head(print);
        if at == slot {
            *self.head_mut(print) = next.wrapping_add(1);
        } else {
            while self.ring[at].next != slot {
                at = self.ring[at].next;
            }
            self.ring[at].next = next;
        }
        self.ring[slot].lasted = lasted;
    }

    /// New estimates from the recorded lives, every 128 requests or earlier if many uses are new.
    ///
    /// Each other request counts the ages of one bucket, so few are left for the estimates.
    pub(crate) fn learn(&mut self, request: u64) -> Option<Arc<Reuse>> {
        let fresh = self.uses - self.counted;
        if request / PERIOD == self.period && PART * fresh < u64::from(self.window) {
            let bucket = usize::try_from(request % BUCKETS as u64).expect("below the buckets");
            self.count_age(bucket, request);
            return None;
        }
        (self.period, self.counted) = (request / PERIOD, self.uses);
        (0..BUCKETS).for_each(|bucket| self.count_age(bucket, request));
        Some(Arc::new(Reuse::learn(&self.counts, self.prior)))
    }

    /// Counts the lives reaching a bucket since the last call.
    fn count_age(&mut self, b: usize, request: u64) {
        let oldest = self.uses.saturating_sub(u64::from(self.window));
        let (first, start) = (self.slot(oldest), start(b));
        // The ring is in order of time.
        let reached = |number: u64| {
            let ahead = u32::try_from(number - oldest).expect("below the window");
            let slot = wrap(u64::from(first) + u64::from(ahead), self.window);
            u64::from(age(self.ring[slot].at, request)) >= start
        };
        let from = self.trails[b].max(oldest);
        let until = first_not(from, self.uses, reached);
        let mut at = from;
        while at < until {
            let slot = self.slot(at);
            let end = slot.saturating_add(u32::try_from(until - at).unwrap_or(u32::MAX));
            let lives = self.ring.stretch(slot, end.min(self.window));
            visits::note(lives.len());
            for life in lives {
                // An open life is `OPEN`, longer than any age.
                if u64::from(life.lasted) >= start {
                    self.counts[usize::from(life.class)].reached[b] += 1.0;
                }
            }
            at += lives.len() as u64;
        }
        self.trails[b] = until;
    }

    fn slot(&self, number: u64) -> u32 {
        u32::try_from(number % u64::from(self.window)).expect("below the window")
    }

    /// Page and place of a print's chain.
    fn home(&self, print: u32) -> (usize, usize) {
        // The high half of the product spreads prints evenly over any number of chains.
        let home = (u64::from(print) * u64::from(self.window)) >> 32;
        let home = usize::try_from(home).expect("below the window");
        (home / PAGE, home % PAGE)
    }

    /// The first life of a print's chain.
    fn head(&self, print: u32) -> u32 {
        let (page, place) = self.home(print);
        self.heads[page].get(place).map_or(NONE, |head| head.wrapping_sub(1))
    }

    /// Prefetches the CPU cache line with the head of a print's chain.
    #[inline]
    pub(crate) fn prefetch_head(&self, print: u32) {
        let (page, place) = self.home(print);
        if place < self.heads[page].len() {
            prefetch_index(&self.heads[page], place);
        }
    }

    /// Prefetches the first life of a print's chain.
    #[inline]
    pub(crate) fn prefetch_life(&self, print: u32) {
        let first = self.head(print);
        if first != NONE {
            self.ring.prefetch_line(first);
        }
    }

    fn head_mut(&mut self, print: u32) -> &mut u32 {
        let (page, place) = self.home(print);
        let page = &mut self.heads[page];
        if page.is_empty() {
            *page = vec![0; PAGE];
        }
        &mut page[place]
    }
}

/// Wraps a slot at most once.
fn wrap(slot: u64, window: u32) -> u32 {
    let window = u64::from(window);
    u32::try_from(if slot < window { slot } else { slot - window }).expect("below the window")
}

/// First number of a range with `so` false. `so` must be monotone.
fn first_not(mut from: u64, mut until: u64, so: impl Fn(u64) -> bool) -> u64 {
    while from < until {
        let middle = u64::midpoint(from, until);
        if so(middle) {
            from = middle + 1;
        } else {
            until = middle;
        }
    }
    from
}

/// Requests from `at` to `request`, saturating below [`OPEN`].
fn age(at: u32, request: u64) -> u16 {
    u16::try_from(low(request).wrapping_sub(at)).unwrap_or(OPEN).min(OPEN - 1)
}

fn low(request: u64) -> u32 {
    u32::try_from(request & u64::from(u32::MAX)).expect("masked")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{BUCKETS, CLASSES, Lives, OPEN, Sampling, bucket, start};

    fn draw(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        f64::from(u32::try_from(*state >> 33).expect("31 bits")) / f64::from(1_u32 << 31)
    }

    proptest! {
        /// Compares the counts with a list of all uses.
        #[test]
        fn they_count_what_a_list_of_all_uses_counts(
            uses in prop::collection::vec((0..12_u32, 0..3_u8, 0..3_u64), 1..120),
            window in 1..40_u32,
        ) {
            let mut lives = Lives::with_window(window);
            // Uses with their lengths, and the latest use of each block in the ring.
            let (mut all, mut request) = (Vec::<(u32, u8, u64, Option<u64>)>::new(), 1_u64);
            let mut ended = BTreeMap::<(u8, usize), u32>::new();
            for &(block, class, later) in &uses {
                request += later;
                let held = all.len().saturating_sub(window as usize);
                let known = all.iter().rposition(|use_| use_.0 == block);
                lives.use_again(block.wrapping_mul(0x4000_0001), class, request, true);
                if let Some(at) = known.filter(|&at| at >= held && all[at].3.is_none()) {
                    let length = request - all[at].2;
                    if length == 0 {
                        continue;
                    }
                    all[at].3 = Some(length);
                    let short = u16::try_from(length).expect("short");
                    *ended.entry((all[at].1, bucket(short))).or_default() += 1;
                }
                all.push((block, class, request, None));
                if all.len().is_multiple_of(window as usize) {
                    ended.clear();
                    lives.counts.iter_mut().for_each(|counts| counts.ended = [0.0; BUCKETS]);
                }
                let open = all.iter().skip(all.len().saturating_sub(window as usize));
                let open = open.filter(|use_| use_.3.is_none()).count();
                let slots = u32::try_from(all.len()).expect("few").min(window);
                let kept = (0..slots).filter(|&slot| lives.ring[slot].lasted == OPEN).count();
                prop_assert_eq!(kept, open);
                for (class, counts) in (0_u8..).zip(&lives.counts) {
                    for (b, &count) in counts.ended.iter().enumerate() {
                        let expected = ended.get(&(class, b)).copied().unwrap_or(0);
                        prop_assert!((count - f64::from(expected)).abs() < 1e-9);
                    }
                }
            }
            (0..BUCKETS).for_each(|b| lives.count_age(b, request + 500));
            let held = &all[all.len().saturating_sub(window as usize)..];
            for b in 0..BUCKETS {
                let reached: f64 = lives.counts.iter().map(|counts| counts.reached[b]).sum();
                let such = |use_: &&(u32, u8, u64, Option<u64>)| {
                    request + 500 - use_.2 >= start(b) && use_.3.is_none_or(|long| long >= start(b))
                };
                let expected = held.iter().filter(such).count();
                let expected = f64::from(u32::try_from(expected).expect("few"));
                prop_assert!((reached - expected).abs() < 1e-9, "bucket {}", b);
            }
        }
    }

    /// Blocks of two classes, reused with a chance per request of 1 / 20 and 1 / 400.
    #[test]
    fn after_150_000_uses_the_rates_are_within_a_tenth() {
        let mut lives = Lives::with_window(200_000);
        let (mut state, mut learned) = (7_u64, None);
        let mut uses = 0;
        let mut request = 0_u64;
        while uses < 150_000 {
            request += 1;
            for block in 0..1200_u32 {
                let (class, chance) = if block < 200 { (9, 0.05) } else { (18, 0.0025) };
                if draw(&mut state) < chance {
                    lives.use_again(block.wrapping_mul(0x9E37_79B9), class, request, true);
                    uses += 1;
                }
            }
            learned = lives.learn(request).or(learned);
        }
        let learned = learned.expect("many requests");
        // Without memory the best rate of reuse is the chance per request, at every age with some
        // hundred ends. 83 lives of the rare class ended at age 1, and the best of noise is high.
        for (class, chance, ages) in [(9, 0.05, 0..10), (18, 0.0025, 4..18)] {
            for b in ages.filter(|&b| start(b + 1) > start(b)) {
                let rate = learned.rates(class)[b];
                assert!((rate / chance - 1.0).abs() < 0.1, "class {class}, bucket {b}: {rate}");
            }
        }
    }

    #[test]
    fn a_ring_is_short_on_tiers_of_every_size() {
        for capacity in [1, 1000, 11_916, 47_662, 47_663, 100_000, 4_000_000, u64::from(u32::MAX)] {
            for several in [false, true] {
                let Sampling { one_in, window, prior } = Sampling::new(capacity, several);
                assert!((8192..=32_768).contains(&window) && prior >= 1.0, "{capacity}: {window}");
                // It spans 5.5 uses per block of capacity, or 11.
                let span = if several { 11 } else { 5 };
                assert!(one_in * (window + 1) >= span * capacity, "{capacity}: {one_in}");
            }
        }
        let one_in = |capacity| Sampling::new(capacity, false).one_in;
        assert_eq!([1, 47_662, 47_663, 100_000].map(one_in), [8, 8, 16, 32]);
    }

    /// A large tier below a small tier records the uses of every fourth of its sampled blocks.
    #[test]
    fn tiers_sample_by_their_size() {
        let [small, large] = [20_000, 100_000].map(|blocks| Sampling::new(blocks, false));
        let (mut dense, mut sparse) = (Lives::new(small, small), Lives::new(large, small));
        for print in 0..4000 {
            dense.use_again(print, 9, 1, true);
            sparse.use_again(print, 9, 1, true);
        }
        assert_eq!((dense.uses, sparse.uses), (4000, 1000));
    }

    #[test]
    fn without_a_life_worth_falls_with_age() {
        let learned = Lives::with_window(8192).learn(128).expect("a lesson");
        for class in (0..CLASSES).map(|class| learned.rates(class)) {
            for b in (10..BUCKETS - 2).filter(|b| b % 2 == 0) {
                // Twice the age, half the worth.
                let ratio = class[b] / class[b + 2];
                assert!((1.8..2.2).contains(&ratio), "{ratio}");
            }
        }
    }

    #[test]
    fn requests_that_fill_the_ring_teach_what_short_ones_do() {
        // Half of the 250 blocks of each request come back after three requests. A ring of 1000
        // holds four requests.
        let rate = |window: u32, every: u64| {
            let (mut lives, mut learned) = (Lives::with_window(window), None);
            for request in 1..=640_u64 {
                let number = u32::try_from(request).expect("few");
                for block in 0..250_u32 {
                    let seldom = block % 2 * (10_000 + 250 * number);
                    let print = 3 * block + number % 3 + seldom;
                    lives.use_again(print.wrapping_mul(0x9E37_79B9), 9, request, true);
                }
                if request.is_multiple_of(every) {
                    learned = lives.learn(request).or(learned);
                }
            }
            learned.expect("a lesson").rates(9)[0]
        };
        let (short, long) = (rate(1000, 1), rate(100_000, 1));
        assert!((short / long - 1.0).abs() < 0.25, "{short} {long}");
        // After 128 requests the ring has dropped most lives, and only their ends were counted.
        assert!(rate(1000, 128) > 1.5 * long);
    }

    #[test]
    fn a_later_law_replaces_an_earlier_one() {
        let mut lives = Lives::with_window(1000);
        let rate = |lives: &mut Lives, from: u64, period: u64| {
            let mut learned = None;
            for request in from..from + 4096 {
                // Ten blocks at a time, each again after `period` requests.
                for block in 0..10_u32 {
                    let turn = u32::try_from(request % period).expect("small");
                    lives.use_again(
                        (block * 1000 + turn).wrapping_mul(0x9E37_79B9),
                        9,
                        request,
                        true,
                    );
                }
                learned = lives.learn(request).or(learned);
            }
            learned.expect("a lesson").rates(9)[0]
        };
        let (often, seldom) = (rate(&mut lives, 1, 4), rate(&mut lives, 5000, 64));
        let fresh = rate(&mut Lives::with_window(1000), 5000, 64);
        assert!(often > 8.0 * seldom, "{often} {seldom}");
        assert!((seldom / fresh - 1.0).abs() < 0.1, "{seldom} {fresh}");
    }
}
