//! Policies: what an entry is worth, and which of two leaves first.
//!
//! Invariant: [`Policy::compare`] is a strict total order at every `now`, and entries of one class
//! keep their order for ever, up to [`Policy::head`]. Numbers are ranked as integers, so every
//! platform picks the same victim. Cost: one multiplication per comparison.

mod entry;
mod memory;
#[cfg(test)]
mod sample;
mod shadow;
#[cfg(test)]
mod suite;

use std::cmp::Ordering;
use std::fmt::Debug;
use std::ops::Range;

use crate::block::BlockId;
use crate::cost::{CostModel, fixed};
use crate::error::{Error, Result};
use crate::time::Nanos;

pub use entry::{Entry, Facts, Key, Reload, Seen};
#[cfg(test)]
pub(crate) use sample::facts;

/// Uses beyond this many count no further.
pub const MOST_USES: u32 = 32;

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

impl Terms {
    /// The terms of a policy that weighs nothing.
    pub const NONE: Self =
        Self { base: 1.0, layer_weight: 1.0, position_weight: 1.0, uses: 1, cost: 1.0 };
}

/// What decides between two entries, and so how the minimum is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The smaller `class / idle`; it changes with time, by a formula that is known.
    Value,
    /// Class, then place: time changes nothing.
    Rank,
    /// The policy's own rule: the heads of all classes are compared.
    Own,
}

/// What a policy is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Whether a policy that may count uses or not does.
    pub reuse: bool,
    /// Blocks of its tier.
    pub capacity: u32,
}

/// A rule of eviction. The victim is the minimum by [`Policy::compare`] of all entries. One object
/// serves one tier; what it remembers changes in `arrived`, `touched` and `left` alone.
pub trait Policy: Debug + Send + Sync {
    /// The name users write.
    fn name(&self) -> &'static str;

    /// The cost of losing the entry, term by term.
    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms;

    /// What decides between two entries.
    fn order(&self) -> Order {
        Order::Value
    }

    /// The entry's class; by default its cost in units of 2^-40.
    fn class(&self, facts: &Facts, cost: &CostModel) -> u64 {
        fixed(self.terms(facts, cost).cost)
    }

    /// The entry's place in its class; by default its last use, which [`Order::Value`] needs.
    fn place(&self, facts: &Facts) -> u64 {
        facts.access
    }

    /// `Less` if `a` leaves before `b`. By value the smaller `class / idle`, compared exactly and
    /// infinite at zero idle time. Equals: lower class, then smaller place, then tie, then id.
    fn compare(&self, a: &Entry, b: &Entry, now: Nanos) -> Ordering {
        match self.order() {
            Order::Value => by_value(a, b, now).then_with(|| a.cmp(b)),
            Order::Rank | Order::Own => a.cmp(b),
        }
    }

    /// Under [`Order::Own`]: which entry of one class leaves first. `keys` are all of it, ascending.
    fn head(&self, keys: &mut dyn DoubleEndedIterator<Item = Key>, now: Nanos) -> Option<Key> {
        let _ = now;
        keys.next()
    }

    /// Whether each of these blocks, which stand one behind the other and were used alike, would
    /// leave before the last of them or, if `alike`, would do so but for ties.
    fn deepens(&self, blocks: Range<BlockId>, alike: bool) -> bool {
        let _ = (blocks, alike);
        false
    }

    /// Whether `Facts::session_blocks` matters.
    fn sessions(&self) -> bool {
        false
    }

    /// Whether `Facts::access` is the last use of anything of the block's session.
    fn ages_by_session(&self) -> bool {
        false
    }

    /// Whether `Facts::uses` goes on counting when a block comes back that was gone.
    fn remembers(&self) -> bool {
        false
    }

    /// Whether it has a memory, and so wants the calls below.
    fn watches(&self) -> bool {
        false
    }

    /// Whether it reads the turns of a conversation in [`Seen`].
    fn turns(&self) -> bool {
        false
    }

    /// Whether it reads [`Facts::reload`].
    fn restores(&self) -> bool {
        false
    }

    /// A block has come to stand on the tier, for the request that is served.
    fn arrived(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let _ = seen;
        Vec::new()
    }

    /// A later request uses a block of the tier. Returns which others changed class or place.
    fn touched(&mut self, seen: &Seen<'_>) -> Vec<BlockId> {
        let _ = seen;
        Vec::new()
    }

    /// A block does not stand on the tier any more.
    fn left(&mut self, id: BlockId, tag: u64) -> Vec<BlockId> {
        let _ = (id, tag);
        Vec::new()
    }

    /// A block is chosen to leave the tier, together with others: their victims are found as if it
    /// had left. Then `left` follows for each of them, or for none.
    fn chosen(&mut self, id: BlockId) {
        let _ = id;
    }

    /// No block is chosen any more.
    fn settled(&mut self) {}

    /// What `explain` shows as value. By default cost per second of idle time, infinite at zero.
    fn value(&self, facts: &Facts, cost: f64, idle: Nanos) -> f64 {
        let _ = facts;
        if idle == 0 { f64::INFINITY } else { cost / seconds(idle) }
    }
}

type Make = fn(Setup) -> Box<dyn Policy>;

macro_rules! policies {
    ($($name:ident => $make:expr;)*) => {
        $(mod $name;)*
        const TABLE: &[(&str, Make)] = &[$((stringify!($name), $make)),*];
    };
}

// A line is all that registers a policy: the file's name, which users write, and how it is made.
policies! {
    lru => |_| Box::new(lru::Lru);
    fifo => |_| Box::new(fifo::Fifo::default());
    lfu => |_| Box::new(lfu::Lfu);
    gdsf => |_| Box::new(gdsf::Gdsf::default());
    s3fifo => |setup| Box::new(s3fifo::S3Fifo::new(setup.capacity));
    lirs => |setup| Box::new(lirs::Lirs::new(setup.capacity));
    arc => |setup| Box::new(arc::Arc::new(setup.capacity));
    hazard => |setup| Box::new(hazard::Hazard::new(setup.capacity));
    retention => |setup| Box::new(retention::Retention { reuse: setup.reuse });
    flat => |_| Box::new(flat::Flat);
    weighted => |_| Box::new(weighted::Weighted);
    checkerboard => |_| Box::new(checkerboard::Checkerboard);
    restore => |_| Box::new(restore::Restore);
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

/// A new policy of that name.
///
/// # Errors
/// `Config` if there is no such policy.
pub fn by_name(name: &str, setup: Setup) -> Result<Box<dyn Policy>> {
    find(name).map(|make| make(setup))
}

/// Whether there is a policy of that name.
///
/// # Errors
/// `Config` if there is none.
pub fn check(name: &str) -> Result<()> {
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

/// Compares `class / idle` by cross multiplication.
pub(crate) fn by_value(a: &Entry, b: &Entry, now: Nanos) -> Ordering {
    let (idle_a, idle_b) = (now.saturating_sub(a.place), now.saturating_sub(b.place));
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
