//! Errors of the core, with the numbers in them.
//!
//! Invariant: an operation that returns an error has changed nothing; [`Error::Invariant`] alone
//! says that the manager itself is broken. Cost: none without an error.

use std::fmt;

/// Result of an operation that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Kinds of error, mirrored one to one by the Python exceptions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A tier has too few free or evictable slots or, where groups of layers share it, pages.
    NoSpace {
        /// The tier's name.
        tier: String,
        /// What the numbers count: slots or pages of that tier.
        unit: &'static str,
        /// Number requested.
        wanted: u64,
        /// Number free or evictable now.
        free: u64,
        /// Number that moves in flight will free.
        coming: u64,
        /// Number held by leases.
        leased: u64,
    },
    /// A setting or argument is wrong.
    Config(String),
    /// An invariant is broken; the manager refuses all further calls.
    Invariant(String),
    /// The manager, lease or move has ended.
    Closed(String),
}

impl Error {
    /// A wrong setting or argument.
    pub fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }

    /// A manager, lease or move that has ended.
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
