//! Errors of a store, with their numbers.
//!
//! Invariant: a failed operation loses only the data named in its error. Cost: none without an
//! error.

use std::fmt;
use std::io;

/// Result of a fallible operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Kinds of error.
#[derive(Debug)]
pub enum Error {
    /// Wrong setting or argument. Nothing was done.
    Config(String),
    /// A miss: the slot does not hold the requested layers, or they are damaged.
    Bad {
        /// The slot.
        slot: u32,
        /// The content found instead.
        reason: String,
    },
    /// The device failed. A retry may succeed.
    Io {
        /// The operation and the file.
        what: String,
        /// The device's error.
        error: io::Error,
    },
    /// The store is read-only: locked by a second process, or the folder forbids writes.
    ReadOnly(String),
    /// The device is full.
    Full(String),
}

impl Error {
    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }

    pub(crate) fn bad(slot: u32, reason: impl Into<String>) -> Self {
        Self::Bad { slot, reason: reason.into() }
    }

    /// Wrap a device error of the operation `what`.
    pub(crate) fn io(what: impl Into<String>, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Full(format!("{}: {error}", what.into()))
            }
            _ => Self::Io { what: what.into(), error },
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(message) | Self::ReadOnly(message) | Self::Full(message) => {
                f.write_str(message)
            }
            Self::Bad { slot, reason } => write!(f, "slot {slot}: {reason}"),
            Self::Io { what, error } => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { error, .. } => Some(error),
            _ => None,
        }
    }
}
