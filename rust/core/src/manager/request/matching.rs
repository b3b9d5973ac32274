//! Matching: what of a prompt is there, and where a request goes on.

pub(in crate::manager) mod borders;
pub(in crate::manager) mod lookup;
pub(in crate::manager) mod path;
pub(in crate::manager) mod price;
pub(in crate::manager) mod residency_scan;
