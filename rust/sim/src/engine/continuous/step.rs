//! A step: what is computed together, and when it ends.
//!
//! Invariant: no more tokens than the budget. Cost: O(chunks), and a term of the cost model per step
//! that only decodes.

use kvtrie_core::Nanos;

use super::super::prefill::pipelined;
use super::decodes::Decodes;
use super::running::Running;
use crate::cost::{Cost, Span, nanos};

/// The step that is put together or runs.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// Tokens that still have a place.
    pub(super) budget: u64,
    /// Whether it has suspended a request: it takes none in.
    pub(super) preempted: bool,
    /// Requests with a chunk, and the chunks.
    pub(super) chunks: Vec<u64>,
    spans: Vec<Span>,
    partial: u128,
    /// By layer: when the chunks' loads are there; empty if they are.
    there: Vec<Nanos>,
    begin: Nanos,
    /// When it ends, if it runs.
    end: Option<Nanos>,
    /// Number of steps that it joins.
    steps: u64,
}

impl Step {
    /// Whether it runs.
    pub(super) fn runs(&self) -> bool {
        self.end.is_some()
    }

    /// A new one is put together.
    pub(super) fn clear(&mut self, budget: u64) {
        (self.budget, self.preempted, self.partial) = (budget, false, 0);
        self.chunks.clear();
        self.spans.clear();
        self.there.clear();
    }

    /// Takes in a chunk of a prefill, if there is a place for a token.
    pub(super) fn take(&mut self, id: u64, running: &mut Running, now: Nanos) {
        if self.budget == 0 {
            return;
        }
        let (tokens, partial) = running.prefill.work.take(self.budget, &mut self.spans);
        self.budget -= tokens;
        self.partial = self.partial.saturating_add(partial);
        self.chunks.push(id);
        let there = running.prefill.there();
        if there.iter().any(|&at| at > now) {
            self.there.resize(there.len(), now);
            for (all, &at) in self.there.iter_mut().zip(there) {
                *all = at.max(*all);
            }
        }
    }

    /// Begins; without chunks it is as many steps as pass until a request that decodes is due.
    /// Returns its end and the part of it that waits for layers; `None` without work.
    pub(super) fn begin(
        &mut self,
        decodes: &Decodes,
        cost: &dyn Cost,
        one_by_one: bool,
        now: Nanos,
    ) -> Option<(Nanos, Nanos)> {
        (self.begin, self.steps) = (now, 1);
        if self.chunks.is_empty() {
            let steps_left = decodes.steps_left()?;
            self.steps = if one_by_one { 1 } else { steps_left.max(1) };
            self.end = decodes.ends(now, cost).nth(usize::try_from(self.steps - 1).unwrap_or(0));
            return self.end.map(|end| (end, 0));
        }
        let parts = cost.step(decodes.batch(), &self.spans).saturating_add(self.partial);
        let (compute, computed) = (nanos(parts), now.saturating_add(nanos(parts)));
        let end =
            if self.there.is_empty() { computed } else { pipelined(now, compute, &self.there) };
        self.end = Some(end);
        Some((end, end - computed))
    }

    /// Steps that only decode end with the one that runs at `now`. Returns the end if it is sooner.
    pub(super) fn cut(&mut self, decodes: &Decodes, cost: &dyn Cost, now: Nanos) -> Option<Nanos> {
        if self.steps <= 1 {
            return None;
        }
        let mut ends = (1..).zip(decodes.ends(self.begin, cost));
        let (steps, end) = ends.find(|&(steps, end)| steps == self.steps || end >= now)?;
        if steps == self.steps {
            return None;
        }
        (self.steps, self.end) = (steps, Some(end));
        self.end
    }

    /// Ends, if that is now. Returns when it began and how many steps it was.
    pub(super) fn end(&mut self, now: Nanos) -> Option<(Nanos, u64)> {
        // An end that was cut short since is none.
        self.end.take_if(|end| *end == now).map(|_| (self.begin, self.steps))
    }
}
