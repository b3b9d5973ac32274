//! Failed moves: dependent moves fail too, and leases recompute.
//!
//! Invariant: every failure ends in recomputation, never in wrong bytes or in a lease that waits
//! forever. Cost: O(moves in flight) per failure. Steps of a failure, as [`Consequence`]s:
//!
//! ```text
//! Fail --> Fail, End of each dependent --> Failed --> TakeBack, Recompute of each lease --> Sweep
//!                                            |            |
//!                                            +------------+--> Unref, GiveBack, Unnamed
//! ```

use std::sync::Arc;

use crate::block::{BlockId, Layers, LeaseId, MoveId, NO_MOVE, Part, Place, TierId};
use crate::private_slots::PrivateSlotId;
use crate::tier::ResidencyState;
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::consequence::{Consequence, FailedMove, Failure};
use crate::manager::kinds::Ahead;
use crate::manager::moves::complete::{Failed, MOST_FAILED};
use crate::manager::request::slots::lease_slots::OpenSlot;
use crate::transfer::{End, MoveKind};
use crate::transfer::{InFlightMove, Leaves};

impl Manager {
    /// Carries out all found consequences, and their own consequences.
    pub(crate) fn carry_out(&mut self) {
        if self.consequences.is_empty() {
            return;
        }
        let now = self.clock.last();
        while let Some(step) = self.consequences.next() {
            match step {
                Consequence::Fail(failure) => self.fail(failure),
                Consequence::Failed(failed) => self.failed_move(&failed),
                Consequence::End(id) => self.end_move(id, now),
                Consequence::TakeBack(lease) => self.find_taken_back(lease),
                Consequence::Recompute(lease, failed) => {
                    self.recompute_lost(lease, &failed.0, &failed.1, now);
                }
                Consequence::Sweep(block) => self.sweep(block),
                Consequence::GiveBack(ahead) => self.give_back(&ahead),
                Consequence::Unnamed(private) => self.cancel_unnamed(private),
                Consequence::Unref(private) => self.unref_copy(private),
            }
        }
    }

    /// Fails a move. Its dependent moves fail next, without blame: executors wait for `after`, so
    /// they never started.
    fn fail(&mut self, failure: Failure) {
        let Failure { id, cause, .. } = failure;
        // The first half of a store through host fails as the store would.
        if let Some(store) = self.moves.get(id).filter(|known| known.kind == MoveKind::Store)
            && cause.is_some()
            && store.block == cause
            && let Some(block) = cause.and_then(|handle| self.trie().resolve(handle))
        {
            self.refused.failed(block, store.dst);
        }
        let Some((known, dependents)) = self.moves.fail(id) else { return };
        self.meter.tier(known.dst).failed += 1;
        for other in dependents {
            self.consequences.push(Consequence::Fail(Failure {
                id: other,
                reason: format!("move {id} before it failed: {}", failure.reason),
                blame: false,
                silent: failure.silent,
                cause: known.block.filter(|_| failure.blame),
            }));
            self.consequences.push(Consequence::End(other));
        }
        self.consequences.push(Consequence::Failed(Arc::new((known, failure))));
    }

