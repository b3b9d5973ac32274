//! Hints: requests of an engine or an agent about the future of blocks, and their answers.
//!
//! A hint never pins. It changes the order of eviction: every block has a priority from 0 to 100, and a
//! lower one leaves before a higher one; within one priority the tier's policy decides. Invariant:
//! a block without a hint has the priority [`NORMAL`]. Cost: plain values.

use crate::block::{LeaseId, TierId, Token};
use crate::scope::Scope;
use crate::time::Nanos;

/// Priority of a block, 0 to [`HIGHEST`].
pub type Priority = u8;

/// Priority of blocks without a hint; TensorRT-LLM's default.
pub const NORMAL: Priority = 35;

/// The highest priority.
pub const HIGHEST: Priority = 100;

/// A tenant with a quota on a tier; 0 for all tenants without one.
pub(crate) type Share = u32;

/// Band of a block on a tier: its rank before its value counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Band {
    /// The lower priority leaves first.
    pub priority: Priority,
    /// Tenant with a quota, or 0.
    pub share: Share,
}

impl Band {
    /// Band of blocks without hint and quota.
    pub const NORMAL: Self = Self { priority: NORMAL, share: 0 };
}

/// Target of a hint: the blocks that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The full blocks of a sequence.
    Tokens {
        /// The sequence.
        tokens: Vec<Token>,
        /// Whose blocks.
        scope: Scope,
    },
    /// The path of a lease, and the blocks that it will commit.
    Lease(LeaseId),
    /// The path of a conversation, and the blocks that its leases will commit.
    Session {
        /// Its name.
        name: String,
        /// Whose session.
        scope: Scope,
    },
}

/// A priority for a range of tokens, and one for those that a request will yet produce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retain {
    /// Which path.
    pub target: Target,
    /// First token; a block belongs to the range if its first token does.
    pub start: u64,
    /// The last token plus 1; `None` for the end of the prompt.
    pub end: Option<u64>,
    /// The range's priority.
    pub priority: Priority,
    /// Time to live, from now on; `None` for ever.
    pub ttl: Option<Nanos>,
    /// Priority of blocks after the prompt, if set.
    pub decode_priority: Option<Priority>,
    /// Time to live, from the commit of each such block on.
    pub decode_ttl: Option<Nanos>,
    /// Owner; `None` is the target's session, if it has one.
    pub owner: Option<String>,
}

/// Target of a release: blocks that are no longer wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Release {
    /// A conversation is over.
    Session {
        /// Its name.
        name: String,
        /// Whose session.
        scope: Scope,
    },
    /// An agent has ended: all blocks that it retained.
    Owner {
        /// Its name.
        name: String,
        /// Whose blocks it retained.
        scope: Scope,
    },
    /// The full blocks of a sequence that this owner retained.
    Tokens {
        /// The sequence.
        tokens: Vec<Token>,
        /// Whose blocks.
        scope: Scope,
        /// Owner that retained them; `None` for blocks without an owner.
        owner: Option<String>,
    },
}

/// One hint.
#[derive(Clone, Debug, PartialEq)]
pub enum Hint {
    /// Retain blocks longer, or less long.
    Retain(Retain),
    /// Release blocks.
    Release(Release),
    /// Prefetch blocks to a tier.
    Prefetch {
        /// Which path.
        target: Target,
        /// Target tier: the first tier, or another one above the blocks' tiers.
        tier: TierId,
        /// Deadline; blocks that would arrive later are not moved.
        deadline: Option<Nanos>,
    },
    /// Demote blocks to a tier.
    Demote {
        /// Which path.
        target: Target,
        /// Where to.
        tier: TierId,
    },
    /// Keep borders of a path resumable, in a model of several groups.
    ResumeAt {
        /// Which path.
        target: Target,
        /// Tokens before each border, at the end of a block.
        borders: Vec<u64>,
    },
    /// The time of a session's next request, as the tool that it waits for estimates it.
    Progress {
        /// The session's name.
        name: String,
        /// Whose session.
        scope: Scope,
        /// Tier on which its blocks are wanted by then.
        tier: TierId,
        /// Time until then.
        eta: Nanos,
    },
    /// Quota: blocks of a tier that a tenant may hold before its own leave first.
    Quota {
        /// The tenant's salt.
        tenant: Vec<u8>,
        /// Which tier.
        tier: TierId,
        /// Maximum number of blocks; `None` for no bound.
        blocks: Option<u64>,
        /// At most this share of the tier's blocks; `None` for no bound.
        share: Option<f64>,
    },
}

/// Outcome of a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// In force for all blocks that it names.
    Accepted,
    /// In force for some of them.
    Clipped,
    /// Waits for blocks that are not cached.
    Deferred,
    /// Changes nothing.
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

/// Reason of a reply, for programs: why a hint is not in force for all blocks that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HintCode {
    /// It is in force for all of them.
    Accepted,
    /// Its path, session, lease or owner has no such block.
    Absent,
    /// Some are not cached yet; it is in force for each once the block is committed.
    Waiting,
    /// A tier retains as many blocks as its share allows.
    Share,
    /// The scope has as many pending hints as it may have.
    Full,
    /// As many loads as may be are in flight to the tier.
    Crowded,
    /// They would arrive after the deadline.
    Late,
    /// The tier has no room.
    NoRoom,
    /// No tier has all layers that the load needs.
    Incomplete,
    /// They are in use, or no tier can take them.
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

/// The answer to one hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HintReply {
    /// Its outcome.
    pub answer: Answer,
    /// Number of blocks for which it is in force now.
    pub blocks: u64,
    /// Number of blocks that it names and is not in force for: clipped, or not cached yet.
    pub left: u64,
    /// The last reason why not for all of them, for programs.
    pub code: HintCode,
    /// Reason why not for all of them, for people; empty if it is accepted.
    pub reason: String,
}
