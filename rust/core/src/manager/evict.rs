//! Eviction: applies an eviction set. Copies leave their tier, write-backs start and slots become
//! free.
//!
//! Invariant: a slot still read by a store is draining, never free. No victim is written to a
//! shared tier (`moves/shared_stores.rs`). Every eviction ends in `vacate` or `vacate_run`. Cost:
//! O(log n) per victim. A victim's slot:
//!
//! ```text
//! resident --clean, drop------------------------------> free
//! resident --demote--> draining (a store reads it) ----> free        once the store has ended
//!                          | reclaimed by a request ----> resident   before a new holder has it
//!                          | the store failed ----------> resident   before that; then it is lost
//! ```

pub(super) mod leased;
pub(super) mod leaving;
mod lost;
pub(super) mod room;
pub(super) mod set;
pub(super) mod write;

use std::ops::Range;

use smallvec::SmallVec;

use crate::arrival::MoveIds;
use crate::block::{BlockId, Layers, MoveId, NO_SLOT, Slot, TierId};
use crate::tier::{Residency, ResidencyState};
use crate::time::Nanos;

use crate::manager::evict::set::{EvictionSet, Fate, Victim};
use crate::manager::kinds::{Cause, Evicted, Reason};
use crate::manager::{Manager, moves};
use crate::transfer::Leaves;
use crate::transfer::{End, Endpoint, MoveKind};

impl Manager {
    /// Carries out every decision in order, and links the set's unlinked entries again.
    pub(super) fn apply(&mut self, set: &EvictionSet, now: Nanos) {
        let last = set.victims.iter().filter(|victim| victim.idle && victim.fate == Fate::Drop);
        // Prefetch ghost lines here, so that they arrive from memory while the victims leave.
        let slices = self.slices_leaving(last.map(Victim::run));
        self.carry_out_set(set, now);
        self.remember(&slices);
        // Tail evictions have linked the parents they exposed: no second pass over `tail_entries`.
        if set.victims.iter().all(|victim| victim.idle) {
            self.refresh_touched(set);
        } else {
            self.relink_set(set);
        }
    }

    /// Evicts the victims in order. On tiers with shared pages, victims of the lowest tier leave
    /// first, so all its slots are free before the tiers above store there.
    fn carry_out_set(&mut self, set: &EvictionSet, now: Nanos) {
        let shared = set.shared();
        if shared.is_empty() {
            let mut changed = Vec::with_capacity(set.victims.len() + 1);
            set.victims.iter().for_each(|victim| self.evict(victim, set.cause, &mut changed, now));
            self.refresh_changed(&changed);
            return;
        }
        self.end_planning(set);
        self.give_spare_slots(set.spared());
        self.hold_copied(set);
        let mut changed = Vec::new();
        for tier in shared.rev() {
            for victim in set.victims.iter().filter(|victim| victim.tier == tier) {
                match victim.fate {
                    Fate::Point(number) => {
                        self.drop_store_of_victim(set, number);
                        self.copy_point_victim(set, number, now);
                    }
                    _ => self.evict(victim, set.cause, &mut changed, now),
                }
                // The copy below that the victim relied on may have left.
                self.prune(victim.block);
            }
            self.free_pages(set, tier);
        }
        self.refresh_changed(&changed);
    }

    /// Refreshes the entries of evicted blocks and of their parents.
    ///
    /// Called after all victims of a set: the parent of a victim often is the next victim, and
    /// would be linked in vain.
    pub(super) fn refresh_changed(&mut self, changed: &[(TierId, BlockId)]) {
        for &(tier, block) in changed {
            self.refresh_on(tier, block);
        }
    }

