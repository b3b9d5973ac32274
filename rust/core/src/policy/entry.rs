//! What a policy knows of a block, and a block's place among those that may leave.
//!
//! Invariant: [`Entry`]s order by class, then by their place in it. Cost: plain integers.

use crate::block::{BlockId, Departure, Layers};
use crate::cost::CostModel;
use crate::time::Nanos;

/// What a policy may know about a block on its tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// The block; [`BlockId::MAX`] if none is meant.
    pub id: BlockId,
    /// Tokens before the block.
    pub context: u64,
    /// Tokens before the part of its path that it shares with nobody.
    pub start: u64,
    /// The block's index in its sequence, from 0.
    pub block: u32,
    /// Blocks of its session; of several the shortest one's, in which its position weighs most.
    pub session_blocks: u32,
    /// How often it was used, the first time included.
    pub uses: u32,
    /// When it was last used, or its session, if the policy ages by session.
    pub access: Nanos,
    /// The layers resident on this tier.
    pub layers: Layers,
    /// The model's number of layers.
    pub model_layers: u16,
    /// The one layer that would leave, on a tier with layer slots; `None`: the whole block.
    pub layer: Option<u16>,
    /// Whether it would be demoted or dropped.
    pub departure: Departure,
    /// What the user says that a token of it costs, if anything.
    pub price: Option<f64>,
    /// What loading takes, if the policy restores.
    pub reload: Reload,
}

/// How long a block takes to load, from where it stands and from where it would go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reload {
    /// Tokens of a block.
    pub tokens: u64,
    /// From its tier; 0 on the first one, where nothing is loaded.
    pub here: Nanos,
    /// From the tier below, if it would be written there.
    pub below: Option<Nanos>,
}

impl Facts {
    /// What a token of the block costs: the user's word, or this.
    pub(super) fn price_or(&self, base: f64) -> f64 {
        self.price.unwrap_or(base)
    }
}

/// What a policy with a memory is told when a block arrives, is used or leaves.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Names the block: the same when it comes back under another id.
    pub tag: u64,
    /// How many requests there were: the clock of policies that count requests.
    pub request: u64,
    /// Whether a request uses the block; otherwise it comes from another tier.
    pub used: bool,
    /// By how many requests one after the other the path was made that this request found.
    pub turn: u32,
    /// Blocks that this request adds to the path.
    pub added: u32,
    /// Whether the block is the last one of the request's prompt.
    pub last: bool,
    /// The block as it is now.
    pub facts: &'a Facts,
    /// What recomputation costs.
    pub cost: &'a CostModel,
}

/// What may leave a tier. `class` and `place` come from the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Entries of one class never change places.
    pub class: u64,
    /// When it was last used, or its place in an order of the policy's own.
    pub place: u64,
    /// What decides between equal places: the smaller one leaves first.
    pub tie: u32,
    /// The block.
    pub id: BlockId,
}

/// An entry's place within its class; ascending order = leaves first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// When it was last used, or its place in an order of the policy's own.
    pub place: u64,
    /// What decides between equal places.
    pub tie: u32,
    /// The block.
    pub id: BlockId,
}

impl Entry {
    /// Its place within its class.
    #[must_use]
    pub fn key(&self) -> Key {
        Key { place: self.place, tie: self.tie, id: self.id }
    }
}

impl Key {
    /// The entry of this place in `class`.
    #[must_use]
    pub fn entry(self, class: u64) -> Entry {
        Entry { class, place: self.place, tie: self.tie, id: self.id }
    }
}
