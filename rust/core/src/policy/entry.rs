//! Inputs of a policy about one block, and the entry of a block among those that may leave.
//!
//! Invariant: [`Entry`]s order by class, then by their place in it. Cost: plain integers.

use crate::block::{BlockId, Departure, Layers};
use crate::time::Nanos;

/// Facts about a block on its tier, from which a policy computes class and place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// The block; [`BlockId::MAX`] if none is meant.
    pub id: BlockId,
    /// Tokens before the block.
    pub context: u64,
    /// The block's index in its sequence, from 0.
    pub block: u32,
    /// Blocks of its session; of several the shortest one's, in which its position weighs most.
    pub session_blocks: u32,
    /// Number of uses, the first one included.
    pub uses: u32,
    /// Time of its last use, or its session's, if the policy needs that.
    pub access: Nanos,
    /// Number of the request by which it became resident on this tier, if the policy needs that.
    pub arrival: u64,
    /// The layers resident on this tier.
    pub layers: Layers,
    /// The model's number of layers.
    pub model_layers: u16,
    /// Layer that would leave, on a tier with layer slots; `None`: the whole block.
    pub layer: Option<u16>,
    /// Whether it would be demoted or dropped.
    pub departure: Departure,
    /// Price per token that the user set, if any.
    pub price: Option<f64>,
    /// Time to load it, if the policy needs that.
    pub reload: Reload,
    /// Its last use, if the policy needs that.
    pub last_use: LastUse,
}

/// Last use of a block by a request, as policies that learn see it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LastUse {
    /// Number of the request, modulo 2^32.
    pub request: u32,
    /// Mean cost of a token of the unshared suffix that the block ended then.
    pub weight: f32,
    /// Class of the life that began with it.
    pub class: u8,
    /// The turn that stored the block.
    pub turn: u8,
}

/// Times to load a block, from its tier and from the tier that it would go to.
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
    /// Price per token: the user's, or else `base`.
    pub(super) fn price_or(&self, base: f64) -> f64 {
        self.price.unwrap_or(base)
    }
}

/// Entry of a block that may leave a tier; its policy computes `class` and `place`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Entries of one class keep their order for ever.
    pub class: u64,
    /// Time of its last use, or a position in an order of the policy's own.
    pub place: u64,
    /// Decides between equal places: the smaller one leaves first.
    pub tie: u32,
    /// The block.
    pub id: BlockId,
}

/// An entry's place within its class; ascending order = leaves first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Time of its last use, or a position in an order of the policy's own.
    pub place: u64,
    /// Decides between equal places.
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
