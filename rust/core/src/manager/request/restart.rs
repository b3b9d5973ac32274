//! Restarts: persistent state of the manager, and residencies set without a request.

pub(in crate::manager) mod clear;
pub(in crate::manager) mod digests;
pub(in crate::manager) mod flush;

pub(in crate::manager) mod index;
pub(in crate::manager) mod mark;
pub(in crate::manager) mod mark_group;
