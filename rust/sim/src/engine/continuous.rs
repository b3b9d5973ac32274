//! Continuous engine: computes all requests with blocks together, step by step.
//!
//! A step has a token per decoding request, then prefill chunks in arrival order, up to the token
//! budget. If there is no room for a token, the latest request is suspended. Consecutive
//! decode-only steps are one event, up to the next request end, full block or external event.
//! Invariant: merged steps take exactly as long as separate steps. Cost: O(log requests) per join,
//! leave or full block, and one cost-model term per step.

mod batch;
mod decodes;
mod queue;
mod relay;
mod running;
mod step;

use std::collections::BTreeSet;
use std::ops::Range;

use kvtrie_core::{MoveId, Nanos, Result};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{Engine, Limits, Service, Wait};
use crate::event::Kind;
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;
use crate::transfer::Entered;
use decodes::Decodes;
use queue::Queue;
use relay::Relay;
pub use relay::{Handoff, Pull};
use running::Running;
use step::Step;

/// Engine with continuous batching.
#[derive(Debug)]
pub struct Continuous {
    service: Service,
    limits: Limits,
    queue: Queue,
    /// Requests with a lease, by id. Ids are in arrival order.
    running: FxHashMap<u64, Running>,
    /// Running requests without pending moves. The last is suspended first.
    computing: BTreeSet<u64>,
    /// Requests of `computing` with unfinished prefills.
    prefills: BTreeSet<u64>,
    decodes: Decodes,
    /// Requests waiting for a move, by move.
    waiting: FxHashMap<MoveId, SmallVec<[u64; 2]>>,
    /// Requests with all moves done, until the next step begins.
    ready: Vec<u64>,
    step: Step,
    relay: Relay,
    due: Vec<(Kind, Nanos)>,
    finished: Vec<Record>,
}

impl Continuous {
    /// Create an idle engine.
    #[must_use]
    pub fn new(service: Service, limits: Limits) -> Self {
        Self {
            service,
            limits,
            queue: Queue::default(),
            running: FxHashMap::default(),
            computing: BTreeSet::new(),
            prefills: BTreeSet::new(),
            decodes: Decodes::default(),
            waiting: FxHashMap::default(),
            ready: Vec::new(),
            step: Step::default(),
            relay: Relay::default(),
            due: Vec::new(),
            finished: Vec::new(),
        }
    }

    /// Add a planned request to the batch, and to the current step if ready.
    fn take_in(&mut self, id: u64, running: Running, now: Nanos) {
        self.running.insert(id, running);
        self.enter_batch(id);
        self.take_chunk(id, now);
    }

    /// Add the next chunk of a prefill to the current step.
    fn take_chunk(&mut self, id: u64, now: Nanos) {
        if let (true, Some(running)) = (self.prefills.contains(&id), self.running.get_mut(&id)) {
            self.step.take(id, running, now);
        }
    }

    /// Resume suspended requests while there is room.
    fn resume(&mut self, machine: &mut Machine, now: Nanos) -> Result<()> {
        while self.open() {
            let Some((id, mut running)) = self.queue.suspended.pop_first() else { break };
            if running.resume(&self.service, machine, now)? {
                self.take_in(id, running, now);
            } else if self.stuck(machine, now)? {
                self.finish(running, machine, None, now)?;
            } else {
                self.queue.suspended.insert(id, running);
                self.queue.blocked = true;
            }
        }
        Ok(())
    }

    /// Whether no room can become free: no request holds blocks and no move is pending.
    fn stuck(&self, machine: &mut Machine, now: Nanos) -> Result<bool> {
        machine.take(now)?;
        let held = !self.running.is_empty() || !self.relay.handed_over.is_empty();
        Ok(!held && machine.executor.idle())
    }

    /// Whether the current step may admit requests.
    fn open(&self) -> bool {
        let held = self.running.len() as u64;
        let full = held >= self.limits.max_running || self.step.budget == 0;
        !(self.step.runs() || self.step.preempted || self.queue.blocked || full)
    }

    /// End merged decode steps with the running step, because of an external event.
    fn interrupt(&mut self, now: Nanos) {
        if !self.step.runs() {
            self.due.push((Kind::StepBegins, now));
        } else if let Some(end) = self.step.cut(&self.decodes, &*self.service.cost, now) {
            self.due.push((Kind::StepEnds, end));
        }
    }
}

impl Engine for Continuous {
    fn push(&mut self, request: Request, now: Nanos) {
        // With queued requests or without a free place, the request is admitted when one of them
        // makes room.
        let first = self.queue.len() == 0;
        self.queue.fresh.push_back(request);
        if first && (self.running.len() as u64) < self.limits.max_running {
            self.interrupt(now);
        }
    }

