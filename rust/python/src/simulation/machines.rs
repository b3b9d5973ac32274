//! Number of machines, and their hardware in a heterogeneous run.
//!
//! Invariant: the core checks the combination of their tiers. Cost: a conversion per machine.

use kvtrie_core::{CostModel, TierSpec};
use kvtrie_sim::simulation::Hardware;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::price::prices;
use crate::error::bad;
use crate::memory::items;
use crate::number::{self, shown};
use crate::settings;

/// Maximum number of machines with given hardware.
const MOST: usize = 1 << 20;

/// Read a number, or a sequence of `(tiers, price, cost)`. `make` converts tiers and cost to the
/// settings of a manager.
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
