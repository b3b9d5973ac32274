//! Completion: the only point at which a copy counts.
//!
//! Invariant: a report about a move that has ended changes nothing; slots that a failed move may
//! still touch stay out of use until it has ended on every rank. Cost: O(log moves) per report,
//! plus the leases that awaited it.

use crate::block::{BlockId, Handle, Layers, LeaseId, MoveId, NO_MOVE, NO_SLOT, Slot, TierId};
use crate::error::{Error, Result};
use crate::tier::State;
use crate::time::Nanos;

use super::Manager;
use super::moves::{End, Move, MoveKind};

/// What an executor says of a move.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    /// Whether it went well.
    pub ok: bool,
    /// How many of its layers are there, in ascending order; `None` means all.
    pub layers_done: Option<u16>,
    /// Which tensor-parallel rank reports.
    pub rank: u32,
    /// A failed move that still runs: its slots stay out of use until it is reported again.
    pub hung: bool,
    /// Why it failed.
    pub error: Option<&'a str>,
}

impl Default for Outcome<'_> {
    fn default() -> Self {
        Self { ok: true, layers_done: None, rank: 0, hung: false, error: None }
    }
}

/// Tokens that will not be where a plan said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The lease concerned; 0 if none is.
    pub lease: LeaseId,
    /// The block; `None` for a partial one.
    pub block: Option<Handle>,
    /// First token on the lease's path.
    pub start: u64,
    /// One behind the last token.
    pub stop: u64,
    /// What the executor said.
    pub reason: String,
}

impl Manager {
    /// Takes reports about moves. Returns how many of them have ended well by this call.
    ///
    /// # Errors
    /// [`Error::Config`] for a move that was never handed out, a rank or a number of layers that
    /// does not exist, or a report that contradicts an earlier one; nothing has changed then.
    pub fn complete(&mut self, ids: &[MoveId], outcome: &Outcome<'_>, now: Nanos) -> Result<usize> {
        self.open()?;
        for (at, &id) in ids.iter().enumerate() {
            self.check_report(id, outcome, &ids[..at])?;
        }
        let now = self.tick(now);
        let mut ended = 0;
        for &id in ids {
            let Some(known) = self.moves.get_mut(&id) else { continue };
            if known.failed {
                if !outcome.hung {
                    self.end_rank(id, outcome.rank, now);
                }
            } else if outcome.ok {
                let len = known.layers.len();
                let rank = outcome.rank as usize;
                let done = outcome.layers_done.unwrap_or(len);
                known.progress[rank] = known.progress[rank].max(done);
                if known.progress[rank] == len {
                    known.done_ranks |= 1 << outcome.rank;
                }
                self.land(id);
                if self.all_ranks(id) {
                    self.finish(id, now);
                    ended += 1;
                }
            } else {
                let reason = outcome.error.unwrap_or("the executor reported a failure").to_owned();
                self.fail(id, &reason, now);
                if !outcome.hung {
                    self.end_rank(id, outcome.rank, now);
                }
            }
        }
        self.unpark();
        self.write_ahead(now);
        Ok(ended)
    }

