//! Reserve, bind and load: the room of a running request.
//!
//! Invariant: a slot that somebody else holds too is copied before it is written. Cost: O(log n)
//! per victim.

use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::arrival::MoveIds;
use crate::block::{BlockId, Layers, LeaseId, MoveId, NO_SLOT, Slot};
use crate::error::{Error, Result};
use crate::time::Nanos;

use super::Manager;
use super::lease::{Action, TailFrom};
use super::load::Passage;
use super::moves::{self, End, MoveKind};
use super::own::{Open, OwnId};
use super::path::Step;
use super::survey::{Need, Prefill};

impl Manager {
    /// Makes room for `tokens` more tokens behind the lease's end, and copies a partial block
    /// that is shared before it is written.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; nothing has changed then.
    pub fn reserve(&mut self, id: LeaseId, tokens: usize, now: Nanos) -> Result<()> {
        self.active(id)?;
        let now = self.tick(now);
        if self.engine_owned() || tokens == 0 {
            return Ok(());
        }
        let adopts =
            !matches!(self.leases[&id].tail_from, TailFrom::Open) && self.room_left(id)? > 0;
        let lease = &self.leases[&id];
        let blocks = lease
            .tail
            .len()
            .checked_add(tokens)
            .ok_or_else(|| Error::config(format!("reserve of {tokens} tokens")))?
            .div_ceil(self.block_tokens());
        let more = blocks.saturating_sub(lease.open.len() + usize::from(adopts));
        if more > 0 {
            self.check_memory(more)?;
            let units = self.units(0, self.all_layers()) * more as u64;
            self.make_room(&[(0, units)], &[], now)?;
        }
        if adopts {
            self.adopt_tail(id);
        }
        let open = self.new_open(more);
        self.lease_mut(id).open.extend(open);
        self.copy_tail(id, now);
        self.write_ahead(now);
        Ok(())
    }

    /// Copies a tail that stands in somebody else's slot into the lease's first open slot.
    fn copy_tail(&mut self, id: LeaseId, now: Nanos) {
        if matches!(self.leases[&id].tail_from, TailFrom::Open) {
            return;
        }
        let open = self.own_open(id, 0);
        let lease = &self.leases[&id];
        let tokens = u32::try_from(lease.tail.len()).expect("less than a block");
        let (block, shared, step) = match lease.tail_from {
            TailFrom::Open => return,
            TailFrom::Shared(own) => (None, Some(own), None),
            TailFrom::Block(step) => (Some(step.block), step.own, Some(step)),
        };
        let mut awaits = Vec::new();
        for piece in self.pieces(0, 0, None, self.all_layers()) {
            let own = shared.filter(|&own| self.owns[own].layers.contains(piece.lo));
            let src = match (own, block) {
                (Some(own), _) => (0, self.own_slot(&self.owns[own], piece.lo), End::Own(own)),
                (None, Some(block)) => (0, self.slot_of(0, block, piece.lo), End::Here),
                (None, None) => return,
            };
            let slot = self.own_slot(&self.owns[open], piece.lo);
            let mut deps: MoveIds = self.tiers[0].space.drained_by(slot).into_iter().collect();
            if let (End::Here, Some(block)) = (src.2, block) {
                deps.extend(self.bringing(0, block, piece));
            }
            let copy = moves::Draft {
                kind: MoveKind::Copy,
                lease: id,
                block,
                src,
                dst: (0, slot, End::Own(open)),
                layers: piece,
                tokens,
                deps,
            };
            awaits.push(self.add_move(copy, now));
        }
        let lease = self.lease_mut(id);
        lease.tail_from = TailFrom::Open;
        self.awaits.add(id, awaits);
        match (step, shared) {
            (Some(step), _) => self.let_go(&step.into(), None),
            (None, Some(own)) => self.unref_own(own),
            (None, None) => {}
        }
    }

    /// Names the slots of a tier that the engine owns: `slots[i]` holds block `first + i` of the
    /// lease's path. Loads that waited for them are queued.
    ///
    /// # Errors
    /// [`Error::Config`] if the first tier is not the engine's or a slot is bound already.
    pub fn bind(&mut self, id: LeaseId, first: usize, slots: &[Slot]) -> Result<()> {
        let lease = self.active(id)?;
        if !self.engine_owned() {
            return Err(Error::config("bind on a first tier whose owner is not 'engine'"));
        }
        let known = lease.path.len();
        let end = first
            .checked_add(slots.len())
            .ok_or_else(|| Error::config(format!("bind from block {first}")))?;
        let next = known + lease.open.len();
        if first > next {
            return Err(Error::config(format!(
                "bind from block {first}, lease {id} has {next} blocks"
            )));
        }
        if let Some(at) = slots.iter().position(|&slot| slot == NO_SLOT) {
            return Err(Error::config(format!("slot {at} of bind is {NO_SLOT}, which names none")));
        }
        for at in first..end.min(next) {
            let own =
                lease.path.get(at).map_or_else(|| lease.open[at - known].own(), |step| step.own);
            if let Some(own) = own
                && self.owns[own].slot != NO_SLOT
                && self.owns[own].slot != slots[at - first]
            {
                return Err(Error::config(format!(
                    "block {at} of lease {id} is bound to slot {}, not {}",
                    self.owns[own].slot,
                    slots[at - first]
                )));
            }
        }
        self.check_memory(end.saturating_sub(next))?;
        let mut bound: FxHashMap<OwnId, Slot> = FxHashMap::default();
        for (at, &slot) in (first..end).zip(slots) {
            let own = self.own_at(id, at);
            self.owns.get_mut(own).expect("just found").slot = slot;
            bound.insert(own, slot);
        }
        let named = |end: End| match end {
            End::Own(own) => bound.get(&own).copied(),
            End::Here | End::Leaving => None,
        };
        for known in self.moves.values_mut() {
            known.dst_slot = named(known.to).unwrap_or(known.dst_slot);
            known.src_slot = named(known.from).unwrap_or(known.src_slot);
        }
        self.unpark();
        Ok(())
    }

