//! Life of a request: from acquire to release, with forks, suspension and sessions.

pub(in crate::manager) mod acquire;
pub(in crate::manager) mod ages;
pub(in crate::manager) mod branch;
pub(in crate::manager) mod commit;
pub(in crate::manager) mod expected_sessions;
pub(in crate::manager) mod lease;
pub(in crate::manager) mod recover;
pub(in crate::manager) mod session;
pub(in crate::manager) mod session_lengths;
pub(in crate::manager) mod suspend;
