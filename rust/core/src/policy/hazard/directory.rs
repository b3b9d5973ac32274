//! Ring buffer of the latest touches of resident and evicted blocks, with counts of their lifetimes.
//!
//! A touch begins a lifetime that ends at the block's next touch. Invariant: `latest` has the latest
//! touch of each block, as long as the ring holds it. Cost: O(1) per touch, amortised; about
//! 60 bytes per touch that it holds.

use rustc_hash::FxHashMap;

use super::rates::{BUCKETS, CLASSES, Counts, bucket, class_of, start};
use crate::policy::Event;

/// Length of a lifetime that has not ended.
const OPEN: u16 = u16::MAX;

#[derive(Clone, Copy, Debug)]
struct Touch {
    tag: u64,
    /// The request, modulo 2^32.
    at: u32,
    /// Length of the lifetime in requests, or [`OPEN`].
    lasted: u16,
    class: u8,
}

#[derive(Clone, Copy, Debug)]
struct Latest {
    /// Number of the touch.
    touch: u64,
    /// Touches of the block before it.
    hits: u8,
}

/// Touches, and counts by class and age.
#[derive(Debug)]
pub(super) struct Directory {
    window: u64,
    ring: Vec<Touch>,
    touches: u64,
    latest: FxHashMap<u64, Latest>,
    /// By bucket: the first touch that had not reached that age at the last count.
    trails: [u64; BUCKETS],
    counts: Vec<Counts>,
}

impl Directory {
    /// An empty directory that holds so many touches.
    pub(super) fn new(window: u64) -> Self {
        Self {
            window,
            ring: Vec::new(),
            touches: 0,
            latest: FxHashMap::default(),
            trails: [0; BUCKETS],
            counts: vec![Counts::default(); CLASSES],
        }
    }

    /// Counts by class.
    pub(super) fn counts(&self) -> &[Counts] {
        &self.counts
    }

    /// Class and age of a block's latest touch, if the ring still holds it.
    pub(super) fn latest(&self, tag: u64, clock: u64) -> Option<(u8, u16)> {
        let touch = self.ring[self.slot(self.latest.get(&tag)?.touch)];
        Some((touch.class, age(touch.at, clock)))
    }

    /// A request touches a block. Returns the class of the lifetime that begins; `None` if the request
    /// touched the block before.
    pub(super) fn touch(&mut self, event: &Event<'_>) -> Option<u8> {
        let mut hits = 0;
        if let Some(&Latest { touch, hits: before }) = self.latest.get(&event.tag) {
            let slot = self.slot(touch);
            let Touch { at, class, .. } = self.ring[slot];
            let lasted = age(at, event.request);
            // The same request again.
            if lasted == 0 {
                return None;
            }
            self.ring[slot].lasted = lasted;
            self.counts[usize::from(class)].ended[bucket(lasted)] += 1.0;
            hits = before.saturating_add(1);
        }
        let class = class_of(event.turn, hits, event.added, event.last);
        self.begin(Touch { tag: event.tag, at: low(event.request), lasted: OPEN, class }, hits);
        Some(class)
    }

    fn begin(&mut self, touch: Touch, hits: u8) {
        let slot = self.slot(self.touches);
        if slot == self.ring.len() {
            self.ring.push(touch);
        } else {
            // A full ring. An open lifetime is the latest of its tag, which is now unknown.
            let old = std::mem::replace(&mut self.ring[slot], touch);
            if old.lasted == OPEN {
                self.latest.remove(&old.tag);
            }
        }
        self.latest.insert(touch.tag, Latest { touch: self.touches, hits });
        self.touches += 1;
        if self.touches.is_multiple_of(4 * self.window) {
            self.counts.iter_mut().for_each(Counts::halve);
        }
    }

    /// Counts the lifetimes that reached each bucket since the last call.
    pub(super) fn count_ages(&mut self, clock: u64) {
        let oldest = self.touches.saturating_sub(self.window);
        for b in 0..BUCKETS {
            let mut at = self.trails[b].max(oldest);
            while at < self.touches {
                let Touch { at: then, lasted, class, .. } = self.ring[self.slot(at)];
                // The ring is in order of time: all behind it are too young as well.
                if u64::from(age(then, clock)) < start(b) {
                    break;
                }
                // An open lifetime is `OPEN`, longer than any age.
                if u64::from(lasted) >= start(b) {
                    self.counts[usize::from(class)].reached[b] += 1.0;
                }
                at += 1;
            }
            self.trails[b] = at;
        }
    }

    fn slot(&self, touch: u64) -> usize {
        usize::try_from(touch % self.window).expect("a ring in memory")
    }
}

/// Requests from `at` to `clock`, saturating below [`OPEN`].
fn age(at: u32, clock: u64) -> u16 {
    u16::try_from(low(clock).wrapping_sub(at)).unwrap_or(OPEN).min(OPEN - 1)
}

fn low(request: u64) -> u32 {
    u32::try_from(request & u64::from(u32::MAX)).expect("masked")
}

#[cfg(test)]
mod tests {
    use super::super::rates::{BUCKETS, bucket, start};
    use super::Directory;
    use crate::cost::CostModel;
    use crate::policy::Event;
    use crate::policy::sample::facts;

    fn touch(directory: &mut Directory, tag: u64, request: u64) {
        let cost = CostModel::default_curve(1.0).expect("good numbers");
        let (facts, last, turn, added, used) = (&facts(0, 0, 1), true, 0, 1, true);
        directory.touch(&Event { tag, request, used, turn, added, last, facts, cost: &cost });
    }

    /// Block 7 goes without for 6 requests, then for 300; the others are touched once.
    #[test]
    fn a_lifetime_counts_in_every_age_that_it_reached() {
        let mut directory = Directory::new(65_536);
        for request in 1..600 {
            let tag = if [1, 7, 307].contains(&request) { 7 } else { 1000 + request };
            touch(&mut directory, tag, request);
        }
        directory.count_ages(512);
        let lasted = |request| match request {
            1 => 6,
            7 => 300,
            _ => u64::MAX,
        };
        let sum = |of: fn(&super::Counts) -> &[f64; BUCKETS], b: usize| -> f64 {
            directory.counts().iter().map(|counts| of(counts)[b]).sum()
        };
        for b in 0..BUCKETS {
            let came = (1_u64..600).filter(|at| at + start(b) <= 512 && lasted(*at) >= start(b));
            let came = u32::try_from(came.count()).expect("few");
            assert!((sum(|counts| &counts.reached, b) - f64::from(came)).abs() < 1e-9, "{b}");
            let ended = u8::from([bucket(6), bucket(300)].contains(&b));
            assert!((sum(|counts| &counts.ended, b) - f64::from(ended)).abs() < 1e-9, "{b}");
        }
        assert_eq!(directory.latest(7, 310), Some((20, 3)));
    }

    #[test]
    fn touches_older_than_the_window_are_overwritten() {
        let mut directory = Directory::new(4);
        for (request, tag) in (1..).zip([1, 2, 3, 4, 1, 5, 6, 7, 8, 2]) {
            touch(&mut directory, tag, request);
            assert!(directory.latest.len() <= 4 && directory.ring.len() <= 4);
        }
        // 1 came again within four touches, 2 did not.
        let ended: f64 = directory.counts().iter().flat_map(|counts| counts.ended).sum();
        assert!((ended - 1.0).abs() < 1e-9);
        assert_eq!((directory.latest(3, 99), directory.latest(8, 11)), (None, Some((20, 2))));
    }
}