    fn load(&self) -> u64 {
        self.queue.len() + (self.running.len() + self.relay.handed_over.len()) as u64
    }

    fn next(&self) -> Option<&Request> {
        self.queue.fresh.front()
    }

    fn head(&self, _: Nanos) -> Option<&Request> {
        self.next().filter(|_| self.open() && self.queue.suspended.is_empty())
    }

    fn step_begins(&mut self, machine: &mut Machine, now: Nanos) -> Result<()> {
        if self.step.runs() {
            return Ok(());
        }
        self.step.clear(self.limits.token_budget);
        self.queue.blocked &= !(self.running.is_empty() && self.relay.handed_over.is_empty());
        self.ready.sort_unstable();
        for id in std::mem::take(&mut self.ready) {
            if let Some(running) = self.running.get_mut(&id) {
                running.arrived(machine, now)?;
            }
            self.enter_batch(id);
        }
        for id in self.decodes.finished() {
            // An earlier request may have suspended it.
            if self.computing.contains(&id) {
                self.make_room(id, machine, now)?;
            }
        }
        self.step.budget -= self.decodes.members();
        for id in self.prefills.iter().copied().collect::<Vec<_>>() {
            self.take_chunk(id, now);
        }
        self.resume(machine, now)?;
        self.pull(machine, now)?;
        machine.take(now)
    }

    fn begin(&mut self, machine: &mut Machine, fetched: Range<usize>, now: Nanos) -> Result<bool> {
        let Some(request) = self.queue.fresh.pop_front() else { return Ok(false) };
        if !Running::fits(&request, machine) {
            self.refuse(&request, machine);
            return Ok(true);
        }
        match Running::begin(request, &self.service, machine, &fetched, now)? {
            Ok(running) => self.take_in(running.request.id, running, now),
            Err(request) if self.stuck(machine, now)? => self.refuse(&request, machine),
            Err(request) => {
                self.queue.fresh.push_front(request);
                self.queue.blocked = true;
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn go_on(&mut self, now: Nanos) {
        if self.step.runs() {
            return;
        }
        // Suspended requests retry with the next step.
        let one_by_one = self.limits.token_by_token || self.step.preempted;
        let begun = self.step.begin(&self.decodes, &*self.service.cost, one_by_one, now);
        if let Some((end, stalled)) = begun {
            self.due.push((Kind::StepEnds, end));
            for id in &self.step.chunks {
                if let (true, Some(running)) = (stalled > 0, self.running.get_mut(id)) {
                    running.record.stalled += stalled;
                }
            }
        } else if self.step.preempted {
            self.due.push((Kind::StepBegins, now));
        }
    }

    fn wake(&mut self, now: Nanos) {
        self.interrupt(now);
    }

    fn entered(&mut self, entered: &[Entered], now: Nanos) {
        if self.service.wait == Wait::All {
            return;
        }
        for one in entered {
            self.on_move(one.id, now, |prefill| prefill.entered(std::slice::from_ref(one)));
        }
        if !self.ready.is_empty() {
            self.interrupt(now);
        }
    }

    fn ended(&mut self, moves: &[MoveId], now: Nanos) {
        for &id in moves {
            self.on_move(id, now, |prefill| prefill.ended(&[id]));
        }
        // Completed moves also free slots. While steps run, only finished requests free enough of
        // them to matter.
        let starved = !self.step.runs() && self.queue.len() > 0;
        self.queue.blocked &= !starved;
        if starved || !self.ready.is_empty() {
            self.interrupt(now);
        }
    }

    fn step_ends(&mut self, machine: &mut Machine, now: Nanos) -> Result<Option<Nanos>> {
        let Some((began, steps)) = self.step.end(now) else { return Ok(None) };
        self.decodes.advance(steps);
        for id in self.decodes.finished() {
            let count = self.decodes.count();
            if self.running.get(&id).is_some_and(|running| running.ended(count)) {
                self.leave_batch(id);
                self.ends(id, machine, now)?;
            }
        }
        for id in std::mem::take(&mut self.step.chunks) {
            self.chunk_ends(id, machine, now)?;
        }
        self.due.push((Kind::StepBegins, now));
        machine.take(now)?;
        Ok(Some(began))
    }

    fn relay(&mut self) -> Option<&mut Self> {
        Some(self)
    }

    fn take_wakeups(&mut self) -> Vec<(Kind, Nanos)> {
        std::mem::take(&mut self.due)
    }

    fn take_finished(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.finished)
    }
}
