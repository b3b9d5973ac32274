//! Completion: takes the results of moves. A copy becomes valid only here.
//!
//! Invariant: a report about an ended move changes nothing. Slots that a failed move may still
//! access stay unused until it has ended on every rank. Cost: O(log moves) per report, plus the
//! leases that await it. A residency:
//!
//! ```text
//! Absent --expect--> Arriving --all landed--> Resident --load failed--> Bad
//!    ^                  | failed, none landed     |                       |
//!    +------------------+--------- evicted -------+-----------------------+
//! ```

use crate::block::{BlockId, Handle, Layers, LeaseId, MoveId, NO_SLOT, Place};
use crate::error::{Error, Result};
use crate::tier::ResidencyState;
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::consequence::{Consequence, Failure};
use crate::manager::kinds::Cause;
use crate::transfer::{End, MoveKind};
use crate::transfer::{InFlightMove, Leaves};

/// Result reported by an executor for moves.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    /// Whether the move succeeded.
    pub ok: bool,
    /// Number of arrived layers, in ascending order. `None` means all.
    pub layers_done: Option<u16>,
    /// The reporting tensor-parallel rank.
    pub rank: u32,
    /// Whether a failed move still runs. Its slots stay unused until a further report.
    pub hung: bool,
    /// Whether a failed move never started. Then neither source nor destination is to blame.
    pub cancelled: bool,
    /// Reason of a failure.
    pub error: Option<&'a str>,
}

impl Default for Outcome<'_> {
    fn default() -> Self {
        Self { ok: true, layers_done: None, rank: 0, hung: false, cancelled: false, error: None }
    }
}

/// Range of tokens missing at its planned place. Read the lease's plan and slots again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The concerned lease, or 0.
    pub lease: LeaseId,
    /// The block, or `None` for a partial block.
    pub block: Option<Handle>,
    /// First token on the lease's path.
    pub start: u64,
    /// The last token plus 1.
    pub stop: u64,
    /// Error text of the executor.
    pub reason: String,
}

/// Capacity of the list of failures for [`Manager::failed`].
pub const MOST_FAILED: usize = 4096;

impl Manager {
    /// Takes reports about moves. Returns the number of moves successfully ended by this call.
    ///
    /// # Errors
    /// [`Error::Config`] for an unissued move, an invalid rank or number of layers, or a
    /// contradiction of an earlier report. Nothing has changed then.
    pub fn complete(&mut self, ids: &[MoveId], outcome: &Outcome<'_>, now: Nanos) -> Result<usize> {
        self.open()?;
        for (at, &id) in ids.iter().enumerate() {
            self.check_report(id, outcome, &ids[..at])?;
        }
        let now = self.tick(now);
        let (mut ended, mut awaited) = (0, Vec::new());
        // With several ranks or partial results each move keeps its own progress.
        let plain = outcome.ok && outcome.layers_done.is_none() && self.settings.ranks == 1;
        let mut rest = ids;
        while let Some(&id) = rest.first() {
            let store = self.moves.get(id).is_none_or(|known| known.kind == MoveKind::Store);
            let together = if plain { self.complete_batch(rest, now) } else { 0 };
            let (these, others) = rest.split_at(together.max(1));
            if together > 0 || self.take_report(id, outcome, now) {
                ended += these.len();
                // No lease awaits a store.
                awaited.extend_from_slice(if store { &[] } else { these });
            }
            rest = others;
        }
        self.awaits.end(awaited);
        self.moves.unpark(now);
        self.continue_demotions(now);
        self.write_ahead(now);
        Ok(ended)
    }

    /// Takes a report about a move. Returns whether the move has successfully ended.
    fn take_report(&mut self, id: MoveId, outcome: &Outcome<'_>, now: Nanos) -> bool {
        let ranks = self.settings.ranks as usize;
        let Some(known) = self.moves.get_mut(id) else { return false };
        // Later reports of a failed move only end the move on a rank.
        if known.failed {
            self.end_rank(id, outcome, now);
        } else if outcome.ok {
            let len = known.layers.len();
            let rank = outcome.rank as usize;
            let done = outcome.layers_done.unwrap_or(len);
            known.progress.resize(ranks, 0);
            known.progress[rank] = known.progress[rank].max(done);
            if known.progress[rank] == len {
                known.done_ranks |= 1 << outcome.rank;
            }
            self.land(id);
            // Each rank has a part of every layer, so layers are valid only on all ranks.
            if self.all_ranks(id) {
                self.finish(id, now);
                return true;
            }
        } else {
            let reason = outcome.error.unwrap_or("the executor reported a failure").to_owned();
            // Other ranks, or a hung copy, may still write: landed layers are no longer valid.
            if outcome.hung || !self.ends(&self.moves[id], outcome) {
                self.revoke_landed(id);
            }
            let blame = !outcome.cancelled;
            let failure = Failure { id, reason, blame, silent: false, cause: None };
            self.consequences.push(Consequence::Fail(failure));
            self.carry_out();
            self.end_rank(id, outcome, now);
        }
        false
    }

