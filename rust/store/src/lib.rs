//! kvtrie-store: the files of the disk tier.
//!
//! A manager chooses slots; a [`Store`] obeys. It writes blocks into fixed places of a few large
//! files, straight from the caller's memory and into it, proves every byte on every read, and
//! finds its blocks again after a restart by reading its manifest only. The format, byte by byte,
//! is in `docs/design/disk.md`.
//!
//! Modules build on each other in one direction: nouns (`error`, `settings`, `meta`,
//! `claim`, `pages`), bytes (`page`, `frame`), files (`work`, `device`, `system` with `regular`, `ring`
//! and `threads` under it, `faults`, `aside`, `segment`), books
//! (`table`, `scan`, `manifest`), and the store with what it can do (`open` with `second`, `read`,
//! `write`, `rows`, `verify`, `gc`).

mod aside;
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
mod pages;
mod read;
mod regular;
#[cfg(target_os = "linux")]
mod ring;
mod rows;
mod scan;
mod second;
mod segment;
mod settings;
mod store;
mod system;
mod table;
mod threads;
mod verify;
mod work;
mod write;

pub use device::{Access, Device, File, Item, Size, Travel};
pub use error::{Error, Result};
pub use faults::{Call, Chance, Fault, Faults};
pub use meta::Meta;
pub use open::{Listed, stores};
pub use pages::Pages;
pub use read::Wanted;
pub use rows::{Kept, Row};
pub use settings::{Durability, PAGE, SEGMENT, Settings};
pub use store::Store;
pub use system::{Queue, System};
pub use verify::{Finding, Progress};
pub use work::{Bytes, Op, Work};
pub use write::Given;
