//! The block manager of one machine.
//!
//! Invariant: arguments are converted before the manager is locked, results after it is
//! unlocked. Cost: that of the core's operation plus one lock.

use kvtrie_core::block::Token;
use kvtrie_core::error::Result;
use kvtrie_core::manager::{self, Acquire, LoadMode, Manager, Outcome};
use kvtrie_core::policy;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::arrays::{handles, numbers};
use crate::committed::Committed;
use crate::error::{bad, raise};
use crate::event::Event;
use crate::explanation::Explanation;
use crate::failed::Failed;
use crate::index;
use crate::lease::Lease;
use crate::mark::times;
use crate::matched::Match;
use crate::moves::{Move, Moves};
use crate::number::{count, maybe_nanos, nanos, small, whole};
use crate::settings::{Given, settings};
use crate::shared::Shared;
use crate::stats::Stats;
use crate::tokens::{Tokens, each};
use crate::transmission::Transmission;

/// Requests with more tokens than this run without the interpreter's lock.
const LONG: usize = 64 << 10;

/// First and last ready times of moves.
type Times<'py> = (Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u64>>);

/// Decides what is cached where, what to keep, what to move and what to recompute.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct BlockManager {
    shared: Shared,
    model: Py<PyAny>,
    tiers: Py<PyTuple>,
    block_tokens: u32,
    layers: u16,
    machine: u32,
}

