//! Block copies in a manager: conversions of the calls changing or listing the contents of tiers.

use std::collections::BTreeMap;

use kvtrie_core::{Manager, Place, VersionFate};
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arrays::{handles, numbers, reals};
use crate::error::bad;
use crate::hint::HintReply;
use crate::index::Index;
use crate::manager::{BlockManager, blocks_of};
use crate::mark::times;
use crate::memory::items;
use crate::number::{self, Blocks, Count, First, LayerTime, Limit, Now, Pin, Ready, shown, small};
use crate::record::{Committed, Unpriced};
use crate::text::{choice, text};
use crate::tokens::{Sequences, Tokens};

/// Version fates by name.
const FATES: [(&str, VersionFate); 3] =
    [("keep", VersionFate::Keep), ("retire", VersionFate::Retire), ("drop", VersionFate::Drop)];

/// Limit of versions per call.
const MOST_VERSIONS: usize = 1 << 16;

#[pymethods]
impl BlockManager {
    /// Mark or clear the residency of a sequence's full blocks on a tier.
    #[pyo3(signature = (
        tokens, tier, *, present, now, ready=None, first=None, per_layer=None, scope=None, skip=0,
        group=None
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
        group: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let py = tokens.py();
        let group = group.map(number::group).transpose()?;
        let (ready, first) = times(ready, first, per_layer, self.layers)?;
        let tokens = Tokens::new(tokens)?;
        let mark = kvtrie_core::Mark {
            tokens: tokens.as_slice(),
            scope: crate::scope::scope(scope)?,
            tier: self.shared.tier(tier)?,
            present,
            ready,
            first,
        };
        let marked = self.shared.call(py, |manager| match group {
            Some(group) => manager.mark_group(&mark, group, skip, now.0),
            None => manager.mark_after(&mark, skip, now.0),
        })?;
        Ok(handles(py, &marked))
    }

    /// Evict blocks from a tier to make room for an engine, all or none.
    #[pyo3(
        signature = (count, tier=None, *, now, stay=None, group=0),
        text_signature = "($self, count, tier=0, *, now, stay=(), group=0)"
    )]
    fn evict<'py>(
        &self,
        py: Python<'py>,
        count: Count,
        tier: Option<&Bound<'_, PyAny>>,
        now: Now,
        stay: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::group)] group: usize,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let tier = tier.map_or(Ok(0), |tier| self.shared.tier(tier))?;
        let stay = stay.map_or_else(|| Ok(Vec::new()), blocks_of)?;
        if group > 0 {
            if !stay.is_empty() {
                return Err(bad(format!("{} blocks stay: pin their parts of a group", stay.len())));
            }
            let place = Place::new(tier, group);
            let evict = |manager: &mut Manager| manager.evict_parts(place, count.0 as u64, now.0);
            return Ok(handles(py, &self.shared.call(py, evict)?));
        }
        let evict =
            |manager: &mut Manager| manager.evict_blocks(tier, count.0 as u64, &stay, now.0);
        Ok(handles(py, &self.shared.call(py, evict)?))
    }

    /// Pin the copies of blocks on a tier while a remote machine reads them.
    #[pyo3(signature = (blocks, tier, *, now, group=0))]
    fn pin_copies(
        &self,
        blocks: &Bound<'_, PyAny>,
        tier: &Bound<'_, PyAny>,
        now: Now,
        #[pyo3(from_py_with = number::group)] group: usize,
    ) -> PyResult<u64> {
        let (found, place) = (blocks_of(blocks)?, Place::new(self.shared.tier(tier)?, group));
        self.shared.call(blocks.py(), |manager| manager.pin_copies(&found, place, now.0))
    }

    /// Clear the copies of blocks in a layer group.
    #[pyo3(signature = (blocks, tier, *, group, now))]
    fn clear_copies<'py>(
        &self,
        blocks: &Bound<'py, PyAny>,
        tier: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::group)] group: usize,
        now: Now,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let (py, found) = (blocks.py(), blocks_of(blocks)?);
        let place = Place::new(self.shared.tier(tier)?, group);
        let clear = |manager: &mut Manager| manager.clear_parts(place, &found, now.0);
        Ok(handles(py, &self.shared.call(py, clear)?))
    }

    /// Number of leading tokens with blocks cached in the first layer group.
    #[pyo3(signature = (tokens, *, scope=None))]
    fn known(
        &self,
        tokens: &Bound<'_, PyAny>,
        scope: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (py, scope) = (tokens.py(), crate::scope::scope(scope)?);
        let tokens = Tokens::new(tokens)?;
        self.shared.call(py, |manager| manager.known(tokens.as_slice(), &scope))
    }

    /// End a pin. Ending it twice has no effect.
    #[pyo3(signature = (pin, *, now))]
    fn unpin_copies(&self, py: Python<'_>, pin: Pin, now: Now) -> PyResult<()> {
        self.shared.call(py, |manager| manager.unpin_copies(pin.0, now.0))
    }

    /// Run `commit` for several leases. On an error, none is committed.
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

    /// Apply hints. Returns a reply to each.
    #[pyo3(signature = (hints, *, now))]
    fn hint(&self, hints: &Bound<'_, PyAny>, now: Now) -> PyResult<Vec<HintReply>> {
        let all = crate::hint::hints(hints, &self.shared)?;
        let replies = self.shared.long(hints.py(), |manager| manager.hint(&all, now.0))?;
        Ok(replies.into_iter().map(HintReply::from).collect())
    }

    /// Time of the next load with a deadline, or None.
    fn next_due(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.shared.call(py, |manager| manager.next_due())
    }

    /// Visit blocks, and keep, retire or drop them by the versions of their scopes.
    #[pyo3(signature = (keep, retire=None, others=None, *, blocks, now, start=None))]
    #[pyo3(text_signature = "($self, keep, retire=(), others='keep', *, blocks, now, start=None)")]
    fn sort_versions(
        &self,
        keep: &Bound<'_, PyAny>,
        retire: Option<&Bound<'_, PyAny>>,
        others: Option<&Bound<'_, PyAny>>,
        blocks: Blocks,
        now: Now,
        start: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(Option<u32>, u64, u64)> {
        let others =
            others.map_or(Ok(VersionFate::Keep), |given| choice(given, "others", &FATES))?;
        let start = start.map(|given| small(given, "start", u32::MAX)).transpose()?;
        let mut fates = BTreeMap::new();
        for (given, fate) in [(Some(keep), VersionFate::Keep), (retire, VersionFate::Retire)] {
            let read = |_, given: Bound<'_, PyAny>| text(&given, "a version").map(str::to_owned);
            let all = given.map_or_else(
                || Ok(Vec::new()),
                |given| match given.try_iter() {
                    Ok(_) => items(given, MOST_VERSIONS, "versions", read),
                    Err(_) => Err(bad(format!("versions are {}, a sequence wanted", shown(given)))),
                },
            )?;
            fates.extend(all.into_iter().map(|one| (one, fate)));
        }
        let from = (start, blocks.0);
        let sort = |manager: &mut Manager| manager.sort_versions(&fates, others, from, now.0);
        self.shared.call(keep.py(), sort).map(|sorted| (sorted.next, sorted.changed, sorted.kept))
    }

    /// Waiting sessions most likely to resume, with their learned rates.
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

    /// Up to `limit` blocks without a user-defined price.
    #[pyo3(signature = (limit=None))]
    fn unpriced(&self, py: Python<'_>, limit: Option<Limit>) -> PyResult<Unpriced> {
        let limit = limit.map_or(usize::MAX, |limit| limit.0);
        self.shared.call(py, |manager| manager.unpriced(limit)).map(Unpriced::from)
    }

    /// Set the token cost of each block. Returns the number of existing blocks among them.
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

    /// Index of a tier, or of given blocks on it, for a later manager. None is the last tier.
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

    /// Restore a tier from its index. Returns the number of restored blocks.
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

    /// Store blocks without a copy on a lower tier to the next tier. Returns the number of started
    /// moves.
    #[pyo3(signature = (*, now))]
    fn flush(&self, py: Python<'_>, now: Now) -> PyResult<u64> {
        self.shared.long(py, |manager| manager.flush(now.0))
    }
}
