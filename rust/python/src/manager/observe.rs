//! Explanations and counters of a manager: conversions of the calls.

use kvtrie_core::Manager;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::bad;
use crate::event::Event;
use crate::manager::BlockManager;
use crate::matched::handle;
use crate::memory::items;
use crate::miss::{BRANCHES, MOST_BRANCHES, Miss};
use crate::number::{self, Layer, Limit, Now};
use crate::record::{Eviction, Explanation};
use crate::stats::Stats;
use crate::text::text;
use crate::tokens::Tokens;

/// Limits of the results per group.
const MOST_GROUPS: usize = 64;
const MOST_BLOCKS: usize = 1 << 24;

/// First block of a range, and the last plus 1.
type Blocks = (u32, u32);

#[pymethods]
impl BlockManager {
    /// Price of a block, or of a layer of it, on a tier, with its rank.
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

    /// Explain why tokens of a prompt would be computed now.
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
            let asked = kvtrie_core::Asked { tokens: &tokens, scope: &scope, session, limit };
            manager.miss(&asked, now.0)
        })?;
        Ok(Miss::new(miss))
    }

    /// Full blocks of a sequence resident above a tier, by group.
    #[pyo3(signature = (tokens, tier, *, scope=None))]
    fn parts_above(
        &self,
        tokens: &Bound<'_, PyAny>,
        tier: &Bound<'_, PyAny>,
        scope: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Vec<bool>>> {
        let (py, tier) = (tokens.py(), self.shared.tier(tier)?);
        let scope = crate::scope::scope(scope)?;
        let tokens = Tokens::new(tokens)?;
        self.shared.call(py, |manager| manager.parts_above(tokens.as_slice(), &scope, tier))
    }

    /// Longest resumable border, with the required blocks of every group after the first.
    fn longest_resume(
        &self,
        parts: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::most)] most: usize,
    ) -> PyResult<u32> {
        let mut present = Vec::new();
        for blocks in parts.try_iter().map_err(|_| bad("parts are no list of lists"))? {
            if present.len() == MOST_GROUPS {
                return Err(bad(format!("parts are of more than {MOST_GROUPS} groups")));
            }
            let has = |at, item: Bound<'_, PyAny>| {
                item.extract().map_err(|_| bad(format!("block {at} of parts is no bool")))
            };
            let blocks = blocks?;
            blocks.try_iter().map_err(|_| bad("parts are no list of lists"))?;
            present.push(items(&blocks, MOST_BLOCKS, "blocks of parts", has)?);
        }
        self.shared.call(parts.py(), |manager| manager.longest_resume(&present, most))
    }

    /// Block ranges required for a resume at a border, for each group after the first.
    fn resume_needs(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::border)] border: u32,
    ) -> PyResult<Vec<(Blocks, Blocks)>> {
        let needs = self.shared.call(py, |manager| Ok(manager.resume_needs(border)))?;
        let range = |range: std::ops::Range<u32>| (range.start, range.end);
        Ok(needs.into_iter().map(|need| (range(need.leading), range(need.trailing))).collect())
    }

    /// Cost of a layer of a block, from the code for ranking victims.
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

    /// Fastest tier of every layer of a block, or -1.
    fn layer_tiers<'py>(&self, block: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i8>>> {
        let (py, block) = (block.py(), handle(block)?);
        let tiers = self.shared.call(py, |manager| manager.layer_tiers(block))?;
        let index = |tier: Option<usize>| tier.map_or(-1, |tier| i8::try_from(tier).unwrap_or(-1));
        Ok(tiers.into_iter().map(index).collect::<Vec<_>>().into_pyarray(py))
    }

    /// Counters of tiers and lanes, and current totals.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.shared.call(py, |manager| {
            manager.open()?;
            Ok(Stats::new(manager))
        })
    }

    /// Last entries of the eviction log, oldest first.
    #[pyo3(signature = (limit=None))]
    fn evictions(&self, py: Python<'_>, limit: Option<Limit>) -> PyResult<Vec<Eviction>> {
        let limit = limit.map_or(usize::MAX, |limit| limit.0);
        let entries = self.shared.call(py, |manager| manager.evictions(limit))?;
        Ok(entries.into_iter().map(Eviction::from).collect())
    }

    /// Take the events.
    fn take_events(&self, py: Python<'_>) -> PyResult<Vec<Event>> {
        self.shared.call(py, |manager| {
            if manager.settings().block_events > 0 {
                return Ok(manager.take_block_events()?.into_iter().map(Event::from).collect());
            }
            Ok(manager.take_events()?.into_iter().map(Event::from).collect())
        })
    }

    /// Complete state as bytes. Equal states give equal bytes.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let state = self.shared.long(py, |manager| Ok(manager.snapshot()))?;
        Ok(PyBytes::new(py, &state))
    }
}
