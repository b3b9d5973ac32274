//! A manager for several threads.
//!
//! The core has no threads and the binding no logic, so the lock between them is a separate crate,
//! tested without Python. Invariant: it makes no decisions. Cost: one lock per call.

mod locked;
mod sync;

pub use locked::Locked;
