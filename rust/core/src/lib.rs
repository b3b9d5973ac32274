//! kvtrie-core: the bookkeeping of kvtrie.
//!
//! A radix trie of token blocks, exact retention priorities, tiers with slots and lanes, and
//! restore plans, behind one [`manager::Manager`]. It decides and never executes: no I/O, no
//! clock, no threads. The same operations give the same moves, byte for byte.
//!
//! Modules build on each other in one direction: nouns (`block`, `error`, `histogram`, `time`,
//! `record`, `hint`, `visits`), structures (`column`, `pairs`, `seats`, `trie`, `scope`, `retention`, `tier`,
//! `arrival`, `presence`, `lane`, `cost`), `policy`, `plan`, `manager`.

#![forbid(unsafe_code)]

pub mod arrival;
pub mod block;
pub mod column;
pub mod cost;
pub mod error;
pub mod hint;
pub mod histogram;
pub mod lane;
pub mod manager;
pub mod memory;
pub mod pairs;
pub mod plan;
pub mod policy;
pub mod presence;
pub mod record;
pub mod retention;
pub mod scope;
pub mod seats;
pub mod tier;
pub mod time;
pub mod trie;
pub mod visits;
