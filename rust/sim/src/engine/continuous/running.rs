//! A request with a lease: progress of its prompt and answer.
//!
//! Invariant: `units` manager tokens are committed, and there are slots for `room` real tokens.
//! Cost: the manager's calls.

use std::ops::Range;

use kvtrie_core::{Nanos, Result, Token};

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
    /// Answer tokens produced before it joined the decoding requests.
    pub(super) made: u64,
    /// Step count at the join.
    pub(super) joined: u64,
    /// Step count at its end or at its next full block.
    pub(super) due: u64,
    /// Whether it waits for a pull from its prefill machine.
    pulls: bool,
    units: usize,
    room: u64,
}

impl Running {
    /// Acquire the blocks of a request. Returns the request if there is no room.
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

    /// Whether a request with its answer fits into an empty machine.
    pub(super) fn fits(request: &Request, machine: &Machine) -> bool {
        let manager = machine.calls.manager();
        let weight = u64::from(manager.settings().token_weight);
        let tokens = request.tokens.len() + request.reserve(weight);
        let room = u64::from(manager.settings().tiers[0].blocks);
        (tokens as u64).div_ceil(u64::from(manager.settings().block_tokens)) <= room
    }

    /// Real tokens with written KV at its next decode step.
    pub(super) fn context(&self, count: u64) -> u64 {
        self.request.input + self.made + (count - self.joined) - 1
    }

    /// Whether its answer is complete.
    pub(super) fn ended(&self, count: u64) -> bool {
        self.made + (count - self.joined) >= self.request.output
    }

    /// Join the decoding requests at a step count, and set `due`. Returns the context.
    pub(super) fn join(&mut self, count: u64) -> u64 {
        self.joined = count;
        let context = self.context(count);
        let end = self.request.output - self.made;
        self.due = count + end.min(self.room.saturating_sub(context));
        context
    }

    /// Leave the decoding requests. Returns the context.
    pub(super) fn part(&mut self, count: u64) -> u64 {
        let context = self.context(count);
        self.made += count - self.joined;
        (self.joined, self.due) = (count, u64::MAX);
        context
    }

    /// Take the record of the prefill machine. Returns the number of missing tokens to pull.
    pub(super) fn pull(&mut self, record: Record) -> u64 {
        (self.record, self.made, self.pulls) = (record, 1, true);
        self.prefill.work.drain()
    }

    /// End the wait, and commit the pulled blocks.
    pub(super) fn arrived(&mut self, machine: &mut Machine, now: Nanos) -> Result<()> {
        if std::mem::take(&mut self.pulls) {
            self.chunk_ends(machine, now)?;
        }
        Ok(())
    }

    /// Reserve slots for the next token, or for all tokens to recompute. Returns whether there is
    /// room.
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

    /// Commit the complete part of the prompt after a prefill chunk.
    pub(super) fn chunk_ends(&mut self, machine: &mut Machine, now: Nanos) -> Result<()> {
        let weight = u64::from(machine.calls.settings().token_weight);
        let (tokens, work) = (&self.request.tokens, &self.prefill.work);
        let end = match work.behind_holes() {
            _ if work.done() => tokens.len(),
            // A partly computed hash is not committed. The answer follows the prompt.
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

    /// Commit the written tokens of the answer. Equal tokens are unique to the request.
    pub(super) fn commit_answer(&self, machine: &mut Machine, now: Nanos) -> Result<()> {
        let weight = u64::from(machine.calls.settings().token_weight);
        let token =
            Token::MAX - Token::try_from(self.request.id % u64::from(Token::MAX)).unwrap_or(0);
        let tokens = vec![token; self.request.reserve(weight)];
        machine.calls.commit(self.prefill.lease, &tokens, now)
    }

    /// Plan again after a preemption. Returns whether there is room.
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

/// Real tokens in the blocks of `tokens` manager tokens.
fn whole_blocks(machine: &Machine, tokens: usize) -> u64 {
    let settings = machine.calls.settings();
    let block = u64::from(settings.block_tokens);
    (tokens as u64).div_ceil(block) * block * u64::from(settings.token_weight)
}
