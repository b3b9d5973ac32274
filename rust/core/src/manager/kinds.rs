//! Enums that calls, moves and reports share; imports nothing of the manager.

use std::ops::Range;

use crate::block::{BlockId, Layers, MoveId, TierId};
use crate::private_slots::PrivateSlotId;
use crate::time::Nanos;

/// Cause of an eviction: the event that made a copy leave a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Another block needed its slots at once.
    #[default]
    Demand,
    /// Another block needed its slots for a write-back ahead of need.
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
    /// Another copy is resident elsewhere.
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
    /// Resident on the first tier, or in flight to it for another lease.
    Reuse,
    /// It is copied up from a lower tier.
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
    /// Tier that has the bytes.
    pub tier: TierId,
    /// Predicted time at which the first layer is ready.
    pub first_ready: Nanos,
    /// Predicted time at which all layers are ready.
    pub ready: Nanos,
}

/// Policy of a request for blocks that are resident on lower tiers only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadMode {
    /// Load or recompute, whichever is ready sooner.
    #[default]
    Plan,
    /// Load all that can be loaded; in a leaf-only scope the match ends at the first block that
    /// cannot.
    All,
    /// Load nothing until [`Manager::load`](crate::manager::Manager::load) says so.
    None,
}

/// Copy of a block that is not committed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// The lease's slot that it is made from.
    pub(crate) source: PrivateSlotId,
    /// The slot that takes it.
    pub(crate) copy: PrivateSlotId,
    /// The move that makes it; it has ended well once it is not in flight any more.
    pub(crate) by: MoveId,
}
