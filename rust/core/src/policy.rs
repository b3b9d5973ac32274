//! Policies: what an entry is worth, and which of two leaves first.
//!
//! Invariant: [`Policy::compare`] is a strict total order at every `now`, and entries of one class
//! keep their order for ever, up to [`Policy::head`]. Numbers are ranked as integers, so every
//! platform picks the same victim. Cost: one multiplication per comparison.

#[cfg(test)]
mod sample;

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use crate::block::{BlockId, Departure, Layers};
use crate::cost::{CostModel, fixed};
use crate::error::{Error, Result};
use crate::time::Nanos;

/// Uses beyond this many count no further.
pub const MOST_USES: u32 = 32;

/// What a policy may know about an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Tokens before the block.
    pub context: u64,
    /// The block's index in its sequence, from 0.
    pub block: u32,
    /// Blocks of its session; the longest one's if there are several.
    pub session_blocks: u32,
    /// How often it was used, the first time included.
    pub uses: u32,
    /// The layers resident on this tier.
    pub layers: Layers,
    /// The model's number of layers.
    pub model_layers: u16,
    /// The one layer that would leave, on a tier with layer slots; `None`: the whole block.
    pub layer: Option<u16>,
    /// Whether it would be demoted or dropped.
    pub departure: Departure,
}

/// What may leave a tier. `class` comes from [`Policy::class`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Entries of one class never change places.
    pub class: u64,
    /// When it was last used.
    pub access: Nanos,
    /// What decides between equal values: the smaller one leaves first.
    pub tie: u32,
    /// The block.
    pub id: BlockId,
}

/// An entry's place within its class; ascending order = leaves first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// When it was last used.
    pub access: Nanos,
    /// What decides between equal values.
    pub tie: u32,
    /// The block.
    pub id: BlockId,
}

impl Entry {
    /// Its place within its class.
    #[must_use]
    pub fn key(&self) -> Key {
        Key { access: self.access, tie: self.tie, id: self.id }
    }
}

impl Key {
    /// The entry of this place in `class`.
    #[must_use]
    pub fn entry(self, class: u64) -> Entry {
        Entry { class, access: self.access, tie: self.tie, id: self.id }
    }
}

/// The terms of a cost, as an explanation shows them. Terms that a policy does not use are 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// The cost of computing a token of the block again.
    pub base: f64,
    /// The layers' weight, summed over those that would leave.
    pub layer_weight: f64,
    /// The weight of the block's position in its session.
    pub position_weight: f64,
    /// The uses that count.
    pub uses: u32,
    /// The product; divided by idle time it is the retention value.
    pub cost: f64,
}

/// A rule of eviction. The victim is the minimum by [`Policy::compare`] of all entries.
pub trait Policy: Debug + Send + Sync {
    /// The name users write.
    fn name(&self) -> &'static str;

    /// The cost of losing the entry, term by term.
    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms;

    /// The entry's class; by default its cost in units of 2^-40.
    fn class(&self, facts: &Facts, cost: &CostModel) -> u64 {
        fixed(self.terms(facts, cost).cost)
    }

    /// `Less` if `a` leaves before `b`. By default the smaller `class / idle`, compared exactly;
    /// infinite at zero idle time. Equal values: lower class, then older, then tie, then id.
    fn compare(&self, a: &Entry, b: &Entry, now: Nanos) -> Ordering {
        by_value(a, b, now).then_with(|| a.cmp(b))
    }

    /// Which entry of one class leaves first. `list` holds all of that class.
    fn head(&self, list: &BTreeSet<Key>, now: Nanos) -> Option<Key> {
        let _ = now;
        list.first().copied()
    }

    /// Whether `Facts::session_blocks` matters.
    fn sessions(&self) -> bool {
        false
    }

    /// The retention value: cost per second of idle time, infinite at zero.
    fn value(&self, cost: f64, idle: Nanos) -> f64 {
        if idle == 0 { f64::INFINITY } else { cost / seconds(idle) }
    }
}

