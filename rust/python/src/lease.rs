//! A matched path held for a request.
//!
//! Invariant: the object is a name for what the manager holds; several may name one lease, and
//! dropping them releases nothing. Cost: one lock per call.

use kvtrie_core::block::{Handle, LeaseId, NO_SLOT};
use kvtrie_core::error::Error;
use kvtrie_core::manager::{self, Manager};
use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::numbers;
use crate::committed::Committed;
use crate::number::{count, maybe_nanos, nanos};
use crate::plan::Plan;
use crate::settings::kind;
use crate::shared::Shared;
use crate::tokens::Tokens;

/// A request's hold on blocks and slots.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Lease {
    shared: Shared,
    id: LeaseId,
    session: Option<String>,
}

impl Lease {
    pub(crate) fn new(shared: &Shared, id: LeaseId, session: Option<String>) -> Self {
        Self { shared: shared.clone(), id, session }
    }

    fn read<T>(
        &self,
        py: Python<'_>,
        of: impl FnOnce(&manager::Lease, &Manager) -> T,
    ) -> PyResult<T> {
        self.shared.call(py, |manager| manager.lease(self.id).map(|lease| of(lease, manager)))
    }
}

#[pymethods]
impl Lease {
    #[getter]
    fn id(&self) -> LeaseId {
        self.id
    }

    #[getter]
    fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.shared.call(py, |manager| match manager.lease(self.id) {
            Ok(lease) if lease.suspended() => Ok("suspended"),
            Ok(_) => Ok("active"),
            Err(Error::Closed(_)) => Ok("released"),
            Err(error) => Err(error),
        })
    }

    #[getter]
    fn plan(&self, py: Python<'_>) -> PyResult<Plan> {
        self.read(py, |lease, manager| {
            let settings = manager.settings();
            Plan::new(lease, settings.block_tokens, settings.layers)
        })
    }

    #[getter]
    fn matched(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, |lease, _| lease.matched())
    }

    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.call(py, |manager| manager.lease_tokens(self.id))
    }

    #[getter]
    fn room(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.call(py, |manager| manager.room_left(self.id))
    }

    #[getter]
    fn after<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        Ok(self.shared.call(py, |manager| manager.awaits(self.id))?.into_pyarray(py))
    }

    fn ready(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.shared.call(py, |manager| manager.awaits(self.id))?.is_empty())
    }

    #[pyo3(signature = (tier=None))]
    fn slots<'py>(
        &self,
        py: Python<'py>,
        tier: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tier = tier.map_or(Ok(0), |tier| self.shared.tier(tier))?;
        let (rows, table) = self.shared.call(py, |manager| manager.slots(self.id, tier))?;
        let blocks = table.len() / rows.max(1);
        let table = table.into_pyarray(py);
        if self.shared.layer_slots(tier) {
            return Ok(table.reshape([rows, blocks])?.into_any());
        }
        Ok(table.into_any())
    }

    #[pyo3(signature = (tokens, *, now))]
    fn reserve(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (tokens, now) = (count(tokens, "tokens")?, nanos(now, "now")?);
        self.shared.call(py, |manager| manager.reserve(self.id, tokens, now))
    }

    fn bind(
        &self,
        py: Python<'_>,
        first_block: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let first = count(first_block, "first_block")?;
        let slots = numbers(slots, "slot", u64::from(NO_SLOT - 1))?;
        let slots: Vec<u32> =
            slots.into_iter().map(|slot| u32::try_from(slot).unwrap_or(NO_SLOT)).collect();
        self.shared.call(py, |manager| manager.bind(self.id, first, &slots))
    }

    #[pyo3(signature = (*, now))]
    fn load<'py>(
        &self,
        py: Python<'py>,
        now: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let now = nanos(now, "now")?;
        Ok(self.shared.call(py, |manager| manager.load(self.id, now))?.into_pyarray(py))
    }

    #[pyo3(signature = (new_tokens, *, now))]
    fn commit(
        &self,
        py: Python<'_>,
        new_tokens: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
    ) -> PyResult<Committed> {
        let (tokens, now) = (Tokens::new(new_tokens)?, nanos(now, "now")?);
        let committed =
            self.shared.call(py, |manager| manager.commit(self.id, tokens.as_slice(), now))?;
        Ok(committed.into())
    }

    #[pyo3(signature = (tokens, *, now))]
    fn truncate(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (tokens, now) = (count(tokens, "tokens")?, nanos(now, "now")?);
        self.shared.call(py, |manager| manager.truncate(self.id, tokens, now))
    }

    #[pyo3(signature = (n, *, now))]
    fn fork(
        &self,
        py: Python<'_>,
        n: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<Self>> {
        const MOST: u32 = 1 << 20;
        let (n, now) = (crate::number::small(n, "n", MOST)?, nanos(now, "now")?);
        let ids = self.shared.call(py, |manager| manager.fork(self.id, n as usize, now))?;
        Ok(ids.into_iter().map(|id| Self::new(&self.shared, id, self.session.clone())).collect())
    }

    #[pyo3(signature = (to="host", *, now))]
    fn suspend(&self, py: Python<'_>, to: &str, now: &Bound<'_, PyAny>) -> PyResult<()> {
        let (to, now) = (kind(to)?, nanos(now, "now")?);
        self.shared.call(py, |manager| manager.suspend(self.id, to, now))
    }

    #[pyo3(signature = (*, now, reserve=None))]
    fn resume(
        &self,
        py: Python<'_>,
        now: &Bound<'_, PyAny>,
        reserve: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let now = nanos(now, "now")?;
        let reserve = reserve.map_or(Ok(0), |tokens| count(tokens, "reserve"))?;
        self.shared.call(py, |manager| manager.resume(self.id, reserve, now))?;
        self.plan(py)
    }

    #[pyo3(signature = (*, now=None))]
    fn release<'py>(
        &self,
        py: Python<'py>,
        now: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let now = maybe_nanos(now, "now")?;
        let reading = self.shared.call(py, |manager| {
            let now = now.unwrap_or_else(|| manager.now());
            match manager.release(self.id, now) {
                // A closed manager holds no lease.
                Err(Error::Closed(_)) => Ok(Vec::new()),
                released => released,
            }
        })?;
        Ok(reading.into_pyarray(py))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_details))]
    fn __exit__(&self, py: Python<'_>, _details: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py, None).map(drop)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let state = self.state(py)?;
        if state == "released" {
            return Ok(format!("Lease(id={}, released)", self.id));
        }
        let (matched, tokens) = (self.matched(py)?, self.tokens(py)?);
        Ok(format!("Lease(id={}, {state}, matched={matched}, tokens={tokens})", self.id))
    }
}

/// A block's handle.
pub(crate) fn handle(number: &Bound<'_, PyAny>) -> PyResult<Handle> {
    crate::number::whole(number, "block", u64::MAX).map(Handle)
}
