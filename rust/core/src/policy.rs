//! Eviction policies: the value of an entry, and the order of two entries.
//!
//! Invariant: [`Policy::compare`] is a strict total order at every `now`, and entries of a class
//! keep their order for ever, up to [`Policy::head`]. Numbers are ranked as integers, so every
//! platform picks the same victim. Cost: a multiplication per comparison.

mod entry;
#[cfg(test)]
mod sample;
#[cfg(test)]
mod suite;

use std::cmp::Ordering;
use std::fmt::Debug;
use std::sync::Arc;

use crate::cost::{CostModel, Objective, fixed};
use crate::error::{Error, Result};
use crate::time::Nanos;

pub(crate) use entry::{Entry, Key};
pub use entry::{Facts, LastUse, Reload};
pub(crate) use learned::Reuse;
pub(crate) use learned::lives::{Lives, Sampling};
pub(crate) use learned::{EXPECTED, class_of, expected_use, is_sooner, pack, unpack};

/// Maximum number of counted uses. It limits the number of classes and fits in six bits per ghost.
pub(crate) const MOST_USES: u32 = 32;

/// Terms of a cost, for explanations. Terms unused by a policy are 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// The cost of computing a token of the block again.
    pub base: f64,
    /// Sum of the weights of the leaving layers.
    pub layer_weight: f64,
    /// The weight of the block's position in its session.
    pub position_weight: f64,
    /// Number of counted uses.
    pub uses: u32,
    /// The product. Divided by idle time it is the retention value.
    pub cost: f64,
}

impl Terms {
    /// Terms of a policy without weights.
    pub const NONE: Self =
        Self { base: 1.0, layer_weight: 1.0, position_weight: 1.0, uses: 1, cost: 1.0 };
}

/// Kind of order between two entries. It decides how to find the minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Smaller `class / idle` first. It changes with time by a known formula: a kinetic tournament.
    Value,
    /// Class, then place. Both are independent of time: a tournament.
    Rank,
    /// The policy's own rule: a scan over the heads of all classes.
    Own,
    /// The policy's own rule over the first and the last entry of every class, by
    /// [`Policy::compare`].
    Ends,
}

/// Bit set of the policy inputs beyond a block's uses and last use. The manager maintains only
/// inputs named by a policy of its tiers, since each costs memory or time.
///
/// ```text
/// bit  6      5       4     3        2          1               0
///      reuse  reload  cost  arrival  past uses  session access  session blocks
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs(u8);

impl Needs {
    /// No inputs.
    pub const NONE: Self = Self(0);
    /// [`Facts::session_blocks`].
    pub const SESSION_BLOCKS: Self = Self(1);
    /// [`Facts::access`] is the last use of any block of the session.
    pub const SESSION_ACCESS: Self = Self(1 << 1);
    /// [`Facts::uses`] continues counting after an evicted block returns.
    pub const PAST_USES: Self = Self(1 << 2);
    /// [`Facts::arrival`].
    pub const ARRIVAL: Self = Self(1 << 3);
    /// A block's cost per token is a factor of its value. The objective gives its weight.
    pub const COST: Self = Self(1 << 4);
    /// [`Facts::reload`].
    pub const RELOAD: Self = Self(1 << 5);
    /// [`Facts::last_use`] and [`Policy::on_request`]. Uses and turns are remembered past eviction.
    pub const REUSE: Self = Self(1 << 6);

    /// Union of the inputs.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` are included.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Eviction policy of one tier: the victim is the minimum by [`Policy::compare`] over all entries.
///
/// A policy implements [`Policy::terms`] and, unless it ranks by value, [`Policy::order`]. State
/// changes only in [`Policy::on_request`].
pub trait Policy: Debug + Send + Sync {
    /// Cost of losing the entry, term by term.
    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms;

    /// Inputs of the policy.
    fn needs(&self) -> Needs {
        Needs::NONE
    }

    /// Kind of order.
    fn order(&self) -> Order {
        Order::Value
    }

    /// The entry's class. By default its cost in units of 2^-40.
    fn class(&self, facts: &Facts, cost: &CostModel) -> u64 {
        fixed(self.terms(facts, cost).cost)
    }

    /// The entry's place in its class. By default its last use, required by [`Order::Value`].
    fn place(&self, facts: &Facts) -> u64 {
        facts.access
    }

    /// `Less` if `a` leaves before `b`. By value, the smaller `class / idle` leaves first, compared
    /// exactly and infinite at zero idle time. Ties: lower class, then smaller place, then tie,
    /// then id.
    fn compare(&self, a: &Entry, b: &Entry, now: Nanos) -> Ordering {
        match self.order() {
            Order::Value => by_value(a, b, now).then_with(|| a.cmp(b)),
            Order::Rank | Order::Own | Order::Ends => a.cmp(b),
        }
    }

    /// First entry of a class to leave under [`Order::Own`]. `keys` are the whole class, ascending.
    fn head(&self, keys: &mut dyn DoubleEndedIterator<Item = Key>, now: Nanos) -> Option<Key> {
        let _ = now;
        keys.next()
    }

