//! Strings: names that users give, and what an executor says.
//!
//! Invariant: a name is UTF-8 of at most 65 535 bytes, otherwise a `ConfigError` says which one is
//! not. Cost: none beyond Python's own.

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::bad;
use crate::number::shown;

/// So many bytes a name may have.
const MOST_NAME: usize = u16::MAX as usize;

/// So many characters are kept of what an executor says.
const MOST_SAID: usize = 4096;

/// A name.
pub(crate) fn text<'a>(given: &'a Bound<'_, PyAny>, name: &str) -> PyResult<&'a str> {
    let Ok(string) = given.cast::<PyString>() else {
        return Err(bad(format!("{name} is {}, a str wanted", shown(given))));
    };
    let Ok(text) = string.to_str() else {
        let whole = string.to_string_lossy();
        let start: String = whole.chars().take(99).collect();
        return Err(bad(format!("{name} is {start:?}: surrogates not allowed")));
    };
    if text.len() > MOST_NAME {
        let size = text.len();
        return Err(bad(format!("{name} has {size} bytes, at most {MOST_NAME} wanted")));
    }
    Ok(text)
}

/// A name that may be left out.
pub(crate) fn any_text<'a>(
    given: Option<&'a Bound<'_, PyAny>>,
    name: &str,
) -> PyResult<Option<&'a str>> {
    given.map(|given| text(given, name)).transpose()
}

/// Why something failed, cut short; what cannot be written as UTF-8 is replaced.
pub(crate) fn reason(given: &Bound<'_, PyAny>, name: &str) -> PyResult<String> {
    let Ok(string) = given.cast::<PyString>() else {
        return Err(bad(format!("{name} is {}, a str wanted", shown(given))));
    };
    Ok(string.to_string_lossy().chars().take(MOST_SAID).collect())
}
