//! Serial engine: a single request at a time, from its first load to its last token.
//!
//! Invariant: requests start in arrival order. Cost: a few events per request. Decoding is one step
//! for any number of tokens.

use std::collections::VecDeque;
use std::ops::Range;

use kvtrie_core::{LeaseId, MoveId, Nanos, Result};

use super::prefill::{Prefill, pipelined};
use super::{Engine, Service, Wait};
use crate::cost::nanos;
use crate::event::Kind;
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;
use crate::transfer::Entered;

/// Progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Waiting for loads, or for a known end time.
    Loading,
    Prefill,
    Decode,
}

/// The running request.
#[derive(Debug)]
struct Running {
    request: Request,
    prefill: Prefill,
    /// Computation time of the prefill.
    compute: Nanos,
    record: Record,
    phase: Phase,
    /// Start of the current step.
    step: Nanos,
}

impl Running {
    /// End of the prefill if its step starts now; `None` while moves are pending.
    fn end(&self, wait: Wait, now: Nanos) -> Option<Nanos> {
        let Self { prefill, compute, .. } = self;
        prefill.ready().then(|| match wait {
            Wait::All => now.saturating_add(*compute),
            // Computation continues from the start of the request, layer after layer.
            Wait::Layer | Wait::Step => pipelined(prefill.began(), *compute, prefill.arrivals()),
        })
    }
}

/// Engine for a single request at a time.
#[derive(Debug)]
pub struct Serial {
    service: Service,
    queue: VecDeque<Request>,
    running: Option<Running>,
    /// Finished requests with blocks kept, oldest first.
    held: VecDeque<(LeaseId, Request)>,
    /// Number of moves to end before the first queued request retries; 0 if it is not blocked.
    blocked: u64,
    /// Earliest start of the next request.
    free_at: Nanos,
    due: Vec<(Kind, Nanos)>,
    finished: Vec<Record>,
}

impl Serial {
    /// Create an idle engine.
    #[must_use]
    pub fn new(service: Service) -> Self {
        let free_at = service.gap;
        let (queue, due, finished) = (VecDeque::new(), Vec::new(), Vec::new());
        let (running, held, blocked) = (None, VecDeque::new(), 0);
        Self { service, queue, running, held, blocked, free_at, due, finished }
    }

    /// End the oldest requests until at most `left` keep their blocks.
    fn release(&mut self, left: usize, machine: &mut Machine, now: Nanos) -> Result<()> {
        while self.held.len() > left
            && let Some((lease, request)) = self.held.pop_front()
        {
            machine.calls.end(lease, &request, now)?;
        }
        machine.take(now)
    }

    /// Block a request without room until earlier requests and pending moves free slots: it retries
    /// after as many completed moves as it lacks slots. If nothing can free slots, the request is
    /// refused. Returns whether it was refused.
    fn waits(&mut self, request: Request, machine: &mut Machine, now: Nanos) -> Result<bool> {
        machine.take(now)?;
        if !self.held.is_empty() {
            self.release(self.held.len() - 1, machine, now)?;
            self.due.push((Kind::StepBegins, now));
        } else if machine.executor.idle() {
            let Request { id, arrival, .. } = request;
            let machine = machine.number;
            self.finished.push(Record { id, machine, arrival, ..Record::default() });
            self.free(now);
            return Ok(true);
        }
        self.queue.push_front(request);
        // A retry walks the whole prompt, and a completed move frees a slot, seldom more.
        self.blocked = machine.calls.lacked().min(machine.executor.unfinished()).max(1);
        Ok(false)
    }

    /// Allow the next request to start.
    fn free(&mut self, now: Nanos) {
        self.free_at = now.saturating_add(self.service.gap);
        if !self.queue.is_empty() {
            self.due.push((Kind::StepBegins, self.free_at));
        }
    }

    /// Start computing as soon as the end time is known.
    fn start(&mut self, now: Nanos) {
        let Some(running) = &mut self.running else { return };
        if let (Phase::Loading, Some(end)) = (running.phase, running.end(self.service.wait, now)) {
            (running.phase, running.step) = (Phase::Prefill, now);
            self.due.push((Kind::StepEnds, end.max(now)));
        }
    }
}

