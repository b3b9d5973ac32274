//! Integration tests of the simulator, in one binary: each binary links the crate again.
//!
//! `cargo test -p kvtrie-sim --test all golden::` runs one module.

mod closed;
mod continuous;
mod disaggregated;
mod figures;
mod golden;
mod machines;
mod physics;
mod rig;
mod routing;
mod timeline;
