//! Reserve and load: slots and loads for a running request.
//!
//! Invariant: a slot with more than one holder is copied before it is written. Cost: O(log n) per
//! victim.

use std::ops::Range;

use crate::arrival::MoveIds;
use crate::block::{BlockId, Layers, LeaseId, MoveId, TierId};
use crate::error::{Error, Result};
use crate::time::Nanos;

use crate::manager::kinds::Action;
use crate::manager::moves::load::Transit;
use crate::manager::request::life::lease::TailFrom;
use crate::manager::request::matching::path::PathBlock;
use crate::manager::request::matching::residency_scan::{MissingBlock, Prefill};
use crate::manager::{Manager, moves};
use crate::transfer::{End, Endpoint, MoveKind};

impl Manager {
    /// Makes room for `tokens` more tokens after the lease's end, and copies a shared partial block
    /// before it is written.
    ///
    /// # Errors
    /// [`Error::NoSpace`]. Nothing has changed then.
    pub fn reserve(&mut self, id: LeaseId, tokens: usize, now: Nanos) -> Result<()> {
        self.active(id)?;
        let now = self.tick(now);
        // The engine makes room for itself.
        if self.tiers.engine_owned() || tokens == 0 {
            return Ok(());
        }
        // A formerly shared tail needs no copy: its slot becomes the first open slot.
        let adopts =
            !matches!(self.leases[&id].tail_from, TailFrom::OpenSlot) && self.room_left(id)? > 0;
        let lease = &self.leases[&id];
        let written = lease
            .tail
            .len()
            .checked_add(tokens)
            .ok_or_else(|| Error::config(format!("reserve of {tokens} tokens")))?;
        let mut places = self.unopened(lease, written);
        if adopts {
            places.first.start = (places.first.start + 1).min(places.first.end);
        }
        let more = places.first.len();
        self.check_memory(more)?;
        let room = self.open_places(id, &places, now);
        // Blocks that already have room are written in any case. A block without a slot in a group
        // is not kept there.
        if more > 0 {
            room?;
        }
        self.place_states(id, written);
        if adopts {
            self.adopt_tail(id);
        }
        self.copy_tail(id, now);
        self.write_ahead(now);
        Ok(())
    }

    /// Copies a tail from a shared slot into the lease's first open slot.
    fn copy_tail(&mut self, id: LeaseId, now: Nanos) {
        if matches!(self.leases[&id].tail_from, TailFrom::OpenSlot) {
            return;
        }
        let open = self.share_open(id);
        let lease = &self.leases[&id];
        let tokens = u32::try_from(lease.tail.len()).expect("less than a block");
        let (block, shared, step) = match lease.tail_from {
            TailFrom::OpenSlot => return,
            TailFrom::Shared(private) => (None, Some(private), None),
            TailFrom::Block(step) => (Some(step.block), step.private, Some(step)),
        };
        let mut awaits = Vec::new();
        for piece in self.pieces(0, 0, None, self.all_layers()) {
            // With layer slots the private slot may have only some layers of the block.
            let private =
                shared.filter(|&private| self.private_slots[private].layers.contains(piece.lo));
            let src = match (private, block) {
                (Some(private), _) => {
                    Endpoint::private(0, self.private_slot(private, piece.lo), private)
                }
                (None, Some(block)) => Endpoint::resident(0, self.slot_of(0, block, piece.lo)),
                (None, None) => return,
            };
            let slot = self.private_slot(open, piece.lo);
            let mut deps: MoveIds = self.blocks.waits(0, slot);
            // The source may still be arriving.
            if let (End::Resident, Some(block)) = (src.end, block) {
                deps.extend(self.bringing(0, block, piece));
            }
            let copy = moves::NewMove {
                kind: MoveKind::Copy,
                lease: id,
                block,
                src,
                dst: Endpoint::private(0, slot, open),
                layers: piece,
                tokens,
                deps,
            };
            awaits.push(self.add_move(copy, now));
        }
        let lease = self.lease_mut(id);
        lease.tail_from = TailFrom::OpenSlot;
        self.awaits.add(id, awaits);
        match (step, shared) {
            (Some(step), _) => self.release_path(&step.into(), None),
            (None, Some(private)) => self.unref_private(private),
            (None, None) => {}
        }
        self.carry_out();
    }