impl Engine for Serial {
    fn push(&mut self, request: Request, now: Nanos) {
        if self.running.is_none() && self.queue.is_empty() {
            self.due.push((Kind::StepBegins, now.max(self.free_at)));
        }
        self.queue.push_back(request);
    }

    fn load(&self) -> u64 {
        self.queue.len() as u64 + u64::from(self.running.is_some())
    }

    fn next(&self) -> Option<&Request> {
        self.queue.front()
    }

    fn head(&self, now: Nanos) -> Option<&Request> {
        if self.running.is_some() || self.blocked > 0 || now < self.free_at {
            None
        } else {
            self.next()
        }
    }

    fn step_begins(&mut self, _: &mut Machine, _: Nanos) -> Result<()> {
        self.blocked = 0;
        Ok(())
    }

    fn begin(&mut self, machine: &mut Machine, fetched: Range<usize>, now: Nanos) -> Result<bool> {
        let Some(request) = self.queue.pop_front() else { return Ok(false) };
        let weight = u64::from(machine.calls.settings().token_weight);
        let answer = request.reserve(weight);
        let begun = Prefill::begin(&request, answer, &self.service, machine, &fetched, now)?;
        if let Some((mut prefill, record)) = begun {
            let mut spans = Vec::new();
            let (_, partial) = prefill.work.take(u64::MAX, &mut spans);
            let compute = nanos(self.service.cost.step((0, 0), &spans).saturating_add(partial));
            let (phase, step) = (Phase::Loading, now);
            self.running = Some(Running { request, prefill, compute, record, phase, step });
            self.start(now);
            return Ok(true);
        }
        self.waits(request, machine, now)
    }

    fn go_on(&mut self, now: Nanos) {
        self.start(now);
    }

    fn wake(&mut self, now: Nanos) {
        self.due.push((Kind::StepBegins, now));
    }

    fn entered(&mut self, entered: &[Entered], now: Nanos) {
        if let Some(running) = &mut self.running
            && running.phase == Phase::Loading
        {
            running.prefill.entered(entered);
            self.start(now);
        }
    }

    fn ended(&mut self, moves: &[MoveId], now: Nanos) {
        if let Some(running) = &mut self.running
            && running.phase == Phase::Loading
        {
            running.prefill.ended(moves);
            if running.prefill.ready() {
                self.due.push((Kind::StepBegins, now));
            }
        } else if self.running.is_none() && self.blocked > 0 {
            if self.blocked <= moves.len() as u64 {
                self.due.push((Kind::StepBegins, now));
            }
            self.blocked = self.blocked.saturating_sub(moves.len() as u64).max(1);
        }
    }

    fn step_ends(&mut self, machine: &mut Machine, now: Nanos) -> Result<Option<Nanos>> {
        let Some(mut running) = self.running.take() else { return Ok(None) };
        let Running { request, prefill, compute, record, phase, step } = &mut running;
        let began = std::mem::replace(step, now);
        if *phase == Phase::Prefill {
            machine.calls.commit(prefill.lease, &request.tokens[prefill.matched..], now)?;
            if let Some(answer) = &request.answer {
                machine.calls.commit(prefill.lease, answer, now)?;
            }
            record.first_token = Some(now);
            record.stalled = (now - prefill.began()).saturating_sub(*compute);
            if request.output > 1 {
                machine.take(now)?;
                *phase = Phase::Decode;
                let decode = nanos(self.service.cost.answer(request.input, request.output - 1));
                self.due.push((Kind::StepEnds, now.saturating_add(decode)));
                self.running = Some(running);
                return Ok(Some(began));
            }
        }
        record.end = Some(now);
        self.finished.push(running.record);
        self.held.push_back((running.prefill.lease, running.request));
        self.release(self.service.held, machine, now)?;
        self.free(now);
        Ok(Some(began))
    }

    fn close(&mut self, machine: &mut Machine, now: Nanos) -> Result<()> {
        self.release(0, machine, now)
    }

    fn take_wakeups(&mut self) -> Vec<(Kind, Nanos)> {
        std::mem::take(&mut self.due)
    }

    fn take_finished(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.finished)
    }
}