    /// Evicts a victim: counts it, frees or drains its slots, and prunes nodes without copies.
    /// Appends the blocks with entries to refresh to `changed`.
    pub(super) fn evict(
        &mut self,
        victim: &Victim,
        cause: Cause,
        changed: &mut Vec<(TierId, BlockId)>,
        now: Nanos,
    ) {
        let Victim { tier, block, blocks, layers, fate, idle } = *victim;
        self.tiers[tier].credit = self.tiers[tier].credit.saturating_sub(u64::from(blocks));
        let reason = match fate {
            Fate::Clean => Reason::Clean,
            Fate::Demote(_) => Reason::Demoted,
            Fate::Drop => Reason::Dropped,
            Fate::Point(_) => return,
        };
        let run = victim.run();
        let evicted = Evicted { tier, blocks: run.clone(), layers, reason, cause };
        self.count_eviction(&evicted, now);
        // A tail has nothing but its slots: no layer ranges, no moves, no partial copies.
        if idle {
            self.vacate_run(tier, run, fate == Fate::Drop);
            return;
        }
        match fate {
            Fate::Demote(dirty) => {
                let slots = self.slots_of(tier, block, layers);
                self.vacate(tier, block, layers, changed);
                // A block slot keeps the clean layers too, in case the store fails.
                let held = if self.tiers[tier].spec.layer_slots { dirty } else { layers };
                self.write_back(block, dirty, Leaves { tier, slot: slots[0], held }, now);
            }
            Fate::Clean | Fate::Drop | Fate::Point(_) => {
                let slots = self.slots_of(tier, block, layers);
                let rest = self.vacate(tier, block, layers, changed);
                if self.tiers[tier].spec.layer_slots {
                    for slot in slots {
                        self.blocks.give_slot(tier, slot);
                    }
                    // The layers share a slot, free once no layer is left.
                } else if rest.is_empty() {
                    self.blocks.give_slot(tier, slots[0]);
                }
                self.prune(block);
            }
        }
    }

    /// Evicts the fully resident and idle tail of a leaf-only run. Removes it from the trie if it
    /// was the last copy. The eviction set has already linked its parent.
    fn vacate_run(&mut self, tier: TierId, blocks: Range<BlockId>, last_copy: bool) {
        let before = self.trie().parent(blocks.start);
        // The eviction of a previous victim may have linked it again.
        self.tiers[tier].eviction.unlink(blocks.end - 1);
        self.blocks.evict_run(tier, blocks.clone());
        self.refresh_above(tier, before);
        if !self.shared_stores.is_empty() {
            blocks.clone().for_each(|block| self.drop_shared_store(tier, block));
        }
        for block in blocks.clone() {
            self.note_arrival(tier, block);
            self.refresh_above(tier, Some(block));
        }
        self.attend_all(tier, blocks.clone().rev());
        // `apply` puts the tail's slices into the ghost table.
        if last_copy {
            self.forget(blocks, before);
        }
    }

    /// The slots of `layers` of a residency: a slot per layer, or the block's only slot.
    pub(super) fn slots_of(
        &self,
        tier: TierId,
        block: BlockId,
        layers: Layers,
    ) -> SmallVec<[Slot; 1]> {
        // Without layer slots the block has a single slot.
        let each = self.tiers[tier].spec.layer_slots;
        let layers = if each { layers } else { Layers::new(layers.lo, layers.lo + 1) };
        layers.iter().map(|layer| self.slot_of(tier, block, layer)).collect()
    }

    /// Clears `layers` of a residency and returns the remaining layers. The caller owns the slots,
    /// and refreshes the blocks appended to `changed`.
    fn vacate(
        &mut self,
        tier: TierId,
        block: BlockId,
        layers: Layers,
        changed: &mut Vec<(TierId, BlockId)>,
    ) -> Layers {
        // The eviction of a previous victim may have linked it again.
        self.tiers[tier].eviction.unlink(block);
        let rest = self.blocks.vacate(tier, block, layers);
        self.note_change(tier, block);
        // The last victim's parent is listed already.
        if changed.last() != Some(&(tier, block)) {
            changed.push((tier, block));
        }
        if let Some(parent) = self.trie().parent(block) {
            changed.push((tier, parent));
            self.refresh_above(tier, Some(parent));
        }
        rest
    }

    /// Starts the write-back of `dirty` to the next tier, out of a slot without a residency. If the
    /// store fails, the slot still has the leaving layers.
    fn write_back(&mut self, block: BlockId, dirty: Layers, leaves: Leaves, now: Nanos) {
        let Leaves { tier, slot, .. } = leaves;
        let stores = self.store(tier, block, dirty, now, |_| Endpoint {
            place: tier.into(),
            slot,
            end: End::Leaving,
        });
        let [by] = stores[..] else { unreachable!("one slot leaves by one store") };
        // A slot of a shared page may belong to a different group by the time its store fails.
        if self.blocks.arena(tier).is_none() {
            self.moves.get_mut(by).expect("just made").leaves = Some(leaves);
        }
        self.blocks.drain(tier, slot, by);
    }

