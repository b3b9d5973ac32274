//! Lines of traces, read in one call where nothing is unusual.
//!
//! Invariant: what it reads, Python's reader would read as the same; anything else it leaves to that
//! one, which says what is wrong. Cost: one pass over the line.

use std::borrow::Cow;

use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use serde::Deserialize;

/// A line of a trace of block hashes.
#[derive(Deserialize)]
struct Hashed<'a> {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u32>,
    /// The other form, which Python reads.
    ranges: Option<serde::de::IgnoredAny>,
    #[serde(borrow)]
    session: Option<Cow<'a, str>>,
}

const NS_PER_MS: u64 = 1_000_000;
/// Names are not longer.
const MOST_NAME: usize = u16::MAX as usize;

/// `(at_ns, input tokens, output tokens, block ids, session)`.
type Row<'py> = (u64, u32, u32, Bound<'py, PyArray1<u32>>, Option<String>);

/// A line of a trace of block hashes; None if it is unusual or cannot be.
#[pyfunction]
pub(crate) fn hashed_line<'py>(py: Python<'py>, line: &str) -> Option<Row<'py>> {
    // An array would be taken for the fields in their order.
    let object = line.trim_start().starts_with('{');
    let row: Hashed<'_> = object.then(|| serde_json::from_str(line).ok()).flatten()?;
    let at = row.timestamp.checked_mul(NS_PER_MS).filter(|&at| at < 1 << 63)?;
    let named = row.session.as_ref().is_none_or(|name| name.len() <= MOST_NAME);
    if row.hash_ids.is_empty() || row.ranges.is_some() || !named {
        return None;
    }
    let ids = row.hash_ids.into_pyarray(py);
    Some((at, row.input_length, row.output_length, ids, row.session.map(Cow::into_owned)))
}
