//! Observation: counters, events, explanations, snapshots and the audit of all invariants.

pub(super) mod audit;
pub(super) mod block_event;
pub(super) mod explain;
pub(super) mod late_hits;
pub(super) mod log;
pub(super) mod meter;
pub(super) mod miss;
pub(super) mod report;
pub(super) mod snapshot;
