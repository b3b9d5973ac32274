//! Hints: what an engine or an agent says about the future of blocks, and what it is answered.
//!
//! A hint never pins. It changes who leaves first: every block has a priority from 0 to 100, and a
//! lower one leaves before a higher one; within one priority the tier's policy decides. Invariant:
//! what nobody has said anything about has the priority [`NORMAL`]. Cost: plain values.

use crate::block::{LeaseId, TierId, Token};
use crate::scope::Scope;
use crate::time::Nanos;

/// How much a block is wanted, 0 to [`HIGHEST`].
pub type Priority = u8;

/// The priority of blocks that no hint names; TensorRT-LLM's default.
pub const NORMAL: Priority = 35;

/// The highest priority.
pub const HIGHEST: Priority = 100;

/// A tenant with a quota on a tier; 0 for all tenants without one.
pub type Share = u32;

/// Which blocks of a tier a block is ranked with, before its value counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Band {
    /// The lower one leaves first.
    pub priority: Priority,
    /// Whose it is, if that matters.
    pub share: Share,
}

impl Band {
    /// Where blocks are that no hint and no quota concerns.
    pub const NORMAL: Self = Self { priority: NORMAL, share: 0 };
}

/// Which blocks a hint is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The full blocks of a sequence.
    Tokens {
        /// The sequence.
        tokens: Vec<Token>,
        /// Whose blocks.
        scope: Scope,
    },
    /// The path of a lease, and what it will commit.
    Lease(LeaseId),
    /// The path of a conversation, and what its leases will commit.
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
    /// A block belongs to the range if its first token does.
    pub start: u64,
    /// One behind the last token; `None` for the end of the prompt.
    pub end: Option<u64>,
    /// The range's priority.
    pub priority: Priority,
    /// For how long, from now on; `None` for good.
    pub ttl: Option<Nanos>,
    /// The priority of blocks behind the prompt, if that was said.
    pub decode_priority: Option<Priority>,
    /// For how long, from the commit of each such block on.
    pub decode_ttl: Option<Nanos>,
    /// Who says so; `None` is the target's session, or nobody in particular.
    pub owner: Option<String>,
}

/// Which blocks are wanted no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Release {
    /// A conversation is over.
    Session {
        /// Its name.
        name: String,
        /// Whose session.
        scope: Scope,
    },
    /// An agent is gone: all that it retained.
    Owner {
        /// Its name.
        name: String,
        /// Whose blocks it retained.
        scope: Scope,
    },
    /// The full blocks of a sequence; of what was retained there, that of this owner.
    Tokens {
        /// The sequence.
        tokens: Vec<Token>,
        /// Whose blocks.
        scope: Scope,
        /// Who retained them; `None` is nobody in particular.
        owner: Option<String>,
    },
}

/// One hint.
#[derive(Clone, Debug, PartialEq)]
pub enum Hint {
    /// Keep blocks longer, or less long.
    Retain(Retain),
    /// Blocks are wanted no more.
    Release(Release),
    /// Bring blocks up to a tier.
    Prefetch {
        /// Which path.
        target: Target,
        /// Where to: the first tier, or another one above theirs.
        tier: TierId,
        /// What would come later than this is not brought.
        deadline: Option<Nanos>,
    },
    /// Take blocks down to a tier.
    Demote {
        /// Which path.
        target: Target,
        /// Where to.
        tier: TierId,
    },
    /// How much of a tier a tenant may hold before its own blocks leave first.
    Quota {
        /// The tenant's salt.
        tenant: Vec<u8>,
        /// Which tier.
        tier: TierId,
        /// At most so many blocks; `None` for no bound.
        blocks: Option<u64>,
        /// At most this share of the tier's blocks; `None` for no bound.
        share: Option<f64>,
    },
}

/// What became of a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// It is in force for all blocks that it names.
    Accepted,
    /// It is in force for some of them.
    Clipped,
    /// It names what is not cached, and waits for it.
    Deferred,
    /// It changes nothing.
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

/// The answer to one hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HintReply {
    /// What became of it.
    pub answer: Answer,
    /// For how many blocks it is in force now.
    pub blocks: u64,
    /// How many blocks it names that it is not in force for: clipped, or not cached yet.
    pub left: u64,
    /// Why not for all of them; empty if it is accepted.
    pub reason: String,
}
