//! Recovery of a lease from a failed load: lost blocks are computed, and the plan is updated.
//!
//! Invariant: a leaf-only prefix has no hole, and a lease with several groups resumes from a border
//! resumable in all groups. Cost: O(path).

use crate::block::{Layers, LeaseId, Structure, TierId};
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::kinds::{Action, Span};
use crate::manager::points::Stay;
use crate::manager::request::life::lease::TailFrom;
use crate::manager::request::matching::path::{LeasePath, path_border};
use crate::manager::request::slots::lease_slots::OpenSlot;
use crate::transfer::{End, InFlightMove};

impl Manager {
    /// Plans the computation of a block after its load failed, in a leaf-only scope with all later
    /// blocks. Returns the range of concerned tokens.
    pub(crate) fn compute_instead(
        &mut self,
        id: LeaseId,
        known: &InFlightMove,
        now: Nanos,
    ) -> (u64, u64) {
        let size = self.block_tokens();
        let Some(block) = known.block.and_then(|handle| self.trie().resolve(handle)) else {
            return (0, 0);
        };
        // The tail's block is not on the path: its tokens are lost with it.
        if let TailFrom::Block(step) = self.leases[&id].tail_from
            && step.block == block
        {
            return self.lose_tail(id);
        }
        // Truncation may have dropped the block since.
        let Some(at) = self.leases[&id].path.blocks().iter().position(|&at| at == block) else {
            return (0, 0);
        };
        let at = self.resumable_before(id, at, known);
        let start = (at * size) as u64;
        // A leaf-only prefix must have no hole.
        if self.departures(block) == Structure::LeafOnly {
            return (start, self.truncate_path(id, at, now));
        }
        let lost = (start, start + size as u64);
        let step = self.leases[&id].path.get(at).expect("found above");
        // With a private slot the lease computes the block there.
        if let Some(private) = step.private {
            let layers = self.private_slots[private].layers;
            // An earlier failure of the same block was reported already.
            if step.compute == layers {
                return (0, 0);
            }
            debug_assert!(matches!(known.to, End::PrivateSlot(_) | End::Resident));
            let lease = self.lease_mut(id);
            lease.path.change(at, |step| {
                (step.compute, step.deferred, step.fresh) = (layers, false, true);
            });
            lease.unconfirmed = true;
            self.recompute_in_plan(id, at, layers);
            return lost;
        }
        let resident = self.residency(0, block).have;
        let lacks = self.lacks(if self.one_slot(resident) { Layers::NONE } else { resident });
        let units = self.tiers.units(0, lacks);
        // Without room for a further slot the match ends here.
        if self.make_room(&[Wanted { tier: 0, slots: &[units] }], &[], now).is_err() {
            return (start, self.truncate_path(id, at, now));
        }
        let private = self.new_private(0, lacks);
        let lease = self.lease_mut(id);
        lease.path.change(at, |step| {
            (step.private, step.compute, step.fresh) = (Some(private), lacks, true);
        });
        lease.unconfirmed = true;
        self.recompute_in_plan(id, at, lacks);
        lost
    }

    /// Border for a lease to resume at after a failed load on its path: at most before block `at`.
    ///
    /// With several groups, the border is resumable from the first tier, and the lease holds its
    /// needs.
    fn resumable_before(&mut self, id: LeaseId, at: usize, known: &InFlightMove) -> usize {
        if !self.points.several() {
            return at;
        }
        self.plan_again(id);
        // The windows of a shorter border are not in the engine's slots.
        if self.tiers.engine_owned() {
            self.lease_mut(id).groups.done = 0;
            return 0;
        }
        let lease = &self.leases[&id];
        let path = lease.path.blocks().to_vec();
        let most = if known.group > 0 { path.len() } else { at };
        let border = self.longest_border(&path[..most.min(lease.path.written())], 1);
        self.move_holds(id, &path, border);
        border as usize
    }

