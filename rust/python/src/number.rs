//! Python integers as Rust ones, with their name in the error.
//!
//! Invariant: an integer out of range is a `ConfigError` with the number, never an
//! `OverflowError`; what is no integer at all is a `TypeError`. Cost: one conversion.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::error::bad;

/// The latest time that calls may name: 292 years, and sums of two of them fit in 64 bits.
const LATEST: u64 = i64::MAX as u64;

/// An integer `0..=most`.
pub(crate) fn whole(number: &Bound<'_, PyAny>, name: &str, most: u64) -> PyResult<u64> {
    match number.extract::<u64>() {
        Ok(whole) if whole <= most => Ok(whole),
        Err(error) if !error.is_instance_of::<PyOverflowError>(number.py()) => Err(error),
        _ => Err(bad(format!("{name} is {number}, 0 to {most} wanted"))),
    }
}

/// An integer that fits the target type.
pub(crate) fn small<T>(number: &Bound<'_, PyAny>, name: &str, most: T) -> PyResult<T>
where
    T: Into<u64> + TryFrom<u64>,
{
    let most: u64 = most.into();
    let found = whole(number, name, most)?;
    T::try_from(found).map_err(|_| bad(format!("{name} is {found}, 0 to {most} wanted")))
}

/// A count of something that a list could hold.
pub(crate) fn count(number: &Bound<'_, PyAny>, name: &str) -> PyResult<usize> {
    let found = whole(number, name, LATEST)?;
    usize::try_from(found).map_err(|_| bad(format!("{name} is {found}, too many")))
}

/// A time in nanoseconds.
pub(crate) fn nanos(number: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    whole(number, name, LATEST)
}

/// A time in nanoseconds that may be left out.
pub(crate) fn maybe_nanos(
    number: Option<&Bound<'_, PyAny>>,
    name: &str,
) -> PyResult<Option<u64>> {
    number.map(|number| nanos(number, name)).transpose()
}
