//! Hints: advice from an engine or an agent about the future of blocks, and the replies.
//!
//! A hint never pins. It changes the order of eviction: every block has a priority from 0 to 100,
//! and lower priorities leave first. Within a priority the tier's policy decides. Invariant: a
//! block without a hint has priority [`NORMAL`]. Cost: plain values.

use crate::block::{LeaseId, TierId, Token};
use crate::scope::Scope;
use crate::time::Nanos;

/// Priority of a block, 0 to [`HIGHEST`].
pub type Priority = u8;

/// Priority of blocks without a hint. Same as TensorRT-LLM's default.
pub const NORMAL: Priority = 35;

/// The highest priority.
pub const HIGHEST: Priority = 100;

/// A tenant with a quota on a tier. 0 for all tenants without a quota.
pub(crate) type Share = u32;

/// Band of a block on a tier, ranked before its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Band {
    /// Priority. Lower priorities leave first.
    pub priority: Priority,
    /// Tenant with a quota, or 0.
    pub share: Share,
}

impl Band {
    /// Band of blocks without a hint or a quota.
    pub const NORMAL: Self = Self { priority: NORMAL, share: 0 };
}

/// Target of a hint: the blocks it applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The full blocks of a sequence.
    Tokens {
        /// The sequence.
        tokens: Vec<Token>,
        /// Scope of the blocks.
        scope: Scope,
    },
    /// The path of a lease, and all blocks it will commit.
    Lease(LeaseId),
    /// The path of a conversation, and all blocks its leases will commit.
    Session {
        /// Name of the session.
        name: String,
        /// Scope of the session.
        scope: Scope,
    },
}

/// A priority for a range of tokens, and a priority for tokens not decoded yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retain {
    /// Path.
    pub target: Target,
    /// First token. A block belongs to the range if its first token does.
    pub start: u64,
    /// The last token plus 1. `None` for the end of the prompt.
    pub end: Option<u64>,
    /// Priority of the range.
    pub priority: Priority,
    /// Time to live from now on. `None` means forever.
    pub ttl: Option<Nanos>,
    /// Priority of blocks after the prompt, if set.
    pub decode_priority: Option<Priority>,
    /// Time to live of each block after the prompt, from its commit on.
    pub decode_ttl: Option<Nanos>,
    /// Owner. `None` is the target's session, if any.
    pub owner: Option<String>,
}

/// Target of a release: blocks no longer wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Release {
    /// All blocks of a finished conversation.
    Session {
        /// Name of the session.
        name: String,
        /// Scope of the session.
        scope: Scope,
    },
    /// All blocks retained by a finished agent.
    Owner {
        /// Name of the owner.
        name: String,
        /// Scope of the retained blocks.
        scope: Scope,
    },
    /// The full blocks of a sequence retained by this owner.
    Tokens {
        /// The sequence.
        tokens: Vec<Token>,
        /// Scope of the blocks.
        scope: Scope,
        /// Owner of the retention. `None` for blocks without an owner.
        owner: Option<String>,
    },
}

/// A hint.
#[derive(Clone, Debug, PartialEq)]
pub enum Hint {
    /// Retain blocks for longer or shorter than normal.
    Retain(Retain),
    /// Release blocks.
    Release(Release),
    /// Prefetch blocks to a tier.
    Prefetch {
        /// Path.
        target: Target,
        /// Destination: the first tier, or any tier above the blocks' tiers.
        tier: TierId,
        /// Deadline. Blocks predicted to arrive later are not moved.
        deadline: Option<Nanos>,
    },
    /// Demote blocks to a tier.
    Demote {
        /// Path.
        target: Target,
        /// Destination.
        tier: TierId,
    },
    /// Keep borders of a path resumable, in a model of several groups.
    ResumeAt {
        /// Path.
        target: Target,
        /// Tokens before each border, at the end of a block.
        borders: Vec<u64>,
    },
    /// A tool's estimate of the time until a session's next request.
    Progress {
        /// Name of the session.
        name: String,
        /// Scope of the session.
        scope: Scope,
        /// Tier on which its blocks are wanted at the next request.
        tier: TierId,
        /// Time until the next request.
        eta: Nanos,
    },
    /// Quota of a tenant on a tier. Over quota, the tenant's blocks leave first.
    Quota {
        /// The tenant's salt.
        tenant: Vec<u8>,
        /// Tier.
        tier: TierId,
        /// Maximum number of blocks. `None` for no bound.
        blocks: Option<u64>,
        /// Maximum share of the tier's blocks. `None` for no bound.
        share: Option<f64>,
    },
}

/// Outcome of a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// In force for all blocks of its target.
    Accepted,
    /// In force for some blocks of its target.
    Clipped,
    /// Waiting for blocks not cached yet.
    Deferred,
    /// Without effect.
    Rejected,
}

impl Answer {
    /// The name users read.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Clipped => "clipped",
            Self::Deferred => "deferred",
            Self::Rejected => "rejected",
        }
    }
}

/// Machine-readable reason why a hint is not in force for all blocks of its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HintCode {
    /// In force for all blocks.
    Accepted,
    /// The path, session, lease or owner has no matching block.
    Absent,
    /// Some blocks are not cached yet. The hint applies to each block once it is committed.
    Waiting,
    /// The tier's share of retained blocks is used up.
    Share,
    /// The scope has the maximum number of pending hints.
    Full,
    /// The maximum number of loads is in flight to the tier.
    Crowded,
    /// The blocks would arrive after the deadline.
    Late,
    /// The tier has no room.
    NoRoom,
    /// No tier has all layers needed for the load.
    Incomplete,
    /// The blocks are in use, or no tier can take them.
    InUse,
}

impl HintCode {
    /// The name users read.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Absent => "absent",
            Self::Waiting => "waiting",
            Self::Share => "share",
            Self::Full => "full",
            Self::Crowded => "crowded",
            Self::Late => "late",
            Self::NoRoom => "no-room",
            Self::Incomplete => "incomplete",
            Self::InUse => "in-use",
        }
    }
}

/// Reply to a hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HintReply {
    /// Outcome.
    pub answer: Answer,
    /// Number of blocks with the hint in force.
    pub blocks: u64,
    /// Number of blocks of the target without the hint in force: clipped, or not cached yet.
    pub not_applied: u64,
    /// Last reason for incomplete effect, machine-readable.
    pub code: HintCode,
    /// Reason for incomplete effect, human-readable. Empty if accepted.
    pub reason: String,
}
