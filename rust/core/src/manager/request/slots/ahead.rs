//! Stores ahead: copies of blocks to the next tier before their lease commits them.
//!
//! An engine that owns the first tier requests these stores before it computes the blocks, copies
//! each computed block, and commits afterwards: commit then adopts the copy as the block's
//! residency instead of starting a second store. Until then a copy belongs to no block. Invariant:
//! a copy is a private slot of the second tier. A row here holds it together with its source slot
//! of the lease, by the engine's slot number. The row is removed with its source slot, with its
//! move's failure and with its plan. Cost: O(log n) per block, and per victim. A copy's life:
//!
//! ```text
//! store_ahead --> in flight --> whole --commit--> residency
//!                   |  |          |
//!                   |  +--commit--+-----------> arrival of the block
//!                   |             |
//!                   +-- fail, drop_ahead, release, suspend --> free, once no rank writes it
//! ```

use std::ops::Range;

use smallvec::smallvec;

use crate::arrival::{Arrival, MoveIds};
use crate::block::{BlockId, Layers, LeaseId, MoveId, NO_SLOT, Structure, TierId};
use crate::error::{Error, Result};
use crate::private_slots::PrivateSlotId;
use crate::tier::{Kind, ResidencyState};
use crate::time::Nanos;

use crate::manager::consequence::Consequence;
use crate::manager::evict::set::Fate;
use crate::manager::kinds::{Ahead, Cause};
use crate::manager::request::life::lease::TailFrom;
use crate::manager::request::slots::lease_slots::OpenSlot;
use crate::manager::{Manager, moves};
use crate::transfer::{End, Endpoint, MoveKind};

/// Source tier and destination tier of the copies.
const FROM: TierId = 0;
const INTO: TierId = 1;

impl Manager {
    /// Starts the stores of blocks after a lease's path, before their commit.
    ///
    /// The blocks are `blocks.start` to before `blocks.end`, or all of them, and the engine must
    /// have named their slots. The moves may be carried out as soon as these slots are written, and
    /// must be carried out before they are overwritten. Stops at the first block without
    /// immediately free room. Starts no store if a commit would not store at once either, or to a
    /// disk or a remote tier. Returns the moves.
    ///
    /// # Errors
    /// [`Error::Config`] if the first tier is not the engine's, or the range has blocks without
    /// named slots after the path.
    pub fn store_ahead(
        &mut self,
        id: LeaseId,
        blocks: Option<Range<usize>>,
        now: Nanos,
    ) -> Result<Vec<MoveId>> {
        let lease = self.active(id)?;
        if !self.tiers.engine_owned() {
            return Err(Error::config("store_ahead on a first tier whose owner is not 'engine'"));
        }
        let known = lease.path.len();
        let open = || lease.groups[0].written.slots().filter_map(OpenSlot::private);
        let named = |private: &PrivateSlotId| self.private_slots[*private].slot != NO_SLOT;
        let end = known + open().take_while(named).count();
        let blocks = blocks.unwrap_or(known..end);
        if blocks.start > blocks.end || blocks.start < known || blocks.end > end {
            return Err(Error::config(format!(
                "store_ahead of blocks {} to before {}, lease {id} has committed {known} and has \
                 slots up to before {end}",
                blocks.start, blocks.end
            )));
        }
        let usable = matches!(lease.tail_from, TailFrom::OpenSlot) && self.stores_ahead();
        let parent = lease.path.blocks().last().copied();
        let sources: Vec<_> = open().collect();
        let now = self.tick(now);
        let mut all = Vec::new();
        for at in if usable { blocks } else { 0..0 } {
            let stored =
                |at: usize| self.ahead.contains_key(&self.private_slots[sources[at - known]].slot);
            // Leases that share a slot store it once.
            if stored(at) {
                continue;
            }
            let before = (at > known).then(|| stored(at - 1));
            if !self.will_follow(id, parent, before) || !self.make_room_ahead(parent, now) {
                break;
            }
            let Some(by) = self.begin_ahead(id, sources[at - known], now) else { break };
            all.push(by);
        }
        Ok(all)
    }

