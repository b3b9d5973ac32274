//! Prefill of a request: hits, work and pending loads.
//!
//! Invariant: hits and computed tokens add up to the prompt. Cost: O(blocks of the prompt) to
//! start, O(layers) per move under `Wait::Layer`.

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

/// A waiting or running prefill.
#[derive(Debug)]
pub(super) struct Prefill {
    pub(super) lease: LeaseId,
    /// Matched prompt tokens, in manager tokens.
    pub(super) matched: usize,
    /// Tokens to compute.
    pub(super) work: Work,
    wait: Wait,
    began: Nanos,
    /// Unfinished moves. With layerwise waiting, only moves not yet in a lane.
    awaited: FxHashSet<MoveId>,
    /// Arrival times of the known loads, by layer.
    arrivals: Vec<Nanos>,
}

impl Prefill {
    /// Acquire the blocks of a request, with room for `reserve` answer tokens, and take its loads.
    /// Returns `None` if there is no room.
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

    /// Create the prefill of a planned lease, for `input` real prompt tokens and `made` answer
    /// tokens. Takes its loads.
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
            arrivals: vec![now; usize::from(layers)],
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

    /// Record the layer times of moves entering their lanes.
    pub(super) fn entered(&mut self, entered: &[Entered]) {
        if self.wait == Wait::All {
            return;
        }
        for Entered { id, layers, times } in entered {
            if self.awaited.remove(id) {
                let mut at = times.first;
                for layer in layers.iter() {
                    let arrival = &mut self.arrivals[usize::from(layer)];
                    *arrival = at.max(*arrival);
                    at = at.saturating_add(times.per_layer);
                }
            }
        }
        if self.wait == Wait::Step {
            let last = self.arrivals.iter().copied().max().unwrap_or(self.began);
            self.arrivals.fill(last);
        }
    }

    /// Remove completed moves.
    pub(super) fn ended(&mut self, moves: &[MoveId]) {
        for id in moves {
            self.awaited.remove(id);
        }
    }

    /// Whether the prefill may enter a step.
    pub(super) fn ready(&self) -> bool {
        self.awaited.is_empty()
    }

    /// Pending moves.
    pub(super) fn awaited(&self) -> impl Iterator<Item = MoveId> + '_ {
        self.awaited.iter().copied()
    }

    /// Whether a move is pending.
    pub(super) fn awaits(&self, id: MoveId) -> bool {
        self.awaited.contains(&id)
    }

    /// Start time.
    pub(super) fn began(&self) -> Nanos {
        self.began
    }

    /// Add a pending move.
    pub(super) fn wait_for(&mut self, id: MoveId) {
        self.awaited.insert(id);
    }

    /// Wait for the ends of all moves of the lease.
    pub(super) fn wait_again(&mut self, machine: &Machine) -> Result<()> {
        self.wait = Wait::All;
        self.awaited.extend(machine.calls.manager().awaits(self.lease)?);
        Ok(())
    }

    /// Arrival times of the loads, by layer.
    pub(super) fn arrivals(&self) -> &[Nanos] {
        &self.arrivals
    }
}

/// End of a step started at `from` with `compute` time, with each layer computed after its arrival.
pub(super) fn pipelined(from: Nanos, compute: Nanos, arrivals: &[Nanos]) -> Nanos {
    let layers = arrivals.len() as u128;
    let until =
        |layer: u128| Nanos::try_from(u128::from(compute) * layer / layers).unwrap_or(Nanos::MAX);
    let steps = (0..)
        .zip(arrivals)
        .map(|(layer, arrival)| (arrival.saturating_sub(from), until(layer + 1) - until(layer)));
    from.saturating_add(pipeline_finish(steps))
}

/// Match of a lease in a prompt of `input` real tokens, with `block` real tokens per block.
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

    /// Real tokens of a block range. The prompt may end inside the last block.
    fn tokens(&self, blocks: &Range<u64>) -> u64 {
        let end = |block: u64| (block * self.block).min(self.input);
        end(blocks.end) - end(blocks.start)
    }

    /// Real tokens covered by the plan.
    fn covered(&self) -> u64 {
        let blocks = self.held.plan().spans.iter().map(|span| u64::from(span.stop)).max();
        self.tokens(&(0..blocks.unwrap_or(0)))
    }

    /// Hit tokens by tier and last on a peer, with the saved computation time. A block counts once:
    /// on a tier it is loaded from, if any. Recomputed blocks, even in part, are no hits.
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
