//! The standard library's locks, as used by `locked`.
//!
//! `rust/locked/tests/schedules.rs` compiles `locked` again with a different `sync`: its locks let
//! a scheduler choose the next thread. Invariant: `locked` uses no other lock. Cost: none.

pub(crate) use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};
