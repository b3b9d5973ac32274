//! What can go wrong, with the numbers in it.
//!
//! Invariant: an operation that returns an error has changed nothing; only
//! [`Error::Invariant`] says that the manager itself is broken. Cost: none on the good path.

use std::fmt;

/// The result of every operation that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// The kinds of failure, mirrored one to one by the Python exceptions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A tier cannot hold what was asked for. All numbers are in slots of that tier.
    NoSpace {
        /// The tier's name.
        tier: String,
        /// Slots asked for.
        wanted: u64,
        /// Slots free or evictable now.
        free: u64,
        /// Slots that moves in flight will give back.
        coming: u64,
        /// Slots held by leases.
        leased: u64,
    },
    /// A setting or an argument is wrong.
    Config(String),
    /// An invariant is broken; the manager refuses all further work.
    Invariant(String),
    /// The manager, the lease or the move is gone.
    Closed(String),
}

impl Error {
    /// A wrong setting or argument.
    pub fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }

    /// Something that is gone.
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
            Self::NoSpace { tier, wanted, free, coming, leased } => write!(
                f,
                "tier '{tier}' has no room: wanted {wanted} slots, {free} free or evictable, \
                 {coming} coming, {leased} leased"
            ),
            Self::Config(message) | Self::Invariant(message) | Self::Closed(message) => {
                f.write_str(message)
            }
        }
    }
}

impl std::error::Error for Error {}