    /// Adds the lost border of a match to the borders of its lease's pass. The request computes the
    /// rest of the prompt from an earlier border, and the next request would miss the lost border.
    fn plan_again(&mut self, id: LeaseId) {
        let every = self.points.every;
        let groups = &mut self.lease_mut(id).groups;
        let (lost, stay) = (groups.done, groups.match_stay.unwrap_or(Stay::Newest));
        let regular = every == 0 || lost.is_multiple_of(every);
        let known = groups.borders.binary_search_by_key(&lost, |&(border, _)| border);
        if let (Err(at), true, true) = (known, regular, 0 < lost && lost <= groups.end) {
            let stay = if every > 0 { Stay::Always } else { stay };
            groups.borders.insert(at, (lost, stay));
        }
    }

    /// Ends a lease's match before block `at` and keeps the size of its room.
    ///
    /// On an engine's tier the slots stay the same. The tail is dropped too, because it was
    /// computed from lost blocks. Returns the end of the range of lost tokens.
    fn truncate_path(&mut self, id: LeaseId, at: usize, now: Nanos) -> u64 {
        let size = self.block_tokens();
        let (_, stop) = self.lose_tail(id);
        let lease = self.lease_mut(id);
        let mut dropped = lease.path.split_off(at);
        lease.matched = lease.matched.min(at * size);
        let engine = self.tiers.engine_owned();
        let kept = if engine { self.take_private(&mut dropped) } else { Vec::new() };
        let lease = self.lease_mut(id);
        let end = path_border(lease.path.blocks());
        lease.groups[0].written.renumber(end, kept);
        self.release_path(&dropped, None);
        self.truncate_plan(id, at);
        // Without room the engine has to call `reserve`.
        if !engine {
            self.reopen(id, dropped.len(), now);
        }
        stop
    }

    /// Takes the slots named by an engine for these blocks: it computes them there.
    fn take_private(&mut self, dropped: &mut LeasePath) -> Vec<OpenSlot> {
        let number = dropped.len();
        let of = |at| {
            let private = dropped.change(at, |step| step.private.take());
            OpenSlot::Private(private.unwrap_or_else(|| self.new_private(0, self.all_layers())))
        };
        (0..number).map(of).collect()
    }

    /// Ends a plan's spans before block `at`.
    pub(in crate::manager::request) fn truncate_plan(&mut self, id: LeaseId, at: usize) {
        let at = u32::try_from(at).unwrap_or(u32::MAX);
        let plan = &mut self.lease_mut(id).plan;
        plan.spans.retain(|span| span.start < at);
        for span in &mut plan.spans {
            span.stop = span.stop.min(at);
        }
    }

    /// Replaces a block's loads in the plan by computation.
    fn recompute_in_plan(&mut self, id: LeaseId, at: usize, layers: Layers) {
        let ready = self.leases[&id].plan.resident_at;
        self.replan_block(id, at, vec![(layers, Action::Recompute, 0, ready, ready)]);
    }

    /// Replaces the spans of a block, except reuse, by `parts`: layers, action, tier, first and
    /// last ready time.
    pub(crate) fn replan_block(
        &mut self,
        id: LeaseId,
        at: usize,
        parts: Vec<(Layers, Action, TierId, Nanos, Nanos)>,
    ) {
        let at = u32::try_from(at).unwrap_or(u32::MAX);
        let plan = &mut self.lease_mut(id).plan;
        let mut spans = Vec::with_capacity(plan.spans.len() + parts.len() + 1);
        for span in &plan.spans {
            let inside = span.start <= at && at < span.stop;
            if !inside || span.action == Action::Reuse {
                spans.push(*span);
                continue;
            }
            // A span of several blocks keeps the blocks before and after this block.
            for (start, stop) in [(span.start, at), (at + 1, span.stop)] {
                if start < stop {
                    spans.push(Span { start, stop, ..*span });
                }
            }
        }
        for (layers, action, tier, first_ready, ready) in parts {
            let start = at;
            spans.push(Span { start, stop: at + 1, layers, action, tier, first_ready, ready });
        }
        spans.sort_by_key(|span| (span.start, span.layers));
        plan.spans = spans;
        plan.exact = false;
    }
}
