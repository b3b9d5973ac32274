//! Batch membership: computing requests, waiting requests, and their exit.
//!
//! Invariant: a request with a lease is in exactly one of `computing`, `waiting` and `ready`. Cost:
//! O(log requests) each, plus the manager's calls.

use kvtrie_core::{MoveId, Nanos, Result};
use smallvec::SmallVec;

use super::super::prefill::Prefill;
use super::Continuous;
use super::running::Running;
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;

impl Continuous {
    /// Add a request to the batch, or to `waiting` if it has pending moves.
    pub(super) fn enter_batch(&mut self, id: u64) {
        let Some(running) = self.running.get_mut(&id) else { return };
        if !running.prefill.ready() {
            for id_of_move in running.prefill.awaited() {
                self.waiting.entry(id_of_move).or_default().push(id);
            }
            return;
        }
        self.computing.insert(id);
        if running.prefill.work.done() {
            let context = running.join(self.decodes.count());
            self.decodes.join(id, context, running.due);
        } else {
            self.prefills.insert(id);
        }
    }

    /// Remove a request from the batch.
    pub(super) fn leave_batch(&mut self, id: u64) {
        self.computing.remove(&id);
        if let (false, Some(running)) = (self.prefills.remove(&id), self.running.get_mut(&id)) {
            let due = running.due;
            let context = running.part(self.decodes.count());
            self.decodes.leave(id, context, due);
        }
    }

    /// Make room for a due request. Without room, suspend the latest requests, possibly including
    /// this request.
    pub(super) fn make_room(&mut self, id: u64, machine: &mut Machine, now: Nanos) -> Result<()> {
        self.leave_batch(id);
        loop {
            let Some(running) = self.running.get_mut(&id) else { return Ok(()) };
            if running.reserve(machine, now)? {
                running.prefill.wait_again(machine)?;
                self.enter_batch(id);
                return Ok(());
            }
            let latest = self.computing.last().copied().filter(|&latest| latest > id);
            let latest = latest.unwrap_or(id);
            self.leave_batch(latest);
            if let Some(mut running) = self.running.remove(&latest) {
                machine.calls.suspend(running.prefill.lease, now)?;
                running.record.suspended += 1;
                self.queue.suspended.insert(latest, running);
            }
            self.step.preempted = true;
        }
    }

    /// Update the requests waiting for a move, after its end or its layer times are known.
    pub(super) fn on_move(&mut self, id: MoveId, now: Nanos, tell: impl Fn(&mut Prefill)) {
        let mut rest = SmallVec::new();
        for request in self.waiting.remove(&id).unwrap_or_default() {
            let Some(running) = self.running.get_mut(&request) else { continue };
            tell(&mut running.prefill);
            if running.prefill.ready() {
                if running.record.first_token.is_none() {
                    running.record.stalled += now - running.prefill.began();
                }
                self.ready.push(request);
            } else if running.prefill.awaits(id) {
                rest.push(request);
            }
        }
        if !rest.is_empty() {
            self.waiting.insert(id, rest);
        }
    }
    /// End a request. `end` is `None` for a refused request.
    pub(super) fn finish(
        &mut self,
        mut running: Running,
        machine: &mut Machine,
        end: Option<Nanos>,
        now: Nanos,
    ) -> Result<()> {
        if end.is_some() && self.limits.cache_answers {
            running.commit_answer(machine, now)?;
        }
        machine.calls.end(running.prefill.lease, &running.request, now)?;
        self.queue.blocked = false;
        if end.is_none() {
            self.refuse(&running.request, machine);
            return Ok(());
        }
        running.record.end = end;
        self.finished.push(running.record);
        Ok(())
    }

    pub(super) fn refuse(&mut self, request: &Request, machine: &Machine) {
        let Request { id, arrival, .. } = *request;
        let machine = machine.number;
        self.finished.push(Record { id, machine, arrival, ..Record::default() });
    }

    /// Commit the computed chunk of a request.
    pub(super) fn chunk_ends(&mut self, id: u64, machine: &mut Machine, now: Nanos) -> Result<()> {
        let Some(running) = self.running.get_mut(&id) else { return Ok(()) };
        running.chunk_ends(machine, now)?;
        if !running.prefill.work.done() {
            return Ok(());
        }
        // After a suspension, a prefill produces a later token than the first.
        running.record.first_token.get_or_insert(now);
        running.made += 1;
        running.joined = self.decodes.count();
        self.prefills.remove(&id);
        if running.made < running.request.output && self.relay.hands_over {
            self.hand_over(id);
        } else if running.made < running.request.output {
            self.enter_batch(id);
        } else {
            self.ends(id, machine, now)?;
        }
        Ok(())
    }

    /// End a request after its last token.
    pub(super) fn ends(&mut self, id: u64, machine: &mut Machine, now: Nanos) -> Result<()> {
        self.computing.remove(&id);
        match self.running.remove(&id) {
            Some(running) => self.finish(running, machine, Some(now), now),
            None => Ok(()),
        }
    }
}
