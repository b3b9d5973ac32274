//! One request's prefill: what it found, what it computes and what it waits for.
//!
//! Invariant: hits and computed tokens add up to the prompt. Cost: O(blocks of the prompt) to begin,
//! O(layers) per move under `Wait::Layer`.

use std::ops::Range;

use kvtrie_core::block::{LeaseId, MoveId};
use kvtrie_core::error::Result;
use kvtrie_core::manager::{Action, Lease};
use kvtrie_core::plan::pipeline;
use kvtrie_core::time::Nanos;
use rustc_hash::FxHashSet;

use super::{Service, Wait};
use crate::cost::{Cost, nanos};
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;
use crate::transfer::Entered;

/// A prefill that waits or runs.
#[derive(Debug)]
pub(super) struct Prefill {
    pub(super) lease: LeaseId,
    /// Tokens of the prompt, as the manager takes them, that need not be computed.
    pub(super) matched: usize,
    wait: Wait,
    began: Nanos,
    compute: Nanos,
    /// Moves that have not ended or, layer by layer, not entered their lane.
    awaited: FxHashSet<MoveId>,
    /// By layer: when what is known to come is there.
    there: Vec<Nanos>,
}

impl Prefill {
    /// Acquires a request's blocks and takes over its loads; `None` if there is no room.
    pub(super) fn begin(
        request: &Request,
        service: &Service,
        machine: &mut Machine,
        fetched: &Range<usize>,
        now: Nanos,
    ) -> Result<Option<(Self, Record)>> {
        let weight = u64::from(machine.calls.manager().settings().token_weight);
        let (keep, reserve) = (request.keep(service.keep, weight), request.reserve(weight));
        let layerwise = service.wait == Wait::Layer;
        let session = request.session.as_deref();
        let room = (keep, reserve);
        let asked = machine.calls.acquire(&request.tokens, room, layerwise, session, now)?;
        let Some(lease) = asked else { return Ok(None) };
        let manager = machine.calls.manager();
        let (held, settings) = (manager.lease(lease)?, manager.settings());
        let block = u64::from(settings.block_tokens) * weight;
        let found = Found { held, block, input: request.input };
        let (mut hits, saved) = found.hits(settings.tiers.len(), fetched, &*service.cost);
        let peer = hits.pop().unwrap_or(0);
        let record = Record {
            id: request.id,
            machine: machine.number,
            arrival: request.arrival,
            computed: request.input - hits.iter().sum::<u64>() - peer,
            hits,
            peer,
            saved,
            output: request.output,
            ..Record::default()
        };
        let mut prefill = Self {
            lease,
            matched: held.matched(),
            wait: service.wait,
            began: now,
            compute: found.compute(&*service.cost, settings.layers),
            awaited: manager.awaits(lease)?.into_iter().collect(),
            there: vec![now; usize::from(settings.layers)],
        };
        machine.take(now)?;
        if layerwise {
            let coming: Vec<Entered> =
                prefill.awaited.iter().filter_map(|&id| machine.executor.times(id)).collect();
            prefill.entered(&coming);
        }
        Ok(Some((prefill, record)))
    }

    /// Moves have entered their lanes.
    pub(super) fn entered(&mut self, entered: &[Entered]) {
        if self.wait == Wait::All {
            return;
        }
        for Entered { id, layers, times } in entered {
            if self.awaited.remove(id) {
                let mut at = times.first;
                for layer in layers.iter() {
                    let there = &mut self.there[usize::from(layer)];
                    *there = at.max(*there);
                    at = at.saturating_add(times.per_layer);
                }
            }
        }
    }

    /// Moves have ended.
    pub(super) fn ended(&mut self, moves: &[MoveId]) {
        for id in moves {
            self.awaited.remove(id);
        }
    }

    /// Whether nothing keeps a step from beginning.
    pub(super) fn ready(&self) -> bool {
        self.awaited.is_empty()
    }

