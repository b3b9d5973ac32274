//! Write-back: at commit (write-through), ahead of need, and before an engine takes slots back.
//!
//! Invariant: writing is soft. If a lower tier has no room, nothing is written and nothing fails.
//! Cost: O(log n) per written block. The preview ahead of need costs O(log n) per slot of the
//! watermark, at most once per watermark's number of evictions.

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, Slot, Structure, TierId};
use crate::private_slots::PrivateSlotId;
use crate::tier::ResidencyState;
use crate::time::{Nanos, Stamp};

use crate::manager::Manager;
use crate::manager::evict::set::{EvictionSet, Fate, Victim};
use crate::manager::kinds::Cause;
use crate::manager::moves::batch::TransferBatch;
use crate::manager::moves::shared_stores::SharedStore;
use crate::transfer::{End, Endpoint, MoveKind};

impl Manager {
    /// Copies a block down once it is resident on a write-through tier.
    pub(crate) fn write_through(
        &mut self,
        tier: TierId,
        block: BlockId,
        source: Option<PrivateSlotId>,
        now: Nanos,
    ) {
        if self.tiers.writes_through(tier)
            && (!self.writes_points() || tier > 0 && self.serves_points(tier, block))
        {
            self.write_down(tier, block, source, Stamp::MAX, now);
        }
    }

    /// Whether blocks of the first tier are written together with their resume point, not
    /// individually.
    fn writes_points(&self) -> bool {
        self.points.several() && !self.tiers.engine_owned()
    }

    /// Writes consecutive blocks of a run through, like `write_through`.
    pub(crate) fn write_run(&mut self, tier: TierId, blocks: Range<BlockId>, now: Nanos) {
        // Write block by block if some blocks are already below, refused, or not idle.
        if !self.tiers.writes_through(tier)
            || self.writes_points()
            || !self.tiers.above_shared(tier) && self.write_batch(tier, &blocks, now)
        {
            return;
        }
        for block in blocks {
            self.write_down(tier, block, None, Stamp::MAX, now);
        }
    }

    /// Starts to copy blocks down in a batch, if none is resident below. Returns whether nothing is
    /// left to do.
    fn write_batch(&mut self, tier: TierId, blocks: &Range<BlockId>, now: Nanos) -> bool {
        let below = tier + 1;
        // All blocks are resident below already.
        if (below..self.tiers.len()).any(|at| self.blocks.table(at).all_full(blocks.clone())) {
            return true;
        }
        let plain = self.can_batch(tier, below)
            && self.refused.is_empty()
            && self.blocks.table(tier).all_idle(blocks.clone())
            && (below..self.tiers.len())
                .all(|at| self.blocks.table(at).none_present(blocks.clone()));
        // Blocks of a run share uses and scope, so the first decides for all.
        if !plain || !self.worth_writing(tier, blocks.start) {
            return plain;
        }
        let mut set = self.eviction_set_for(Cause::Ahead);
        let fits = self.room(&mut set, below, &[u64::from(blocks.end - blocks.start)], now);
        // In a write block by block, the first stored block would keep the parent on the tier
        // below.
        let before = self.trie().parent(blocks.start);
        if !fits || set.victims.iter().any(|v| v.tier == below && Some(v.block) == before) {
            self.abandon(&set);
            return false;
        }
        self.apply(&set, now);
        let blocks = blocks.clone();
        self.start_batch(
            &TransferBatch { kind: MoveKind::Store, lease: 0, src: tier, dst: below, blocks },
            now,
        );
        true
    }

    /// Whether a block was used often enough to be written below, and is useful there: below a
    /// missing parent it would be a hole of a leaf-only scope.
    pub(crate) fn worth_writing(&self, tier: TierId, block: BlockId) -> bool {
        let node = self.node(block);
        node.uses >= self.tiers[tier].spec.admit_after
            && (self.structure(block) == Structure::Holes
                || self.trie().parent(block).is_none_or(|parent| self.missing(parent).is_empty()))
    }

    /// Copies the layers missing on every lower tier to the next tier.
    ///
    /// The source is the block's residency or an engine's slot. Does nothing if a block used after
    /// `younger` would be dropped or written for it. A store to a shared tier waits until an
    /// executor requests it. Returns whether a store was started or queued.
    pub(crate) fn write_down(
        &mut self,
        tier: TierId,
        block: BlockId,
        source: Option<PrivateSlotId>,
        younger: Stamp,
        now: Nanos,
    ) -> bool {
        if !self.may_leave(tier, block) {
            return false;
        }
        let Some(dirty) = self.unwritten(tier, block, source) else { return false };
        // An engine takes its slots back at any time.
        let waits = source.is_none() && self.tiers.above_shared(tier);
        // A flush, which spares younger blocks, counts the stores with enough room.
        if waits && younger == Stamp::MAX {
            return self.shared_stores.add(SharedStore { tier, block, point: false, younger });
        }
        let Some(set) = self.room_below(tier, block, dirty, younger, now) else { return false };
        if waits {
            self.abandon(&set);
            return self.shared_stores.add(SharedStore { tier, block, point: false, younger });
        }
        self.apply(&set, now);
        self.copy_down(tier, block, dirty, source, now);
        true
    }

