//! The block manager of a machine: conversions of its calls.
//!
//! Submodules have the calls for moves, for copies, and for explanations and counters. Invariant:
//! arguments are converted before the manager is locked, results after it is unlocked. Cost: the
//! core's operation plus a lock.

mod copies;
mod moves;
mod observe;

use kvtrie_core::{
    Acquire, DropOrder, Handle, LoadMode, Manager, Objective, Query, Result, Structure, Token,
};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{handles, numbers};
use crate::error::{bad, raise};
use crate::lease::{Lease, load_mode};
use crate::matched::Match;
use crate::number::{self, Deadline, LeaseNumber, Now, SessionBlocks};
use crate::settings;
use crate::shared::Shared;
use crate::text::text;
use crate::tokens::{Sequences, Tokens, Unchecked};

/// Token count from which a call releases the interpreter's lock.
const LONG: usize = 64 << 10;

/// First and last ready times of moves.
type Times<'py> = (Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u64>>);

/// Session name, length in blocks, and handles of its blocks.
type Session<'py> = (String, u32, Bound<'py, PyArray1<u64>>);

/// KV-cache block manager: decides which blocks to keep, move, evict and recompute.
#[pyclass(frozen, weakref, module = "kvtrie")]
pub(crate) struct BlockManager {
    pub(crate) shared: Shared,
    /// Shape of the model.
    #[pyo3(get)]
    model: Py<PyAny>,
    /// Tiers, fastest first.
    #[pyo3(get)]
    tiers: Py<PyTuple>,
    /// Tokens per block.
    #[pyo3(get)]
    block_tokens: u32,
    layers: u16,
    /// Number of this machine.
    #[pyo3(get)]
    machine: u32,
}

impl BlockManager {
    /// Require a fingerprint of the model for KV readable by different processes.
    fn named(&self, py: Python<'_>, what: &str) -> PyResult<()> {
        settings::require_fingerprint(self.model.bind(py), what)
    }

    fn found(&self, blocks: Vec<Handle>, now: u64) -> Match {
        let tokens = blocks.len() * self.block_tokens as usize;
        Match::new(&self.shared, blocks, tokens, now)
    }
}

/// Parse block handles.
fn blocks_of(given: &Bound<'_, PyAny>) -> PyResult<Vec<Handle>> {
    Ok(numbers(given, "block", u64::MAX)?.into_iter().map(Handle).collect())
}