    /// The own slot of a lease's block on a tier that the engine owns, made if there is none.
    fn own_at(&mut self, id: LeaseId, at: usize) -> OwnId {
        let lease = &self.leases[&id];
        let known = lease.path.len();
        if let Some(step) = lease.path.get(at) {
            if let Some(own) = step.own {
                return own;
            }
            let own = self.new_own(0, self.all_layers());
            self.lease_mut(id).path.change(at, |step| step.own = Some(own));
            return own;
        }
        if at - known < lease.open.len() {
            return self.own_open(id, at - known);
        }
        let own = self.new_own(0, self.all_layers());
        self.lease_mut(id).open.push(Open::Own(own));
        own
    }

    /// Starts the loads that `acquire` with [`super::LoadMode::None`] left out, of all blocks
    /// that stand on a lower tier by now; of all layers and blocks of the path, or of those given.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if a transit slot is wanted and there is none; [`Error::Config`] if
    /// there are no such layers or blocks, or what remains to be loaded of a block would not be
    /// one range.
    pub fn load(
        &mut self,
        id: LeaseId,
        layers: Option<Layers>,
        blocks: Option<Range<usize>>,
        now: Nanos,
    ) -> Result<Vec<MoveId>> {
        let known = self.active(id)?.path.len();
        let asked = layers.unwrap_or(self.all_layers());
        if asked.is_empty() || asked.hi > self.settings.layers {
            return Err(Error::config(format!(
                "load of layers {asked}, the model has {}",
                self.settings.layers
            )));
        }
        let within = blocks.unwrap_or(0..known);
        if within.start > within.end || within.end > known {
            return Err(Error::config(format!(
                "load of blocks {} to before {}, lease {id} has matched {known}",
                within.start, within.end
            )));
        }
        let apart = self.leases[&id].path.apart();
        let steps: Vec<(usize, Step)> =
            apart.filter(|(at, step)| step.deferred && within.contains(at)).collect();
        for (at, step) in &steps {
            if step.compute.without(asked).is_none() {
                return Err(Error::config(format!(
                    "load of layers {asked} would leave a gap in layers {} of block {at}",
                    step.compute
                )));
            }
        }
        let now = self.tick(now);
        let blocks: Vec<BlockId> = steps.iter().map(|(_, step)| step.block).collect();
        let need = |(at, &block)| self.need(at, block, now);
        let mut needs: Vec<_> = blocks.iter().enumerate().map(need).collect();
        self.decide_loads(&mut needs, now, Prefill::ALL);
        let mut passage = self.open_passage(&needs, 0, now)?;
        let mut all = Vec::new();
        for (&(at, step), need) in steps.iter().zip(&needs) {
            all.extend(self.load_step(id, (at, step), need, asked, &mut passage, now));
        }
        self.close_passage(passage);
        Ok(all)
    }

    /// Starts the loads of one deferred block of a path.
    fn load_step(
        &mut self,
        id: LeaseId,
        (at, step): (usize, Step),
        need: &Need,
        asked: Layers,
        passage: &mut Passage,
        now: Nanos,
    ) -> MoveIds {
        let own = step.own.expect("a deferred step has an own slot");
        if need.lacks.is_empty() {
            // Somebody else has brought the block meanwhile.
            self.lease_mut(id).path.change(at, |step| *step = Step::shared(step.block));
            self.unref_own(own);
            let arriving = self.bringing(0, step.block, self.all_layers());
            self.awaits.add(id, arriving);
            self.retell(id, at, vec![(self.all_layers(), Action::Reuse, 0, now, now)]);
            return MoveIds::new();
        }
        let loadable = Layers::new(need.compute.hi.max(need.lacks.lo), need.lacks.hi);
        let wanted = loadable.meet(asked).meet(step.compute);
        let Some(rest) = step.compute.without(wanted) else { return MoveIds::new() };
        if wanted.is_empty() || need.lacks != self.owns[own].layers {
            return MoveIds::new();
        }
        let moves = self.load_own(need, wanted, own, id, passage, now);
        let first = moves.iter().map(|&id| self.moves[id].first).min().unwrap_or(now);
        let ready = moves.iter().map(|&id| self.moves[id].ready).max().unwrap_or(now);
        let plan = &self.leases[&id].plan;
        let here = u32::try_from(at).unwrap_or(u32::MAX);
        let before = plan
            .spans
            .iter()
            .filter(|span| span.action == Action::Load && span.start <= here && here < span.stop);
        let mut parts: Vec<_> = before
            .map(|span| (span.layers, span.action, span.tier, span.first_ready, span.ready))
            .collect();
        parts.extend(
            need.loads()
                .map(|(tier, layers)| (layers.meet(wanted), Action::Load, tier, first, ready))
                .filter(|(layers, ..)| !layers.is_empty()),
        );
        if !rest.is_empty() {
            parts.push((rest, Action::Recompute, 0, plan.stands, plan.stands));
        }
        self.retell(id, at, parts);
        let lease = self.lease_mut(id);
        lease.path.change(at, |step| (step.deferred, step.compute) = (!rest.is_empty(), rest));
        self.awaits.add(id, moves.iter().copied());
        moves
    }
}
