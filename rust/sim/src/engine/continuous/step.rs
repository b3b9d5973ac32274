//! A step of the continuous engine: its work and its end.
//!
//! Invariant: at most `budget` tokens. Cost: O(chunks), plus one cost-model term per decode-only
//! step.

use kvtrie_core::Nanos;

use super::super::prefill::pipelined;
use super::decodes::Decodes;
use super::running::Running;
use crate::cost::{Cost, Span, nanos};

/// A step in preparation or running.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// Remaining token budget.
    pub(super) budget: u64,
    /// Whether it has suspended a request and therefore admits none.
    pub(super) preempted: bool,
    /// Requests with a chunk in the step.
    pub(super) chunks: Vec<u64>,
    spans: Vec<Span>,
    partial: u128,
    /// Arrival times of the chunks' loads by layer. Empty after the last arrival.
    arrivals: Vec<Nanos>,
    begin: Nanos,
    /// End time of a running step.
    end: Option<Nanos>,
    /// Number of merged steps.
    steps: u64,
}

impl Step {
    /// Whether the step is running.
    pub(super) fn runs(&self) -> bool {
        self.end.is_some()
    }

    /// Reset to an empty step with a token budget.
    pub(super) fn clear(&mut self, budget: u64) {
        (self.budget, self.preempted, self.partial) = (budget, false, 0);
        self.chunks.clear();
        self.spans.clear();
        self.arrivals.clear();
    }

    /// Add a chunk of a prefill, if any budget is left.
    pub(super) fn take(&mut self, id: u64, running: &mut Running, now: Nanos) {
        if self.budget == 0 {
            return;
        }
        let (tokens, partial) = running.prefill.work.take(self.budget, &mut self.spans);
        self.budget -= tokens;
        self.partial = self.partial.saturating_add(partial);
        self.chunks.push(id);
        let arrivals = running.prefill.arrivals();
        if arrivals.iter().any(|&at| at > now) {
            self.arrivals.resize(arrivals.len(), now);
            for (all, &at) in self.arrivals.iter_mut().zip(arrivals) {
                *all = at.max(*all);
            }
        }
    }

    /// Start the step. Without chunks it merges all steps until the next due request. Returns the
    /// end and the time spent waiting for layers; `None` without work.
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
        let end = if self.arrivals.is_empty() {
            computed
        } else {
            pipelined(now, compute, &self.arrivals)
        };
        self.end = Some(end);
        Some((end, end - computed))
    }

    /// End merged decode steps with the step running at `now`. Returns the new end if it is
    /// earlier.
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

    /// End the step if `now` is its end. Returns its start time and the number of merged steps.
    pub(super) fn end(&mut self, now: Nanos) -> Option<(Nanos, u64)> {
        // After a cut, the event of the old end is ignored.
        self.end.take_if(|end| *end == now).map(|_| (self.begin, self.steps))
    }
}
