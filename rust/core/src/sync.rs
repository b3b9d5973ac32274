//! The standard library's locks, under the names that `locked` uses.
//!
//! `rust/locked/tests/schedules.rs` compiles `locked` once more with another `sync`, whose locks let
//! a scheduler choose the next thread. Invariant: `locked` uses no other lock. Cost: none.

pub(crate) use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};
