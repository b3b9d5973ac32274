//! Requests: the calls of an engine, from lookup to release.
//!
//! ```text
//!            acquire                  load, complete           release
//! (no lease) -------> Active, loading -----------> Active, ready ------> (no lease)
//!                       ^   | suspend                 |  ^ commit: blocks enter the trie
//!                resume |   v                         |  | reserve: more open slots
//!                     Suspended (tokens only) <-------+--+ fork, rewind: paths shared
//! ```

pub(super) mod life;
pub(super) mod matching;
pub(super) mod restart;
pub(super) mod slots;
