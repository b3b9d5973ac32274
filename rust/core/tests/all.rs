//! Integration tests of the core, in one binary: each binary links the core again.
//!
//! `cargo test -p kvtrie-core --test all contract::` runs one module. Tests that count bytes are
//! binaries of their own, `memory` and `sessions`: their allocator counts for a whole process.

mod bytes;
mod contract;
mod digests;
mod fuzz;
mod group_calls;
mod group_holes;
mod group_story;
mod groups;
mod model;
mod rig;
mod scenarios;
mod world;
