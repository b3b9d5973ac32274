//! kvtrie-core: the KV-cache block manager, without I/O, clock or threads.
//!
//! [`manager::Manager`] combines a radix trie of token blocks, eviction policies, tiers with slots
//! and lanes, and restore plans. It decides, and the caller executes. The same operations give the
//! same moves, byte for byte.
//!
//! ```text
//! manager --> plan --> tiers --> policy
//!    +--> trie, scope, eviction, tier, arrival, residency, private_slots, lane, cost, recurrence
//!            +--> paged_vec, u32_map, paged_slab      structures
//!                    +--> block, error, group, histogram, time, record, hint, visits      nouns
//! ```

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod arrival;
mod block;
mod cost;
mod error;
mod eviction;
mod group;
mod hint;
mod histogram;
mod lane;
mod locked;
mod manager;
mod memory;
mod paged_slab;
mod paged_vec;
mod plan;
mod policy;
mod private_slots;
mod record;
mod recurrence;
mod residency;
mod scope;
mod sync;
mod tier;
mod tiers;
mod time;
mod transfer;
mod trie;
mod u32_map;
mod visits;

// The public API for engines, block stores and simulators. `pub` elsewhere exports nothing. New
// names in this list are reviewed.
pub use block::{
    BlockId, GroupId, Handle, Layers, LeaseId, MoveId, NO_MOVE, NO_SLOT, Place, Slot, Structure,
    TierId, Token,
};
pub use cost::{CostModel, Objective, layer_weight, position_weight};
pub use error::{Error, Result};
pub use group::longest as longest_resume;
pub use group::{Group, GroupKind, Needed, page_bytes};
pub use hint::{
    Answer, HIGHEST, Hint, HintCode, HintReply, NORMAL, Priority, Release, Retain, Target,
};
pub use histogram::Histogram;
pub use lane::{LaneId, LaneSpec, Lanes, Transmission};
pub use locked::Locked;
pub use manager::{
    Acquire, Action, Asked, BlockEvent, BlockEventKind, BlockTokens, Cause, Committed, Contents,
    Copy, DropOrder, Event, Eviction, ExpectedSession, Explanation, Failed, Groups, Lease,
    LoadMode, MOST_FAILED, Manager, Mark, Match, MatchedBlock, Miss, MissBranch, MissCause, Move,
    MoveKind, Occupancy, OpenMiss, Outcome, PinId, Plan, Reason, RequestStats, Row, Settings,
    SortedVersions, Span, TierStats, TierTimes, Unpriced, VersionFate, producer_key,
};
pub use plan::pipeline::finish as pipeline_finish;
pub use policy::NAMES as POLICIES;
pub use record::sound as sound_price;
pub use record::{
    BlockKey, Label, Producer, Record, ScopeOwner, Usage, Wanted, keys_of, scope_key,
};
pub use residency::GroupSlots;
pub use scope::Scope;
pub use tier::{Kind, Owner, TierSpec, Write};
pub use time::{DAY, NEVER, Nanos};
pub use trie::Query;

/// Internals for benches and tests. Not part of the API, and subject to change without notice.
#[doc(hidden)]
pub mod internals {
    pub use crate::block::Departure;
    pub use crate::eviction::EvictionIndex;
    pub use crate::hint::Band;
    pub use crate::plan::{Source, Step, solve};
    pub use crate::policy::{Facts, LastUse, Reload, by_name};
    pub use crate::scope::{FIRST_DIGEST, SHARED};
    #[cfg(any(test, debug_assertions))]
    pub use crate::visits::during as visits_during;
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
