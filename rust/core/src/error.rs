//! Errors of the core, with numbers.
//!
//! Invariant: a failed operation has changed nothing. Only [`Error::Invariant`] reports a broken
//! manager. Cost: none without an error.

use std::fmt;

/// Result of a fallible operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Kinds of error. Each has its own Python exception.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A tier has too few free or evictable slots or, where groups of layers share it, pages.
    NoSpace {
        /// The tier's name.
        tier: String,
        /// Unit of the numbers: slots or pages of the tier.
        unit: &'static str,
        /// Number requested.
        wanted: u64,
        /// Number free or evictable now.
        free: u64,
        /// Number to be freed by moves in flight.
        coming: u64,
        /// Number held by leases.
        leased: u64,
    },
    /// A setting or argument is wrong.
    Config(String),
    /// An invariant is broken. The manager refuses all further calls.
    Invariant(String),
    /// The manager, lease or move has ended.
    Closed(String),
}

impl Error {
    /// A wrong setting or argument.
    pub fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }

    /// An ended manager, lease or move.
    pub fn closed(message: impl Into<String>) -> Self {
        Self::Closed(message.into())
    }

    /// A broken invariant.
    pub fn invariant(message: impl Into<String>) -> Self {
        Self::Invariant(message.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSpace { tier, unit, wanted, free, coming, leased } => write!(
                f,
                "tier '{tier}' has no room: wanted {wanted} {unit}, {free} free or evictable, \
                 {coming} coming, {leased} leased"
            ),
            Self::Config(message) | Self::Invariant(message) | Self::Closed(message) => {
                f.write_str(message)
            }
        }
    }
}

impl std::error::Error for Error {}