    /// Cancels the uncommitted stores of [`Manager::store_ahead`] for a lease: the blocks will not
    /// be written. A slot that a rank may still write stays unused until the move has ended there.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn drop_ahead(&mut self, id: LeaseId, now: Nanos) -> Result<()> {
        self.lease(id)?;
        self.tick(now);
        self.take_back(id);
        Ok(())
    }

    /// Cancels a lease's stores ahead at once, within a different call.
    pub(crate) fn take_back(&mut self, id: LeaseId) {
        self.find_taken_back(id);
        self.carry_out();
    }

    /// Makes the copy ahead of a private slot the residency of the slot's block, if the block has
    /// none. Returns whether it did.
    pub(crate) fn adopt_ahead(
        &mut self,
        block: BlockId,
        source: PrivateSlotId,
        now: Nanos,
    ) -> bool {
        let Some(ahead) = self.remove_ahead(source) else { return false };
        let residency = self.residency(INTO, block);
        // Below a missing parent the copy would be a hole.
        if residency.state != ResidencyState::Absent || !self.worth_writing(FROM, block) {
            self.consequences.push(Consequence::GiveBack(ahead));
            self.carry_out();
            return false;
        }
        self.meter.tier(INTO).demoted += 1;
        let Ahead { copy, by, .. } = ahead;
        if self.moves.contains(by) {
            self.arrive_ahead(block, copy, by);
        } else {
            self.install(INTO, block, copy);
            self.write_through(INTO, block, None, now);
        }
        true
    }

    /// Redirects the move of a copy ahead to a block.
    fn arrive_ahead(&mut self, block: BlockId, copy: PrivateSlotId, by: MoveId) {
        let handle = self.trie().handle(block);
        let known = self.moves.get_mut(by).expect("in flight");
        (known.to, known.block) = (End::Resident, Some(handle));
        let (landed, first, ready) = (known.landed, known.first, known.ready);
        let slot = self.private_slots.take(copy).slot;
        let arrival = Arrival::new(self.all_layers(), smallvec![by], first, ready);
        self.blocks.begin_arrival(INTO, block, slot, arrival);
        if landed > 0 {
            self.blocks.alter(INTO, block, |residency| residency.have = Layers::new(0, landed));
        }
        self.residency_changed(INTO, block);
    }

    /// Whether a commit stores new blocks at once, by moves without keys.
    fn stores_ahead(&self) -> bool {
        self.tiers.writes_through(FROM)
            && self.tiers[FROM].spec.admit_after <= 1
            && !matches!(self.tiers[INTO].spec.kind, Kind::Disk | Kind::Remote)
            && !self.tiers[INTO].spec.kept
    }

    /// Whether a copy would not be a hole of a leaf-only scope: it follows the last block of the
    /// path, or a block stored ahead too.
    fn will_follow(&self, id: LeaseId, parent: Option<BlockId>, before: Option<bool>) -> bool {
        if self.scopes.get(self.leases[&id].scope_id).structure == Structure::Holes {
            return true;
        }
        match (before, parent) {
            (Some(before), _) => before,
            (None, Some(parent)) => self.missing(parent).is_empty(),
            (None, None) => true,
        }
    }

    /// Makes room for a copy that can be written at once, without evicting the parent block.
    fn make_room_ahead(&mut self, parent: Option<BlockId>, now: Nanos) -> bool {
        let free = self.blocks.free(INTO);
        if free > self.transit_reserve(INTO) {
            return true;
        }
        let mut set = self.eviction_set_for(Cause::Ahead);
        if let Some(parent) = parent {
            self.guard(&mut set, INTO, parent..parent + 1);
        }
        let fits = self.room(&mut set, INTO, &[1], now);
        // A slot is free too late if its victim must be written down first.
        let clean = |fate: Fate| !matches!(fate, Fate::Demote(_));
        let at_once = set.victims.iter().any(|v| v.tier == INTO && clean(v.fate));
        if !fits || (free == 0 && !at_once) {
            self.abandon(&set);
            return false;
        }
        self.apply(&set, now);
        // A victim may have been its last child there.
        if let Some(parent) = parent {
            self.refresh_on(INTO, parent);
        }
        self.blocks.free(INTO) > 0
    }

    /// Starts the copy from a private slot into free room. Returns `None` if a move still reads the
    /// room, a former page of a different group.
    fn begin_ahead(&mut self, id: LeaseId, source: PrivateSlotId, now: Nanos) -> Option<MoveId> {
        let layers = self.all_layers();
        let copy = self.new_private(INTO, layers);
        if self.points.several() && !self.private_waits(copy).is_empty() {
            self.unref_private(copy);
            self.carry_out();
            return None;
        }
        let end = |tier: TierId, private| {
            Endpoint::private(tier, self.private_slots[private].slot, private)
        };
        let (src, dst) = (end(FROM, source), end(INTO, copy));
        let store = moves::NewMove {
            kind: MoveKind::Store,
            lease: id,
            block: None,
            src,
            dst,
            layers,
            tokens: self.settings.block_tokens,
            deps: MoveIds::new(),
        };
        let by = self.add_move(store, now);
        self.ahead.insert(src.slot, Ahead { source, copy, by });
        Some(by)
    }
}
