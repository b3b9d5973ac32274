//! Branches: fork, truncation, and the recovery of a lease from a failed load.
//!
//! Invariant: a slot with more than one holder is never written; `reserve` copies the tail first.
//! Cost: O(path) per fork, O(blocks dropped) per truncation.

use crate::block::{Layers, LeaseId, Structure, TierId};
use crate::error::{Error, Result};
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::kinds::{Action, Span};
use crate::manager::meter::late_hits::Undecided;
use crate::manager::request::life::lease::{Hold, Lease, Plan, TailFrom};
use crate::manager::request::matching::path::LeasePath;
use crate::manager::request::slots::open_slot::OpenSlot;
use crate::transfer::End;
use crate::transfer::InFlightMove;

impl Manager {
    /// Makes `n` leases over the same tokens, which share full blocks and the partial one. All of
    /// them, this one too, must call `reserve` before the next write.
    ///
    /// Of a model with several groups they wait for copies of what the lease still writes in the
    /// groups after the first.
    ///
    /// # Errors
    /// [`Error::Config`] while something of the plan is still to be loaded or computed;
    /// [`Error::NoSpace`] for those copies. Nothing has changed then.
    pub fn fork(&mut self, id: LeaseId, n: usize, now: Nanos) -> Result<Vec<LeaseId>> {
        let lease = self.active(id)?;
        let awaits = self.awaits(id)?.len();
        let fresh = lease.path.exceptions().filter(|(_, step)| step.fresh).count();
        // Blocks that are still to be written would have two writers.
        if awaits > 0 || fresh > 0 {
            return Err(Error::config(format!(
                "fork of lease {id}, which awaits {awaits} moves and has {fresh} blocks to \
                 compute; commit first"
            )));
        }
        self.check_forks(id, n)?;
        let now = self.tick(now);
        let written = self.room_for_forks(id, n, now)?;
        self.take_back(id);
        // The tail's slot needs a reference count from here on.
        if !self.leases[&id].tail.is_empty()
            && matches!(self.leases[&id].tail_from, TailFrom::OpenSlot)
            && !self.leases[&id].open.is_empty()
        {
            let private = self.share_open(id, 0);
            let lease = self.lease_mut(id);
            lease.open.remove(0);
            lease.tail_from = TailFrom::Shared(private);
        }
        let mut forks = Vec::with_capacity(n);
        for _ in 0..n {
            let mut copy: Box<Lease> = self.leases[&id].clone();
            copy.id = self.next_lease;
            self.next_lease += 1;
            // Room to grow is not shared: each fork reserves its own.
            copy.open = Vec::new();
            copy.undecided = Undecided::default();
            copy.acquired = now;
            self.scopes.hold(copy.scope_id);
            self.scopes.digests.promise(&copy.scope);
            self.scopes.digests.hold(&copy.tail);
            self.share(&copy.path);
            self.fork_windows(id, &mut copy, &written, now);
            match copy.tail_from {
                TailFrom::OpenSlot => {}
                TailFrom::Shared(private) => {
                    self.private_slots.share(private);
                }
                TailFrom::Block(step) => self.share(&step.into()),
            }
            forks.push(copy.id);
            if let Some(session) = copy.session {
                self.sessions.hold(session, copy.id);
            }
            self.leases.insert(copy.id, copy);
        }
        Ok(forks)
    }

    /// Adds a reference to a path's blocks and private slots.
    fn share(&mut self, path: &LeasePath) {
        self.pin(path.blocks());
        for private in path.private_slots() {
            self.private_slots.share(private);
        }
    }

    /// Keeps the first `tokens` tokens of a lease. Blocks after them are unpinned and stay cached;
    /// private slots after them are released. Of a model with several groups it may keep fewer: no
    /// state is rolled back, and windows end at a border at which the lease can go on.
    ///
    /// # Errors
    /// [`Error::Config`] if the lease holds fewer tokens, or the cut falls into a block that the
    /// engine has still to compute; nothing has changed then.
    pub fn truncate(&mut self, id: LeaseId, tokens: usize, now: Nanos) -> Result<()> {
        self.active(id)?;
        let held = self.lease_tokens(id)?;
        if tokens > held {
            return Err(Error::config(format!(
                "truncate lease {id} to {tokens} tokens, it holds {held}"
            )));
        }
        self.refuse_bound(id, "truncate")?;
        let size = self.block_tokens();
        let tokens = if tokens < held { self.truncation(id, tokens) } else { tokens };
        let (full, rest) = (tokens / size, tokens % size);
        // A tail must have bytes: this block has none until it is committed.
        if rest > 0 && self.leases[&id].path.get(full).is_some_and(|step| step.fresh) {
            return Err(Error::config(format!(
                "truncate lease {id} to {tokens} tokens, within block {full}, which is still to \
                 be computed; commit first"
            )));
        }
        self.tick(now);
        if tokens == held {
            return Ok(());
        }
        // Other tokens may follow.
        self.take_back(id);
        // Only the tail becomes shorter.
        if full == self.leases[&id].path.len() {
            self.remove_tail(id, rest);
            if rest == 0 {
                self.lose_tail(id);
                self.carry_out();
            }
            return Ok(());
        }
        self.lose_tail(id);
        self.truncate_windows(id, full);
        let lease = self.lease_mut(id);
        let open = std::mem::take(&mut lease.open);
        let mut dropped = lease.path.split_off(full);
        lease.matched = lease.matched.min(full * size);
        for open in open {
            self.close_open(open);
        }
        // The tail stays within a block of the trie, which keeps its reference for it.
        if rest > 0 {
            let behind = dropped.split_off(1);
            let step = std::mem::replace(&mut dropped, behind).get(0).expect("the path is longer");
            let kept = self.trie().tokens(step.block)[..rest].to_vec();
            self.extend_tail(id, &kept);
            self.lease_mut(id).tail_from = TailFrom::Block(step);
        }
        self.release_path(&dropped, None);
        self.carry_out();
        self.truncate_plan(id, full);
        self.track_session(id);
        Ok(())
    }

