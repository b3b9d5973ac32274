//! Disaggregated serving: prefill and decode on different machines.
//!
//! The decode machine acquires room first, then pulls the missing blocks. The prefill machine keeps
//! its blocks until the pull ends. Invariant: a request is handed over once, and its blocks are
//! released after the pull. Cost: O(1) per request, plus the managers' calls.

use kvtrie_core::{MoveId, Nanos, Result};
use rustc_hash::FxHashMap;

use super::Continuous;
use super::running::Running;
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;

/// Marks a pull in the set of awaited moves, combined with the request id. Larger than all move
/// ids.
const PULL: MoveId = 1 << 63;

/// A request with its first token, to be decoded elsewhere.
#[derive(Debug)]
pub struct Handoff {
    /// The request.
    pub request: Request,
    /// Its record up to the first token.
    pub record: Record,
}

/// Missing tokens of a request on its decode machine.
#[derive(Clone, Copy, Debug)]
pub struct Pull {
    /// Request id.
    pub request: u64,
    /// Real tokens to transmit.
    pub tokens: u64,
}

/// Requests between two machines.
#[derive(Debug, Default)]
pub(super) struct Relay {
    /// Whether other machines decode the requests of this engine.
    pub(super) hands_over: bool,
    /// Prefilled requests with blocks still to be pulled.
    pub(super) handed_over: FxHashMap<u64, Running>,
    handoffs: Vec<Handoff>,
    pulls: Vec<Pull>,
}

impl Continuous {
    /// Hand over requests after their prefill.
    #[must_use]
    pub fn handing_over(mut self) -> Self {
        self.relay.hands_over = true;
        self
    }

    /// Take the requests to decode elsewhere.
    pub fn take_handoffs(&mut self) -> Vec<Handoff> {
        std::mem::take(&mut self.relay.handoffs)
    }

    /// Take the pulls to start.
    pub fn take_pulls(&mut self) -> Vec<Pull> {
        std::mem::take(&mut self.relay.pulls)
    }

    /// Hand over a request after its first token. Its blocks stay.
    pub(super) fn hand_over(&mut self, id: u64) {
        self.computing.remove(&id);
        if let Some(running) = self.running.remove(&id) {
            let (request, record) = (running.request.clone(), running.record.clone());
            self.relay.handoffs.push(Handoff { request, record });
            self.relay.handed_over.insert(id, running);
        }
    }

    /// Release the blocks of a pulled request.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::release`].
    pub fn release_handed_over(
        &mut self,
        id: u64,
        machine: &mut Machine,
        now: Nanos,
    ) -> Result<()> {
        if let Some(running) = self.relay.handed_over.remove(&id) {
            machine.calls.end(running.prefill.lease, &running.request, now)?;
            machine.take(now)?;
        }
        self.queue.blocked = false;
        if self.queue.len() > 0 {
            self.interrupt(now);
        }
        Ok(())
    }

    /// Enqueue a request from its prefill machine.
    pub fn take_over(&mut self, handoff: Handoff, now: Nanos) {
        self.queue.handed.push_back(handoff);
        self.interrupt(now);
    }

    /// Admit handed-over requests while there is room.
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

    /// End the pull of a request.
    pub fn pulled(&mut self, id: u64, now: Nanos) {
        self.on_move(PULL | id, now, |prefill| prefill.ended(&[PULL | id]));
        if !self.ready.is_empty() {
            self.interrupt(now);
        }
    }
}
