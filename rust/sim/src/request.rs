//! A request of a trace.
//!
//! Invariant: `tokens` are manager tokens. If each token is the hash of several real tokens,
//! separate fields hold the real counts. Cost: plain values.

use kvtrie_core::{Nanos, Scope, Token};

/// A request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Position in the trace, from 0 on. After arrival: number of earlier arrivals.
    pub id: u64,
    /// Arrival time, or the think time before the request in a trace of clients.
    pub arrival: Nanos,
    /// Prompt in manager tokens.
    pub tokens: Vec<Token>,
    /// Tokens of the answer, if the trace has them. Committed with the prompt.
    pub answer: Option<Vec<Token>>,
    /// Conversation name.
    pub session: Option<String>,
    /// Cache scope of the blocks and of the conversation name.
    pub scope: Scope,
    /// Whether it is the last request of its conversation and the manager gets a hint.
    pub last: bool,
    /// Positions of earlier requests to wait for before arrival.
    pub after: Vec<u64>,
    /// Delay from the last of these ends to the arrival. The arrival is no earlier than `arrival`.
    pub pause: Nanos,
    /// Whether later requests may wait for it.
    pub named: bool,
    /// Reporting tool to run after it, if any.
    pub tool: Option<Tool>,
    /// Real tokens of the prompt.
    pub input: u64,
    /// Real tokens of the answer.
    pub output: u64,
}

/// A tool between two requests of a conversation, with progress reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tool {
    /// End of the tool and arrival of the next request.
    pub ends: Nanos,
    /// Pairs of report time and reported time left, in thousandths of the tool's duration and of
    /// the actual time left.
    pub reports: Vec<(u32, u32)>,
}

impl Tool {
    /// Return the report times after a start, with the reported time left.
    pub fn reports(&self, begun: Nanos) -> impl Iterator<Item = (Nanos, Nanos)> + '_ {
        let takes = self.ends.saturating_sub(begun);
        let part = |time: Nanos, thousandths: u32| {
            let part = u128::from(time) * u128::from(thousandths) / 1000;
            Nanos::try_from(part).unwrap_or(Nanos::MAX)
        };
        let reports = self.reports.iter().filter(move |_| takes > 0);
        reports.map(move |&(when, states)| {
            let at = begun.saturating_add(part(takes, when));
            (at, part(self.ends.saturating_sub(at), states))
        })
    }
}

/// Prompt of a lookup.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Tokens in manager units.
    pub tokens: &'a [Token],
    /// Tokens at the end to compute in any case.
    pub keep: usize,
}

impl Request {
    /// Session ended by this request, if the manager gets a hint.
    #[must_use]
    pub fn ends(&self) -> Option<&str> {
        self.session.as_deref().filter(|_| self.last)
    }

    /// Prompt for lookups, without its last `keep` real tokens.
    #[must_use]
    pub fn prompt(&self, keep: u64, weight: u64) -> Prompt<'_> {
        Prompt { tokens: &self.tokens, keep: self.keep(keep, weight) }
    }

    /// Convert `keep` real tokens to compute at the prompt's end to manager tokens.
    ///
    /// With hashes of `weight` real tokens each, a `keep` of 0 allows all to match. Otherwise only
    /// hashes ending before the kept tokens match.
    #[must_use]
    pub fn keep(&self, keep: u64, weight: u64) -> usize {
        if weight == 1 || keep == 0 {
            return usize::try_from(keep).unwrap_or(usize::MAX);
        }
        let usable = self.input.saturating_sub(keep) / weight;
        self.tokens.len().saturating_sub(usize::try_from(usable).unwrap_or(usize::MAX))
    }

    /// Slots to reserve after the prompt, in manager tokens. The last token of an answer is never
    /// written.
    #[must_use]
    pub fn reserve(&self, weight: u64) -> usize {
        if let Some(answer) = &self.answer {
            return answer.len();
        }
        let written = self.input.saturating_add(self.output.saturating_sub(1));
        let units = usize::try_from(written.div_ceil(weight)).unwrap_or(usize::MAX);
        units.saturating_sub(self.tokens.len())
    }
}

#[cfg(test)]
mod tests {
    use super::{Request, Tool};

    #[test]
    fn a_tool_reports_at_parts_of_its_time_what_it_states_of_the_rest() {
        let tool = Tool { ends: 1100, reports: vec![(0, 2000), (500, 500), (1000, 1000)] };
        assert!(tool.reports(100).eq([(100, 2000), (600, 250), (1100, 0)]));
        assert_eq!(tool.reports(1100).count(), 0);
        assert_eq!(tool.reports(1200).count(), 0);
    }

    #[test]
    fn a_hash_is_matched_if_it_ends_before_the_kept_tokens() {
        let request =
            Request { tokens: vec![1, 2, 3], input: 1100, output: 600, ..Request::default() };
        assert_eq!([0, 1, 76, 77].map(|keep| request.keep(keep, 512)), [0, 1, 1, 2]);
        // 1100 + 599 tokens are written.
        assert_eq!(request.reserve(512), 1);
        let plain = Request { tokens: vec![0; 20], input: 20, output: 4, ..Request::default() };
        assert_eq!((plain.keep(1, 1), plain.reserve(1)), (1, 3));
        let none = Request { output: 0, ..plain };
        assert_eq!(none.reserve(1), 0);
    }
}
