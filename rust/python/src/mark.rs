//! Times of a marked copy.
//!
//! Invariant: `first + (layers - 1) * per_layer == ready`, as in a transmission. Cost: none.

use pyo3::PyResult;

use crate::error::bad;
use crate::number::{First, LayerTime, Ready};

/// Complete `ready` and `first` from `per_layer`. Refuses contradictory times.
pub(crate) fn times(
    ready: Option<Ready>,
    first: Option<First>,
    per_layer: Option<LayerTime>,
    layers: u16,
) -> PyResult<(Option<u64>, Option<u64>)> {
    let steps = |step: u64| {
        u64::from(layers - 1)
            .checked_mul(step)
            .ok_or_else(|| bad(format!("per_layer is {step}, too much for {layers} layers")))
    };
    match (ready.map(|at| at.0), first.map(|at| at.0), per_layer.map(|time| time.0)) {
        (Some(ready), Some(first), None) if first > ready => {
            Err(bad(format!("first is {first}, later than ready at {ready}")))
        }
        (None, Some(first), None) => {
            Err(bad(format!("first is {first} without ready or per_layer")))
        }
        (None, None, Some(step)) => Err(bad(format!("per_layer is {step} without ready or first"))),
        (ready, first, None) => Ok((ready, first)),
        (Some(ready), None, Some(step)) => {
            let first = ready.checked_sub(steps(step)?).ok_or_else(|| {
                bad(format!("{layers} layers of {step} ns do not fit before ready at {ready}"))
            })?;
            Ok((Some(ready), Some(first)))
        }
        (ready, Some(first), Some(step)) => {
            let end = first
                .checked_add(steps(step)?)
                .ok_or_else(|| bad(format!("{layers} layers of {step} ns after {first}")))?;
            match ready {
                Some(ready) if ready != end => Err(bad(format!(
                    "ready is {ready}, but {layers} layers every {step} ns from {first} end at {end}"
                ))),
                _ => Ok((Some(end), Some(first))),
            }
        }
    }
}