type Make = fn(reuse: bool) -> Arc<dyn Policy>;

macro_rules! policies {
    ($($name:ident => $make:expr;)*) => {
        $(mod $name;)*
        const TABLE: &[(&str, Make)] = &[$((stringify!($name), $make)),*];
    };
}

// A line is all that registers a policy: the file's name, which users write, and how it is made.
policies! {
    lru => |_| Arc::new(lru::Lru);
    flat => |_| Arc::new(flat::Flat);
    retention => |reuse| Arc::new(retention::Retention { reuse });
    weighted => |_| Arc::new(weighted::Weighted);
    checkerboard => |_| Arc::new(checkerboard::Checkerboard);
}

/// The names that [`by_name`] knows.
pub const NAMES: &[&str] = &{
    let mut names = [""; TABLE.len()];
    let mut i = 0;
    while i < TABLE.len() {
        names[i] = TABLE[i].0;
        i += 1;
    }
    names
};

/// The policy of that name. `reuse`: whether a policy that may count uses or not does.
///
/// # Errors
/// `Config` if there is no such policy.
pub fn by_name(name: &str, reuse: bool) -> Result<Arc<dyn Policy>> {
    match TABLE.iter().find(|(known, _)| *known == name) {
        Some((_, make)) => Ok(make(reuse)),
        None => Err(Error::config(format!(
            "there is no policy '{name}', choose one of {}",
            NAMES.join(", ")
        ))),
    }
}

