//! `learned`: expected reuse per request times cost, compact enough to be the default.
//!
//! Classes are by turn and hits. A life is the time from a use of a block to the next. The number
//! of lives that ended at each age predicts the next use of a block of the class. [`Lives`] counts
//! a sample of the blocks on each tier, and a [`Reuse`] carries the resulting estimates. The policy
//! has no state per block: the entry holds class, request and weight of a block's last use.
//! Invariant: the candidates of a class are its oldest and youngest entry, so a victim is the
//! minimum over these, not over the entries in between. Cost: O(classes) per victim, or O(1) if it
//! is the neighbour of the previous victim.

pub(crate) mod lives;
mod rates;

use std::cmp::Ordering;
use std::sync::{Arc, OnceLock};

use super::{Entry, Facts, LastUse, Needs, Order, Policy, Terms};
use crate::cost::CostModel;
use crate::time::Nanos;
use rates::{BUCKETS, Counts, Estimates, Rates, bucket, start};

/// Maximum distinguished number of turns, and of hits.
const MOST: u8 = 7;

/// A class for each (turn, hits), separately for last blocks of prompts and all earlier blocks.
const CLASSES: usize = 128;

/// The first class of last blocks.
const LAST: u8 = 64;

/// A group for each (turn up to 3, hits up to 4), and for the last blocks of each turn.
const GROUPS: usize = 28;

/// Uses store request numbers modulo this.
const WRAP: u64 = 1 << 32;

/// Class of blocks with an announced next use. No use has turn 0. The entry's request is the
/// announced request.
pub(crate) const EXPECTED: u8 = 7;

/// Offset between numbers of announced and past requests. It keeps them distinct from the current
/// request.
const APART: u64 = 1 << 31;

/// Number of an announced request, as stored in a last use.
pub(crate) fn expected_use(request: u64) -> u32 {
    u32::try_from((request + APART) % WRAP).expect("below 2^32")
}

/// Number of requests from the `now`th until an announced request. Negative if overdue.
fn ahead(expected: u32, now: u64) -> i32 {
    expected.wrapping_sub(expected_use(now)).cast_signed()
}

/// Whether the announced request `one` comes before `other` and is not overdue.
pub(crate) fn is_sooner(one: u32, other: u32, now: u64) -> bool {
    (0..ahead(other, now)).contains(&ahead(one, now))
}

/// Class of a use in turn `turn` after `hits` earlier uses of the block. `last`: the block is the
/// last of the prompt.
pub(crate) fn class_of(turn: u8, hits: u32, last: bool) -> u8 {
    let (turn, hits) = (turn.min(MOST), u8::try_from(hits).unwrap_or(MOST).min(MOST));
    8 * turn + hits + if last { LAST } else { 0 }
}

fn group_of(class: usize) -> usize {
    match class.checked_sub(usize::from(LAST)) {
        Some(last) => 20 + last / 8,
        None => (class / 8).min(3) * 5 + (class % 8).min(4),
    }
}

/// Packs turn and uses of a removed block into the six bits of a ghost.
pub(crate) fn pack(turn: u8, uses: u32) -> u32 {
    // A turn is at least 1, so the result is never 0.
    u32::from(turn.clamp(1, MOST)) << 3 | uses.saturating_sub(1).min(u32::from(MOST))
}

/// Unpacks turn and uses from a ghost. `None` for 0.
pub(crate) fn unpack(ghost: u32) -> Option<(u8, u32)> {
    let turn = u8::try_from(ghost >> 3 & 7).expect("three bits");
    (ghost > 0).then_some((turn, (ghost & 7) + 1))
}

/// Estimates of the next use of blocks, per class.
#[derive(Clone, Debug)]
pub struct Reuse {
    estimates: Estimates,
    /// Best rate of reuse per request by age, computed per class on demand.
    index: Vec<OnceLock<Rates>>,
}

impl Reuse {
    /// Learns from lives by class and age. A wider class's estimate weighs `prior` lives.
    fn learn(counts: &[Counts], prior: f64) -> Self {
        let estimates = Estimates::new(counts, GROUPS, group_of, prior);
        Self { estimates, index: vec![OnceLock::new(); CLASSES] }
    }

