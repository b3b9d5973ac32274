//! Settings of a storage tier, and the residency of a block on it.
//!
//! Invariant: a residency holds a contiguous range of layers. Cost: plain values.

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
    /// A store shared by machines. It exchanges bytes with host memory only.
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

/// Allocator of a tier's slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Owner {
    /// kvtrie.
    #[default]
    Kvtrie,
    /// The engine allocates. `bind` names its slots.
    Engine,
    /// None: there are no bytes.
    Nobody,
}

/// Write policy: when to write copies to the next lower tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Write {
    /// When a block becomes a victim, or ahead of need.
    #[default]
    Back,
    /// As soon as a block is resident.
    Through,
    /// Never. Victims are dropped.
    Never,
}

/// Settings of a tier.
#[derive(Clone, Debug)]
pub struct TierSpec {
    /// Storage level.
    pub kind: Kind,
    /// Capacity in blocks.
    pub blocks: u32,
    /// Allocator of its slots.
    pub owner: Owner,
    /// Write policy towards the next tier.
    pub write: Write,
    /// Least number of uses for a write.
    pub admit_after: u32,
    /// Below this share of free or clean slots, dirty blocks are written down ahead of need.
    pub free_low: f64,
    /// Share kept for running decodes. `reserve` may use it, `acquire` may not.
    pub growth_reserve: f64,
    /// Maximum share of blocks retained by hints.
    pub retained_share: f64,
    /// A slot per layer instead of per block.
    pub layer_slots: bool,
    /// Whether bytes outlive the manager, so moves carry the block's key. Always true for disk and
    /// remote.
    pub kept: bool,
    /// Policy of this tier, if different from the manager's.
    pub policy: Option<String>,
    /// Lane for reads from this tier.
    pub read: LaneSpec,
    /// Lane for writes to this tier.
    pub store: LaneSpec,
}

impl TierSpec {
    /// A write-back tier with slots allocated by kvtrie, and lanes at the usual speed of its kind:
    /// 2 TB/s for GPU memory, 12 GB/s for host memory, 2 GB/s for a disk, 1 GB/s for a remote
    /// store.
    #[must_use]
    pub fn new(kind: Kind, blocks: u32) -> Self {
        let (bytes_per_s, latency_ns) = match kind {
            Kind::Gpu => (2_000_000_000_000, 0),
            Kind::Host => (12_000_000_000, 10_000),
            Kind::Disk => (2_000_000_000, 100_000),
            Kind::Remote => (1_000_000_000, 1_000_000),
        };
        let lane = |way: &str| LaneSpec {
            name: format!("{} {way}", kind.name()),
            bytes_per_s,
            latency_ns,
            shares: None,
        };
        Self {
            kind,
            blocks,
            owner: Owner::default(),
            write: Write::default(),
            admit_after: 1,
            free_low: 0.0,
            growth_reserve: 0.0,
            retained_share: 0.5,
            layer_slots: false,
            kept: false,
            policy: None,
            read: lane("read"),
            store: lane("store"),
        }
    }
}

/// State of a residency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum ResidencyState {
    /// No layer is resident.
    #[default]
    Absent,
    /// The layers `have` are valid, and none is in flight.
    Resident,
    /// More layers are in flight. The layers `have` are valid already.
    Arriving,
    /// A load failed. The slot has no valid bytes and may be evicted.
    Bad,
}

/// Residency of a block on a tier: a contiguous range of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Residency {
    /// The slot, or with layer slots the row of slots.
    pub slot: u32,
    /// Valid layers.
    pub have: Layers,
    /// Number of moves reading or writing here.
    pub busy: u16,
    /// Its state.
    pub state: ResidencyState,
}

impl Default for Residency {
    fn default() -> Self {
        Self { slot: NO_SLOT, have: Layers::NONE, busy: 0, state: ResidencyState::Absent }
    }
}

impl Residency {
    /// Layers usable in a plan.
    #[must_use]
    pub(crate) fn usable(&self) -> Layers {
        if self.state == ResidencyState::Bad { Layers::NONE } else { self.have }
    }
}
