//! What can go wrong with a store, with the numbers in it.
//!
//! Invariant: an operation that returns an error has lost nothing but what the error names.
//! Cost: none on the good path.

use std::fmt;
use std::io;

/// The result of every operation that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// The kinds of failure.
#[derive(Debug)]
pub enum Error {
    /// A setting or an argument is wrong; nothing was done.
    Config(String),
    /// The slot does not hold what was asked for: a miss.
    Bad {
        /// The slot.
        slot: u32,
        /// What was found instead.
        reason: String,
    },
    /// The device failed; trying again may help.
    Io {
        /// What was being done, and where.
        what: String,
        /// What the device said.
        error: io::Error,
    },
    /// This store may not write: another process does, or the folder forbids it.
    ReadOnly(String),
    /// The device has no room left.
    Full(String),
}

impl Error {
    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }

    pub(crate) fn bad(slot: u32, reason: impl Into<String>) -> Self {
        Self::Bad { slot, reason: reason.into() }
    }

    /// What the device said while `what` was done.
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
