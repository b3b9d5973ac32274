//! Enums shared by calls, moves and reports. Imports nothing of the manager.

use std::ops::Range;

use crate::block::{BlockId, Layers, MoveId, TierId};
use crate::private_slots::PrivateSlotId;
use crate::time::Nanos;

/// Cause of an eviction: the event that made a copy leave a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A block needed its slots at once.
    #[default]
    Demand,
    /// A block needed its slots for a write-back ahead of need.
    Ahead,
    /// Its lease was suspended.
    Suspended,
    /// A move failed: the copy could not be read, or its parent was lost.
    Failed,
    /// `mark` cleared it.
    Cleared,
    /// `reset` forgot it.
    Reset,
    /// A hint demoted it.
    Hinted,
}

/// Kind of an eviction, by what remains of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A second copy is still resident.
    Clean,
    /// It is written back one tier down.
    Demoted,
    /// It was the last copy.
    Dropped,
}

/// Consecutive blocks of a run that leave a tier together.
#[derive(Clone, Debug)]
pub(crate) struct Evicted {
    pub(crate) tier: TierId,
    pub(crate) blocks: Range<BlockId>,
    pub(crate) layers: Layers,
    pub(crate) reason: Reason,
    pub(crate) cause: Cause,
}

/// Action of a plan for a span of blocks and layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Resident on the first tier, or in flight to it for a different lease.
    Reuse,
    /// Copied up from a lower tier.
    Load,
    /// The engine computes it at its own positions.
    Recompute,
}

/// Rectangle of a plan: some layers of consecutive blocks, and the action for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First block, counted on the lease's path.
    pub start: u32,
    /// The last block plus 1.
    pub stop: u32,
    /// Layers concerned.
    pub layers: Layers,
    /// The action.
    pub action: Action,
    /// Tier with the bytes.
    pub tier: TierId,
    /// Predicted time at which the first layer is ready.
    pub first_ready: Nanos,
    /// Predicted time at which all layers are ready.
    pub ready: Nanos,
}

/// Policy of a request for blocks resident only on lower tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadMode {
    /// Load or recompute, whichever is ready sooner.
    #[default]
    Plan,
    /// Load every loadable block. In a leaf-only scope the match ends at the first block that
    /// cannot be loaded.
    All,
    /// Load nothing before a call of [`Manager::load`](crate::manager::Manager::load).
    None,
}

/// Copy of a block before its commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// Slot of the lease, the source of the copy.
    pub(crate) source: PrivateSlotId,
    /// Destination slot.
    pub(crate) copy: PrivateSlotId,
    /// The copying move. It succeeded if it is no longer in flight.
    pub(crate) by: MoveId,
}
