//! Rows of a tier's manifest.
//!
//! Invariant: a row names its parent by an earlier row. Cost: one pass.

use kvtrie_core::manager::Row;
use pyo3::prelude::*;

use crate::number::{count, nanos, small};
use crate::tokens::Tokens;

/// Reads tuples `(parent, tokens, slot, age, uses)`.
pub(crate) fn rows(given: &Bound<'_, PyAny>) -> PyResult<Vec<Row>> {
    type Fields<'py> = (
        Option<Bound<'py, PyAny>>,
        Bound<'py, PyAny>,
        Bound<'py, PyAny>,
        Bound<'py, PyAny>,
        Bound<'py, PyAny>,
    );
    let mut rows = Vec::with_capacity(given.len().unwrap_or(0));
    for row in given.try_iter()? {
        let (parent, tokens, slot, age, uses): Fields<'_> = row?.extract()?;
        rows.push(Row {
            parent: parent.map(|parent| count(&parent, "parent")).transpose()?,
            tokens: Tokens::new(&tokens)?.into_vec(),
            slot: small(&slot, "slot", u32::MAX - 1)?,
            age: nanos(&age, "age")?,
            uses: small(&uses, "uses", u32::MAX)?,
        });
    }
    Ok(rows)
}