    /// The layers of a block to store on the tier below, or `None`.
    pub(crate) fn unwritten(
        &mut self,
        tier: TierId,
        block: BlockId,
        source: Option<PrivateSlotId>,
    ) -> Option<Layers> {
        let have = match source {
            Some(private) => self.private_slots[private].layers,
            // A point is copied further before its blocks have arrived.
            None if self.points.several() => self.expected(tier, block),
            None => self.residency(tier, block).usable(),
        };
        let below = tier + 1;
        let mut dirty = Some(have);
        for lower in below..self.tiers.len() {
            dirty = dirty.and_then(|left| left.without(self.expected(lower, block)));
        }
        // Nothing to write, or dirty layers on both sides of clean layers.
        let dirty = dirty.filter(|dirty| !dirty.is_empty())?;
        self.forget_bad_copies(block);
        let residency = self.residency(below, block);
        // A range with a gap cannot be kept below.
        let joined = self.expected(below, block).join(dirty);
        let joins = joined
            .is_some_and(|joined| self.saves_compute(joined, |other| self.expected(other, block)));
        let worth = self.worth_writing(tier, block) && self.refused.may_write(block, below);
        let takes = residency.state != ResidencyState::Bad && !self.stuck(below, block);
        (takes && joins && worth).then_some(dirty)
    }

    /// The set that makes room for a block on the tier below, or `None` without enough room.
    pub(crate) fn room_below(
        &mut self,
        tier: TierId,
        block: BlockId,
        dirty: Layers,
        younger: Stamp,
        now: Nanos,
    ) -> Option<EvictionSet> {
        let below = tier + 1;
        let mut set = self.eviction_set_for(Cause::Ahead);
        self.guard(&mut set, below, block..block + 1);
        let fresh = self.expected(below, block).is_empty();
        // A slot with part of the block has room for the rest.
        let units = if fresh || self.tiers[below].spec.layer_slots {
            self.tiers.units(below, dirty)
        } else {
            0
        };
        let passes = self.transit(tier, below).is_none_or(|host| self.pass(&mut set, host));
        let fits = passes && self.room(&mut set, below, &[units], now);
        // A clean victim above the last tier costs nothing: its bytes are below.
        let costs = |v: &Victim| v.tier == self.tiers.last() || !matches!(v.fate, Fate::Clean);
        let young = |v: &Victim| self.node(v.block).access > younger;
        // A flush must not evict a younger block for an older block.
        if !fits || set.victims.iter().any(|v| costs(v) && young(v)) {
            self.abandon(&set);
            return None;
        }
        Some(set)
    }

    /// Starts the stores of `dirty`, into room already made. The source stays resident.
    pub(crate) fn copy_down(
        &mut self,
        tier: TierId,
        block: BlockId,
        dirty: Layers,
        source: Option<PrivateSlotId>,
        now: Nanos,
    ) {
        let each = self.tiers[tier].spec.layer_slots;
        // Without layer slots a single slot has all layers, and a single move copies them.
        let layers = if each { dirty } else { Layers::new(dirty.lo, dirty.lo + 1) };
        let slots: SmallVec<[Slot; 1]> = match source {
            Some(private) => layers.iter().map(|l| self.private_slot(private, l)).collect(),
            None => layers.iter().map(|layer| self.slot_of(tier, block, layer)).collect(),
        };
        let end = source.map_or(End::Resident, End::PrivateSlot);
        let slot = |at: u16| slots[if each { usize::from(at - dirty.lo) } else { 0 }];
        let source = |at| Endpoint { place: tier.into(), slot: slot(at), end };
        self.store(tier, block, dirty, now, source);
    }

    /// Writes the least valuable dirty blocks of a tier down before their slots are needed, while
    /// its free and clean slots are below its watermark `free_low`. The copies above stay valid.
    pub(crate) fn write_ahead_on(&mut self, tier: TierId, now: Nanos) {
        let (this, space) = (&self.tiers[tier], self.blocks.space(tier));
        let free = space.takeable();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share below one of a capacity below 2^32"
        )]
        let low = (f64::from(space.capacity()) * this.spec.free_low) as u64;
        // An eighth of slack keeps the preview from running at every call.
        if free + this.credit + low / 8 >= low || this.eviction.is_empty() {
            return;
        }
        let mut set = self.preview(tier);
        self.room(&mut set, tier, &[low], now);
        let ours = set.victims.iter().filter(|victim| victim.tier == tier);
        let clean = ours.map(|victim| u64::from(victim.blocks)).sum();
        self.carry_out_below(&set, tier, now);
        self.abandon(&set);
        self.tiers[tier].credit = clean;
    }

    /// Evicts a set's victims below `tier`, and only writes its victims on `tier`.
    fn carry_out_below(&mut self, set: &EvictionSet, tier: TierId, now: Nanos) {
        let shared = self.tiers.above_shared(tier);
        let mut changed = Vec::new();
        for victim in &set.victims {
            match victim.fate {
                // A store to a shared tier makes its room when it starts.
                Fate::Demote(_) if shared && victim.tier == tier => {
                    self.write_down(tier, victim.block, None, Stamp::MAX, now);
                }
                Fate::Demote(dirty) if victim.tier == tier => {
                    self.copy_down(tier, victim.block, dirty, None, now);
                }
                // Below the tier the victims make room for the copies, so they must go.
                _ if victim.tier > tier && !shared => {
                    self.evict(victim, set.cause, &mut changed, now);
                }
                _ => {}
            }
        }
        self.refresh_changed(&changed);
    }
}
