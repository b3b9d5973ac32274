//! The block manager of one machine: conversions of its calls.
//!
//! The file is long because `PyO3` takes one block of methods per class, and each has its
//! signature. Invariant: arguments are converted before the manager is locked, results after it is
//! unlocked. Cost: that of the core's operation plus one lock.

use kvtrie_core::block::{Handle, Structure, Token};
use kvtrie_core::cost::Objective;
use kvtrie_core::error::Result;
use kvtrie_core::manager::{self, Acquire, DropOrder, LoadMode, Manager, Outcome};
use kvtrie_core::policy;
use kvtrie_core::trie::Query;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::arrays::{handles, numbers, reals};
use crate::error::{bad, raise};
use crate::event::Event;
use crate::hint::HintReply;
use crate::index::Index;
use crate::lease::{Lease, load_mode};
use crate::mark::times;
use crate::matched::{Match, handle};
use crate::miss::{BRANCHES, MOST_BRANCHES, Miss};
use crate::moves::{Move, Moves};
use crate::number::{
    self, BusyTime, Count, Deadline, First, Layer, LayerTime, Layers, LayersDone, LeaseNumber,
    Limit, Now, Pin, Ready, SessionBlocks, shown,
};
use crate::record::{Committed, Eviction, Explanation, Failed, Transmission, Unpriced};
use crate::settings;
use crate::shared::Shared;
use crate::stats::Stats;
use crate::text::{reason, text};
use crate::tokens::{Sequences, Tokens, Unchecked};

/// Token count from which a request releases the interpreter's lock.
const LONG: usize = 64 << 10;

/// First and last ready times of moves.
type Times<'py> = (Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u64>>);

/// A session's name, its length in blocks and its number of blocks.
type Session<'py> = (String, u32, Bound<'py, PyArray1<u64>>);

/// KV-cache block manager: decides which blocks to keep, move, evict and recompute.
#[pyclass(frozen, weakref, module = "kvtrie")]
pub(crate) struct BlockManager {
    pub(crate) shared: Shared,
    /// The shape of the model.
    #[pyo3(get)]
    model: Py<PyAny>,
    /// The tiers, fastest first.
    #[pyo3(get)]
    tiers: Py<PyTuple>,
    /// Tokens of one block.
    #[pyo3(get)]
    block_tokens: u32,
    layers: u16,
    /// This machine's number.
    #[pyo3(get)]
    machine: u32,
}

impl BlockManager {
    /// Refuses tiers that other processes can read if the model's KV has no name.
    fn named(&self, py: Python<'_>, what: &str) -> PyResult<()> {
        settings::require_fingerprint(self.model.bind(py), what)
    }

    fn found(&self, blocks: Vec<Handle>, now: u64) -> Match {
        let tokens = blocks.len() * self.block_tokens as usize;
        Match::new(&self.shared, blocks, tokens, now)
    }
}