    /// Best rate of reuse per request of a class, by age.
    fn rates(&self, class: usize) -> &Rates {
        // Few classes have evictable blocks, so rates are computed lazily.
        self.index[class].get_or_init(|| self.estimates.rates(class, group_of(class)))
    }
}

/// Learned rates of reuse, shared by the tiers of a manager.
#[derive(Debug)]
pub(super) struct Learned {
    /// Number of the latest request.
    request: u64,
    reuse: Arc<Reuse>,
}

impl Default for Learned {
    fn default() -> Self {
        Self { request: 0, reuse: Arc::new(Reuse::learn(&vec![Counts::default(); CLASSES], 1.0)) }
    }
}

impl Learned {
    /// Number of the next request, modulo [`WRAP`].
    fn now(&self) -> u64 {
        (self.request + 1) % WRAP
    }

    /// Requests since an entry's last use, as of the next request.
    fn age(&self, place: u64) -> u16 {
        u16::try_from(self.now().saturating_sub(place >> 32)).unwrap_or(u16::MAX)
    }

    /// Requests until an announced use of an entry, or since it was due. At least 1.
    fn wait(&self, place: u64) -> u32 {
        let expected = u32::try_from(place >> 32).expect("the upper half");
        ahead(expected, self.request).unsigned_abs().max(1)
    }

    /// Expected reuse per request, times weight.
    fn rate(&self, entry: &Entry) -> f64 {
        if entry.class == u64::from(EXPECTED) {
            return weight(entry.place) / f64::from(self.wait(entry.place));
        }
        let class = usize::try_from(entry.class).unwrap_or(CLASSES).min(CLASSES - 1);
        self.reuse.rates(class)[bucket(self.age(entry.place))] * weight(entry.place)
    }

    fn entry(&self, facts: &Facts, cost: &CostModel) -> Entry {
        let place = place(facts.last_use.request, self.terms(facts, cost).cost);
        Entry { class: u64::from(facts.last_use.class), place, tie: 0, id: facts.id }
    }
}

/// Packs the request of the last use above the weight. Of blocks with the same last use the lighter
/// comes first.
fn place(request: u32, weight: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are enough")]
    let weight = weight as f32;
    u64::from(request) << 32 | u64::from(weight.to_bits())
}

/// The weight of a place. Infinite if the bits are not a number.
fn weight(place: u64) -> f64 {
    let bits = u32::try_from(place & u64::from(u32::MAX)).expect("masked");
    let weight = f32::from_bits(bits);
    if weight.is_nan() { f64::INFINITY } else { f64::from(weight) }
}

impl Policy for Learned {
    fn terms(&self, facts: &Facts, _cost: &CostModel) -> Terms {
        let base = facts.price_or(f64::from(facts.last_use.weight));
        Terms { base, cost: base, ..Terms::NONE }
    }

    fn order(&self) -> Order {
        Order::Ends
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        u64::from(facts.last_use.class)
    }

    fn place(&self, facts: &Facts) -> u64 {
        place(facts.last_use.request, facts.price_or(f64::from(facts.last_use.weight)))
    }

    fn compare(&self, a: &Entry, b: &Entry, _now: Nanos) -> Ordering {
        self.rate(a).total_cmp(&self.rate(b)).then_with(|| (a.place, a).cmp(&(b.place, b)))
    }

    fn follows(&self, before: &Entry, chosen: &Entry) -> bool {
        // Within a class and request, the lighter block is always worth less.
        before.class == chosen.class
            && before.place >> 32 == chosen.place >> 32
            && before.place <= chosen.place
    }

    fn of_use(&self, last_use: &LastUse) -> Option<(u64, u64)> {
        Some((u64::from(last_use.class), place(last_use.request, f64::from(last_use.weight))))
    }

    fn worth(&self, entry: &Entry) -> (f64, u64) {
        if entry.class == u64::from(EXPECTED) {
            return (self.rate(entry), 1);
        }
        let age = self.age(entry.place).max(1);
        let bucket = bucket(age);
        let older =
            if bucket + 1 < BUCKETS { start(bucket + 1) - u64::from(age) } else { u64::MAX };
        // All ages restart when request numbers wrap to 0.
        (self.rate(entry), older.min(WRAP - self.now()))
    }

