//! Policy inputs of a block, and the block's entry in the eviction index.
//!
//! Invariant: [`Entry`]s order by class, then by place in the class. Cost: plain integers.

use crate::block::{BlockId, Departure, Layers};
use crate::time::Nanos;

/// Facts about a block on its tier, the input for its class and place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// The block, or [`BlockId::MAX`] for none.
    pub id: BlockId,
    /// Tokens before the block.
    pub context: u64,
    /// The block's index in its sequence, from 0.
    pub block: u32,
    /// Blocks of its session. With several sessions, of the shortest, where the position weighs
    /// most.
    pub session_blocks: u32,
    /// Number of uses, including the first.
    pub uses: u32,
    /// Time of its last use, or of its session's last use if the policy needs it.
    pub access: Nanos,
    /// Number of the request that made it resident on this tier, if the policy needs it.
    pub arrival: u64,
    /// The layers resident on this tier.
    pub layers: Layers,
    /// The model's number of layers.
    pub model_layers: u16,
    /// Layer to leave, on a tier with layer slots. `None` for the whole block.
    pub layer: Option<u16>,
    /// Whether it would be demoted or dropped.
    pub departure: Departure,
    /// User-defined price per token, if any.
    pub price: Option<f64>,
    /// Time to load it, if the policy needs it.
    pub reload: Reload,
    /// Its last use, if the policy needs it.
    pub last_use: LastUse,
}

/// Last use of a block by a request, for learning policies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LastUse {
    /// Number of the request, modulo 2^32.
    pub request: u32,
    /// Mean cost per token of the unshared suffix ending with the block at this use.
    pub weight: f32,
    /// Class of the life starting with this use.
    pub class: u8,
    /// Turn of the request that stored the block.
    pub turn: u8,
}

/// Times to load a block, from its tier and from the tier below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reload {
    /// Tokens of a block.
    pub tokens: u64,
    /// From its tier. 0 on the first tier, which needs no load.
    pub own_tier: Nanos,
    /// From the tier below, if eviction writes it there.
    pub below: Option<Nanos>,
}

impl Facts {
    /// Price per token: the user's, or else `base`.
    pub(super) fn price_or(&self, base: f64) -> f64 {
        self.price.unwrap_or(base)
    }
}

/// Entry of an evictable block. The tier's policy computes `class` and `place`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Entries of a class keep their order for ever.
    pub class: u64,
    /// Time of its last use, or a policy-defined position.
    pub place: u64,
    /// Decides between equal places. The smaller value leaves first.
    pub tie: u32,
    /// The block.
    pub id: BlockId,
}

/// An entry's place within its class, ascending in the order of leaving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Time of its last use, or a policy-defined position.
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