    /// Whether neither class nor place decreases along a path of equally used blocks. The tail of a
    /// run then leaves as a whole, without a comparison per block.
    fn deepens(&self) -> bool {
        false
    }

    /// Whether `before`, the block before the victim `chosen`, is the next victim, for
    /// [`Order::Ends`]. True only if it has the same class and is never worth more than `chosen`.
    fn follows(&self, before: &Entry, chosen: &Entry) -> bool {
        let _ = (before, chosen);
        false
    }

    /// Class and place of a block without a price, if its last use determines them.
    fn of_use(&self, last_use: &LastUse) -> Option<(u64, u64)> {
        let _ = last_use;
        None
    }

    /// Value compared first by [`Policy::compare`] under [`Order::Ends`]: uses per request times
    /// weight. Smaller values leave first.
    ///
    /// Also returns the number of requests, at least 1, for which the value stays constant unless a
    /// request brings learned data.
    fn worth(&self, entry: &Entry) -> (f64, u64) {
        let _ = entry;
        (0.0, 1)
    }

    /// Notifies the policy of the start of the `request`th request. `learned` is new learned data
    /// since the last call, if any.
    fn on_request(&mut self, request: u64, learned: Option<&Arc<Reuse>>) {
        let _ = (request, learned);
    }

    /// The entry's value in words, for policies with a value beyond their terms.
    fn words(&self, facts: &Facts, cost: &CostModel) -> Option<String> {
        let _ = (facts, cost);
        None
    }

    /// Value for `explain`. By default cost per second of idle time, infinite at zero idle time.
    fn value(&self, facts: &Facts, cost: f64, idle: Nanos) -> f64 {
        let _ = facts;
        if idle == 0 { f64::INFINITY } else { cost / seconds(idle) }
    }
}

/// Refuses an objective unused by all of these policies, because they rank by use alone.
///
/// # Errors
/// `Config` for an unused objective or an unknown policy name.
pub(crate) fn check_objective<'a>(
    names: impl Iterator<Item = &'a str>,
    objective: Objective,
) -> Result<()> {
    if objective == Objective::Cost {
        return Ok(());
    }
    let weighs = |policy: &dyn Policy| policy.needs().has(Needs::COST);
    let mut none = "";
    for name in names {
        if weighs(&*by_name(name, true)?) {
            return Ok(());
        }
        none = name;
    }
    let by_value = TABLE.iter().filter(|(_, make)| weighs(&*make(true)));
    let choices: Vec<&str> = by_value.map(|&(name, _)| name).collect();
    Err(Error::config(format!(
        "objective is '{}', but policy '{none}' has no values: choose one of {}",
        objective.name(),
        choices.join(", ")
    )))
}

type Make = fn(bool) -> Box<dyn Policy>;

macro_rules! policies {
    ($($name:ident => $make:expr;)*) => {
        $(mod $name;)*
        const TABLE: &[(&str, Make)] = &[$((stringify!($name), $make)),*];
    };
}

// One line registers a policy: its file name, which is its user-visible name, and its constructor.
policies! {
    lru => |_| Box::new(lru::Lru);
    fifo => |_| Box::new(fifo::Fifo);
    lfu => |_| Box::new(lfu::Lfu);
    retention => |reuse| Box::new(retention::Retention { reuse });
    flat => |_| Box::new(flat::Flat);
    weighted => |_| Box::new(weighted::Weighted);
    checkerboard => |_| Box::new(checkerboard::Checkerboard);
    restore => |_| Box::new(restore::Restore);
    learned => |_| Box::new(learned::Learned::default());
}

/// Names accepted by [`by_name`].
pub const NAMES: &[&str] = &{
    let mut names = [""; TABLE.len()];
    let mut i = 0;
    while i < TABLE.len() {
        names[i] = TABLE[i].0;
        i += 1;
    }
    names
};

/// Creates a policy by name. `reuse`: whether uses count, for policies with this option.
///
/// # Errors
/// `Config` for an unknown name.
pub fn by_name(name: &str, reuse: bool) -> Result<Box<dyn Policy>> {
    find(name).map(|make| make(reuse))
}

/// Checks a policy name.
///
/// # Errors
/// `Config` for an unknown name.
pub(crate) fn check(name: &str) -> Result<()> {
    find(name).map(|_| ())
}

fn find(name: &str) -> Result<Make> {
    match TABLE.iter().find(|(known, _)| *known == name) {
        Some((_, make)) => Ok(*make),
        None => Err(Error::config(format!(
            "there is no policy '{name}', choose one of {}",
            NAMES.join(", ")
        ))),
    }
}

/// Compares `class / idle` by cross multiplication, exactly: 64 by 64 bits fit in 128.
pub(crate) fn by_value(a: &Entry, b: &Entry, now: Nanos) -> Ordering {
    let (idle_a, idle_b) = (now.saturating_sub(a.place), now.saturating_sub(b.place));
    // Without idle time a value is infinite, even at zero cost.
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
