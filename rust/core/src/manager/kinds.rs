//! Kinds that calls, moves and reports have in common. Imports nothing of the manager.

use slotmap::new_key_type;

use crate::block::{Layers, TierId};
use crate::time::Nanos;

new_key_type! {
    /// An own slot, for as long as it lives.
    pub(super) struct PrivateSlotId;
}

/// What made a copy leave a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Its room was wanted at once.
    #[default]
    Demand,
    /// Its room was wanted for something that is written down before its slot is needed.
    Ahead,
    /// Its lease was suspended.
    Suspended,
    /// A move failed: it could not be read, or stood behind what was lost.
    Failed,
    /// `mark` cleared it.
    Cleared,
    /// `reset` forgot it.
    Reset,
    /// A hint took it down.
    Hinted,
}

/// Why a copy left a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It stands elsewhere too.
    Clean,
    /// It is written one tier down.
    Demoted,
    /// It was the last copy.
    Dropped,
}

/// What a plan does with a span of blocks and layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// It stands on the first tier, or arrives there for somebody else.
    Reuse,
    /// It is copied up from a lower tier.
    Load,
    /// The engine computes it at its own positions.
    Recompute,
}

/// What happens to some layers of consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First block on the path.
    pub start: u32,
    /// One behind the last block.
    pub stop: u32,
    /// Which layers.
    pub layers: Layers,
    /// What happens.
    pub action: Action,
    /// Where the bytes are.
    pub tier: TierId,
    /// Predicted time at which the first layer is there.
    pub first_ready: Nanos,
    /// Predicted time at which all of it is there.
    pub ready: Nanos,
}

/// Whether blocks of lower tiers are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadMode {
    /// Load or recompute, whichever is ready sooner.
    #[default]
    Plan,
    /// Load all that can be loaded; in a leaf-only scope the match ends where that is not.
    All,
    /// Load nothing until [`Manager::load`] says so.
    None,
}

/// What a move is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoveKind {
    /// Towards a faster tier.
    Load,
    /// Towards a slower tier.
    Store,
    /// Within the first tier, before a shared partial block is written.
    Copy,
}

/// One end of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The block's residency on that tier.
    Here,
    /// A lease's own slot, or one reserved for transit.
    PrivateSlot(PrivateSlotId),
    /// A slot whose block leaves with this move.
    Leaving,
}