    /// Updates the block of a failed move, and lets the leases that awaited it recompute.
    fn failed_move(&mut self, failed: &FailedMove) {
        let (known, failure) = &**failed;
        let block = known.block.and_then(|handle| self.trie().resolve(handle));
        if let (End::Resident, Some(block)) = (known.to, block) {
            self.fail_arrival(known.target(), block);
        }
        match (known.kind, block) {
            (MoveKind::Store, None) => self.ahead_failed(known),
            (MoveKind::Store, Some(block)) => {
                // A store that never started says nothing about the tier below.
                if failure.blame {
                    self.refused.failed(block, known.dst);
                }
                self.store_failed(known, block);
            }
            (MoveKind::Load, Some(block)) if failure.blame => self.load_failed(known, block),
            (MoveKind::Load | MoveKind::Copy, _) => {}
        }
        // No lease awaits a store.
        let leases = (known.kind != MoveKind::Store).then(|| self.awaits.all());
        let awaiting =
            leases.into_iter().flatten().filter(|(_, ids)| ids.binary_search(&known.id).is_ok());
        let concerned: Vec<LeaseId> = awaiting.map(|(lease, _)| lease).collect();
        // A store, or a prefetch: the failure is reported without a lease.
        if concerned.is_empty() {
            let (block, reason) = (known.block, failure.reason.clone());
            let row = Failed { lease: NO_MOVE, block, start: 0, stop: 0, reason };
            self.push_failed(row, failure.silent);
        }
        for lease in concerned {
            // Tokens computed after the failed block may be wrong.
            self.consequences.push(Consequence::TakeBack(lease));
            self.consequences.push(Consequence::Recompute(lease, Arc::clone(failed)));
        }
        if let Some(block) = block {
            self.consequences.push(Consequence::Sweep(block));
        }
    }

    /// Releases the copy of a failed move ahead: commit stores its block as usual.
    fn ahead_failed(&mut self, known: &InFlightMove) {
        let End::PrivateSlot(source) = known.from else { return };
        let slot = self.private_slots[source].slot;
        if self.ahead.get(&slot).is_some_and(|row| row.by == known.id) {
            let Ahead { copy, .. } = self.ahead.remove(&slot).expect("seen above");
            self.unref_copy(copy);
        }
    }

    /// Finds the copies ahead of a lease's open slots, to release them.
    pub(crate) fn find_taken_back(&mut self, id: LeaseId) {
        if self.ahead.is_empty() {
            return;
        }
        let open = self.leases[&id].groups[0].written.slots();
        let sources: Vec<_> = open.filter_map(OpenSlot::private).collect();
        for source in sources {
            if let Some(ahead) = self.remove_ahead(source) {
                self.consequences.push(Consequence::GiveBack(ahead));
            }
        }
    }

    /// Releases a copy ahead. Cancels its move if it was not issued yet.
    fn give_back(&mut self, ahead: &Ahead) {
        if self.moves.get(ahead.by).is_some_and(|known| !known.issued) {
            self.cancel(ahead.by, "its block will not be written");
        }
        self.consequences.push(Consequence::Unref(ahead.copy));
    }

    /// Fails a move before its start. No request waits for it, so the failure is not reported.
    fn cancel(&mut self, id: MoveId, reason: &str) {
        let reason = reason.to_owned();
        let failure = Failure { id, reason, blame: false, silent: true, cause: None };
        self.consequences.push(Consequence::Fail(failure));
        self.consequences.push(Consequence::End(id));
    }

    /// Revokes the landed layers of a move that is about to fail and may still write them.
    pub(crate) fn revoke_landed(&mut self, id: MoveId) {
        let known = &self.moves[id];
        let (tier, lo) = (known.dst, known.layers.lo);
        let landed = Layers::new(lo, lo + known.landed);
        let Some(block) = known.lands_on().and_then(|handle| self.trie().resolve(handle)) else {
            return;
        };
        let Some(arrival) = self.arrival_mut(tier, block) else { return };
        arrival.landed.retain(|part| part.meet(landed).is_empty());
        self.blocks.alter(tier, block, |residency| {
            // No further layers of the range have landed, so these layers are at an end.
            residency.have = residency.have.without(landed).expect("landed layers are at an end");
        });
        self.residency_changed(tier, block);
    }

    /// Marks an unreadable source as bad: no request uses it until its eviction.
    fn load_failed(&mut self, known: &InFlightMove, block: BlockId) {
        let Place { tier, group } = known.source();
        let residency = self.residency(known.source(), block);
        if known.from == End::Resident && tier > 0 && residency.state == ResidencyState::Resident {
            self.blocks.alter(known.source(), block, |residency| {
                residency.state = ResidencyState::Bad;
            });
            self.refresh_part(known.source(), block);
            if group > 0 {
                self.drop_points_of(tier, Part { group, block });
            }
        }
    }