#[pymethods]
impl BlockManager {
    #[new]
    #[pyo3(signature = (
        model, tiers, *, block_tokens=16, policy=String::from("learned"), cost=None,
        structure=Structure::LeafOnly, drop_order=DropOrder::Shallow, token_weight=1, machine=0, ranks=1,
        events=0, events_of=false, eviction_log=0, reuse=true, epsilon=0.015_625,
        objective=Objective::Cost, resume=None, explain=false, secret=None
    ), text_signature = "(model, tiers, *, block_tokens=16, policy='learned', cost='default', \
        structure='leaf-only', drop_order='shallow', token_weight=1, machine=0, ranks=1, \
        events=0, events_of='evictions', eviction_log=0, reuse=True, epsilon=0.015625, \
        objective='cost', resume=None, explain=False, secret=None)")]
    fn new(
        model: &Bound<'_, PyAny>,
        tiers: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::block_tokens)] block_tokens: u32,
        #[pyo3(from_py_with = settings::policy)] policy: String,
        cost: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::scope::structure_of)] structure: Structure,
        #[pyo3(from_py_with = settings::drop_order)] drop_order: DropOrder,
        #[pyo3(from_py_with = number::token_weight)] token_weight: u32,
        #[pyo3(from_py_with = number::machine)] machine: u32,
        #[pyo3(from_py_with = number::ranks)] ranks: u32,
        #[pyo3(from_py_with = number::events)] events: u32,
        #[pyo3(from_py_with = settings::of_residency)] events_of: bool,
        #[pyo3(from_py_with = number::eviction_log)] eviction_log: u32,
        #[pyo3(from_py_with = number::reuse)] reuse: bool,
        #[pyo3(from_py_with = number::epsilon)] epsilon: f64,
        #[pyo3(from_py_with = settings::objective)] objective: Objective,
        resume: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::explain)] explain: bool,
        #[pyo3(from_py_with = settings::secret_key)] secret: Option<[u8; 32]>,
    ) -> PyResult<Self> {
        let py = model.py();
        let tiers = settings::tiers(tiers)?;
        let given =
            settings::Given { model, tiers: &tiers, block_tokens, token_weight, cost, resume };
        let basic = settings::settings(&given)?;
        let settings = kvtrie_core::Settings {
            policy,
            structure,
            drop_order,
            ranks,
            events: if events_of { 0 } else { events as usize },
            block_events: if events_of { events as usize } else { 0 },
            eviction_log: eviction_log as usize,
            reuse,
            explain,
            producer_key: secret,
            epsilon,
            cost: basic.cost.with_objective(objective),
            ..basic
        };
        let layers = settings.layers;
        Ok(Self {
            shared: Shared::new(Manager::new(settings).map_err(raise)?),
            model: model.clone().unbind(),
            tiers: PyTuple::new(py, tiers)?.unbind(),
            block_tokens,
            layers,
            machine,
        })
    }

    /// Counter, incremented whenever the result of a lookup may have changed.
    #[getter]
    fn generation(&self, py: Python<'_>) -> PyResult<u64> {
        self.shared.call(py, |manager| {
            manager.open()?;
            Ok(manager.generation())
        })
    }

    /// Names of all policies.
    #[staticmethod]
    fn policies() -> Vec<&'static str> {
        kvtrie_core::POLICIES.to_vec()
    }

    /// Return the longest usable prefix of a sequence. Pins and refreshes no block.
    #[pyo3(signature = (tokens, *, now, scope=None, keep=1))]
    fn lookup(
        &self,
        tokens: &Bound<'_, PyAny>,
        now: Now,
        scope: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::keep)] keep: usize,
    ) -> PyResult<Match> {
        let py = tokens.py();
        let scope = crate::scope::scope(scope)?;
        let look = |query| self.shared.call(py, |manager| manager.probe(query, &scope, keep));
        let found = match Unchecked::of(tokens) {
            None => look(Query::Tokens(Tokens::new(tokens)?.as_slice()))?,
            Some(numbers) => {
                let found = look(numbers.query())?;
                numbers.check(found.len() * self.block_tokens as usize)?;
                found
            }
        };
        Ok(self.found(found, now.0))
    }

    /// Run `lookup` for several sequences.
    #[pyo3(signature = (tokens, *, now, scope=None, keep=1))]
    fn lookup_many(
        &self,
        tokens: &Bound<'_, PyAny>,
        now: Now,
        scope: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::keep)] keep: usize,
    ) -> PyResult<Vec<Match>> {
        let py = tokens.py();
        let scope = crate::scope::scope(scope)?;
        let all = Sequences::many(tokens)?;
        let look = |manager: &Manager, all: &[&[Token]]| {
            let probe = |tokens| manager.probe(Query::Tokens(tokens), &scope, keep);
            all.iter().copied().map(probe).collect::<Result<Vec<_>>>()
        };
        let found = if all.slices().iter().map(|tokens| tokens.len()).sum::<usize>() > LONG {
            let all = all.into_vecs()?;
            let all: Vec<&[Token]> = all.iter().map(Vec::as_slice).collect();
            self.shared.long(py, |manager| look(manager, &all))?
        } else {
            let all = all.slices();
            self.shared.call(py, |manager| look(manager, &all))?
        };
        Ok(found.into_iter().map(|found| self.found(found, now.0)).collect())
    }

    /// Content keys of the full blocks of a sequence, cached or not.
    #[pyo3(signature = (tokens, *, scope=None))]
    fn keys<'py>(
        &self,
        tokens: &Bound<'py, PyAny>,
        scope: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray2<u8>>> {
        let py = tokens.py();
        self.named(py, "the keys of blocks")?;
        let scope = crate::scope::scope(scope)?;
        let tokens = Tokens::new(tokens)?;
        let keys = if tokens.as_slice().len() > LONG {
            let tokens = tokens.into_vec()?;
            self.shared.long(py, |manager| manager.keys(&scope, &tokens))?
        } else {
            self.shared.call(py, |manager| manager.keys(&scope, tokens.as_slice()))?
        };
        let blocks = keys.len();
        keys.into_flattened().into_pyarray(py).reshape([blocks, 32])
    }

    /// Match a prompt, pin the blocks to reuse or load, and allocate the rest. Changes nothing on
    /// an error.
    #[pyo3(
        signature = (
            tokens, *, now, scope=None, session=None, session_blocks=None, keep=1, reserve=0,
            load=LoadMode::Plan, deadline=None, layerwise=false
        ),
        text_signature = "($self, tokens, *, now, scope=None, session=None, session_blocks=None, \
            keep=1, reserve=0, load='plan', deadline=None, layerwise=False)"
    )]
    fn acquire(
        &self,
        tokens: &Bound<'_, PyAny>,
        now: Now,
        scope: Option<&Bound<'_, PyAny>>,
        session: Option<&Bound<'_, PyAny>>,
        session_blocks: Option<SessionBlocks>,
        #[pyo3(from_py_with = number::keep)] keep: usize,
        #[pyo3(from_py_with = number::reserve)] reserve: usize,
        #[pyo3(from_py_with = load_mode)] load: LoadMode,
        deadline: Option<Deadline>,
        #[pyo3(from_py_with = number::layerwise)] layerwise: bool,
    ) -> PyResult<Lease> {
        let py = tokens.py();
        let tokens = Tokens::new(tokens)?;
        if tokens.as_slice().is_empty() {
            return Err(bad("an empty prompt: a request has at least one token"));
        }
        let session = session.map(|session| text(session, "session")).transpose()?;
        let scope = crate::scope::scope(scope)?;
        let mut ask = Acquire {
            tokens: &[],
            scope,
            session,
            session_blocks: session_blocks.map(|blocks| blocks.0),
            keep,
            reserve,
            load,
            deadline: deadline.map(|deadline| deadline.0),
            layerwise,
        };
        let id = if tokens.as_slice().len() > LONG {
            let tokens = tokens.into_vec()?;
            ask.tokens = &tokens;
            self.shared.long(py, |manager| manager.acquire(&ask, now.0))?
        } else {
            ask.tokens = tokens.as_slice();
            self.shared.call(py, |manager| manager.acquire(&ask, now.0))?
        };
        Ok(Lease::new(&self.shared, id))
    }

    /// Unreleased lease with an id.
    fn lease(&self, py: Python<'_>, lease_id: LeaseNumber) -> PyResult<Lease> {
        self.shared.call(py, |manager| manager.lease(lease_id.0).map(drop))?;
        Ok(Lease::new(&self.shared, lease_id.0))
    }

    /// All named sessions of a scope: name, length in blocks, and handles of the blocks.
    #[pyo3(signature = (*, scope=None))]
    fn sessions<'py>(
        &self,
        py: Python<'py>,
        scope: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Session<'py>>> {
        let scope = crate::scope::scope(scope)?;
        let sessions = self.shared.call(py, |manager| manager.sessions(&scope))?;
        let of = |(name, length, path): (_, _, Vec<_>)| (name, length, handles(py, &path));
        Ok(sessions.into_iter().map(of).collect())
    }

    /// Forget all blocks.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.call(py, Manager::reset)
    }

    /// Check every invariant from scratch.
    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.long(py, Manager::audit)
    }

    /// Close the manager.
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
