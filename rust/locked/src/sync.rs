//! The locks of the standard library, under the names that `locked` uses.
//!
//! `tests/schedules.rs` compiles `locked` once more beside another `sync`, whose locks let a
//! scheduler choose who goes on. Invariant: `locked` names no other lock. Cost: none.

pub(crate) use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};
