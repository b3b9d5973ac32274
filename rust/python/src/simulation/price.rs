//! Computation prices from Python's numbers.
//!
//! Invariant: axes ascend and times never decrease. Cost: a conversion per run.

use std::sync::Arc;

use kvtrie_sim::cost::{Affine, Cost, Grid, PART_BITS, Passes, Table};
use pyo3::prelude::*;

use crate::error::bad;
use crate::number::shown;

/// `(contexts, counts, rows)` in nanoseconds.
type GridRows = (Vec<u64>, Vec<u64>, Vec<Vec<u64>>);

/// `(base, prefill, decode, request)`: fixed nanoseconds of a step, two tables of the additional
/// time, and nanoseconds of a request outside of steps.
type Sheet = (u64, GridRows, GridRows, u64);

fn passes((base, prefill, decode, request): Sheet) -> Option<Passes> {
    // Counts ascend from 1, so the first column is the price of a single request.
    let single = decode.0.iter().zip(&decode.2).map(|(&context, row)| {
        let cell = row.first().filter(|&&ns| ns < 1 << 31);
        cell.map(|&ns| (context, ns << PART_BITS))
    });
    let single = single.collect::<Option<Vec<_>>>()?;
    let of = |(contexts, counts, rows): GridRows| Grid::new(contexts, counts, rows);
    Some(Passes::new(base, of(prefill)?, of(decode)?, Table(single), request))
}

/// Parse `(base, slope)`, or a list of `(context, price)`, in fractions of a nanosecond.
pub(super) fn prices(given: &Bound<'_, PyAny>) -> PyResult<Arc<dyn Cost>> {
    if let Ok((base, slope)) = given.extract::<(u64, u64)>() {
        return Ok(Arc::new(Affine { base, slope }));
    }
    if let Ok(sheet) = given.extract::<Sheet>() {
        let wrong = || {
            bad(
                "price is a base, two tables with ascending axes and times, and the time of a request",
            )
        };
        return Ok(Arc::new(passes(sheet).ok_or_else(wrong)?));
    }
    let points = given.extract::<Vec<(u64, u64)>>().unwrap_or_default();
    let ascends = points.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 <= two[1].1);
    if points.is_empty() || !ascends {
        return Err(bad(format!(
            "price is {}, a pair or ascending pairs of integers wanted",
            shown(given)
        )));
    }
    Ok(Arc::new(Table(points)))
}
