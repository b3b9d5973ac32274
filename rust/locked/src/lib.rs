//! A manager that several threads call.
//!
//! The core has no threads and the binding has no logic, so the lock between them stands here,
//! where it is tested without Python. Invariant: nothing here decides. Cost: one lock per call.

mod locked;
mod sync;

pub use locked::Locked;
