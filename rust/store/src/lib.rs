//! kvtrie-store: the files of the disk tier.
//!
//! A manager chooses slots; a [`Store`] obeys. It writes blocks into fixed places of a few large
//! files, straight from the caller's memory and into it, proves every byte on every read, and
//! finds its blocks again after a restart by reading its manifest only. The format, byte by byte,
//! is in `docs/design/disk.md`.
//!
//! Modules build on each other in one direction: nouns (`error`, `settings`, `meta`,
//! `claim`), bytes (`page`, `frame`), files (`device`, `system`, `faults`, `segment`), books
//! (`table`, `scan`, `manifest`), and the store with what it can do (`open`, `read`, `write`,
//! `rows`, `verify`, `gc`).

#![forbid(unsafe_code)]

mod claim;
mod device;
mod error;
mod faults;
mod frame;
mod gc;
mod manifest;
mod meta;
mod open;
mod page;
mod read;
mod rows;
mod scan;
mod segment;
mod settings;
mod store;
mod system;
mod table;
mod verify;
mod write;

pub use device::{Access, Device, File, Item, Size};
pub use error::{Error, Result};
pub use faults::{Call, Chance, Fault, Faults};
pub use meta::Meta;
pub use open::{Listed, stores};
pub use rows::{Kept, Row};
pub use settings::{Durability, PAGE, SEGMENT, Settings};
pub use store::Store;
pub use system::System;
pub use verify::{Finding, Progress};
