//! Machines: how many there are, and the hardware of each if they differ.
//!
//! Invariant: the core checks that their tiers go together. Cost: one conversion per machine.

use kvtrie_core::{CostModel, TierSpec};
use kvtrie_sim::simulation::Hardware;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::price::prices;
use crate::error::bad;
use crate::memory::items;
use crate::number::{self, shown};
use crate::settings;

/// The most machines whose hardware is given.
const MOST: usize = 1 << 20;

/// Reads a number, or a sequence of `(tiers, price, cost)`, of which `make` makes what a manager
/// takes.
pub(super) fn machines_of<'py>(
    given: Option<&Bound<'py, PyAny>>,
    make: impl Fn(
        &[Bound<'py, PyAny>],
        Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Vec<TierSpec>, CostModel)>,
) -> PyResult<(usize, Vec<Hardware>)> {
    let Some(given) = given else { return Ok((1, Vec::new())) };
    if given.is_instance_of::<PyString>() || given.try_iter().is_err() {
        return Ok((number::machine(given)? as usize, Vec::new()));
    }
    let hardware = items(given, MOST, "machines", |at, row: Bound<'py, PyAny>| {
        type Row<'py, T = Bound<'py, PyAny>> = (T, T, T);
        let (tiers, price, cost) = row.extract::<Row<'py>>().map_err(|_| {
            let row = shown(&row);
            bad(format!("machines[{at}] is {row}, a number or (tiers, price, cost) of each wanted"))
        })?;
        let (tiers, cost) = make(&settings::tiers(&tiers)?, Some(&cost))?;
        Ok(Hardware { tiers, price: prices(&price)?, cost })
    })?;
    Ok((hardware.len(), hardware))
}
