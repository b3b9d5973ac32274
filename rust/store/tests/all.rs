//! Integration tests of the store, in one binary: each binary links the crate again.
//!
//! `cargo test -p kvtrie-store --test all crash::` runs one module. Tests that start processes are binaries
//! of their own: until it runs, a child has the open files of all tests next to it.

mod budget;
mod crash;
mod damage;
mod faults;
mod model;
mod moved;
mod opening;
mod rig;
mod travel;
mod uses;
