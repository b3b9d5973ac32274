//! Lease: a matched path pinned for a request.
//!
//! Invariant: the object is only a reference to the manager's lease. Several objects may refer to
//! the same lease, and dropping them releases nothing. Cost: a lock per call.

use kvtrie_core::{Error, Kind, Layers, LeaseId, LoadMode, Manager, MoveId, NO_SLOT, Result};
use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{handles, moves, numbers};
use crate::number::{self, BlockRange, Forks, LayerRange, Now};
use crate::plan::Plan;
use crate::record::Committed;
use crate::settings::to;
use crate::shared::Shared;
use crate::text::choice;
use crate::tokens::Tokens;

/// Parse the argument for loading blocks of lower tiers.
pub(crate) fn load_mode(load: &Bound<'_, PyAny>) -> PyResult<LoadMode> {
    let known = [("plan", LoadMode::Plan), ("all", LoadMode::All), ("none", LoadMode::None)];
    choice(load, "load", &known)
}

/// A request's lease on blocks and slots.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Lease {
    shared: Shared,
    /// Lease id, never reused.
    #[pyo3(get)]
    pub(crate) id: LeaseId,
}

impl Lease {
    pub(crate) fn new(shared: &Shared, id: LeaseId) -> Self {
        Self { shared: shared.clone(), id }
    }

    fn moves<'py>(
        &self,
        py: Python<'py>,
        of: impl FnOnce(&mut Manager) -> Result<Vec<MoveId>>,
    ) -> PyResult<Bound<'py, PyArray1<MoveId>>> {
        Ok(moves(py, self.shared.call(py, of)?))
    }

    fn read<T>(
        &self,
        py: Python<'_>,
        of: impl FnOnce(&kvtrie_core::Lease, &Manager) -> T,
    ) -> PyResult<T> {
        self.shared.call(py, |manager| manager.lease(self.id).map(|lease| of(lease, manager)))
    }
}

#[pymethods]
impl Lease {
    /// Name of its session, or None.
    #[getter]
    fn session(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let name = |manager: &mut Manager| {
            manager.session_name(self.id).map(|name| name.map(str::to_owned))
        };
        self.shared.call(py, name)
    }