    /// Takes the failures since the last call, at most the latest [`MOST_FAILED`]. Overwritten
    /// failures are counted in `failed_lost` of [`Manager::requested`].
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Invariant`].
    pub fn failed(&mut self) -> Result<Vec<Failed>> {
        self.open()?;
        Ok(std::mem::take(&mut self.failed).into())
    }

    /// Checks a report against the move and earlier reports, before any report is taken.
    fn check_report(&self, id: MoveId, outcome: &Outcome<'_>, before: &[MoveId]) -> Result<()> {
        if outcome.rank >= self.settings.ranks {
            return Err(Error::config(format!(
                "rank {} reported move {id}, there are {} ranks",
                outcome.rank, self.settings.ranks
            )));
        }
        if !self.moves.issued_id(id) {
            return Err(Error::config(format!("there is no move {id}")));
        }
        let Some(known) = self.moves.get(id) else {
            // An ended move: an equal report is ignored, a contradicting report is an error.
            return match self.moves.result(id) {
                Some(ok) if ok != outcome.ok => Err(Error::config(format!(
                    "move {id} was reported {} before",
                    if ok { "done" } else { "failed" }
                ))),
                _ => Ok(()),
            };
        };
        if !known.issued && !known.failed {
            return Err(Error::config(format!("move {id} was not handed out yet")));
        }
        // A dependency may end earlier in the same call.
        let early = known.deps.iter().find(|dep| {
            let ends = |m: &InFlightMove| before.contains(dep) && self.ends(m, outcome);
            self.moves.get(**dep).is_some_and(|m| !ends(m))
        });
        // A rank that reports in this order has read the source before it was written.
        if let (true, false, Some(dep)) = (outcome.ok, known.failed, early) {
            return Err(Error::config(format!(
                "rank {} reported move {id} done before move {dep}, which it waits for, had ended \
                 on all {} ranks",
                outcome.rank, self.settings.ranks
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

    /// Whether this report successfully ends a move.
    fn ends(&self, known: &InFlightMove, outcome: &Outcome<'_>) -> bool {
        let ranks = known.done_ranks | 1 << outcome.rank;
        ranks.count_ones() == self.settings.ranks
            && outcome.layers_done.is_none_or(|done| done == known.layers.len())
    }

    fn all_ranks(&self, id: MoveId) -> bool {
        self.moves[id].done_ranks.count_ones() == self.settings.ranks
    }

    /// Makes layers valid once they have arrived on all ranks.
    fn land(&mut self, id: MoveId) {
        let known = &self.moves[id];
        let done = known.progress.iter().copied().min().unwrap_or(0);
        if done <= known.landed {
            return;
        }
        let lo = known.layers.lo;
        let layers = Layers::new(lo + known.landed, lo + done);
        let (dst, lands_on) = (known.dst, known.lands_on());
        self.moves.get_mut(id).expect("seen").landed = done;
        // The block was removed after its lease had ended.
        let Some(block) = lands_on.and_then(|handle| self.trie().resolve(handle)) else {
            return;
        };
        let mut have = self.residency(dst, block).have;
        let Some(arrival) = self.arrival_mut(dst, block) else { return };
        arrival.landed.push(layers);
        let target = arrival.target;
        // The first valid layers must be at an end of the tier's range.
        let anchored = |layers: Layers| {
            if dst == 0 { layers.lo == 0 } else { layers.hi == target.hi || layers.lo == target.lo }
        };
        // Layers arrive out of order across moves: join adjacent ranges.
        loop {
            let next = arrival.landed.iter().position(|&landed| {
                if have.is_empty() { anchored(landed) } else { have.join(landed).is_some() }
            });
            let Some(at) = next else { break };
            have = have.join(arrival.landed.swap_remove(at)).expect("adjacent");
        }
        self.blocks.alter(dst, block, |residency| residency.have = have);
    }

    /// Ends a move after its success on all ranks.
    fn finish(&mut self, id: MoveId, now: Nanos) {
        let known = self.moves.remove(id).expect("in flight");
        self.count_move(&known, now);
        if known.kind == MoveKind::Store {
            self.refused.took(known.dst, 1);
        }
        self.end(&known, now);
        self.moves.ended(&[id], true);
    }

    /// Frees both ends of a stopped move, and settles their blocks.
    fn end(&mut self, known: &InFlightMove, now: Nanos) {
        let block = known.block.and_then(|handle| self.trie().resolve(handle));
        // The slot of the victim is free to write from here on.
        if let Some(Leaves { tier, slot, .. }) = known.leaves {
            self.blocks.drained(tier, slot);
        }
        for at in known.ends() {
            match (at.end, block) {
                (End::Resident, Some(block)) => {
                    self.blocks.end_use(at.place, block, known.id);
                    self.refresh_part(at.place, block);
                }
                (End::PrivateSlot(private), _) => self.unbusy_private(private),
                (End::Open, _) => self.blocks.end_touch(at.place, at.slot, known.id),
                (End::Resident | End::Leaving, _) => self.blocks.end_drain(at.place.tier, known.id),
            }
        }
        if let (End::Resident, Some(block)) = (known.to, block)
            && let Some(arrival) = self.arrival_mut(known.target(), block)
        {
            arrival.moves.retain(|id| *id != known.id);
        }
        if let Some(block) = block {
            for place in [known.source(), known.target()] {
                self.arrive_if_over(place, block, now);
            }
            // The move may have kept an unneeded block in the trie.
            let parent = self.trie().parent(block);
            self.prune(block);
            self.sweep(block);
            // An earlier block may have lost its last copy while this move kept it there.
            self.sweep_path(parent);
        }
    }

    /// Ends an arrival without remaining moves. A failed arrival waits until no move reads its
    /// landed layers.
    fn arrive_if_over(&mut self, place: Place, block: BlockId, now: Nanos) {
        let busy = self.residency(place, block).busy;
        let Some(arrival) = self.arrival(place, block) else { return };
        // All groups of a block are marked with the first.
        let marked = place.group == 0 && self.marked.contains(&(arrival.ready, place.tier, block));
        if arrival.moves.is_empty() && !marked && (!arrival.failed || busy == 0) {
            self.end_arrival(place, block, now);
        }
    }

    /// Ends an arrival: every layer has landed or failed.
    pub(crate) fn end_arrival(&mut self, place: impl Into<Place>, block: BlockId, now: Nanos) {
        let place = place.into();
        let tier = place.tier;
        let arrival = self.blocks.take_arrival(place, block).expect("arriving");
        let residency = self.residency(place, block);
        let mut have = if arrival.failed { residency.have } else { arrival.target };
        if arrival.failed && tier == 0 && self.one_slot(have) {
            // Every lease computes the block elsewhere, so a slot without its last layers is
            // useless here.
            self.count_loss(tier, block, Cause::Failed, now);
            have = Layers::NONE;
        }
        if residency.slot != NO_SLOT && have.is_empty() {
            self.blocks.give_slots(place, residency.slot, arrival.target, true);
        // The unlanded layers of a failed arrival return their slots.
        } else if residency.slot != NO_SLOT {
            for lost in
                [Layers::new(arrival.target.lo, have.lo), Layers::new(have.hi, arrival.target.hi)]
            {
                self.blocks.give_slots(place, residency.slot, lost, false);
            }
        }
        self.blocks.alter(place, block, |residency| {
            (residency.have, residency.state) = (have, ResidencyState::Resident);
            if have.is_empty() {
                (residency.state, residency.slot) = (ResidencyState::Absent, NO_SLOT);
            }
        });
        if place.group > 0 {
            self.blocks.list_released(place, block);
            return;
        }
        self.residency_changed(tier, block);
        if !have.is_empty() {
            self.write_through(tier, block, None, now);
        }
    }

    /// Ends a failed move on a rank. The rank no longer uses its slots unless the move hangs there.
    fn end_rank(&mut self, id: MoveId, outcome: &Outcome<'_>, now: Nanos) {
        let Some(known) = self.moves.get_mut(id) else { return };
        let ranks = if outcome.hung { &mut known.hung_ranks } else { &mut known.done_ranks };
        *ranks |= 1 << outcome.rank;
        let reported = known.done_ranks | known.hung_ranks;
        if self.all_ranks(id) {
            self.end_move(id, now);
        } else if reported.count_ones() == self.settings.ranks {
            self.release_hung_source(id);
        }
    }

    /// Makes the slot of a hung failed store writable for its holder. The store may never end, and
    /// its result is unused.
    fn release_hung_source(&mut self, id: MoveId) {
        let known = &self.moves[id];
        match (known.leaves, known.from) {
            (Some(Leaves { tier, slot, .. }), _) => {
                self.blocks.drained(tier, slot);
                self.moves.get_mut(id).expect("seen").leaves = None;
            }
            // With several groups, leases have slots only on the first tier.
            (None, End::Leaving) if known.src == 0 => self.blocks.end_drain(0, id),
            _ => return,
        }
        self.moves.release_waiters(id);
    }

    /// Ends a failed move on every rank.
    pub(crate) fn end_move(&mut self, id: MoveId, now: Nanos) {
        if let Some(known) = self.moves.remove(id) {
            self.end(&known, now);
            self.moves.ended(&[id], false);
            // Leases kept awaiting it while it could still write their slots.
            if known.kind != MoveKind::Store {
                self.awaits.end(vec![id]);
            }
        }
    }
}
