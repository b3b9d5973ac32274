//! One request's prefill: what it found, what it computes and what it waits for.
//!
//! Invariant: hits and computed tokens add up to the prompt. Cost: O(blocks of the prompt) to begin,
//! O(layers) per move under `Wait::Layer`.

use std::ops::Range;

use kvtrie_core::{Action, Lease, LeaseId, Manager, MoveId, Nanos, Result, pipeline_finish};
use rustc_hash::FxHashSet;

use super::work::Work;
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
    /// Tokens to compute.
    pub(super) work: Work,
    wait: Wait,
    began: Nanos,
    /// Moves that have not ended or, layer by layer, not entered their lane.
    awaited: FxHashSet<MoveId>,
    /// By layer: when what is known to come is there.
    there: Vec<Nanos>,
}

impl Prefill {
    /// Acquires a request's blocks, with room for `reserve` tokens of its answer, and takes over its
    /// loads; `None` if there is no room.
    pub(super) fn begin(
        request: &Request,
        reserve: usize,
        service: &Service,
        machine: &mut Machine,
        fetched: &Range<usize>,
        now: Nanos,
    ) -> Result<Option<(Self, Record)>> {
        let weight = u64::from(machine.calls.settings().token_weight);
        let layerwise = service.wait == Wait::Layer;
        let session = request.session.as_deref();
        let keep = machine.find(&request.tokens, request.keep(service.keep, weight), now)?;
        let room = (keep, reserve);
        let asked = machine.calls.acquire(
            &request.tokens,
            room,
            layerwise,
            (&request.scope, session),
            now,
        )?;
        let Some(lease) = asked else { return Ok(None) };
        let manager = machine.calls.manager();
        let found = Found::of(&manager, lease, request.input)?;
        let tiers = machine.calls.settings().tiers.len();
        let (mut hits, saved) = found.hits(tiers, fetched, &*service.cost);
        let peer = hits.pop().unwrap_or(0);
        let record = Record {
            id: request.id,
            machine: machine.number,
            arrival: request.arrival,
            queued: now.saturating_sub(request.arrival),
            computed: request.input - hits.iter().sum::<u64>() - peer,
            hits,
            peer,
            saved,
            matched: found.held.matched(),
            holes: found.held.recompute().map(|(at, _)| at).collect(),
            output: request.output,
            ..Record::default()
        };
        drop(manager);
        Ok(Some((Self::of(lease, (request.input, 0), service, machine, now)?, record)))
    }

    /// The prefill of a lease that was just planned, of a prompt of `input` real tokens and of `made`
    /// tokens of its answer. Takes over its loads.
    pub(super) fn of(
        lease: LeaseId,
        (input, made): (u64, u64),
        service: &Service,
        machine: &mut Machine,
        now: Nanos,
    ) -> Result<Self> {
        let layers = machine.calls.settings().layers;
        let manager = machine.calls.manager();
        let found = Found::of(&manager, lease, input)?;
        let span = (found.covered(), input + made);
        let mut prefill = Self {
            lease,
            matched: found.held.matched(),
            work: Work::of(found.held, span, found.block, layers, &*service.cost),
            wait: service.wait,
            began: now,
            awaited: manager.awaits(lease)?.into_iter().collect(),
            there: vec![now; usize::from(layers)],
        };
        drop(manager);
        machine.take(now)?;
        if service.wait != Wait::All {
            let coming: Vec<Entered> =
                prefill.awaited.iter().filter_map(|&id| machine.executor.times(id)).collect();
            prefill.entered(&coming);
        }
        Ok(prefill)
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
        if self.wait == Wait::Step {
            let last = self.there.iter().copied().max().unwrap_or(self.began);
            self.there.fill(last);
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

    /// Moves that it waits for.
    pub(super) fn awaited(&self) -> impl Iterator<Item = MoveId> + '_ {
        self.awaited.iter().copied()
    }

    /// Whether it waits for a move.
    pub(super) fn awaits(&self, id: MoveId) -> bool {
        self.awaited.contains(&id)
    }

    /// When it began.
    pub(super) fn began(&self) -> Nanos {
        self.began
    }

    /// Waits for one thing more.
    pub(super) fn wait_for(&mut self, id: MoveId) {
        self.awaited.insert(id);
    }

    /// Waits for all that its lease does, to their ends.
    pub(super) fn wait_again(&mut self, machine: &Machine) -> Result<()> {
        self.wait = Wait::All;
        self.awaited.extend(machine.calls.manager().awaits(self.lease)?);
        Ok(())
    }

    /// By layer: when what it loads is there.
    pub(super) fn there(&self) -> &[Nanos] {
        &self.there
    }
}

/// When a step ends that begins at `from` and computes for `compute`, each layer once it is there.
pub(super) fn pipelined(from: Nanos, compute: Nanos, there: &[Nanos]) -> Nanos {
    let layers = there.len() as u128;
    let until =
        |layer: u128| Nanos::try_from(u128::from(compute) * layer / layers).unwrap_or(Nanos::MAX);
    let steps = (0..)
        .zip(there)
        .map(|(layer, there)| (there.saturating_sub(from), until(layer + 1) - until(layer)));
    from.saturating_add(pipeline_finish(steps))
}

/// Match of a lease in a prompt of `input` real tokens, in blocks of `block` of them.
struct Found<'a> {
    held: &'a Lease,
    block: u64,
    input: u64,
}

impl<'a> Found<'a> {
    fn of(manager: &'a Manager, lease: LeaseId, input: u64) -> Result<Self> {
        let settings = manager.settings();
        let block = u64::from(settings.block_tokens) * u64::from(settings.token_weight);
        Ok(Self { held: manager.lease(lease)?, block, input })
    }

    /// Real tokens of some blocks: the prompt may end inside the last one.
    fn tokens(&self, blocks: &Range<u64>) -> u64 {
        let end = |block: u64| (block * self.block).min(self.input);
        end(blocks.end) - end(blocks.start)
    }

    /// Real tokens that the plan covers.
    fn covered(&self) -> u64 {
        let blocks = self.held.plan().spans.iter().map(|span| u64::from(span.stop)).max();
        self.tokens(&(0..blocks.unwrap_or(0)))
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
}
