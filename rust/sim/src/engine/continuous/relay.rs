//! Disaggregated serving: one machine computes a prompt, another one makes the answer.
//!
//! The machine that decodes acquires room first and pulls what it lacks; the machine of the prefill
//! keeps its blocks until then. Invariant: a request is handed over once, and its blocks are let go
//! once it was pulled. Cost: O(1) per request, plus the managers' calls.

use kvtrie_core::{MoveId, Nanos, Result};
use rustc_hash::FxHashMap;

use super::Continuous;
use super::running::Running;
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;

/// Number that an engine awaits for a pull, combined with the request's id. It is above all move
/// ids.
const PULL: MoveId = 1 << 63;

/// A request whose first token is there.
#[derive(Debug)]
pub struct Handoff {
    /// The request.
    pub request: Request,
    /// Its record so far.
    pub record: Record,
}

/// Tokens that a request lacks on the machine that decodes it.
#[derive(Clone, Copy, Debug)]
pub struct Pull {
    /// Of which request.
    pub request: u64,
    /// Real tokens.
    pub tokens: u64,
}

/// Requests between two machines.
#[derive(Debug, Default)]
pub(super) struct Relay {
    /// Whether another machine decodes.
    pub(super) gives: bool,
    /// Requests whose blocks another machine has not pulled yet.
    pub(super) given: FxHashMap<u64, Running>,
    handoffs: Vec<Handoff>,
    pulls: Vec<Pull>,
}

impl Continuous {
    /// Another machine decodes what is computed here.
    #[must_use]
    pub fn giving(mut self) -> Self {
        self.relay.gives = true;
        self
    }

    /// Requests to be decoded elsewhere; each is returned once.
    pub fn take_handoffs(&mut self) -> Vec<Handoff> {
        std::mem::take(&mut self.relay.handoffs)
    }

    /// Pulls that begin; each is returned once.
    pub fn take_pulls(&mut self) -> Vec<Pull> {
        std::mem::take(&mut self.relay.pulls)
    }

    /// A request whose first token is there leaves its place; its blocks stay.
    pub(super) fn give(&mut self, id: u64) {
        self.computing.remove(&id);
        if let Some(running) = self.running.remove(&id) {
            let (request, record) = (running.request.clone(), running.record.clone());
            self.relay.handoffs.push(Handoff { request, record });
            self.relay.given.insert(id, running);
        }
    }

    /// A request was pulled: its blocks may leave.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::release`].
    pub fn let_go(&mut self, id: u64, machine: &mut Machine, now: Nanos) -> Result<()> {
        if let Some(running) = self.relay.given.remove(&id) {
            machine.calls.end(running.prefill.lease, &running.request, now)?;
            machine.take(now)?;
        }
        self.queue.blocked = false;
        if self.queue.len() > 0 {
            self.interrupt(now);
        }
        Ok(())
    }

    /// A request comes from the machine of its prefill.
    pub fn take_over(&mut self, handoff: Handoff, now: Nanos) {
        self.queue.handed.push_back(handoff);
        self.interrupt(now);
    }

    /// Requests of other machines are taken in, as long as there is room.
    pub(super) fn pull(&mut self, machine: &mut Machine, now: Nanos) -> Result<()> {
        while self.open() && self.queue.suspended.is_empty() {
            let Some(Handoff { request, record }) = self.queue.handed.pop_front() else { break };
            match Running::begin(request, &self.service, machine, &(0..0), now)? {
                Ok(mut running) => {
                    let (id, tokens) = (running.request.id, running.pull(record));
                    // Pulled blocks are committed, so no load may be in flight then.
                    running.prefill.wait_again(machine)?;
                    running.prefill.wait_for(PULL | id);
                    self.relay.pulls.push(Pull { request: id, tokens });
                    self.take_in(id, running, now);
                }
                Err(request) if self.stuck(machine, now)? => self.refuse(&request, machine),
                Err(request) => {
                    self.queue.handed.push_front(Handoff { request, record });
                    self.queue.blocked = true;
                }
            }
        }
        Ok(())
    }

    /// Ends the pull of a request.
    pub fn pulled(&mut self, id: u64, now: Nanos) {
        self.came(PULL | id, now, |prefill| prefill.ended(&[PULL | id]));
        if !self.ready.is_empty() {
            self.interrupt(now);
        }
    }
}
