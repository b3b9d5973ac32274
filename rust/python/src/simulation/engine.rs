//! Engines and their bounds, from Python's words and numbers.

use kvtrie_sim::engine::{Kind, Limits};
use pyo3::prelude::*;

use crate::error::bad;
use crate::number::count;
use crate::text::text;

pub(super) fn moves_per_job(given: &Bound<'_, PyAny>) -> PyResult<usize> {
    count(given, "moves_per_job")
}

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

pub(super) fn prefill_machines(given: &Bound<'_, PyAny>) -> PyResult<usize> {
    count(given, "prefill")
}

/// None for an open trace.
pub(super) fn clients_of(given: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    if given.is_none() { Ok(None) } else { count(given, "clients").map(Some) }
}

pub(super) fn token_budget(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    count(given, "token_budget").map(|count| count as u64)
}

pub(super) fn max_running(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    count(given, "max_running").map(|count| count as u64)
}
