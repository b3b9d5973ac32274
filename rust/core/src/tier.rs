//! A storage level of one machine as the user describes it, and one block's residency on it.
//!
//! Invariant: a residency holds one contiguous range of layers. Cost: plain values.

use crate::block::{Layers, NO_SLOT};
use crate::lane::LaneSpec;

/// The kinds of tier, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Device memory.
    Gpu,
    /// Host memory.
    Host,
    /// A local disk.
    Disk,
    /// A store shared by machines; it exchanges bytes with host memory only.
    Remote,
}

impl Kind {
    /// The name users write.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Remote => "remote",
        }
    }

    /// The kind of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Gpu, Self::Host, Self::Disk, Self::Remote].into_iter().find(|k| k.name() == name)
    }
}

/// Who hands out a tier's slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The pool is ours.
    #[default]
    Kvtrie,
    /// The engine allocates; `bind` names its slots.
    Engine,
    /// There are no bytes.
    Nobody,
}

/// When copies are written one tier down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Write {
    /// When a block is chosen as victim, or ahead of need.
    #[default]
    Back,
    /// As soon as a block is there.
    Through,
    /// Never; victims are dropped.
    Never,
}

/// What the user says of a tier.
#[derive(Clone, Debug)]
pub struct TierSpec {
    /// Which storage level.
    pub kind: Kind,
    /// Room in blocks.
    pub blocks: u32,
    /// Who hands out slots.
    pub owner: Owner,
    /// When blocks of this tier are copied to the next one.
    pub write: Write,
    /// How often a block must have been used before it is worth a write.
    pub admit_after: u32,
    /// Below this share of free or clean slots, dirty blocks are written down ahead of need.
    pub free_low: f64,
    /// This share is kept for running decodes: `acquire` leaves it, `reserve` may take it.
    pub growth_reserve: f64,
    /// At most this share of its blocks is retained by hints.
    pub retained_share: f64,
    /// One slot per layer instead of one per block.
    pub layer_slots: bool,
    /// The policy on this tier, if not the manager's.
    pub policy: Option<String>,
    /// The lane that carries blocks up from here.
    pub read: LaneSpec,
    /// The lane that carries blocks down to here.
    pub store: LaneSpec,
}

/// What a residency is good for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    /// Nothing is here.
    #[default]
    Absent,
    /// `have` is valid and nothing is under way.
    Resident,
    /// More layers are on their way; those of `have` are valid already.
    Arriving,
    /// Bytes that could not be delivered: they take room, serve nobody and may be evicted.
    Bad,
}

/// One block on one tier: one contiguous range of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residency {
    /// The slot, or with layer slots the row of slots.
    pub slot: u32,
    /// The layers that are valid here.
    pub have: Layers,
    /// Moves that read or write here.
    pub busy: u16,
    /// What it is good for.
    pub state: State,
}

impl Default for Residency {
    fn default() -> Self {
        Self { slot: NO_SLOT, have: Layers::NONE, busy: 0, state: State::Absent }
    }
}

impl Residency {
    /// The layers that a plan may count on.
    #[must_use]
    pub fn usable(&self) -> Layers {
        if self.state == State::Bad { Layers::NONE } else { self.have }
    }
}