    /// Drops the tail of a lease. Returns its range of tokens.
    pub(crate) fn lose_tail(&mut self, id: LeaseId) -> (u64, u64) {
        let size = self.block_tokens();
        let lease = self.lease_mut(id);
        let start = (lease.path.len() * size) as u64;
        let stop = start + lease.tail.len() as u64;
        self.remove_tail(id, 0);
        let lease = self.lease_mut(id);
        match std::mem::replace(&mut lease.tail_from, TailFrom::OpenSlot) {
            TailFrom::OpenSlot => {}
            TailFrom::Shared(private) => self.unref_private(private),
            TailFrom::Block(shared) => self.release_path(&shared.into(), None),
        }
        (start, stop)
    }

    /// Has a block computed whose load failed, in a leaf-only scope with all that follow. Returns
    /// the range of tokens concerned.
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
            debug_assert!(matches!(known.to, End::PrivateSlot(_) | End::Here));
            let lease = self.lease_mut(id);
            lease.path.change(at, |step| {
                (step.compute, step.deferred, step.fresh) = (layers, false, true);
            });
            lease.unconfirmed = true;
            self.recompute_in_plan(id, at, layers);
            return lost;
        }
        let here = self.residency(0, block).have;
        let lacks = self.lacks(if self.one_slot(here) { Layers::NONE } else { here });
        let units = self.tiers.units(0, lacks);
        // Without room for another slot the match ends here.
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

    /// Ends a lease's match before block `at` and keeps the size of its room; on a tier that the
    /// engine owns the slots stay the same. The tail is dropped too: it was computed from lost
    /// blocks. Returns the end of the range of lost tokens.
    fn truncate_path(&mut self, id: LeaseId, at: usize, now: Nanos) -> u64 {
        let size = self.block_tokens();
        let (_, stop) = self.lose_tail(id);
        let lease = self.lease_mut(id);
        let mut dropped = lease.path.split_off(at);
        lease.matched = lease.matched.min(at * size);
        if self.tiers.engine_owned() {
            self.reopen(id, &mut dropped);
        }
        self.release_path(&dropped, None);
        self.truncate_plan(id, at);
        if self.tiers.engine_owned() {
            return stop;
        }
        // Without room the engine has to call `reserve`.
        self.reopen_groups(id, dropped.len(), now);
        stop
    }

    /// Keeps the slots that an engine has named for these blocks: it computes them there.
    fn reopen(&mut self, id: LeaseId, dropped: &mut LeasePath) {
        let mut open = Vec::with_capacity(dropped.len());
        for at in 0..dropped.len() {
            let private = dropped.change(at, |step| step.private.take());
            open.push(OpenSlot::Private(
                private.unwrap_or_else(|| self.new_private(0, self.all_layers())),
            ));
        }
        self.lease_mut(id).open.splice(0..0, open);
    }

    /// Ends a plan's spans before block `at`.
    fn truncate_plan(&mut self, id: LeaseId, at: usize) {
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

    /// Replaces the spans of one block, but for reuse, by `parts`: layers, action, tier, first and
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
            // A span of several blocks keeps those before and after this one.
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

    /// Leaves a suspended lease its tokens and nothing else.
    pub(crate) fn empty_lease(&mut self, id: LeaseId, hold: Hold) {
        self.awaits.forget(id);
        let lease = self.lease_mut(id);
        lease.path = LeasePath::default();
        lease.open = Vec::new();
        lease.tail = Vec::new();
        lease.tail_from = TailFrom::OpenSlot;
        lease.plan = Plan::default();
        lease.undecided = Undecided::default();
        lease.windows = None;
        lease.matched = 0;
        lease.hold = hold;
    }
}
