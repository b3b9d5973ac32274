//! kvtrie-core: the KV-cache block manager, without I/O, clock or threads.
//!
//! A radix trie of token blocks, eviction policies, tiers with slots and lanes, and restore plans
//! in one [`manager::Manager`]: it decides, the caller executes. The same operations give the same
//! moves, byte for byte.
//!
//! ```text
//! manager --> plan --> tiers --> policy
//!    +--> trie, scope, eviction, tier, arrival, residency, private_slots, lane, cost, recurrence
//!            +--> paged_vec, u32_map, paged_slab      structures
//!                    +--> block, error, group, histogram, time, record, hint, visits      nouns
//! ```

#![forbid(unsafe_code)]

pub mod arrival;
pub mod block;
pub mod cost;
pub mod error;
pub mod eviction;
pub mod group;
pub mod hint;
pub mod histogram;
pub mod lane;
pub mod manager;
pub mod memory;
pub mod paged_slab;
pub mod paged_vec;
pub mod plan;
pub mod policy;
mod private_slots;
pub mod record;
pub mod recurrence;
pub mod residency;
pub mod scope;
pub mod tier;
mod tiers;
pub mod time;
mod transfer;
pub mod trie;
pub mod u32_map;
pub mod visits;