/// Compares `class / idle` by cross multiplication.
fn by_value(a: &Entry, b: &Entry, now: Nanos) -> Ordering {
    let (idle_a, idle_b) = (now.saturating_sub(a.access), now.saturating_sub(b.access));
    match (idle_a, idle_b) {
        (0, 0) => Ordering::Equal,
        (0, _) => Ordering::Greater,
        (_, 0) => Ordering::Less,
        _ => {
            let left = u128::from(a.class) * u128::from(idle_b);
            left.cmp(&(u128::from(b.class) * u128::from(idle_a)))
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "an explanation needs no more than 53 bits")]
fn seconds(nanos: Nanos) -> f64 {
    nanos as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use super::sample::{facts, order};
    use super::{Entry, NAMES, by_name};
    use crate::cost::CostModel;
    use crate::error::{Error, Result};

    /// Four blocks, seen at 110: (context, block, session blocks, uses, access).
    const TRACE: [(u64, u32, u32, u32, u64); 4] =
        [(0, 0, 4, 4, 100), (10_700, 3, 4, 1, 100), (0, 0, 1, 1, 40), (32_100, 3, 16, 1, 10)];

    #[test]
    fn each_policy_has_its_order_on_a_small_trace() -> Result<()> {
        let expected = [
            ("lru", true, [3, 2, 0, 1]),
            ("flat", true, [2, 3, 0, 1]),
            ("retention", true, [2, 3, 1, 0]),
            ("retention", false, [2, 3, 0, 1]),
            ("weighted", true, [3, 2, 0, 1]),
            ("checkerboard", true, [2, 3, 0, 1]),
        ];
        assert!(NAMES.iter().all(|name| expected.iter().any(|(known, ..)| known == name)));
        let cost = CostModel::default_curve(1.0)?;
        for (name, reuse, ids) in expected {
            let policy = by_name(name, reuse)?;
            let entries = TRACE.iter().zip(0..).map(|(row, id)| {
                let &(context, block, session_blocks, uses, access) = row;
                let facts = super::Facts { uses, ..facts(context, block, session_blocks) };
                Entry { class: policy.class(&facts, &cost), access, tie: 0, id }
            });
            assert_eq!(order(&*policy, entries.collect(), 110), ids, "{name}, reuse {reuse}");
        }
        Ok(())
    }

    #[test]
    fn each_policy_keeps_what_was_used_just_now_and_gives_up_the_old() -> Result<()> {
        let cost = CostModel::default_curve(1.0)?;
        for name in NAMES {
            let policy = by_name(name, true)?;
            assert_eq!(policy.name(), *name);
            let class = policy.class(&facts(64, 4, 9), &cost);
            let entries = [(4, 90), (1, 100), (2, 0), (3, 120)].map(|(id, access)| Entry {
                class,
                access,
                tie: 0,
                id,
            });
            assert_eq!(order(&*policy, entries.to_vec(), 100), [2, 4, 1, 3], "{name}");
        }
        Ok(())
    }

    #[test]
    fn each_policy_breaks_ties_the_same_way_every_time() -> Result<()> {
        for name in NAMES {
            let policy = by_name(name, true)?;
            let entry = |tie, id| Entry { class: 7, access: 3, tie, id };
            let ids = order(&*policy, vec![entry(1, 5), entry(0, 9), entry(0, 8), entry(1, 4)], 50);
            let expected = if *name == "checkerboard" { [4, 5, 8, 9] } else { [8, 9, 4, 5] };
            assert_eq!(ids, expected, "{name}");
        }
        Ok(())
    }

    #[test]
    fn each_policy_orders_strictly() -> Result<()> {
        let times = [0, 1, 50, 99, 100, 101, u64::MAX];
        let classes = [0, 1, 2, 3, 1 << 40, (1 << 62) - 1, 1 << 62];
        let mut entries = Vec::new();
        for class in classes {
            for access in times {
                let id = u32::try_from(entries.len()).unwrap_or(0);
                entries.push(Entry { class, access, tie: id % 3, id });
            }
        }
        for name in NAMES {
            let policy = by_name(name, true)?;
            for now in [0, 1, 100, 12_345, u64::MAX] {
                let mut sorted = entries.clone();
                sorted.sort_by(|a, b| policy.compare(a, b, now));
                for (i, a) in sorted.iter().enumerate() {
                    for (j, b) in sorted.iter().enumerate() {
                        assert_eq!(
                            policy.compare(a, b, now),
                            i.cmp(&j),
                            "{name} {a:?} {b:?} {now}"
                        );
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn values_are_compared_exactly() -> Result<()> {
        let policy = by_name("retention", true)?;
        let entry = |class, idle: u64, id| Entry { class, access: u64::MAX - idle, tie: 0, id };
        let compare = |a: &Entry, b: &Entry| policy.compare(a, b, u64::MAX);
        // 2^62 / (2^63 + 1) is below 2^61 / 2^62; as floats they are equal.
        let (a, b) = (entry(1 << 62, (1 << 63) + 1, 9), entry(1 << 61, 1 << 62, 1));
        assert_eq!(compare(&a, &b), Ordering::Less);
        // Equal values: the lower class leaves first, then the smaller tie, then the smaller id.
        assert_eq!(compare(&entry(3, 30, 9), &entry(4, 40, 1)), Ordering::Less);
        assert_eq!(compare(&entry(4, 0, 1), &entry(3, 0, 9)), Ordering::Greater);
        assert!(policy.value(2.0, 0).is_infinite());
        assert!((policy.value(2.0, 500_000_000) - 4.0).abs() < 1e-12);
        Ok(())
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let Err(Error::Config(message)) = by_name("random", true) else { panic!("not refused") };
        assert!(message.contains("'random'") && NAMES.iter().all(|name| message.contains(name)));
    }

    #[test]
    fn who_reads_the_length_of_sessions_says_so() -> Result<()> {
        let cost = CostModel::default_curve(1.0)?;
        for name in NAMES {
            let policy = by_name(name, true)?;
            let class = |length| policy.class(&facts(64, 4, length), &cost);
            assert_eq!(policy.sessions(), class(5) != class(50), "{name}");
        }
        Ok(())
    }
}