    /// Starts the moves that copy `layers` of a block to the next tier, into free slots. `source`
    /// returns the source end of a layer. Returns the moves that end below.
    pub(super) fn store(
        &mut self,
        tier: TierId,
        block: BlockId,
        layers: Layers,
        now: Nanos,
        source: impl Fn(u16) -> Endpoint,
    ) -> MoveIds {
        let below = tier + 1;
        let into = self.residency(below, block).slot;
        let row = self.blocks.take_slots(below, into, layers);
        self.blocks.alter(below, block, |residency| residency.slot = row);
        let transit = self.transit(tier, below);
        let mut moves = MoveIds::new();
        for piece in self.pieces(tier, below, transit, layers) {
            let mut from = source(piece.lo);
            let dst = self.slot_of(below, block, piece.lo);
            let mut deps = self.blocks.waits(below, dst);
            // A point is copied further before its blocks have arrived.
            if let (End::Resident, Some(arrival)) = (from.end, self.arrival(tier, block))
                && self.blocks.arena(tier).is_some()
            {
                deps.extend_from_slice(&arrival.moves);
            }
            if let Some(host) = transit {
                let up;
                (up, from) = self.pass_up(block, from, host, piece, now);
                deps.push(up);
            }
            let id = self.add_move(
                moves::NewMove {
                    kind: MoveKind::Store,
                    lease: 0,
                    block: Some(block),
                    src: from,
                    dst: Endpoint::resident(below, dst),
                    layers: piece,
                    tokens: self.settings.block_tokens,
                    deps,
                },
                now,
            );
            // The moves keep the transit slot alive from here on.
            if let (Some(_), End::PrivateSlot(private)) = (transit, from.end) {
                self.unref_copy(private);
            }
            moves.push(id);
        }
        self.meter.tier(below).demoted += 1;
        self.expect(below, block, layers, &moves);
        moves
    }

    /// Drops an idle copy from a tier.
    pub(super) fn drop_copy(&mut self, tier: TierId, block: BlockId, cause: Cause) {
        self.count_loss(tier, block, cause, self.clock.last());
        // Arriving layers have slots too, and are dropped with the resident layers.
        if let Some(arrival) = self.blocks.take_arrival(tier, block) {
            self.marked.remove(&(arrival.ready, tier, block));
            self.blocks.alter(tier, block, |residency| residency.have = arrival.target);
        }
        let residency = self.residency(tier, block);
        // The block was absent, or only its arrival was dropped.
        if residency.slot == NO_SLOT {
            return;
        }
        self.blocks.give_slots(tier, residency.slot, residency.have, true);
        self.blocks.alter(tier, block, |residency| *residency = Residency::default());
        self.residency_changed(tier, block);
    }

    /// Drops bad copies of a block once a good copy is resident on the first tier.
    pub(super) fn forget_bad_copies(&mut self, block: BlockId) {
        for tier in 1..self.tiers.len() {
            let residency = self.residency(tier, block);
            if residency.state == ResidencyState::Bad && residency.busy == 0 {
                self.drop_copy(tier, block, Cause::Failed);
            }
        }
    }

    /// Starts the first half of a store through host, because disk and remote do not exchange
    /// bytes: the block goes up to host and down again. Returns the move and its destination.
    fn pass_up(
        &mut self,
        block: BlockId,
        src: Endpoint,
        host: TierId,
        piece: Layers,
        now: Nanos,
    ) -> (MoveId, Endpoint) {
        let private = self.new_private(host, self.all_layers());
        let passing = Endpoint::private(host, self.private_slot(private, piece.lo), private);
        let up = moves::NewMove {
            kind: MoveKind::Load,
            lease: 0,
            block: Some(block),
            src,
            dst: passing,
            layers: piece,
            tokens: self.settings.block_tokens,
            deps: self.private_waits(private),
        };
        (self.add_move(up, now), passing)
    }
}
