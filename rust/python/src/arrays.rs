//! Conversions between Rust vectors and numpy arrays.
//!
//! Invariant: returned arrays are new or empty, so they have no further writers. Cost: at most one
//! copy.

use kvtrie_core::{Handle, MoveId};
use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyInt;

use crate::error::bad;
use crate::memory::{claimed, items, vector};
use crate::number::{real, shown, whole};

/// Convert block handles to an array.
pub(crate) fn handles<'py>(py: Python<'py>, handles: &[Handle]) -> Bound<'py, PyArray1<u64>> {
    column(py, handles, |handle| handle.0)
}

/// Convert one value per item to an array.
pub(crate) fn column<'py, R, T: numpy::Element>(
    py: Python<'py>,
    items: &[R],
    of: impl Fn(&R) -> T,
) -> Bound<'py, PyArray1<T>> {
    items.iter().map(of).collect::<Vec<T>>().into_pyarray(py)
}

/// Convert moves to an array. The empty array is the usual case and is created once.
pub(crate) fn moves(py: Python<'_>, moves: Vec<MoveId>) -> Bound<'_, PyArray1<MoveId>> {
    static NONE: PyOnceLock<Py<PyArray1<MoveId>>> = PyOnceLock::new();
    if !moves.is_empty() {
        return moves.into_pyarray(py);
    }
    let none = NONE.get_or_init(py, || {
        let none = moves.into_pyarray(py);
        none.readwrite().make_nonwriteable();
        none.unbind()
    });
    none.bind(py).clone()
}

/// Limit of ids, slots or costs per call.
const MOST: usize = 1 << 24;

/// Read ids (of moves or leases) or slots from an integer, a sequence or an array.
pub(crate) fn numbers(given: &Bound<'_, PyAny>, name: &str, most: u64) -> PyResult<Vec<u64>> {
    if let Ok(array) = given.extract::<numpy::PyReadonlyArray1<'_, u64>>() {
        let mut numbers = vector(claimed(given, MOST, "numbers")?, "numbers")?;
        numbers.extend(array.as_array().iter().copied());
        if let Some(at) = numbers.iter().position(|&number| number > most) {
            return Err(bad(format!("{name} {at} is {}, 0 to {most} wanted", numbers[at])));
        }
        return Ok(numbers);
    }
    // Not iterable: a single number (possibly of numpy), or invalid.
    let single =
        || given.try_iter().is_err_and(|error| error.is_instance_of::<PyTypeError>(given.py()));
    if given.is_instance_of::<PyInt>() || single() {
        return Ok(vec![whole(given, name, most)?]);
    }
    items(given, MOST, "numbers", |at, item| whole(&item, &format!("{name} {at}"), most))
}

/// Read floats from a sequence or an array.
pub(crate) fn reals(given: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<f64>> {
    if given.try_iter().is_err_and(|error| error.is_instance_of::<PyTypeError>(given.py())) {
        return Err(bad(format!("{name}s are {}, a sequence of numbers wanted", shown(given))));
    }
    items(given, MOST, "numbers", |at, item| real(&item, &format!("{name} {at}")))
}
