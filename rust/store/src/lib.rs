//! kvtrie-store: the files of the disk tier.
//!
//! The manager allocates slots. A [`Store`] writes blocks to fixed positions of a few large files,
//! directly from and into the caller's memory, and verifies every byte of every read. After a
//! restart it finds its blocks from its manifest alone. Format: `docs/design/disk.md`.
//!
//! ```text
//! store --> manifest --> scan, table --> frame, page --> meta, pages, settings, claim, error
//!   |           +--> quarantine --> file, regular
//!   +--> segment --> system --> ring, threads --> work      or faults, in tests
//! open, read, write, rows, verify, gc      operations of a store, a file each
//! value_folder --> value_place, value_gc --> value      values of a shared store
//! kept      the table of a host pool in shared memory, without a device
//! ```

#![deny(missing_docs)]

mod claim;
mod device;
mod error;
#[cfg(any(test, feature = "faults"))]
mod faults;
mod file;
mod frame;
mod gc;
mod kept;
mod manifest;
mod meta;
mod open;
mod page;
mod pages;
mod quarantine;
mod read;
mod regular;
#[cfg(target_os = "linux")]
mod ring;
mod rows;
mod scan;
mod segment;
mod settings;
mod store;
mod system;
mod table;
mod threads;
mod value;
mod value_folder;
mod value_gc;
mod value_place;
mod verify;
mod work;
mod write;

pub use device::{Access, Device, Item, TransferPath};
pub use error::{Error, Result};
#[cfg(any(test, feature = "faults"))]
pub use faults::{Call, Chance, Fault, Faults};
pub use file::{File, Size};
pub use kept::{Found, KeptFile, Opened, Owner, Unsealed};
pub use meta::Meta;
pub use open::{Listed, stores};
pub use pages::Pages;
pub use read::BlockRead;
pub use rows::{KeptBlock, StoredBlock, UsedBlock};
pub use settings::{Durability, PAGE, SEGMENT, Settings};
pub use store::Store;
pub use system::{QueueKind, System};
pub use value::ValueFormat;
pub use value_folder::{Outcome, ValueFolder, ValueRead, ValueWrite};
pub use value_gc::{Collected, Removed, collect};
pub use verify::{Finding, Progress};
pub use work::{Bytes, Op, Work};
pub use write::BlockWrite;
