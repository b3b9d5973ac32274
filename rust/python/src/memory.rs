//! Vectors with lengths from the caller: allocation limited by memory.
//!
//! Invariant: a vector too large for memory is a `ConfigError`, and a claimed length over the limit
//! is refused before reading. Cost: a comparison per item.

use pyo3::exceptions::{PyMemoryError, PyOverflowError};
use pyo3::prelude::*;

use crate::error::bad;

/// Number of items allocated at once for a claimed length.
const TRUSTED: usize = 1 << 16;

/// Length claimed by an object, at most `most`. 0 if it claims none.
pub(crate) fn claimed(given: &Bound<'_, PyAny>, most: usize, what: &str) -> PyResult<usize> {
    let claimed = match given.len() {
        Ok(claimed) => claimed,
        Err(error) if error.is_instance_of::<PyOverflowError>(given.py()) => usize::MAX,
        Err(_) => 0,
    };
    if claimed > most { Err(too_many(most, what)) } else { Ok(claimed) }
}

fn too_many(most: usize, what: &str) -> PyErr {
    bad(format!("more than {most} {what} in one call"))
}

fn lacking(length: usize, what: &str) -> PyErr {
    bad(format!("{length} {what} do not fit into memory"))
}

/// Empty vector with capacity for `length` items.
pub(crate) fn vector<T>(length: usize, what: &str) -> PyResult<Vec<T>> {
    let mut all = Vec::new();
    all.try_reserve_exact(length).map_err(|_| lacking(length, what))?;
    Ok(all)
}

/// Items of an iterable, at most `most`.
pub(crate) fn items<'py, T>(
    given: &Bound<'py, PyAny>,
    most: usize,
    what: &str,
    read: impl Fn(usize, Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let mut all = vector(claimed(given, most, what)?.min(TRUSTED), what)?;
    for (at, item) in given.try_iter()?.enumerate() {
        let item = item.map_err(|error| fits(error, given.py(), what))?;
        if at == most {
            return Err(too_many(most, what));
        }
        if all.len() == all.capacity() {
            all.try_reserve(1).map_err(|_| lacking(at, what))?;
        }
        all.push(read(at, item)?);
    }
    Ok(all)
}

/// Convert Python's `MemoryError` to the error of bad arguments.
pub(crate) fn fits(error: PyErr, py: Python<'_>, what: &str) -> PyErr {
    if error.is_instance_of::<PyMemoryError>(py) {
        return bad(format!("{what} do not fit into memory: {error}"));
    }
    error
}