    /// Marks the arrival of a block as failed, and ends the resume points and holds that expect it.
    pub(crate) fn fail_arrival(&mut self, place: Place, block: BlockId) {
        if let Some(arrival) = self.arrival_mut(place, block) {
            arrival.failed = true;
        }
        let Place { tier, group } = place;
        if group > 0 {
            self.drop_points_of(tier, Part { group, block });
            if tier == 0 {
                self.end_lease_holds(Part { group, block });
            }
        }
    }

    /// Makes the victim of a failed store resident again in its slot. If the slot was granted, its
    /// holder may know the address, so the block is lost.
    fn store_failed(&mut self, known: &InFlightMove, block: BlockId) {
        let Some(Leaves { tier, slot, held }) = known.leaves else { return };
        if !self.blocks.undrain(tier, slot) {
            return;
        }
        // The store keeps the slot in use until it has ended, because it may hang. A block now
        // resident or arriving in a different slot cannot return.
        let from = if self.can_return(tier, block, held) {
            self.make_resident(block, Leaves { tier, slot, held });
            End::Resident
        } else {
            let slot = self.blocks.adopt(tier, slot, held.lo);
            let private = self.private_slots.add(tier, slot, held);
            self.private_slots.begin_move(private);
            self.unref_copy(private);
            End::PrivateSlot(private)
        };
        let flight = self.moves.get_mut(known.id).expect("in flight");
        (flight.from, flight.leaves) = (from, None);
    }

    /// Whether leaving layers form a single range with the resident layers.
    fn can_return(&self, tier: TierId, block: BlockId, layers: Layers) -> bool {
        let residency = self.residency(tier, block);
        match residency.state {
            ResidencyState::Absent => {
                !self.tiers[tier].spec.layer_slots || tier > 0 || layers.lo == 0
            }
            ResidencyState::Resident => {
                self.tiers[tier].spec.layer_slots
                    && residency.have.meet(layers).is_empty()
                    && residency.have.join(layers).is_some()
            }
            ResidencyState::Arriving | ResidencyState::Bad => false,
        }
    }

    /// Appends a failure for `failed` unless it is silent. Drops the oldest failure above the
    /// limit.
    fn push_failed(&mut self, row: Failed, silent: bool) {
        if silent {
            return;
        }
        if self.failed.len() == MOST_FAILED {
            self.failed.pop_front();
            self.meter.requested.failed_lost += 1;
        }
        self.failed.push_back(row);
    }

    /// Fails the moves waiting for a slot that no lease will name: they never start. The lease
    /// released the slot, so these failures concern no request.
    fn cancel_unnamed(&mut self, private: PrivateSlotId) {
        let touches =
            |known: &InFlightMove| [known.from, known.to].contains(&End::PrivateSlot(private));
        let waiting = self.moves.values().filter(|known| touches(known));
        let mut waiting: Vec<MoveId> = waiting.map(|known| known.id).collect();
        waiting.sort_unstable();
        for id in waiting {
            self.cancel(id, "its slot was never named");
        }
    }

    /// Makes a lease that awaited a failed move compute the block instead.
    fn recompute_lost(&mut self, id: LeaseId, known: &InFlightMove, failure: &Failure, now: Nanos) {
        let (start, stop) = match known.kind {
            MoveKind::Copy => self.lose_tail(id),
            _ => self.compute_instead(id, known, now),
        };
        // Until it has ended on every rank it may write a slot kept by the lease.
        let writes = match known.to {
            End::PrivateSlot(private) => self.leases[&id].keeps(private),
            End::Open => true,
            End::Resident | End::Leaving => false,
        };
        if !writes {
            self.awaits.remove(id, known.id);
        }
        // An earlier failure of the block was reported already.
        if start < stop {
            let row = Failed {
                lease: id,
                block: known.block,
                start,
                stop,
                reason: failure.reason.clone(),
            };
            self.push_failed(row, failure.silent);
        }
    }
}