    /// What failed since the last call.
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Invariant`].
    pub fn failed(&mut self) -> Result<Vec<Failed>> {
        self.open()?;
        Ok(std::mem::take(&mut self.failed))
    }

    fn check_report(&self, id: MoveId, outcome: &Outcome<'_>, before: &[MoveId]) -> Result<()> {
        if outcome.rank >= self.settings.ranks {
            return Err(Error::config(format!(
                "rank {} reported move {id}, there are {} ranks",
                outcome.rank, self.settings.ranks
            )));
        }
        if id == NO_MOVE || id >= self.next_move {
            return Err(Error::config(format!("there is no move {id}")));
        }
        let Some(known) = self.moves.get(&id) else {
            return match self.outcomes.get(&id) {
                Some(&ok) if ok != outcome.ok => Err(Error::config(format!(
                    "move {id} was reported {} before",
                    if ok { "done" } else { "failed" }
                ))),
                _ => Ok(()),
            };
        };
        if !known.issued && !known.failed {
            return Err(Error::config(format!("move {id} was not handed out yet")));
        }
        let early = known.deps.iter().find(|dep| {
            let reported =
                self.moves.get(dep).is_none_or(|m| m.done_ranks >> outcome.rank & 1 == 1);
            !reported && !before.contains(dep)
        });
        if let (true, false, Some(dep)) = (outcome.ok, known.failed, early) {
            return Err(Error::config(format!(
                "move {id} was reported done before move {dep}, which it waits for"
            )));
        }
        match outcome.layers_done {
            Some(done) if done > known.layers.len() => Err(Error::config(format!(
                "{done} layers of move {id} done, it has {}",
                known.layers.len()
            ))),
            _ => Ok(()),
        }
    }

    fn all_ranks(&self, id: MoveId) -> bool {
        self.moves[&id].done_ranks.count_ones() == self.settings.ranks
    }

    /// Layers that are there on all ranks become valid.
    fn land(&mut self, id: MoveId) {
        let known = &self.moves[&id];
        let done = known.progress.iter().copied().min().unwrap_or(0);
        if done <= known.landed {
            return;
        }
        let lo = known.layers.lo;
        let layers = Layers::new(lo + known.landed, lo + done);
        let dst = known.dst;
        let here = (known.to == End::Here).then_some(known.block).flatten();
        self.moves.get_mut(&id).expect("seen").landed = done;
        let Some(block) = here.and_then(|handle| self.trie.resolve(handle)) else { return };
        let Some(arrival) = self.arriving.get_mut(&(dst, block)) else { return };
        arrival.landed.push(layers);
        let target = arrival.target;
        let mut have = self.tiers[dst].here[block as usize].have;
        // The first layers to count are those at the end that the tier must hold.
        let anchored = |layers: Layers| {
            if dst == 0 { layers.lo == 0 } else { layers.hi == target.hi || layers.lo == target.lo }
        };
        loop {
            let next = arrival.landed.iter().position(|&landed| {
                if have.is_empty() { anchored(landed) } else { have.join(landed).is_some() }
            });
            let Some(at) = next else { break };
            have = have.join(arrival.landed.swap_remove(at)).expect("adjacent");
        }
        self.residency_mut(dst, block).have = have;
    }

    /// A move has ended well on all ranks.
    fn finish(&mut self, id: MoveId, now: Nanos) {
        let known = self.moves.remove(&id).expect("under way");
        let bytes = self.settings.layer_bytes * u64::from(known.layers.len());
        let took = now.saturating_sub(known.started);
        self.tiers[known.src].stats.bytes_read += bytes;
        self.tiers[known.dst].stats.bytes_written += bytes;
        self.tiers[known.dst].stats.move_ns += took;
        if let Some((tier, slot)) = known.leaves {
            self.tiers[tier].space.drained(slot);
        }
        self.end(&known, now);
        self.remember(id, true);
        for other in self.moves.values_mut() {
            other.deps.retain(|dep| *dep != id);
            if other.after == id && !other.issued {
                other.after = NO_MOVE;
            }
        }
        for lease in self.leases.values_mut() {
            lease.awaits.remove(&id);
        }
    }

    /// The endpoints of a move that no longer runs.
    fn end(&mut self, known: &Move, now: Nanos) {
        let block = known.block.and_then(|handle| self.trie.resolve(handle));
        for (tier, end) in [(known.src, known.from), (known.dst, known.to)] {
            match (end, block) {
                (End::Here, Some(block)) => {
                    self.residency_mut(tier, block).busy -= 1;
                    self.refresh_on(tier, block);
                }
                (End::Own(own), _) => self.unbusy_own(own),
                _ => {}
            }
        }
        if let (Some((tier, _)), true, Some(block)) = (known.leaves, known.returned, block) {
            self.residency_mut(tier, block).busy -= 1;
            self.refresh_on(tier, block);
        }
        if let (End::Here, Some(block)) = (known.to, block)
            && let Some(arrival) = self.arriving.get_mut(&(known.dst, block))
        {
            arrival.moves.retain(|id| *id != known.id);
        }
        for tier in [known.src, known.dst] {
            if let Some(block) = block {
                self.settle_if_over(tier, block, now);
            }
        }
        if let Some(block) = block {
            let parent = self.trie.parent(block);
            self.prune(block);
            self.sweep(block);
            if let Some(parent) = parent {
                self.sweep(parent);
            }
        }
    }

    /// Settles an arrival that no move brings any more. What failed is cleared away only when
    /// nobody reads the part that had landed.
    fn settle_if_over(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        let busy = self.residency(tier, block).busy;
        let Some(arrival) = self.arriving.get(&(tier, block)) else { return };
        let marked = self.marked.contains(&(arrival.ready, tier, block));
        if arrival.moves.is_empty() && !marked && (!arrival.failed || busy == 0) {
            self.settle(tier, block, now);
        }
    }

    /// Everything that was to arrive has landed or failed.
    pub(super) fn settle(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        let arrival = self.arriving.remove(&(tier, block)).expect("arriving");
        let here = self.residency(tier, block);
        let have = if arrival.failed { here.have } else { arrival.target };
        let lost = arrival.target.without(have).unwrap_or(Layers::NONE);
        if !lost.is_empty() && here.slot != NO_SLOT {
            self.give_slots(tier, here.slot, lost, have.is_empty());
        }
        let residency = self.residency_mut(tier, block);
        residency.have = have;
        residency.state = State::Resident;
        if have.is_empty() {
            residency.state = State::Absent;
            residency.slot = NO_SLOT;
        }
        self.presence_changed(tier, block);
        if !have.is_empty() {
            self.write_through(tier, block, None, now);
        }
    }

    /// A move will not bring what it should. Moves that depend on it fail with it.
    fn fail(&mut self, id: MoveId, reason: &str, now: Nanos) {
        // A move that depends on two may have failed with the other one.
        let Some(known) = self.moves.get_mut(&id).filter(|known| !known.failed) else { return };
        known.failed = true;
        let known = known.clone();
        self.queue.retain(|queued| *queued != id);
        self.parked.remove(&id);
        self.tiers[known.dst].stats.failed += 1;
        let dependents: Vec<MoveId> = self
            .moves
            .values()
            .filter(|other| other.deps.contains(&id) && !other.failed)
            .map(|other| other.id)
            .collect();
        for dependent in dependents {
            // It never started: executors wait for `after`.
            self.fail(dependent, &format!("move {id} before it failed: {reason}"), now);
            self.end_move(dependent, now);
        }
        let block = known.block.and_then(|handle| self.trie.resolve(handle));
        if let (End::Here, Some(block)) = (known.to, block)
            && let Some(arrival) = self.arriving.get_mut(&(known.dst, block))
        {
            arrival.failed = true;
        }
        if let Some(block) = block {
            match known.kind {
                MoveKind::Store => self.store_failed(&known, block, now),
                MoveKind::Load => self.load_failed(&known, block),
                MoveKind::Copy => {}
            }
        }
        self.replan(&known, reason, now);
        if let Some(block) = block {
            self.sweep(block);
        }
    }

    /// The bytes of a source could not be delivered; it serves nobody until it is evicted.
    fn load_failed(&mut self, known: &Move, block: BlockId) {
        let waited = known.deps.iter().any(|dep| self.moves.get(dep).is_none_or(|m| m.failed));
        let here = self.residency(known.src, block);
        if known.from == End::Here && known.src > 0 && !waited && here.state == State::Resident {
            self.residency_mut(known.src, block).state = State::Bad;
            self.refresh_on(known.src, block);
        }
    }

    /// The victim of a failed store stays where it was.
    fn store_failed(&mut self, known: &Move, block: BlockId, now: Nanos) {
        self.nodes[block as usize].unwritable = true;
        let Some((tier, slot)) = known.leaves else { return };
        let promised = self.tiers[tier].space.undrain(slot);
        let mut back = self.can_return(tier, block, known.layers);
        if promised {
            back = back && self.replace_promised(tier, slot, block, now);
            if !back {
                return;
            }
        }
        if !back {
            self.tiers[tier].space.give(slot);
            return;
        }
        let whole = !self.tiers[tier].spec.layer_slots;
        let here = self.residency(tier, block);
        let have = here.have.join(known.layers).expect("it can return");
        let row = match (whole, here.slot) {
            (true, _) => slot,
            (false, NO_SLOT) => self.tiers[tier].space.new_row(),
            (false, row) => row,
        };
        if !whole {
            self.tiers[tier].space.set(row, known.layers.lo, slot);
        }
        // A store that hangs still reads the slot: it keeps the copy busy until it ends.
        let residency = self.residency_mut(tier, block);
        residency.slot = row;
        residency.have = have;
        residency.state = State::Resident;
        residency.busy += 1;
        self.moves.get_mut(&known.id).expect("under way").returned = true;
        self.presence_changed(tier, block);
    }

    fn can_return(&self, tier: TierId, block: BlockId, layers: Layers) -> bool {
        let here = self.residency(tier, block);
        match here.state {
            State::Absent => !self.tiers[tier].spec.layer_slots || tier > 0 || layers.lo == 0,
            State::Resident => {
                self.tiers[tier].spec.layer_slots
                    && here.have.meet(layers).is_empty()
                    && here.have.join(layers).is_some()
            }
            State::Arriving | State::Bad => false,
        }
    }

    /// Finds another slot for the holder of one that goes back to its block. Without room the
    /// holder keeps it, and the block is lost.
    fn replace_promised(&mut self, tier: TierId, slot: Slot, block: BlockId, now: Nanos) -> bool {
        let layer_slots = self.tiers[tier].spec.layer_slots;
        let holder = self.owns.iter().find_map(|(&id, own)| {
            if own.tier != tier || own.slot == NO_SLOT {
                return None;
            }
            if !layer_slots {
                return (own.slot == slot).then_some((id, 0));
            }
            let at = self.tiers[tier].space.row(own.slot).iter().position(|&s| s == slot)?;
            Some((id, u16::try_from(at).unwrap_or(u16::MAX)))
        });
        let Some((holder, layer)) = holder else { return false };
        let mut draft = self.draft();
        // The block itself must stay as it is, or its layers would not fit together again.
        self.guard(&mut draft, tier, block);
        if !self.room(&mut draft, tier, 1, now) {
            self.abandon(&draft);
            return false;
        }
        self.apply(&draft, now);
        let grant = self.tiers[tier].space.take().expect("room was made");
        if layer_slots {
            let row = self.owns[&holder].slot;
            self.tiers[tier].space.set(row, layer, grant.slot);
        } else {
            self.owns.get_mut(&holder).expect("found").slot = grant.slot;
        }
        true
    }

    /// A rank no longer touches the slots of a failed move.
    fn end_rank(&mut self, id: MoveId, rank: u32, now: Nanos) {
        if let Some(known) = self.moves.get_mut(&id) {
            known.done_ranks |= 1 << rank;
            if self.all_ranks(id) {
                self.end_move(id, now);
            }
        }
    }

    fn end_move(&mut self, id: MoveId, now: Nanos) {
        if let Some(known) = self.moves.remove(&id) {
            self.end(&known, now);
            self.remember(id, false);
        }
    }

    /// Keeps the outcome of recent moves, so that a contradiction is noticed.
    fn remember(&mut self, id: MoveId, ok: bool) {
        const KEPT: usize = 4096;
        self.outcomes.insert(id, ok);
        if self.outcomes.len() > KEPT {
            self.outcomes.pop_first();
        }
    }

    /// Every lease that awaited a failed move computes the block instead.
    fn replan(&mut self, known: &Move, reason: &str, now: Nanos) {
        let concerned: Vec<LeaseId> = self
            .leases
            .values()
            .filter(|lease| lease.awaits.contains(&known.id))
            .map(|lease| lease.id)
            .collect();
        if concerned.is_empty() {
            self.failed.push(Failed {
                lease: NO_MOVE,
                block: known.block,
                start: 0,
                stop: 0,
                reason: reason.to_owned(),
            });
        }
        for id in concerned {
            self.lease_mut(id).awaits.remove(&known.id);
            let (start, stop) = match known.kind {
                MoveKind::Copy => self.lose_tail(id),
                _ => self.compute_instead(id, known, now),
            };
            if start < stop {
                let reason = reason.to_owned();
                self.failed.push(Failed { lease: id, block: known.block, start, stop, reason });
            }
        }
    }
}
