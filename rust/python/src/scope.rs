//! `kvtrie.Scope` as the core's scope.
//!
//! Invariant: no scope is the empty scope. Cost: a few attribute reads.

use kvtrie_core::block::Structure;
use kvtrie_core::scope::Scope;
use pyo3::intern;
use pyo3::prelude::*;

use crate::error::bad;
use crate::number::nanos;

/// Reads a scope; `None` is the plain one.
pub(crate) fn scope(given: Option<&Bound<'_, PyAny>>) -> PyResult<Scope> {
    let Some(given) = given else { return Ok(Scope::default()) };
    let py = given.py();
    let mut extra = Vec::new();
    for pair in given.getattr(intern!(py, "extra"))?.try_iter()? {
        let (offset, digest): (Bound<'_, PyAny>, Vec<u8>) = pair?.extract()?;
        extra.push((nanos(&offset, "offset of a digest")?, digest));
    }
    let named: Option<String> = given.getattr(intern!(py, "structure"))?.extract()?;
    Ok(Scope {
        tenant: given.getattr(intern!(py, "tenant"))?.extract()?,
        lora: given.getattr(intern!(py, "lora"))?.extract()?,
        extra,
        structure: named.as_deref().map(structure).transpose()?,
    })
}

/// The structure of that name.
pub(crate) fn structure(name: &str) -> PyResult<Structure> {
    [Structure::LeafOnly, Structure::Holes]
        .into_iter()
        .find(|structure| structure.name() == name)
        .ok_or_else(|| bad(format!("structure is 'leaf-only' or 'holes', not '{name}'")))
}