    /// Starts the deferred loads of a lease.
    ///
    /// `acquire` defers loads with [`LoadMode::None`](crate::manager::LoadMode::None). Loads all
    /// blocks now resident on a lower tier: all layers and blocks of the path, or the given layers
    /// and blocks. Starts none if a window or state within them has left all tiers.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if there is no room for a transit slot. [`Error::Config`] for nonexistent
    /// layers or blocks, or if the remaining layers of a block would not be a single range.
    pub fn load(
        &mut self,
        id: LeaseId,
        layers: Option<Layers>,
        blocks: Option<Range<usize>>,
        now: Nanos,
    ) -> Result<Vec<MoveId>> {
        let known = self.active(id)?.path.len();
        let requested = layers.unwrap_or(self.all_layers());
        if requested.is_empty() || requested.hi > self.settings.layers {
            return Err(Error::config(format!(
                "load of layers {requested}, the model has {}",
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
        let exceptions = self.leases[&id].path.exceptions();
        let steps: Vec<(usize, PathBlock)> =
            exceptions.filter(|(at, step)| step.deferred && within.contains(at)).collect();
        for (at, step) in &steps {
            // Layers are computed from the lowest up: loading the middle would leave two ranges.
            if step.compute.without(requested).is_none() {
                return Err(Error::config(format!(
                    "load of layers {requested} would leave a gap in layers {} of block {at}",
                    step.compute
                )));
            }
        }
        let now = self.tick(now);
        let blocks: Vec<BlockId> = steps.iter().map(|(_, step)| step.block).collect();
        let miss = |(at, &block)| self.find_missing(at, block, now);
        let mut missing: Vec<_> = blocks.iter().enumerate().map(miss).collect();
        self.decide_loads(&mut missing, now, Prefill::ALL);
        let mut transit = self.open_transit(&missing, &[0], now)?;
        let parts = self.load_deferred(id, &within, now);
        let steps = if parts.is_some() { steps } else { Vec::new() };
        let mut all = parts.unwrap_or_default().into_vec();
        for (&(at, step), miss) in steps.iter().zip(&missing) {
            all.extend(self.load_step(id, (at, step), miss, requested, &mut transit, now));
        }
        self.close_transit(transit);
        Ok(all)
    }

    /// Starts the loads of a deferred block of a path.
    fn load_step(
        &mut self,
        id: LeaseId,
        (at, step): (usize, PathBlock),
        miss: &MissingBlock,
        requested: Layers,
        transit: &mut Transit,
        now: Nanos,
    ) -> MoveIds {
        let private = step.private.expect("a deferred step has a private slot");
        if miss.lacks.is_empty() {
            // A different request has loaded the block since: use its residency.
            self.lease_mut(id).path.change(at, |step| *step = PathBlock::shared(step.block));
            self.unref_private(private);
            self.carry_out();
            let arriving = self.bringing(0, step.block, self.all_layers());
            self.awaits.add(id, arriving);
            self.replan_block(id, at, vec![(self.all_layers(), Action::Reuse, 0, now, now)]);
            self.count_late_hit(id, at, 0);
            return MoveIds::new();
        }
        let loadable = Layers::new(miss.compute.hi.max(miss.lacks.lo), miss.lacks.hi);
        let wanted = loadable.meet(requested).meet(step.compute);
        // Layers below a gap are computed, so only layers above it can be loaded.
        let Some(rest) = step.compute.without(wanted) else { return MoveIds::new() };
        // The residency has changed since the slot was taken, so the parts would not fit together.
        if wanted.is_empty() || miss.lacks != self.private_slots[private].layers {
            return MoveIds::new();
        }
        let moves = self.load_private(miss, wanted, private, id, transit, now);
        let hit = self.plan_load(id, at, miss, wanted, rest, &moves);
        if let Some(tier) = hit {
            self.count_late_hit(id, at, tier);
        }
        let lease = self.lease_mut(id);
        lease.path.change(at, |step| (step.deferred, step.compute) = (!rest.is_empty(), rest));
        self.awaits.add(id, moves.iter().copied());
        moves
    }

    /// Replaces a deferred block's spans: layers `wanted` are loaded by `moves`, and `rest` is
    /// left. If nothing is left, returns the tier of the hit.
    fn plan_load(
        &mut self,
        id: LeaseId,
        at: usize,
        miss: &MissingBlock,
        wanted: Layers,
        rest: Layers,
        moves: &[MoveId],
    ) -> Option<TierId> {
        let now = self.clock.last();
        let first = moves.iter().map(|&id| self.moves[id].first).min().unwrap_or(now);
        let ready = moves.iter().map(|&id| self.moves[id].ready).max().unwrap_or(now);
        let plan = &self.leases[&id].plan;
        let position = u32::try_from(at).unwrap_or(u32::MAX);
        // Spans of earlier loads of this block stay.
        let before = plan.spans.iter().filter(|span| {
            span.action == Action::Load && span.start <= position && position < span.stop
        });
        let mut parts: Vec<_> = before
            .map(|span| (span.layers, span.action, span.tier, span.first_ready, span.ready))
            .collect();
        parts.extend(
            miss.loads()
                .map(|(tier, layers)| (layers.meet(wanted), Action::Load, tier, first, ready))
                .filter(|(layers, ..)| !layers.is_empty()),
        );
        // The hit counts on the tier of the block's lowest layers, like in `count_request`.
        let lowest =
            parts.iter().min_by_key(|(layers, ..)| layers.lo).map(|&(_, _, tier, ..)| tier);
        let hit = lowest.filter(|_| rest.is_empty());
        if !rest.is_empty() {
            parts.push((rest, Action::Recompute, 0, plan.resident_at, plan.resident_at));
        }
        self.replan_block(id, at, parts);
        hit
    }
}