#[pymethods]
impl BlockManager {
    #[new]
    #[pyo3(signature = (
        model, tiers, *, block_tokens=None, policy="retention", cost=None,
        structure="leaf-only", drop_order="shallow", token_weight=None, machine=None, ranks=None,
        events=None, reuse=true
    ))]
    #[expect(clippy::too_many_arguments, reason = "an engine's settings are keyword arguments")]
    fn new(
        model: &Bound<'_, PyAny>,
        tiers: &Bound<'_, PyAny>,
        block_tokens: Option<&Bound<'_, PyAny>>,
        policy: &str,
        cost: Option<&Bound<'_, PyAny>>,
        structure: &str,
        drop_order: &str,
        token_weight: Option<&Bound<'_, PyAny>>,
        machine: Option<&Bound<'_, PyAny>>,
        ranks: Option<&Bound<'_, PyAny>>,
        events: Option<&Bound<'_, PyAny>>,
        reuse: bool,
    ) -> PyResult<Self> {
        let py = model.py();
        let tiers: Vec<Bound<'_, PyAny>> = tiers.try_iter()?.collect::<PyResult<_>>()?;
        let or = |number: Option<&Bound<'_, PyAny>>, name, default| {
            number.map_or(Ok(default), |number| small(number, name, u32::MAX))
        };
        let default = pyo3::types::PyString::new(py, "default").into_any();
        let settings = settings(&Given {
            model,
            tiers: &tiers,
            block_tokens: or(block_tokens, "block_tokens", 16)?,
            policy,
            cost: cost.unwrap_or(&default),
            structure,
            drop_order,
            token_weight: or(token_weight, "token_weight", 1)?,
            ranks: or(ranks, "ranks", 1)?,
            events: or(events, "events", 0)? as usize,
            reuse,
        })?;
        let (block_tokens, layers) = (settings.block_tokens, settings.layers);
        Ok(Self {
            shared: Shared::new(Manager::new(settings).map_err(raise)?),
            model: model.clone().unbind(),
            tiers: PyTuple::new(py, tiers)?.unbind(),
            block_tokens,
            layers,
            machine: or(machine, "machine", 0)?,
        })
    }

    #[getter]
    fn model(&self, py: Python<'_>) -> Py<PyAny> {
        self.model.clone_ref(py)
    }

    #[getter]
    fn tiers(&self, py: Python<'_>) -> Py<PyTuple> {
        self.tiers.clone_ref(py)
    }

    #[getter]
    fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    #[getter]
    fn machine(&self) -> u32 {
        self.machine
    }

    #[staticmethod]
    fn policies() -> Vec<&'static str> {
        policy::NAMES.to_vec()
    }

    #[pyo3(signature = (tokens, *, now, scope=None, keep=None))]
    fn lookup(
        &self,
        tokens: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
        scope: Option<&Bound<'_, PyAny>>,
        keep: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Match> {
        let py = tokens.py();
        let (tokens, now) = (Tokens::new(tokens)?, nanos(now, "now")?);
        let scope = crate::scope::scope(scope)?;
        let keep = keep.map_or(Ok(1), |keep| count(keep, "keep"))?;
        let found =
            self.shared.call(py, |manager| manager.lookup(tokens.as_slice(), now, &scope, keep))?;
        Ok(found.into())
    }

    #[pyo3(signature = (tokens, *, now, scope=None, keep=None))]
    fn lookup_many(
        &self,
        tokens: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
        scope: Option<&Bound<'_, PyAny>>,
        keep: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Match>> {
        let py = tokens.py();
        let (all, now) = (each(tokens)?, nanos(now, "now")?);
        let scope = crate::scope::scope(scope)?;
        let keep = keep.map_or(Ok(1), |keep| count(keep, "keep"))?;
        let found = self.shared.long(py, |manager| {
            let look = |tokens: &Vec<Token>| manager.lookup(tokens, now, &scope, keep);
            all.iter().map(look).collect::<Result<Vec<_>>>()
        })?;
        Ok(found.into_iter().map(Match::from).collect())
    }

    #[pyo3(signature = (
        tokens, *, now, scope=None, session=None, keep=None, reserve=None, load="plan",
        deadline=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "a request's settings are keyword arguments")]
    fn acquire(
        &self,
        tokens: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
        scope: Option<&Bound<'_, PyAny>>,
        session: Option<String>,
        keep: Option<&Bound<'_, PyAny>>,
        reserve: Option<&Bound<'_, PyAny>>,
        load: &str,
        deadline: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Lease> {
        let py = tokens.py();
        let (tokens, now) = (Tokens::new(tokens)?, nanos(now, "now")?);
        let load = match load {
            "plan" => LoadMode::Plan,
            "all" => LoadMode::All,
            "none" => LoadMode::None,
            other => return Err(bad(format!("load is 'plan', 'all' or 'none', not '{other}'"))),
        };
        let mut ask = Acquire {
            tokens: &[],
            scope: crate::scope::scope(scope)?,
            session: session.as_deref(),
            keep: keep.map_or(Ok(1), |keep| count(keep, "keep"))?,
            reserve: reserve.map_or(Ok(0), |reserve| count(reserve, "reserve"))?,
            load,
            deadline: maybe_nanos(deadline, "deadline")?,
        };
        let id = if tokens.as_slice().len() > LONG {
            let tokens = tokens.into_vec();
            ask.tokens = &tokens;
            self.shared.long(py, |manager| manager.acquire(&ask, now))?
        } else {
            ask.tokens = tokens.as_slice();
            self.shared.call(py, |manager| manager.acquire(&ask, now))?
        };
        Ok(Lease::new(&self.shared, id, session))
    }

    fn lease(&self, id: &Bound<'_, PyAny>) -> PyResult<Lease> {
        let py = id.py();
        let id = whole(id, "id of a lease", u64::MAX)?;
        self.shared.call(py, |manager| manager.lease(id).map(drop))?;
        Ok(Lease::new(&self.shared, id, None))
    }

    fn sessions<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(String, u32, Bound<'py, PyArray1<u64>>)>> {
        let sessions = self.shared.call(py, |manager| Ok(manager.sessions()))?;
        let of = |(name, length, path): (_, _, Vec<_>)| (name, length, handles(py, &path));
        Ok(sessions.into_iter().map(of).collect())
    }

    #[pyo3(signature = (limit=None))]
    fn moves(&self, py: Python<'_>, limit: Option<&Bound<'_, PyAny>>) -> PyResult<Moves> {
        let limit = limit.map_or(Ok(usize::MAX), |limit| count(limit, "limit"))?;
        let moves = self.shared.call(py, |manager| manager.moves(limit))?;
        Ok(moves.iter().map(Move::from).collect::<Vec<_>>().into())
    }

    #[pyo3(signature = (
        ids, *, now, ok=true, layers_done=None, rank=None, error=None, hung=false
    ))]
    #[expect(clippy::too_many_arguments, reason = "a report's details are keyword arguments")]
    fn complete(
        &self,
        ids: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
        ok: bool,
        layers_done: Option<&Bound<'_, PyAny>>,
        rank: Option<&Bound<'_, PyAny>>,
        error: Option<&str>,
        hung: bool,
    ) -> PyResult<usize> {
        let (moves, now) = (numbers(ids, "id", u64::MAX)?, nanos(now, "now")?);
        if ok && (hung || error.is_some()) {
            return Err(bad("ok=True contradicts hung=True and error"));
        }
        let outcome = Outcome {
            ok,
            layers_done: layers_done
                .map(|done| small(done, "layers_done", u16::MAX))
                .transpose()?,
            rank: rank.map_or(Ok(0), |rank| small(rank, "rank", u32::MAX))?,
            hung,
            error,
        };
        self.shared.call(ids.py(), |manager| manager.complete(&moves, &outcome, now))
    }

    fn failed(&self, py: Python<'_>) -> PyResult<Vec<Failed>> {
        let failed = self.shared.call(py, Manager::failed)?;
        Ok(failed.into_iter().map(Failed::from).collect())
    }

    #[pyo3(signature = (ids, *, now))]
    fn predict<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<'py, PyAny>,
        now: &Bound<'_, PyAny>,
    ) -> PyResult<Times<'py>> {
        let (moves, now) = (numbers(ids, "id", u64::MAX)?, nanos(now, "now")?);
        let times = self.shared.call(py, |manager| Ok(manager.predict(&moves, now)))?;
        let (first, ready): (Vec<u64>, Vec<u64>) = times.into_iter().unzip();
        Ok((first.into_pyarray(py), ready.into_pyarray(py)))
    }

    #[pyo3(signature = (lane, tokens, *, now, layers=None))]
    fn transmit(
        &self,
        py: Python<'_>,
        lane: &str,
        tokens: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
        layers: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transmission> {
        let (tokens, now) = (count(tokens, "tokens")? as u64, nanos(now, "now")?);
        let layers = layers.map_or(Ok(self.layers), |n| small(n, "layers", u16::MAX))?;
        let sent = self.shared.call(py, |manager| manager.transmit(lane, tokens, now, layers))?;
        Ok(sent.into())
    }

    #[pyo3(signature = (
        tokens, tier, *, present, now, ready=None, first=None, per_layer=None, scope=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "a copy's details are keyword arguments")]
    fn mark<'py>(
        &self,
        tokens: &Bound<'py, PyAny>,
        tier: &Bound<'_, PyAny>,
        present: bool,
        now: &Bound<'_, PyAny>,
        ready: Option<&Bound<'_, PyAny>>,
        first: Option<&Bound<'_, PyAny>>,
        per_layer: Option<&Bound<'_, PyAny>>,
        scope: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let (given, now) = (Tokens::new(tokens)?, nanos(now, "now")?);
        let (ready, first) = times(
            maybe_nanos(ready, "ready")?,
            maybe_nanos(first, "first")?,
            maybe_nanos(per_layer, "per_layer")?,
            self.layers,
        )?;
        let mark = manager::Mark {
            tokens: given.as_slice(),
            scope: crate::scope::scope(scope)?,
            tier: self.shared.tier(tier)?,
            present,
            ready,
            first,
        };
        let py = tokens.py();
        Ok(handles(py, &self.shared.call(py, |manager| manager.mark(&mark, now))?))
    }

    #[pyo3(signature = (lease_ids, tokens, *, now))]
    fn commit_many(
        &self,
        lease_ids: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<Committed>> {
        let (ids, now) = (numbers(lease_ids, "lease", u64::MAX)?, nanos(now, "now")?);
        let all = each(tokens)?;
        if ids.len() != all.len() {
            return Err(bad(format!("{} leases and tokens of {}", ids.len(), all.len())));
        }
        let batch: Vec<_> = ids.into_iter().zip(all).collect();
        let committed =
            self.shared.call(tokens.py(), |manager| manager.commit_many(&batch, now))?;
        Ok(committed.into_iter().map(Committed::from).collect())
    }

    #[pyo3(signature = (rows, *, now, tier=None, scope=None))]
    fn load_index(
        &self,
        rows: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
        tier: Option<&Bound<'_, PyAny>>,
        scope: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let py = rows.py();
        let (rows, now) = (index::rows(rows)?, nanos(now, "now")?);
        let tier = tier.map_or(Ok(self.shared.tiers() - 1), |tier| self.shared.tier(tier))?;
        let scope = crate::scope::scope(scope)?;
        self.shared.long(py, |manager| manager.load_index(tier, &scope, &rows, now))
    }

    #[pyo3(signature = (block, *, now, tier=None))]
    fn explain(
        &self,
        block: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
        tier: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Explanation> {
        let py = block.py();
        let (block, now) = (crate::lease::handle(block)?, nanos(now, "now")?);
        let tier = tier.map_or(Ok(0), |tier| self.shared.tier(tier))?;
        Ok(self.shared.call(py, |manager| manager.explain(block, tier, now))?.into())
    }

    #[pyo3(signature = (layer, block, session_blocks, context, *, tier=None))]
    fn cost(
        &self,
        layer: &Bound<'_, PyAny>,
        block: &Bound<'_, PyAny>,
        session_blocks: &Bound<'_, PyAny>,
        context: &Bound<'_, PyAny>,
        tier: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<f64> {
        let layer_index = small(layer, "layer", u16::MAX)?;
        let block = small(block, "block", u32::MAX)?;
        let length = small(session_blocks, "session_blocks", u32::MAX)?;
        let context = nanos(context, "context")?;
        let tier = tier.map_or(Ok(0), |tier| self.shared.tier(tier))?;
        let price = |manager: &mut Manager| manager.cost(tier, layer_index, block, length, context);
        Ok(self.shared.call(layer.py(), price)?.cost)
    }

    fn layer_tiers<'py>(
        &self,
        block: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<i8>>> {
        let py = block.py();
        let block = crate::lease::handle(block)?;
        let tiers = self.shared.call(py, |manager| manager.layer_tiers(block))?;
        let index = |tier: Option<usize>| tier.map_or(-1, |tier| i8::try_from(tier).unwrap_or(-1));
        Ok(tiers.into_iter().map(index).collect::<Vec<_>>().into_pyarray(py))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.shared.call(py, |manager| Ok(Stats::new(manager)))?.into_dict(py)
    }

    fn take_events(&self, py: Python<'_>) -> PyResult<Vec<Event>> {
        let events = self.shared.call(py, Manager::take_events)?;
        Ok(events.into_iter().map(Event::from).collect())
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let state = self.shared.long(py, |manager| Ok(manager.snapshot()))?;
        Ok(PyBytes::new(py, &state))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.call(py, Manager::reset)
    }

    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.long(py, Manager::audit)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.call(py, |manager| {
            manager.close();
            Ok(())
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.shared.call(py, |manager| {
            let (blocks, leases, _) = manager.totals();
            let tiers = manager.settings().tiers.iter().enumerate().map(|(at, tier)| {
                let now = manager.occupancy(at);
                format!("{} {}/{} free", tier.kind.name(), now.free, now.slots)
            });
            let tiers = tiers.collect::<Vec<_>>().join(", ");
            Ok(format!("BlockManager({tiers}; blocks={blocks}, leases={leases})"))
        })
    }
}
