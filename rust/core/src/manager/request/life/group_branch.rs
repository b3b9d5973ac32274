//! Branches of a lease of a model with several groups: truncation, forks and suspension.
//!
//! A lease goes back to a border at which all groups resume, since no state is rolled back. A fork
//! shares what its blocks have, and copies what the lease still writes. Invariant: a slot that is
//! written has one holder. Cost: O(path) per call, one move per copied slot.

use crate::block::{GroupId, LeaseId, Place, Slot};
use crate::error::{Error, Result};
use crate::group::GroupKind;
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::moves::copy::CopyOrder;
use crate::manager::points::Stay;
use crate::manager::request::life::lease::Lease;
use crate::manager::request::slots::placed_slots::PlacedSlots;
use crate::manager::request::slots::window_slots::{blocks_at, path_border};
use crate::time::Nanos;
use crate::transfer::{End, Endpoint, InFlightMove, MoveKind};

/// Slot that a lease still writes, for a place on its path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    group: GroupId,
    place: u32,
    slot: Slot,
}

impl Manager {
    /// Border at which a lease can go on after the load of a block on its path failed: at most before
    /// block `at`. Of a model with several groups it is one at which the first tier has all that a
    /// resume needs; the lease holds that then.
    pub(crate) fn resumable_before(
        &mut self,
        id: LeaseId,
        at: usize,
        known: &InFlightMove,
    ) -> usize {
        if self.leases[&id].windows.is_none() {
            return at;
        }
        self.plan_again(id);
        // The windows of a shorter border are not in the engine's slots.
        if self.tiers.engine_owned() {
            if let Some(windows) = &mut self.lease_mut(id).windows {
                windows.done = 0;
            }
            return 0;
        }
        let lease = &self.leases[&id];
        let path = lease.path.blocks().to_vec();
        let most = if known.group > 0 { path.len() } else { at };
        let border = self.longest_border(&path[..most.min(lease.path.written())], 1);
        self.move_windows(id, &path, border);
        border as usize
    }

    /// Adds the border of a match to those of its lease's pass: the request computes the rest of the
    /// prompt from an earlier one, and the next request would miss the border that was lost.
    fn plan_again(&mut self, id: LeaseId) {
        let every = self.points.every;
        let Some(windows) = &mut self.lease_mut(id).windows else { return };
        let (lost, stay) = (windows.done, windows.here.unwrap_or(Stay::Newest));
        let regular = every == 0 || lost.is_multiple_of(every);
        let known = windows.borders.binary_search_by_key(&lost, |&(border, _)| border);
        if let (Err(at), true, true) = (known, regular, 0 < lost && lost <= windows.end) {
            let stay = if every > 0 { Stay::Always } else { stay };
            windows.borders.insert(at, (lost, stay));
        }
    }

    /// Tokens that a lease keeps if it is truncated to `tokens`, fewer than it holds: of a model with
    /// several groups those up to the longest border at which it can go on, or part of its tail if no
    /// group has states.
    pub(crate) fn truncation(&self, id: LeaseId, tokens: usize) -> usize {
        let lease = &self.leases[&id];
        if lease.windows.is_none() {
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

    /// Moves a lease's holds to the border at which it is truncated, and gives its other slots back.
    pub(crate) fn truncate_windows(&mut self, id: LeaseId, full: usize) {
        let lease = &self.leases[&id];
        if lease.windows.is_none() {
            return;
        }
        let path = lease.path.blocks().to_vec();
        let border = path_border(&path[..full]);
        self.move_windows(id, &path, border);
        let mut windows = self.lease_mut(id).windows.take().expect("seen above");
        for (group, slot) in windows.take_slots() {
            self.blocks.give_slot(Place::new(0, group), slot);
        }
        // Other tokens may follow.
        windows.borders.clear();
        windows.end = border;
        let moves = self.bringing_windows(&windows, &path);
        self.lease_mut(id).windows = Some(windows);
        self.awaits.add(id, moves);
    }

    /// Makes room for the slots that `n` forks of a lease copy, and returns what they copy.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; [`Error::Config`] if the lease has its own copy of a block that arrives for
    /// another request. Nothing has changed then.
    pub(crate) fn room_for_forks(
        &mut self,
        id: LeaseId,
        n: usize,
        now: Nanos,
    ) -> Result<Vec<Written>> {
        let lease = &self.leases[&id];
        let Some(windows) = &lease.windows else { return Ok(Vec::new()) };
        self.refuse_bound(id, "fork")?;
        let end = path_border(lease.path.blocks());
        let mut written = Vec::new();
        for (group, open) in windows.open.iter().enumerate() {
            if let Some((place, _)) = open.iter().next().filter(|&(place, _)| place < end) {
                return Err(Error::config(format!(
                    "fork of lease {id}, whose block {place} arrives for another request in group \
                     {group}; truncate or release it",
                )));
            }
            let tail = open.get(end).filter(|_| !lease.tail.is_empty());
            written.extend(tail.map(|slot| Written { group, place: end, slot }));
        }
        let mut wanted = vec![0; windows.open.len()];
        for written in &written {
            wanted[written.group] += n as u64;
        }
        if !written.is_empty() {
            self.make_room(&[Wanted { tier: 0, slots: &wanted }], &[], now)?;
        }
        Ok(written)
    }

    /// Gives a fork the holds of the lease that it is a copy of, and copies of what that still writes.
    /// Both wait for the copies.
    pub(crate) fn fork_windows(
        &mut self,
        of: LeaseId,
        fork: &mut Lease,
        written: &[Written],
        now: Nanos,
    ) {
        let Some(windows) = &mut fork.windows else { return };
        for (group, held) in windows.held.iter().enumerate() {
            self.blocks.hold(Place::new(0, group), blocks_at(fork.path.blocks(), held));
        }
        windows.open.iter_mut().chain(&mut windows.spare).for_each(PlacedSlots::clear);
        let mut moves = Vec::with_capacity(written.len());
        for &Written { group, place, slot } in written {
            let own = self.blocks.take_slot(Place::new(0, group)).slot;
            windows.open[group].insert(place, own);
            let [from, into] = [slot, own].map(|slot| Endpoint {
                place: Place::new(0, group),
                slot,
                end: End::Open,
            });
            let state = self.points.groups[group].kind == GroupKind::State;
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
}
