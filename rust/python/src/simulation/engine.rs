//! Engines by their names.

use kvtrie_sim::engine::{Kind, Limits};
use pyo3::prelude::*;

use crate::error::bad;
use crate::text::text;

/// An engine by its name.
pub(super) fn engine_kind(
    given: Option<&Bound<'_, PyAny>>,
    limits: Limits,
    prefill: usize,
) -> PyResult<Kind> {
    match given.map_or(Ok("serial"), |given| text(given, "engine"))? {
        "serial" => Ok(Kind::Serial),
        "continuous" => Ok(Kind::Continuous(limits)),
        "disaggregated" => Ok(Kind::Disaggregated(limits, prefill)),
        other => {
            Err(bad(format!("engine is 'serial', 'continuous' or 'disaggregated', not '{other}'")))
        }
    }
}
