//! Conversion of `kvtrie.Scope`.
//!
//! Invariant: None is the empty scope. Cost: a few attribute reads.

use kvtrie_core::{Scope, Structure};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::bad;
use crate::number::{nanos, shown};
use crate::text::{chosen, text};

/// Convert a scope. `None` is the empty scope.
pub(crate) fn scope(given: Option<&Bound<'_, PyAny>>) -> PyResult<Scope> {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let Some(given) = given else { return Ok(Scope::default()) };
    let py = given.py();
    if !given.is_instance(CLASS.import(py, "kvtrie.settings.scope", "Scope")?)? {
        return Err(bad(format!("scope is {}, a Scope wanted", shown(given))));
    }
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
        share_after: given
            .getattr(intern!(py, "share_after"))?
            .extract::<Option<u32>>()?
            .unwrap_or(0),
    })
}

/// Parse the structure argument of a manager.
pub(crate) fn structure_of(given: &Bound<'_, PyAny>) -> PyResult<Structure> {
    structure(text(given, "structure")?)
}

/// Parse a structure name.
pub(crate) fn structure(name: &str) -> PyResult<Structure> {
    let known = [Structure::LeafOnly, Structure::Holes].map(|known| (known.name(), known));
    chosen(name, "structure", &known)
}
