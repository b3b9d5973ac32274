//! A request that holds blocks: how far its prompt and its answer are.
//!
//! Invariant: `units` tokens, as the manager takes them, are committed, and there are slots for `room`
//! real ones. Cost: that of the manager's calls.

use std::ops::Range;

use kvtrie_core::{Nanos, Result};

use super::super::Service;
use super::super::prefill::Prefill;
use crate::machine::Machine;
use crate::record::Record;
use crate::request::Request;

/// A request with a lease.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) request: Request,
    pub(super) record: Record,
    pub(super) prefill: Prefill,
    /// Tokens of the answer that were made before it joined those that decode.
    pub(super) made: u64,
    /// Steps that had decoded then.
    pub(super) joined: u64,
    /// At how many such steps it has ended, or must have more room.
    pub(super) due: u64,
    /// Whether it waits for what another machine has computed.
    pulls: bool,
    units: usize,
    room: u64,
}

impl Running {
    /// Acquires a request's blocks; gives it back if there is no room.
    pub(super) fn begin(
        request: Request,
        service: &Service,
        machine: &mut Machine,
        fetched: &Range<usize>,
        now: Nanos,
    ) -> Result<std::result::Result<Self, Request>> {
        let begun = Prefill::begin(&request, 0, service, machine, fetched, now)?;
        let Some((prefill, record)) = begun else { return Ok(Err(request)) };
        let (units, room) = (prefill.matched, whole_blocks(machine, request.tokens.len()));
        let (made, joined, due, pulls) = (0, 0, u64::MAX, false);
        Ok(Ok(Self { request, record, prefill, made, joined, due, pulls, units, room }))
    }

    /// Whether a request with its answer can fit into a machine without another.
    pub(super) fn fits(request: &Request, machine: &Machine) -> bool {
        let manager = machine.calls.manager();
        let weight = u64::from(manager.settings().token_weight);
        let tokens = request.tokens.len() + request.reserve(weight);
        let room = u64::from(manager.settings().tiers[0].blocks);
        (tokens as u64).div_ceil(u64::from(manager.settings().block_tokens)) <= room
    }

    /// Real tokens whose KV is written when it decodes next.
    pub(super) fn context(&self, count: u64) -> u64 {
        self.request.input + self.made + (count - self.joined) - 1
    }

    /// Whether its answer is complete.
    pub(super) fn ended(&self, count: u64) -> bool {
        self.made + (count - self.joined) >= self.request.output
    }

    /// It decodes from a count of steps on. Returns its context; `due` is known from then on.
    pub(super) fn join(&mut self, count: u64) -> u64 {
        self.joined = count;
        let context = self.context(count);
        let end = self.request.output - self.made;
        self.due = count + end.min(self.room.saturating_sub(context));
        context
    }

    /// It does not decode any more. Returns its context.
    pub(super) fn part(&mut self, count: u64) -> u64 {
        let context = self.context(count);
        self.made += count - self.joined;
        (self.joined, self.due) = (count, u64::MAX);
        context
    }

    /// It was computed elsewhere up to its first token, and what it lacks here comes from there.
    /// Returns how many tokens.
    pub(super) fn pull(&mut self, record: Record) -> u64 {
        (self.record, self.made, self.pulls) = (record, 1, true);
        self.prefill.work.drain()
    }

    /// Ends its wait: pulled blocks are cached.
    pub(super) fn arrived(&mut self, machine: &mut Machine, now: Nanos) -> Result<()> {
        if std::mem::take(&mut self.pulls) {
            self.chunk_ends(machine, now)?;
        }
        Ok(())
    }

    /// Makes room for the next token, or for all that must be computed. Whether there is any.
    pub(super) fn reserve(&mut self, machine: &mut Machine, now: Nanos) -> Result<bool> {
        let weight = u64::from(machine.calls.settings().token_weight);
        let needed = self.request.input + self.made;
        let units = usize::try_from(needed.div_ceil(weight)).unwrap_or(usize::MAX);
        let units = units.max(self.request.tokens.len());
        if !machine.calls.reserve(self.prefill.lease, units - self.units, now)? {
            return Ok(false);
        }
        self.room = whole_blocks(machine, units);
        Ok(true)
    }

    /// A chunk of its prefill is computed: what is complete of its prompt is cached.
    pub(super) fn chunk_ends(&mut self, machine: &mut Machine, now: Nanos) -> Result<()> {
        let weight = u64::from(machine.calls.settings().token_weight);
        let (tokens, work) = (&self.request.tokens, &self.prefill.work);
        let end = match work.behind_holes() {
            _ if work.done() => tokens.len(),
            // A hash that is cut is not there yet; the answer follows the prompt.
            Some(context) if context < self.request.input => {
                usize::try_from(context / weight).unwrap_or(usize::MAX).min(tokens.len())
            }
            Some(_) => tokens.len(),
            None => self.units,
        };
        if end > self.units || work.done() {
            machine.calls.commit(self.prefill.lease, &tokens[self.units..end], now)?;
            self.units = end;
        }
        Ok(())
    }

    /// Plans again after a preemption; returns whether there is room.
    pub(super) fn resume(
        &mut self,
        service: &Service,
        machine: &mut Machine,
        now: Nanos,
    ) -> Result<bool> {
        let lease = self.prefill.lease;
        machine.find(&self.request.tokens, 0, now)?;
        if !machine.calls.resume(lease, now)? {
            return Ok(false);
        }
        self.units = machine.calls.manager().lease(lease)?.matched();
        if !self.reserve(machine, now)? {
            machine.calls.suspend(lease, now)?;
            return Ok(false);
        }
        let span = (self.request.input, self.made);
        self.prefill = Prefill::of(lease, span, service, machine, now)?;
        Ok(true)
    }
}

/// Real tokens of the blocks of some tokens.
fn whole_blocks(machine: &Machine, tokens: usize) -> u64 {
    let settings = machine.calls.settings();
    let block = u64::from(settings.block_tokens);
    (tokens as u64).div_ceil(block) * block * u64::from(settings.token_weight)
}
