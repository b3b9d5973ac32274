//! The core's errors as the Python exceptions of `kvtrie.errors`.
//!
//! Invariant: every kind of the core has one exception, with the same message. Cost: none on the
//! good path.

use kvtrie_core::Error;
use pyo3::PyErr;

pyo3::import_exception!(kvtrie.errors, ClosedError);
pyo3::import_exception!(kvtrie.errors, ConfigError);
pyo3::import_exception!(kvtrie.errors, InvariantError);
pyo3::import_exception!(kvtrie.errors, NoSpaceError);
pyo3::import_exception!(kvtrie.errors, TransferError);

/// The exception for an error of the core.
pub(crate) fn raise(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::NoSpace { tier, wanted, free, coming, leased, .. } => {
            NoSpaceError::new_err((message, tier, wanted, free, coming, leased))
        }
        Error::Config(_) => ConfigError::new_err(message),
        Error::Invariant(_) => InvariantError::new_err(message),
        Error::Closed(_) => ClosedError::new_err(message),
    }
}

/// A bad argument.
pub(crate) fn bad(message: impl Into<String>) -> PyErr {
    ConfigError::new_err(message.into())
}
