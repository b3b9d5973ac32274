//! Strings: user-defined names, and messages of an executor.
//!
//! Invariant: a name is UTF-8 of at most 65 535 bytes, otherwise a `ConfigError` names it. Cost:
//! none in addition to Python's.

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::bad;
use crate::number::shown;

/// Byte limit of a name.
const MOST_NAME: usize = u16::MAX as usize;

/// Character limit of an executor's message.
const MOST_SAID: usize = 4096;

/// Convert a name.
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

/// Parse a word argument, and return its value.
pub(crate) fn choice<T: Copy>(
    given: &Bound<'_, PyAny>,
    name: &str,
    known: &[(&str, T)],
) -> PyResult<T> {
    chosen(text(given, name)?, name, known)
}

/// Return the value of a word.
pub(crate) fn chosen<T: Copy>(word: &str, name: &str, known: &[(&str, T)]) -> PyResult<T> {
    if let Some((_, value)) = known.iter().find(|(known, _)| *known == word) {
        return Ok(*value);
    }
    let mut words: Vec<String> = known.iter().map(|(known, _)| format!("'{known}'")).collect();
    let last = words.pop().unwrap_or_default();
    Err(bad(format!("{name} is {} or {last}, not '{word}'", words.join(", "))))
}

/// Convert a reason, truncated. Characters not encodable as UTF-8 are replaced.
pub(crate) fn reason(given: &Bound<'_, PyAny>, name: &str) -> PyResult<String> {
    let Ok(string) = given.cast::<PyString>() else {
        return Err(bad(format!("{name} is {}, a str wanted", shown(given))));
    };
    Ok(string.to_string_lossy().chars().take(MOST_SAID).collect())
}
