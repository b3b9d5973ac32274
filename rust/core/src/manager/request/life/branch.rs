//! Branches: fork and truncation.
//!
//! A fork shares blocks and the tail of the first group, copied by `reserve`. In later groups it
//! copies the unfinished slots of the lease. Truncation moves a lease back to a border resumable in
//! all groups, since no state is rolled back. Invariant: a slot with more than one holder is never
//! written. Cost: O(path) per fork and truncation with several groups, O(dropped blocks) per
//! truncation with a single group, and a move per copied slot.

use crate::block::{LeaseId, Place, Slot};
use crate::error::{Error, Result};
use crate::group::GroupKind;
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::meter::late_hits::Undecided;
use crate::manager::moves::copy::CopyOrder;
use crate::manager::request::life::lease::{Hold, Lease, Plan, TailFrom};
use crate::manager::request::matching::path::{LeasePath, blocks_at, path_border};
use crate::manager::request::slots::lease_slots::{LeaseGroups, OpenSlot};
use crate::transfer::{End, Endpoint, MoveKind};

impl Manager {
    /// Makes `n` leases over the same tokens, with shared full blocks and a shared partial block.
    /// All leases, including this lease, must call `reserve` before the next write.
    ///
    /// With several groups, the leases wait for copies of the unfinished slots in the groups after
    /// the first.
    ///
    /// # Errors
    /// [`Error::Config`] while a part of the plan is still to be loaded or computed.
    /// [`Error::NoSpace`] for the copies. Nothing has changed then.
    pub fn fork(&mut self, id: LeaseId, n: usize, now: Nanos) -> Result<Vec<LeaseId>> {
        let lease = self.active(id)?;
        let awaits = self.awaits(id)?.len();
        let fresh = lease.path.exceptions().filter(|(_, step)| step.fresh).count();
        // Blocks still to be written would have two writers.
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
            && !self.leases[&id].groups[0].written.is_empty()
        {
            let private = self.share_open(id);
            let lease = self.lease_mut(id);
            let next = path_border(lease.path.blocks());
            lease.groups[0].written.remove(next);
            lease.groups[0].written.renumber(next, Vec::new());
            lease.tail_from = TailFrom::Shared(private);
        }
        let mut forks = Vec::with_capacity(n);
        for _ in 0..n {
            let mut copy: Box<Lease> = self.leases[&id].clone();
            copy.id = self.next_lease;
            self.next_lease += 1;
            copy.undecided = Undecided::default();
            copy.acquired = now;
            self.scopes.hold(copy.scope_id);
            self.scopes.digests.promise(&copy.scope);
            self.scopes.digests.hold(&copy.tail);
            self.share(&copy.path);
            self.fork_groups(id, &mut copy, &written, now);
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

    /// Keeps the first `tokens` tokens of a lease.
    ///
    /// Later blocks are unpinned and stay cached, and later private slots are released. With
    /// several groups it may keep fewer tokens: no state is rolled back, and windows end at a
    /// resumable border.
    ///
    /// # Errors
    /// [`Error::Config`] if the lease has fewer tokens, or the cut is within a block the engine has
    /// yet to compute. Nothing has changed then.
    pub fn truncate(&mut self, id: LeaseId, tokens: usize, now: Nanos) -> Result<()> {
        self.active(id)?;
        let held = self.lease_tokens(id)?;
        if tokens > held {
            return Err(Error::config(format!(
                "truncate lease {id} to {tokens} tokens, it holds {held}"
            )));
        }
        self.refuse_engine_groups(id, "truncate")?;
        let size = self.block_tokens();
        let tokens = if tokens < held { self.truncation(id, tokens) } else { tokens };
        let (full, rest) = (tokens / size, tokens % size);
        // A tail must have bytes, and this block has none until it is committed.
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
        // Different tokens may follow.
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
        self.truncate_groups(id, full);
        let lease = self.lease_mut(id);
        let mut dropped = lease.path.split_off(full);
        lease.matched = lease.matched.min(full * size);
        // The tail stays within a block of the trie, which keeps its reference for it.
        if rest > 0 {
            let later = dropped.split_off(1);
            let step = std::mem::replace(&mut dropped, later).get(0).expect("the path is longer");
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

    /// Number of tokens kept by a truncation to fewer than the held tokens. With several groups,
    /// the tokens up to the longest resumable border, or part of the tail if no group has states.
    fn truncation(&self, id: LeaseId, tokens: usize) -> usize {
        let lease = &self.leases[&id];
        if !self.points.several() {
            return tokens;
        }
        let path = lease.path.blocks();
        let full = tokens / self.block_tokens();
        let states = self.points.groups.iter().any(|group| group.kind == GroupKind::State);
        if full == path.len() && !states {
            return tokens;
        }
        // The holes from here on are still to be computed.
        let full = full.min(lease.path.written());
        self.longest_border(&path[..full], 1) as usize * self.block_tokens()
    }

    /// Moves a lease's holds to its truncated border, and returns its slots.
    fn truncate_groups(&mut self, id: LeaseId, full: usize) {
        let path = self.leases[&id].path.blocks().to_vec();
        let border = path_border(&path[..full]);
        self.move_holds(id, &path, border);
        let mut groups = std::mem::take(&mut *self.lease_mut(id).groups);
        self.close_slots(&mut groups);
        // Different tokens may follow.
        groups.borders.clear();
        groups.end = groups.end.min(border);
        let moves = self.bringing_held(&groups, &path);
        *self.lease_mut(id).groups = groups;
        self.awaits.add(id, moves);
    }

    /// Makes room for the slots copied by `n` forks of a lease: the slots of its tail in groups
    /// after the first. Returns these slots.
    ///
    /// # Errors
    /// [`Error::NoSpace`]. [`Error::Config`] if the lease has its own copy of a block arriving for
    /// a different request. Nothing has changed then.
    fn room_for_forks(&mut self, id: LeaseId, n: usize, now: Nanos) -> Result<Vec<(Place, Slot)>> {
        self.refuse_engine_groups(id, "fork")?;
        let lease = &self.leases[&id];
        let end = path_border(lease.path.blocks());
        let (mut written, mut wanted) = (Vec::new(), vec![0; lease.groups.all().len()]);
        for (group, slots) in lease.groups.all().iter().enumerate().skip(1) {
            let own = &slots.written;
            if let Some((place, _)) = own.iter().next().filter(|&(place, _)| place < end) {
                return Err(Error::config(format!(
                    "fork of lease {id}, whose block {place} arrives for another request in group \
                     {group}; truncate or release it",
                )));
            }
            let tail = own.get(end).filter(|_| !lease.tail.is_empty()).and_then(OpenSlot::plain);
            wanted[group] = if tail.is_some() { n as u64 } else { 0 };
            written.extend(tail.map(|slot| (Place::new(0, group), slot)));
        }
        if !written.is_empty() {
            self.make_room(&[Wanted { tier: 0, slots: &wanted }], &[], now)?;
        }
        Ok(written)
    }

    /// Gives a fork the holds of its original lease, and copies of the slots of its unfinished
    /// tail. Both leases wait for the copies.
    fn fork_groups(&mut self, of: LeaseId, fork: &mut Lease, tail: &[(Place, Slot)], now: Nanos) {
        let end = path_border(fork.path.blocks());
        for (group, slots) in fork.groups.all_mut().iter_mut().enumerate() {
            self.blocks.hold(Place::new(0, group), blocks_at(fork.path.blocks(), &slots.held));
            // Room to grow is not shared: each fork reserves its own.
            slots.written.clear();
            slots.spare.clear();
        }
        let mut moves = Vec::with_capacity(tail.len());
        for &(place, slot) in tail {
            let own = self.blocks.take_slot(place).slot;
            fork.groups[place.group].written.insert(end, OpenSlot::Plain(own));
            let [from, into] = [slot, own].map(|slot| Endpoint { place, slot, end: End::Open });
            let state = self.points.groups[place.group].kind == GroupKind::State;
            let part = if state { self.block_tokens() } else { fork.tail.len() };
            let order = CopyOrder {
                kind: MoveKind::Copy,
                lease: fork.id,
                block: None,
                tokens: u32::try_from(part).expect("a block at most"),
            };
            moves.push(self.copy_slot(order, from, into, now));
        }
        self.awaits.add(of, moves.iter().copied());
        self.awaits.add(fork.id, moves);
    }

    /// Refuses a call for a lease with several groups in slots owned by an engine.
    fn refuse_engine_groups(&self, id: LeaseId, what: &str) -> Result<()> {
        if self.tiers.engine_owned() && self.points.several() {
            return Err(Error::config(format!(
                "{what} of lease {id} is not supported where an engine owns the slots of several \
                 groups"
            )));
        }
        Ok(())
    }

    /// Clears everything of a suspended lease except its tokens.
    pub(crate) fn empty_lease(&mut self, id: LeaseId, hold: Hold) {
        self.awaits.forget(id);
        let groups = self.points.groups.len();
        let lease = self.lease_mut(id);
        lease.path = LeasePath::default();
        lease.tail = Vec::new();
        lease.tail_from = TailFrom::OpenSlot;
        lease.plan = Plan::default();
        lease.undecided = Undecided::default();
        *lease.groups = LeaseGroups::of(groups);
        lease.matched = 0;
        lease.hold = hold;
    }
}