    fn needs(&self) -> Needs {
        Needs::REUSE.and(Needs::COST)
    }

    fn on_request(&mut self, request: u64, learned: Option<&Arc<Reuse>>) {
        self.request = request;
        if let Some(reuse) = learned {
            self.reuse = Arc::clone(reuse);
        }
    }

    /// Uses per request times cost.
    fn value(&self, facts: &Facts, cost: f64, _idle: Nanos) -> f64 {
        let place = place(facts.last_use.request, cost);
        self.rate(&Entry { class: u64::from(facts.last_use.class), place, tie: 0, id: facts.id })
    }

    fn words(&self, facts: &Facts, cost: &CostModel) -> Option<String> {
        let entry = self.entry(facts, cost);
        let (class, age) = (facts.last_use.class, self.age(entry.place));
        if class == EXPECTED {
            return Some(format!(
                "its session's next request is announced {} requests from now, or is overdue by as \
                 many: worth 1 / requests, times a cost of {:.3}",
                self.wait(entry.place),
                weight(entry.place),
            ));
        }
        let kind = match class.checked_sub(LAST) {
            Some(last) => format!(
                "the last block of a prompt in turn {}, used {} times before",
                last / 8,
                last % 8
            ),
            None => format!("turn {}, used {} times before", class / 8, class % 8),
        };
        let (b, class) = (bucket(age), usize::from(class).min(CLASSES - 1));
        let (counts, index) = (self.reuse.estimates.counts(class), self.reuse.rates(class)[b]);
        Some(format!(
            "{kind}; {age} requests ago. Of {:.1} sampled lives of this class at an age of {} \
             requests, {:.1} ended below {}: worth {index:.6} uses per request, times a cost of \
             {:.3}",
            counts.reached[b],
            start(b),
            counts.ended[b],
            if b + 1 < BUCKETS { start(b + 1).to_string() } else { "any".to_owned() },
            weight(entry.place),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::{CLASSES, GROUPS, class_of, expected_use, group_of, is_sooner};
    use super::{pack, place, unpack, weight};

    #[test]
    fn classes_are_turns_and_hits() {
        let given = [(0, 0, false), (1, 3, false), (9, 99, false), (2, 5, true), (9, 0, true)];
        assert_eq!(
            given.map(|(turn, hits, last)| class_of(turn, hits, last)),
            [0, 11, 63, 85, 120]
        );
        let mut sizes = [0; GROUPS];
        (0..CLASSES).for_each(|class| sizes[group_of(class)] += 1);
        assert_eq!(sizes[..5], [1, 1, 1, 1, 4]);
        assert_eq!(sizes[15..], [5, 5, 5, 5, 20, 8, 8, 8, 8, 8, 8, 8, 8]);
    }

    #[test]
    fn a_ghost_has_turn_and_uses() {
        for turn in 1..=7 {
            for uses in 1..=8 {
                assert_eq!(unpack(pack(turn, uses)), Some((turn, uses)));
            }
        }
        assert_eq!((pack(0, 0), pack(99, 99), unpack(0)), (8, 63, None));
    }

    #[test]
    fn of_announced_requests_the_next_one_is_sooner_unless_it_is_overdue() {
        // Numbers wrap to 0 after 2^32.
        for now in [9, (1 << 31) - 5, (1 << 32) - 5, 1 << 40] {
            let [before, soon, later] = [now - 1, now + 1, now + 11].map(expected_use);
            assert!(is_sooner(soon, later, now) && !is_sooner(later, soon, now));
            assert!(!is_sooner(before, later, now) && !is_sooner(soon, soon, now));
        }
    }

    #[test]
    fn of_one_request_the_lighter_block_comes_first() {
        assert!(place(7, 1.5) < place(7, 2.0) && place(7, 900.0) < place(8, 1.0));
        assert!((weight(place(7, 1.5)) - 1.5).abs() < 1e-12);
        assert!(weight(u64::MAX).is_infinite());
    }
}
