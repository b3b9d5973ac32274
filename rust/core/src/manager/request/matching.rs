//! Matching: the cached prefix of a prompt, and the border where a request resumes.

pub(in crate::manager) mod borders;
pub(in crate::manager) mod lookup;
pub(in crate::manager) mod path;
pub(in crate::manager) mod price;
pub(in crate::manager) mod residency_scan;
