//! Router settings of a simulation, and router decisions as tuples.
//!
//! Invariant: weights are integers. Cost: a conversion per reported decision.

use kvtrie_sim::decision::{Choice, Decision};
use kvtrie_sim::request::Request;
use kvtrie_sim::router::{
    Candidate, Hash, LeastLoaded, Locality, RATIO_ONE, RoundRobin, Router, Score,
};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error::bad;
use crate::number::{pair, shown, whole};
use crate::text::text;

/// Parse a name, `("locality", ratio in 2**-32)`, or `("score", hit_weight, load_weight)`.
pub(crate) fn routed(
    given: Option<&Bound<'_, PyAny>>,
    block_tokens: u32,
) -> PyResult<Box<dyn Router>> {
    let Some(given) = given else { return Ok(Box::<RoundRobin>::default()) };
    let parts = given.cast::<PyTuple>().map(|parts| parts.iter().collect()).unwrap_or_default();
    let parts: Vec<Bound<'_, PyAny>> = parts;
    let name = text(parts.first().unwrap_or(given), "router")?;
    let weight = |at: usize, what: &str| whole(&parts[at], what, u64::MAX);
    match (name, parts.len()) {
        ("round-robin", 0) => Ok(Box::<RoundRobin>::default()),
        ("least-loaded", 0) => Ok(Box::new(LeastLoaded)),
        ("hash", 0) => Ok(Box::new(Hash { block_tokens: block_tokens as usize })),
        ("locality", 2) => Ok(Box::new(Locality { ratio: ratio_of(&parts[1])? })),
        ("score", 3) => Ok(Box::new(Score {
            hit_weight: weight(1, "hit_weight")?,
            load_weight: weight(2, "load_weight")?,
        })),
        _ => Err(bad(format!(
            "router is 'round-robin', 'least-loaded', 'hash', ('locality', ratio) or ('score', \
             hit_weight, load_weight), not {}",
            shown(given)
        ))),
    }
}

fn ratio_of(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    let ratio = whole(given, "ratio", u64::MAX)?;
    if ratio < RATIO_ONE {
        return Err(bad(format!("ratio is {ratio}, at least 2**32 wanted, which is 1")));
    }
    Ok(ratio)
}

/// Return the candidate chosen by `Locality` among `(load, hit)` pairs. The ratio is in units of
/// 2**-32.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 converts to a value")]
pub(crate) fn locality(
    candidates: Vec<Bound<'_, PyAny>>,
    ratio: &Bound<'_, PyAny>,
) -> PyResult<usize> {
    let candidate = |given: &Bound<'_, PyAny>| {
        let [load, hit] = pair(given, "a candidate")?;
        let (load, hit) = (whole(&load, "load", u64::MAX)?, whole(&hit, "hit", u64::MAX)?);
        Ok(Candidate { load, hit, queued: 0 })
    };
    let machines = candidates.iter().map(candidate).collect::<PyResult<Vec<_>>>()?;
    if machines.is_empty() {
        return Err(bad("candidates is empty, at least one wanted".to_owned()));
    }
    Ok(Locality { ratio: ratio_of(ratio)? }.route(&Request::default(), &machines))
}

/// `(machine, tokens hit, tokens queued, cost in ns)`.
type ChoiceRow = (usize, u64, u64, u64);

/// `(id, arrival, chosen, others, regret)`.
pub(crate) type DecisionRow = (u64, u64, ChoiceRow, Vec<ChoiceRow>, u64);

fn choice_row(choice: &Choice) -> ChoiceRow {
    (choice.machine, choice.hit, choice.queued, choice.cost)
}

pub(crate) fn decision_row(decision: &Decision) -> DecisionRow {
    let Decision { id, arrival, ref chosen, ref others, regret } = *decision;
    (id, arrival, choice_row(chosen), others.iter().map(choice_row).collect(), regret)
}