    /// Of the time since it began, what it did not compute in, if it ends now.
    pub(super) fn stalled(&self, now: Nanos) -> Nanos {
        (now - self.began).saturating_sub(self.compute)
    }

    /// When it ends if a step begins now; `None` while that cannot be known or begin.
    pub(super) fn end(&self, now: Nanos) -> Option<Nanos> {
        if !self.ready() {
            return None;
        }
        if self.wait == Wait::All {
            return Some(now.saturating_add(self.compute));
        }
        // Computing goes on from when the request began, layer after layer.
        let layers = self.there.len() as u128;
        let until = |layer: u128| {
            Nanos::try_from(u128::from(self.compute) * layer / layers).unwrap_or(Nanos::MAX)
        };
        let steps = (0..)
            .zip(&self.there)
            .map(|(layer, there)| (there - self.began, until(layer + 1) - until(layer)));
        Some(self.began.saturating_add(pipeline::finish(steps)))
    }
}

/// What a lease found of a prompt of `input` real tokens, in blocks of `block` of them.
struct Found<'a> {
    held: &'a Lease,
    block: u64,
    input: u64,
}

impl Found<'_> {
    /// Real tokens of some blocks: the prompt may end inside the last one.
    fn tokens(&self, blocks: &Range<u64>) -> u64 {
        let end = |block: u64| (block * self.block).min(self.input);
        end(blocks.end) - end(blocks.start)
    }

    /// Tokens found by tier and last on a peer, and how long computing them would have taken. A block
    /// counts once: on the tier that some of it is loaded from, if there is one; what is computed
    /// again, even in part, is no hit.
    fn hits(
        &self,
        tiers: usize,
        fetched: &Range<usize>,
        cost: &dyn Cost,
    ) -> (Vec<u64>, Vec<Nanos>) {
        let spans = &self.held.plan().spans;
        let blocks = spans.iter().map(|span| span.stop as usize).max().unwrap_or(0);
        let mut found: Vec<Option<(Action, usize)>> = vec![None; blocks];
        for wanted in [Action::Recompute, Action::Load, Action::Reuse] {
            for span in spans.iter().filter(|span| span.action == wanted) {
                for at in &mut found[span.start as usize..span.stop as usize] {
                    at.get_or_insert((span.action, span.tier));
                }
            }
        }
        let place = |(at, found): (usize, Option<(Action, usize)>)| match found {
            Some((Action::Recompute, _)) | None => None,
            Some((Action::Load, _)) if fetched.contains(&at) => Some(tiers),
            Some((_, tier)) => Some(tier),
        };
        let places: Vec<_> = found.into_iter().enumerate().map(place).collect();
        let (mut hits, mut saved) = (vec![0; tiers + 1], vec![0; tiers + 1]);
        let mut at = 0;
        for run in places.chunk_by(|one, next| one == next) {
            let blocks = at..at + run.len() as u64;
            at = blocks.end;
            if let Some(place) = run[0] {
                let tokens = self.tokens(&blocks);
                hits[place] += tokens;
                saved[place] += cost.parts(blocks.start * self.block, tokens);
            }
        }
        (hits, saved.into_iter().map(nanos).collect())
    }

    /// How long the holes and the tokens behind the match compute. A hole of some layers takes their
    /// share: a layer is computed through all below it.
    fn compute(&self, cost: &dyn Cost, layers: u16) -> Nanos {
        let blocks = self.held.plan().spans.iter().map(|span| u64::from(span.stop)).max();
        let known = self.tokens(&(0..blocks.unwrap_or(0)));
        let mut parts = cost.parts(known, self.input - known);
        for (at, holes) in self.held.recompute() {
            let at = u64::from(at);
            let whole = cost.parts(at * self.block, self.tokens(&(at..at + 1)));
            parts = parts.saturating_add(whole * u128::from(holes.hi) / u128::from(layers.max(1)));
        }
        nanos(parts)
    }
}
