//! Observation: counters, events, explanations, snapshots and the audit of all invariants.

pub(super) mod audit;
pub(super) mod explain;
pub(super) mod miss;
pub(super) mod parts;
pub(super) mod report;
pub(super) mod snapshot;
