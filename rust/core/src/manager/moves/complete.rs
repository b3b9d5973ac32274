//! Completion: takes the results of moves, the only point at which a copy becomes valid.
//!
//! Invariant: a report about a move that has ended changes nothing; slots that a failed move may
//! still touch stay out of use until it has ended on every rank. Cost: O(log moves) per report,
//! plus the leases that await it. A residency:
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

/// Result that an executor reports for moves.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    /// Whether it went well.
    pub ok: bool,
    /// Number of its layers that have arrived, in ascending order; `None` means all.
    pub layers_done: Option<u16>,
    /// Which tensor-parallel rank reports.
    pub rank: u32,
    /// A failed move that still runs: its slots stay out of use until it is reported again.
    pub hung: bool,
    /// A failed move that never started: neither its source nor its destination is to blame.
    pub cancelled: bool,
    /// Why it failed.
    pub error: Option<&'a str>,
}

impl Default for Outcome<'_> {
    fn default() -> Self {
        Self { ok: true, layers_done: None, rank: 0, hung: false, cancelled: false, error: None }
    }
}

/// Range of tokens that will not be where a plan said; the lease's plan and slots must be read
/// again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The lease concerned; 0 if none is.
    pub lease: LeaseId,
    /// The block; `None` for a partial one.
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

    /// Takes one move's result. Returns whether it has ended well.
    fn take_report(&mut self, id: MoveId, outcome: &Outcome<'_>, now: Nanos) -> bool {
        let ranks = self.settings.ranks as usize;
        let Some(known) = self.moves.get_mut(id) else { return false };
        // Later reports of a failed move only say that a rank touches its slots no longer.
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
            // Layers are valid only on all ranks, since each rank has a part of them.
            if self.all_ranks(id) {
                self.finish(id, now);
                return true;
            }
        } else {
            let reason = outcome.error.unwrap_or("the executor reported a failure").to_owned();
            // Other ranks, or a hung copy, may still write: layers that have landed are not valid
            // any more.
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

    /// Takes the failures since the last call: the latest [`MOST_FAILED`]; overwritten ones are
    /// counted in `failed_lost` of [`Manager::requested`].
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Invariant`].
    pub fn failed(&mut self) -> Result<Vec<Failed>> {
        self.open()?;
        Ok(std::mem::take(&mut self.failed).into())
    }

    /// Checks one report against the move and earlier reports, before any is taken.
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
            // An ended move: a repeated report is fine, an opposite one is an error.
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

    /// Whether this report ends a move well.
    fn ends(&self, known: &InFlightMove, outcome: &Outcome<'_>) -> bool {
        let ranks = known.done_ranks | 1 << outcome.rank;
        ranks.count_ones() == self.settings.ranks
            && outcome.layers_done.is_none_or(|done| done == known.layers.len())
    }

    fn all_ranks(&self, id: MoveId) -> bool {
        self.moves[id].done_ranks.count_ones() == self.settings.ranks
    }

    /// Makes the layers valid that have arrived on all ranks.
    fn land(&mut self, id: MoveId) {
        let known = &self.moves[id];
        let done = known.progress.iter().copied().min().unwrap_or(0);
        if done <= known.landed {
            return;
        }
        let lo = known.layers.lo;
        let layers = Layers::new(lo + known.landed, lo + done);
        let (dst, here) = (known.dst, known.lands_on());
        self.moves.get_mut(id).expect("seen").landed = done;
        // The block was removed after its lease had ended.
        let Some(block) = here.and_then(|handle| self.trie().resolve(handle)) else {
            return;
        };
        let mut have = self.residency(dst, block).have;
        let Some(arrival) = self.arrival_mut(dst, block) else { return };
        arrival.landed.push(layers);
        let target = arrival.target;
        // The first valid layers are those at the end of the range that the tier must hold.
        let anchored = |layers: Layers| {
            if dst == 0 { layers.lo == 0 } else { layers.hi == target.hi || layers.lo == target.lo }
        };
        // Layers arrive out of order across moves: join what has become adjacent.
        loop {
            let next = arrival.landed.iter().position(|&landed| {
                if have.is_empty() { anchored(landed) } else { have.join(landed).is_some() }
            });
            let Some(at) = next else { break };
            have = have.join(arrival.landed.swap_remove(at)).expect("adjacent");
        }
        self.blocks.alter(dst, block, |here| here.have = have);
    }

    /// Ends a move that went well on all ranks.
    fn finish(&mut self, id: MoveId, now: Nanos) {
        let known = self.moves.remove(id).expect("in flight");
        self.count_move(&known, now);
        if known.kind == MoveKind::Store {
            self.refused.took(known.dst, 1);
        }
        self.end(&known, now);
        self.moves.ended(&[id], true);
    }

    /// Frees both ends of a move that no longer runs, and settles their blocks.
    fn end(&mut self, known: &InFlightMove, now: Nanos) {
        let block = known.block.and_then(|handle| self.trie().resolve(handle));
        // The slot of the victim is free to write from here on.
        if let Some(Leaves { tier, slot, .. }) = known.leaves {
            self.blocks.drained(tier, slot);
        }
        for at in known.ends() {
            match (at.end, block) {
                (End::Here, Some(block)) => {
                    self.blocks.end_use(at.place, block, known.id);
                    self.refresh_part(at.place, block);
                }
                (End::PrivateSlot(private), _) => self.unbusy_private(private),
                (End::Open, _) => self.blocks.end_touch(at.place, at.slot, known.id),
                (End::Here | End::Leaving, _) => self.blocks.end_drain(at.place.tier, known.id),
            }
        }
        if let (End::Here, Some(block)) = (known.to, block)
            && let Some(arrival) = self.arrival_mut(known.target(), block)
        {
            arrival.moves.retain(|id| *id != known.id);
        }
        if let Some(block) = block {
            for place in [known.source(), known.target()] {
                self.arrive_if_over(place, block, now);
            }
            // The move may have kept a block in the trie that nothing needs any more.
            let parent = self.trie().parent(block);
            self.prune(block);
            self.sweep(block);
            // A block before it may have lost its last copy while this move kept it there.
            self.sweep_path(parent);
        }
    }

    /// Ends an arrival that no move brings any more. A failed one waits until no move reads the
    /// layers that had landed.
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
        let here = self.residency(place, block);
        let mut have = if arrival.failed { here.have } else { arrival.target };
        if arrival.failed && tier == 0 && self.one_slot(have) {
            // Every lease computes the block elsewhere; a slot without its last layers is useless
            // here.
            self.count_loss(tier, block, Cause::Failed, now);
            have = Layers::NONE;
        }
        if here.slot != NO_SLOT && have.is_empty() {
            self.blocks.give_slots(place, here.slot, arrival.target, true);
        // Of a failed arrival the slots of layers that did not land return.
        } else if here.slot != NO_SLOT {
            for lost in
                [Layers::new(arrival.target.lo, have.lo), Layers::new(have.hi, arrival.target.hi)]
            {
                self.blocks.give_slots(place, here.slot, lost, false);
            }
        }
        self.blocks.alter(place, block, |here| {
            (here.have, here.state) = (have, ResidencyState::Resident);
            if have.is_empty() {
                (here.state, here.slot) = (ResidencyState::Absent, NO_SLOT);
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

    /// Ends a failed move on one rank, which no longer touches its slots unless it hangs there.
    fn end_rank(&mut self, id: MoveId, outcome: &Outcome<'_>, now: Nanos) {
        let Some(known) = self.moves.get_mut(id) else { return };
        let ranks = if outcome.hung { &mut known.hung_ranks } else { &mut known.done_ranks };
        *ranks |= 1 << outcome.rank;
        let reported = known.done_ranks | known.hung_ranks;
        if self.all_ranks(id) {
            self.end_move(id, now);
        } else if reported.count_ones() == self.settings.ranks {
            self.give_up_source(id);
        }
    }

    /// Lets the holder of a slot write it that a failed store still reads on ranks where it hangs:
    /// such a store may never end, and nothing uses what it reads from then on.
    fn give_up_source(&mut self, id: MoveId) {
        let known = &self.moves[id];
        match (known.leaves, known.from) {
            (Some(Leaves { tier, slot, .. }), _) => {
                self.blocks.drained(tier, slot);
                self.moves.get_mut(id).expect("seen").leaves = None;
            }
            // Of several groups: leases have slots of the first tier alone.
            (None, End::Leaving) if known.src == 0 => self.blocks.end_drain(0, id),
            _ => return,
        }
        self.moves.let_go(id);
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
