//! Core errors as Python exceptions of `kvtrie.errors`.
//!
//! Invariant: every kind of core error has an exception, with the same message. Cost: none without
//! an error.

use kvtrie_core::Error;
use pyo3::PyErr;

pyo3::import_exception!(kvtrie.errors, ClosedError);
pyo3::import_exception!(kvtrie.errors, ConfigError);
pyo3::import_exception!(kvtrie.errors, InvariantError);
pyo3::import_exception!(kvtrie.errors, NoSpaceError);
pyo3::import_exception!(kvtrie.errors, TransferError);

/// Convert a core error to an exception.
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

/// Create the error of a bad argument.
pub(crate) fn bad(message: impl Into<String>) -> PyErr {
    ConfigError::new_err(message.into())
}