/// Blocks by their handles.
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
        objective=Objective::Cost, resume=None, explain=false
    ), text_signature = "(model, tiers, *, block_tokens=16, policy='learned', cost='default', \
        structure='leaf-only', drop_order='shallow', token_weight=1, machine=0, ranks=1, \
        events=0, events_of='evictions', eviction_log=0, reuse=True, epsilon=0.015625, \
        objective='cost', resume=None, explain=False)")]
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
    ) -> PyResult<Self> {
        let py = model.py();
        let tiers = settings::tiers(tiers)?;
        let given =
            settings::Given { model, tiers: &tiers, block_tokens, token_weight, cost, resume };
        let basic = settings::settings(&given)?;
        let settings = manager::Settings {
            policy,
            structure,
            drop_order,
            ranks,
            events: if events_of { 0 } else { events as usize },
            block_events: if events_of { events as usize } else { 0 },
            eviction_log: eviction_log as usize,
            reuse,
            explain,
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

    /// A number that stays as long as lookups find what they found.
    #[getter]
    fn generation(&self, py: Python<'_>) -> PyResult<u64> {
        self.shared.call(py, |manager| {
            manager.open()?;
            Ok(manager.generation())
        })
    }

    /// The names of all policies.
    #[staticmethod]
    fn policies() -> Vec<&'static str> {
        policy::NAMES.to_vec()
    }

    /// The longest usable prefix of a sequence; pins and refreshes no block.
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

    /// `lookup` of several sequences in one call.
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

    /// Matches a prompt, pins the blocks that its plan reuses or loads, and allocates the rest; or
    /// changes nothing.
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

    /// An unreleased lease, by its id.
    fn lease(&self, py: Python<'_>, lease_id: LeaseNumber) -> PyResult<Lease> {
        self.shared.call(py, |manager| manager.lease(lease_id.0).map(drop))?;
        Ok(Lease::new(&self.shared, lease_id.0))
    }

    /// Every named session of a scope: its name, its length in blocks, and its number of blocks.
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

    /// Takes moves to execute, each exactly once, in topological order.
    #[pyo3(signature = (limit=None))]
    fn moves(&self, py: Python<'_>, limit: Option<Limit>) -> PyResult<Moves> {
        let limit = limit.map_or(usize::MAX, |limit| limit.0);
        let moves = self.shared.call(py, |manager| manager.hand_out(limit, Move::handed_out))?;
        Ok(moves.into())
    }

    /// Reports moves; returns how many ended well by it.
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

    /// Takes the tokens of plans that will not arrive.
    fn failed(&self, py: Python<'_>) -> PyResult<Vec<Failed>> {
        let failed = self.shared.call(py, Manager::failed)?;
        Ok(failed.into_iter().map(Failed::from).collect())
    }

    /// The predicted first-layer and last-layer ready times of moves.
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

    /// Starts a transmission on a lane by hand; a simulator's source of times.
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

    /// Reports the measured speed of a lane.
    fn set_lane(&self, lane: &Bound<'_, PyAny>) -> PyResult<()> {
        let spec = settings::lane(lane)?;
        self.shared.call(lane.py(), |manager| {
            manager.set_lane(&spec.name, spec.bytes_per_s, spec.latency_ns)
        })
    }

    /// Counts time in which a lane was busy.
    #[pyo3(signature = (lane, *, busy_ns))]
    fn saw_lane(&self, py: Python<'_>, lane: &Bound<'_, PyAny>, busy_ns: BusyTime) -> PyResult<()> {
        let lane = text(lane, "lane")?;
        self.shared.call(py, |manager| manager.saw_lane(lane, busy_ns.0))
    }

    /// Marks or clears the residency of a sequence's full blocks on a tier.
    #[pyo3(signature = (
        tokens, tier, *, present, now, ready=None, first=None, per_layer=None, scope=None, skip=0
    ))]
    fn mark<'py>(
        &self,
        tokens: &Bound<'py, PyAny>,
        tier: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::present)] present: bool,
        now: Now,
        ready: Option<Ready>,
        first: Option<First>,
        per_layer: Option<LayerTime>,
        scope: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::skip)] skip: usize,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let py = tokens.py();
        let (ready, first) = times(ready, first, per_layer, self.layers)?;
        let tokens = Tokens::new(tokens)?;
        let mark = manager::Mark {
            tokens: tokens.as_slice(),
            scope: crate::scope::scope(scope)?,
            tier: self.shared.tier(tier)?,
            present,
            ready,
            first,
        };
        Ok(handles(py, &self.shared.call(py, |manager| manager.mark_behind(&mark, skip, now.0))?))
    }

    /// Evicts blocks from a tier that an engine needs room on, all or none.
    #[pyo3(
        signature = (count, tier=None, *, now, stay=None),
        text_signature = "($self, count, tier=0, *, now, stay=())"
    )]
    fn evict<'py>(
        &self,
        py: Python<'py>,
        count: Count,
        tier: Option<&Bound<'_, PyAny>>,
        now: Now,
        stay: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let tier = tier.map_or(Ok(0), |tier| self.shared.tier(tier))?;
        let stay = stay.map_or_else(|| Ok(Vec::new()), blocks_of)?;
        let evict =
            |manager: &mut Manager| manager.evict_blocks(tier, count.0 as u64, &stay, now.0);
        Ok(handles(py, &self.shared.call(py, evict)?))
    }

    /// Keeps the copies of blocks on a tier while another machine reads them.
    #[pyo3(signature = (blocks, tier, *, now))]
    fn pin_copies(
        &self,
        blocks: &Bound<'_, PyAny>,
        tier: &Bound<'_, PyAny>,
        now: Now,
    ) -> PyResult<u64> {
        let (found, tier) = (blocks_of(blocks)?, self.shared.tier(tier)?);
        self.shared.call(blocks.py(), |manager| manager.pin_copies(&found, tier, now.0))
    }

    /// Ends a pin; ending it twice does nothing.
    #[pyo3(signature = (pin, *, now))]
    fn unpin_copies(&self, py: Python<'_>, pin: Pin, now: Now) -> PyResult<()> {
        self.shared.call(py, |manager| manager.unpin_copies(pin.0, now.0))
    }

    /// `commit` for many leases: all of them or, on an error, none.
    #[pyo3(signature = (lease_ids, tokens, *, now))]
    fn commit_many(
        &self,
        lease_ids: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        now: Now,
    ) -> PyResult<Vec<Committed>> {
        let (ids, all) = (numbers(lease_ids, "lease", u64::MAX)?, Sequences::new(tokens)?);
        if ids.len() != all.len() {
            return Err(bad(format!("{} leases and tokens of {}", ids.len(), all.len())));
        }
        let all = all.slices();
        let batch: Vec<_> = ids.into_iter().zip(all).collect();
        let committed =
            self.shared.call(tokens.py(), |manager| manager.commit_many(&batch, now.0))?;
        Ok(committed.into_iter().map(Committed::from).collect())
    }

    /// Takes hints; returns a reply to each.
    #[pyo3(signature = (hints, *, now))]
    fn hint(&self, hints: &Bound<'_, PyAny>, now: Now) -> PyResult<Vec<HintReply>> {
        let all = crate::hint::hints(hints, &self.shared)?;
        let replies = self.shared.long(hints.py(), |manager| manager.hint(&all, now.0))?;
        Ok(replies.into_iter().map(HintReply::from).collect())
    }

    /// The sessions that wait and are likeliest to go on soon, each with its learned rate.
    #[pyo3(signature = (limit=None, *, now, scope=None))]
    fn expected_sessions(
        &self,
        py: Python<'_>,
        limit: Option<Limit>,
        now: Now,
        scope: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<(String, f64)>> {
        let (scope, limit) =
            (crate::scope::scope(scope)?, limit.map_or(usize::MAX, |limit| limit.0));
        let expected =
            self.shared.call(py, |manager| manager.expected_sessions(&scope, limit, now.0))?;
        Ok(expected.into_iter().map(|one| (one.session, one.rate)).collect())
    }

    /// Blocks that await a price by the user, at most `limit`.
    #[pyo3(signature = (limit=None))]
    fn unpriced(&self, py: Python<'_>, limit: Option<Limit>) -> PyResult<Unpriced> {
        let limit = limit.map_or(usize::MAX, |limit| limit.0);
        self.shared.call(py, |manager| manager.unpriced(limit)).map(Unpriced::from)
    }

    /// Sets a token's cost for each block; returns how many of the blocks still exist.
    #[pyo3(signature = (ids, costs, *, now))]
    fn set_costs(
        &self,
        ids: &Bound<'_, PyAny>,
        costs: &Bound<'_, PyAny>,
        now: Now,
    ) -> PyResult<usize> {
        let (blocks, costs) = (blocks_of(ids)?, reals(costs, "cost")?);
        self.shared.call(ids.py(), |manager| manager.set_costs(&blocks, &costs, now.0))
    }

    /// The index of a tier, or of given blocks on it, for a later manager; None is the last tier.
    #[pyo3(signature = (tier=None, *, now, blocks=None))]
    fn index(
        &self,
        py: Python<'_>,
        tier: Option<&Bound<'_, PyAny>>,
        now: Now,
        blocks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Index> {
        self.named(py, "the index of a tier")?;
        let tier = tier.map_or(Ok(self.shared.tiers() - 1), |tier| self.shared.tier(tier))?;
        if let Some(blocks) = blocks {
            let blocks = blocks_of(blocks)?;
            let index = self.shared.call(py, |manager| manager.index_of(tier, &blocks, now.0));
            return index.map(Index::from);
        }
        self.shared.long(py, |manager| manager.index(tier, now.0)).map(Index::from)
    }

    /// Restores a tier from its index; returns how many blocks are back.
    #[pyo3(signature = (index, tier=None, *, now))]
    fn load_index(
        &self,
        index: &Bound<'_, PyAny>,
        tier: Option<&Bound<'_, PyAny>>,
        now: Now,
    ) -> PyResult<usize> {
        self.named(index.py(), "the index of a tier")?;
        let tier = tier.map_or(Ok(self.shared.tiers() - 1), |tier| self.shared.tier(tier))?;
        let Ok(given) = index.cast::<Index>() else {
            return Err(bad(format!("index is {}, an Index wanted", shown(index))));
        };
        let rows = &given.get().0;
        self.shared.long(index.py(), |manager| manager.load_index(tier, rows, now.0))
    }

    /// Stores blocks to the next tier that are on no lower one; returns how many moves began.
    #[pyo3(signature = (*, now))]
    fn flush(&self, py: Python<'_>, now: Now) -> PyResult<u64> {
        self.shared.long(py, |manager| manager.flush(now.0))
    }

    /// The price of a block, or of one layer of it, on a tier, and its rank.
    #[pyo3(
        signature = (block, *, now, tier=None, layer=None),
        text_signature = "($self, block, *, now, tier=0, layer=None)"
    )]
    fn explain(
        &self,
        block: &Bound<'_, PyAny>,
        now: Now,
        tier: Option<&Bound<'_, PyAny>>,
        layer: Option<Layer>,
    ) -> PyResult<Explanation> {
        let (py, block) = (block.py(), handle(block)?);
        let tier = tier.map_or(Ok(0), |tier| self.shared.tier(tier))?;
        let explained = self.shared.call(py, |manager| match layer {
            Some(layer) => manager.explain_layer(block, tier, layer.0, now.0),
            None => manager.explain(block, tier, now.0),
        })?;
        Ok(explained.into())
    }

    /// Why tokens of a prompt would be computed now.
    #[pyo3(
        signature = (tokens, *, now, scope=None, session=None, limit=None),
        text_signature = "($self, tokens, *, now, scope=None, session=None, limit=8)"
    )]
    fn explain_miss(
        &self,
        tokens: &Bound<'_, PyAny>,
        now: Now,
        scope: Option<&Bound<'_, PyAny>>,
        session: Option<&Bound<'_, PyAny>>,
        limit: Option<Limit>,
    ) -> PyResult<Miss> {
        let py = tokens.py();
        let limit = limit.map_or(BRANCHES, |limit| limit.0);
        if limit > MOST_BRANCHES {
            return Err(bad(format!("limit is {limit}, 0 to {MOST_BRANCHES} wanted")));
        }
        let tokens = Tokens::new(tokens)?.into_vec()?;
        let scope = crate::scope::scope(scope)?;
        let session =
            session.map(|session| text(session, "session")).transpose()?.map(str::to_owned);
        let miss = self.shared.long(py, |manager| {
            let session = session.as_deref();
            let asked = manager::Asked { tokens: &tokens, scope: &scope, session, limit };
            manager.miss(&asked, now.0)
        })?;
        Ok(Miss::new(miss))
    }

    /// The cost of one layer of a block, by the code that ranks victims.
    #[pyo3(
        signature = (layer, block, session_blocks, context, *, tier=None),
        text_signature = "($self, layer, block, session_blocks, context, *, tier=0)"
    )]
    fn cost(
        &self,
        py: Python<'_>,
        layer: Layer,
        #[pyo3(from_py_with = number::block)] block: u32,
        #[pyo3(from_py_with = number::session_blocks)] session_blocks: u32,
        #[pyo3(from_py_with = number::context)] context: u64,
        tier: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<f64> {
        let tier = tier.map_or(Ok(0), |tier| self.shared.tier(tier))?;
        let price = |manager: &mut Manager| {
            manager.cost(tier, layer.0, block, session_blocks, context).map(|terms| terms.cost)
        };
        self.shared.call(py, price)
    }

    /// The fastest tier of every layer of a block, -1 for none.
    fn layer_tiers<'py>(&self, block: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i8>>> {
        let (py, block) = (block.py(), handle(block)?);
        let tiers = self.shared.call(py, |manager| manager.layer_tiers(block))?;
        let index = |tier: Option<usize>| tier.map_or(-1, |tier| i8::try_from(tier).unwrap_or(-1));
        Ok(tiers.into_iter().map(index).collect::<Vec<_>>().into_pyarray(py))
    }

    /// Counters of tiers and lanes, and present totals.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.shared.call(py, |manager| {
            manager.open()?;
            Ok(Stats::new(manager))
        })
    }

    /// The last entries of the eviction log, the oldest first.
    #[pyo3(signature = (limit=None))]
    fn evictions(&self, py: Python<'_>, limit: Option<Limit>) -> PyResult<Vec<Eviction>> {
        let limit = limit.map_or(usize::MAX, |limit| limit.0);
        let entries = self.shared.call(py, |manager| manager.evictions(limit))?;
        Ok(entries.into_iter().map(Eviction::from).collect())
    }

    /// Takes the events.
    fn take_events(&self, py: Python<'_>) -> PyResult<Vec<Event>> {
        self.shared.call(py, |manager| {
            if manager.settings().block_events > 0 {
                return Ok(manager.take_block_events()?.into_iter().map(Event::from).collect());
            }
            Ok(manager.take_events()?.into_iter().map(Event::from).collect())
        })
    }

    /// The complete state as bytes, equal for equal states.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let state = self.shared.long(py, |manager| Ok(manager.snapshot()))?;
        Ok(PyBytes::new(py, &state))
    }

    /// Forgets all blocks.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.call(py, Manager::reset)
    }

    /// Checks every invariant from scratch.
    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.long(py, Manager::audit)
    }

    /// Closes the manager.
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