    /// "active", "suspended" or "released".
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.shared.call(py, |manager| match manager.lease(self.id) {
            Ok(lease) if lease.suspended() => Ok("suspended"),
            Ok(_) => Ok("active"),
            Err(Error::Closed(_)) => Ok("released"),
            Err(error) => Err(error),
        })
    }

    /// Current tokens to reuse, load and compute.
    #[getter]
    fn plan(&self, py: Python<'_>) -> PyResult<Plan> {
        self.read(py, |lease, manager| {
            let settings = manager.settings();
            Plan::new(lease, settings.block_tokens, settings.layers)
        })
    }

    /// Tokens covered by the plan. A multiple of the block size.
    #[getter]
    fn matched(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, |lease, _| lease.matched())
    }

    /// Number of its tokens.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.call(py, |manager| manager.lease_tokens(self.id))
    }

    /// Handles of its full blocks, in logical order.
    #[getter]
    fn handles<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        Ok(handles(py, &self.shared.call(py, |manager| manager.lease_blocks(self.id))?))
    }

    /// Number of tokens with room to commit. None if the engine owns the slots.
    #[getter]
    fn room(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        let room = self.shared.call(py, |manager| manager.room_left(self.id))?;
        Ok((room < usize::MAX).then_some(room))
    }

    /// Moves to wait for before reading and writing its slots.
    #[getter]
    fn after<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        self.moves(py, |manager| manager.awaits(self.id))
    }

    /// Whether all moves of `after` have ended.
    fn ready(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.shared.call(py, |manager| manager.awaits(self.id))?.is_empty())
    }

    /// Block table of a layer group on a tier, in logical order.
    #[pyo3(signature = (tier=None, group=0), text_signature = "($self, tier=0, group=0)")]
    fn slots<'py>(
        &self,
        py: Python<'py>,
        tier: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = number::group)] group: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tier = tier.map_or(Ok(0), |tier| self.shared.tier(tier))?;
        let (rows, table) =
            self.shared.call(py, |manager| manager.group_table(self.id, tier, group))?;
        let blocks = table.len() / rows.max(1);
        let table = table.into_pyarray(py);
        if self.shared.layer_slots(tier) {
            return Ok(table.reshape([rows, blocks])?.into_any());
        }
        Ok(table.into_any())
    }

    /// Allocate room for further tokens.
    #[pyo3(signature = (tokens, *, now))]
    fn reserve(&self, py: Python<'_>, tokens: number::Tokens, now: Now) -> PyResult<()> {
        self.shared.call(py, |manager| manager.reserve(self.id, tokens.0, now.0))
    }

    /// Bind slots of a tier owned by the engine.
    #[pyo3(signature = (first_block, slots, group=0))]
    fn bind(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::first_block)] first_block: usize,
        slots: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::group)] group: usize,
    ) -> PyResult<()> {
        let slots = numbers(slots, "slot", u64::from(NO_SLOT - 1))?;
        let slots: Vec<u32> =
            slots.into_iter().map(|slot| u32::try_from(slot).unwrap_or(NO_SLOT)).collect();
        self.shared.call(py, |manager| manager.bind_group(self.id, first_block, &slots, group))
    }

    /// Unbind the slots of blocks before `first_block` in a group after the first.
    #[pyo3(signature = (first_block, group))]
    fn unbind(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::first_block)] first_block: usize,
        #[pyo3(from_py_with = number::group)] group: usize,
    ) -> PyResult<()> {
        self.shared.call(py, |manager| manager.unbind(self.id, first_block, group))
    }

    /// Start the loads omitted by `load="none"`, optionally limited to a range of layers and
    /// blocks. Returns their moves.
    #[pyo3(signature = (layers=None, blocks=None, *, now))]
    fn load<'py>(
        &self,
        py: Python<'py>,
        layers: Option<LayerRange>,
        blocks: Option<BlockRange>,
        now: Now,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let layers = layers.map(|LayerRange((lo, hi))| Layers::new(lo, hi));
        let blocks = blocks.map(|BlockRange((lo, hi))| lo..hi);
        self.moves(py, |manager| manager.load(self.id, layers, blocks, now.0))
    }

    /// Start the stores of blocks before the engine writes and commits them. Returns their moves.
    #[pyo3(signature = (blocks=None, *, now))]
    fn store_ahead<'py>(
        &self,
        py: Python<'py>,
        blocks: Option<BlockRange>,
        now: Now,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let blocks = blocks.map(|BlockRange((lo, hi))| lo..hi);
        self.moves(py, |manager| manager.store_ahead(self.id, blocks, now.0))
    }

    /// Cancel stores of `store_ahead` not yet taken over by `commit`.
    #[pyo3(signature = (*, now))]
    fn drop_ahead(&self, py: Python<'_>, now: Now) -> PyResult<()> {
        self.shared.call(py, |manager| manager.drop_ahead(self.id, now.0))
    }

    /// Append tokens with written KV.
    #[pyo3(signature = (new_tokens, *, now))]
    fn commit(
        &self,
        py: Python<'_>,
        new_tokens: &Bound<'_, PyAny>,
        now: Now,
    ) -> PyResult<Committed> {
        let tokens = Tokens::new(new_tokens)?;
        let committed =
            self.shared.call(py, |manager| manager.commit(self.id, tokens.as_slice(), now.0))?;
        Ok(committed.into())
    }

    /// Keep the first `tokens` tokens.
    #[pyo3(signature = (tokens, *, now))]
    fn truncate(&self, py: Python<'_>, tokens: number::Tokens, now: Now) -> PyResult<()> {
        self.shared.call(py, |manager| manager.truncate(self.id, tokens.0, now.0))
    }

    /// Create `n` further leases over the same tokens.
    #[pyo3(signature = (n, *, now))]
    fn fork(&self, py: Python<'_>, n: Forks, now: Now) -> PyResult<Vec<Self>> {
        let ids = self.shared.call(py, |manager| manager.fork(self.id, n.0 as usize, now.0))?;
        Ok(ids.into_iter().map(|id| Self::new(&self.shared, id)).collect())
    }

    /// Free the memory and keep the tokens. Never fails for lack of slots. Returns the moves still
    /// using an engine's slots.
    #[pyo3(
        signature = (to=Kind::Host, *, now),
        text_signature = "($self, to='host', *, now)"
    )]
    fn suspend<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = to)] to: Kind,
        now: Now,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        self.moves(py, |manager| manager.suspend(self.id, to, now.0))
    }

    /// Plan a suspended lease again.
    #[pyo3(
        signature = (reserve=0, *, now, load=LoadMode::Plan),
        text_signature = "($self, reserve=0, *, now, load='plan')"
    )]
    fn resume(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::reserve)] reserve: usize,
        now: Now,
        #[pyo3(from_py_with = load_mode)] load: LoadMode,
    ) -> PyResult<Plan> {
        self.shared.call(py, |manager| manager.resume(self.id, reserve, load, now.0))?;
        self.plan(py)
    }

    /// End the lease. Its blocks stay cached. Releasing twice has no effect.
    #[pyo3(signature = (*, now=None))]
    fn release<'py>(
        &self,
        py: Python<'py>,
        now: Option<Now>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        self.moves(py, |manager| {
            let now = now.map_or_else(|| manager.now(), |now| now.0);
            match manager.release(self.id, now) {
                // A closed manager has no leases left to release.
                Err(Error::Closed(_)) => Ok(Vec::new()),
                released => released,
            }
        })
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_details))]
    fn __exit__(&self, py: Python<'_>, _details: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py, None).map(drop)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.shared.call(py, |manager| {
            let (id, held) = (self.id, manager.lease_tokens(self.id));
            match (manager.lease(id), held) {
                (Ok(lease), Ok(tokens)) => {
                    let state = if lease.suspended() { "suspended" } else { "active" };
                    let matched = lease.matched();
                    Ok(format!("Lease(id={id}, {state}, matched={matched}, tokens={tokens})"))
                }
                (Err(Error::Closed(_)), _) => Ok(format!("Lease(id={id}, released)")),
                (Err(error), _) | (_, Err(error)) => Err(error),
            }
        })
    }
}
