//! Requests: the calls of an engine, from lookup to release.
//!
//! ```text
//!            acquire                  load, complete           release
//! (no lease) -------> Active, loading -----------> Active, ready ------> (no lease)
//!                       ^   | suspend                 |  ^ commit: blocks enter the trie
//!                resume |   v                         |  | reserve: more open slots
//!                     Suspended (tokens only) <-------+--+ fork, rewind: paths shared
//! ```

pub(super) mod acquire;
pub(super) mod ages;
pub(super) mod ahead;
pub(super) mod borders;
pub(super) mod bound_windows;
pub(super) mod branch;
pub(super) mod commit;
pub(super) mod digests;
pub(super) mod expected_sessions;
pub(super) mod flush;
pub(super) mod group_branch;
pub(super) mod group_mark;
pub(super) mod group_room;
pub(super) mod index;
pub(super) mod lease;
pub(super) mod lookup;
pub(super) mod mark;
pub(super) mod new_point;
pub(super) mod next_slots;
pub(super) mod open_slot;
pub(super) mod path;
pub(super) mod pins;
pub(super) mod placed_slots;
pub(super) mod price;
pub(super) mod refused;
pub(super) mod reserve;
pub(super) mod residency_scan;
pub(super) mod session;
mod session_lengths;
pub(super) mod suspend;
pub(super) mod victims;
pub(super) mod weigh;
pub(super) mod window_plan;
pub(super) mod window_slots;
pub(super) mod windows;
