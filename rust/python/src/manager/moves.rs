//! Moves and lanes of a manager: conversions of the executor's calls.

use kvtrie_core::{Manager, Outcome};
use numpy::IntoPyArray;
use pyo3::prelude::*;

use crate::arrays::numbers;
use crate::error::bad;
use crate::manager::{BlockManager, Times};
use crate::moves::{Move, Moves};
use crate::number::{self, BusyTime, Layers, LayersDone, Limit, Now, SharedBlocks, shown};
use crate::record::{Failed, Transmission};
use crate::text::{reason, text};

#[pymethods]
impl BlockManager {
    /// Take moves to execute, each exactly once, in topological order.
    #[pyo3(signature = (limit=None, *, shared=None))]
    fn moves(
        &self,
        py: Python<'_>,
        limit: Option<Limit>,
        shared: Option<SharedBlocks>,
    ) -> PyResult<Moves> {
        let limit = limit.map_or(usize::MAX, |limit| limit.0);
        let shared = shared.map_or(usize::MAX, |shared| shared.0);
        let take = |manager: &mut Manager| manager.hand_out(limit, shared, Move::handed_out);
        Ok(self.shared.call(py, take)?.into())
    }

    /// Numbers of waiting stores to a shared tier, and of stores dropped by eviction.
    #[getter]
    fn shared_stores(&self, py: Python<'_>) -> PyResult<(usize, u64)> {
        self.shared.call(py, |manager| {
            manager.open()?;
            Ok(manager.shared_stores())
        })
    }

    /// Report moves. Returns the number of successful moves.
    #[pyo3(signature = (
        ids, *, now, ok=true, layers_done=None, rank=0, error=None, hung=false,
        cancelled=false
    ))]
    fn complete(
        &self,
        ids: &Bound<'_, PyAny>,
        now: Now,
        #[pyo3(from_py_with = number::ok)] ok: bool,
        layers_done: Option<LayersDone>,
        #[pyo3(from_py_with = number::rank)] rank: u32,
        error: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::hung)] hung: bool,
        #[pyo3(from_py_with = number::cancelled)] cancelled: bool,
    ) -> PyResult<usize> {
        let moves = numbers(ids, "id", u64::MAX)?;
        let causes = [(hung, "hung"), (cancelled, "cancelled"), (error.is_some(), "error")];
        if let (true, Some((_, what))) = (ok, causes.into_iter().find(|(given, _)| *given)) {
            return Err(bad(format!("'{what}' contradicts ok=True in a report of {}", shown(ids))));
        }
        if hung && cancelled {
            let ids = shown(ids);
            return Err(bad(format!("what hangs has started: {ids} cannot be cancelled")));
        }
        let error = error.map(|error| reason(error, "error")).transpose()?;
        let error = error.as_deref();
        let layers_done = layers_done.map(|layers| layers.0);
        let outcome = Outcome { ok, layers_done, rank, hung, cancelled, error };
        self.shared.call(ids.py(), |manager| manager.complete(&moves, &outcome, now.0))
    }

    /// Take the planned tokens lost by failed loads.
    fn failed(&self, py: Python<'_>) -> PyResult<Vec<Failed>> {
        let failed = self.shared.call(py, Manager::failed)?;
        Ok(failed.into_iter().map(Failed::from).collect())
    }

    /// Predicted ready times of the first and last layers of moves.
    #[pyo3(signature = (ids, *, now))]
    fn predict<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<'py, PyAny>,
        now: Now,
    ) -> PyResult<Times<'py>> {
        let moves = numbers(ids, "id", u64::MAX)?;
        let times = self.shared.call(py, |manager| manager.predict(&moves, now.0))?;
        let (first, ready): (Vec<u64>, Vec<u64>) = times.into_iter().unzip();
        Ok((first.into_pyarray(py), ready.into_pyarray(py)))
    }

    /// Start a transmission on a lane without a move, for simulators.
    #[pyo3(signature = (lane, tokens, *, now, layers=None))]
    fn transmit(
        &self,
        py: Python<'_>,
        lane: &Bound<'_, PyAny>,
        tokens: number::Tokens,
        now: Now,
        layers: Option<Layers>,
    ) -> PyResult<Transmission> {
        let (tokens, layers) = (tokens.0 as u64, layers.map_or(self.layers, |layers| layers.0));
        let lane = text(lane, "lane")?;
        let sent = self.shared.call(py, |manager| manager.transmit(lane, tokens, now.0, layers))?;
        Ok(sent.into())
    }

    /// Add busy time to a lane.
    #[pyo3(signature = (lane, *, busy_ns))]
    fn add_lane_busy(
        &self,
        py: Python<'_>,
        lane: &Bound<'_, PyAny>,
        busy_ns: BusyTime,
    ) -> PyResult<()> {
        let lane = text(lane, "lane")?;
        self.shared.call(py, |manager| manager.add_lane_busy(lane, busy_ns.0))
    }
}
