//! A request of a trace.
//!
//! Invariant: `tokens` are what the manager matches; if one of them is the hash of several real
//! tokens, separate fields hold the real numbers. Cost: plain values.

use kvtrie_core::{Nanos, Scope, Token};

/// One request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Its place in the trace, from 0 on; once it has come in, how many came in before it.
    pub id: u64,
    /// When it comes in; in the trace of clients, how long one thinks before.
    pub arrival: Nanos,
    /// Its prompt as the manager takes it.
    pub tokens: Vec<Token>,
    /// The tokens of its answer, where a trace has them. They are committed with the prompt.
    pub answer: Option<Vec<Token>>,
    /// The conversation it belongs to.
    pub session: Option<String>,
    /// Scope within which its blocks are shared, and its conversation's name.
    pub scope: Scope,
    /// Whether its conversation ends with it and the manager gets a hint.
    pub last: bool,
    /// Places of the requests above it that have to end before it comes in.
    pub after: Vec<u64>,
    /// The time between the last of these ends and its arrival, which is no earlier than `arrival`.
    pub pause: Nanos,
    /// Whether requests below it may wait for it.
    pub named: bool,
    /// The tool that its conversation waits for then, if that reports.
    pub tool: Option<Tool>,
    /// Real tokens of its prompt.
    pub input: u64,
    /// Real tokens of its answer.
    pub output: u64,
}

/// A tool between two requests of a conversation, which says how long it will take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tool {
    /// When it ends: the next request comes in.
    pub ends: Nanos,
    /// Its reports: when, and the time left that it states, in thousandths of its time and of the
    /// time that is left.
    pub reports: Vec<(u32, u32)>,
}

impl Tool {
    /// When it reports after it has begun, and the time left that it states.
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

/// The front of a prompt, to look up.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The prompt as managers take it.
    pub tokens: &'a [Token],
    /// Tokens at its end that stay to be computed.
    pub keep: usize,
}

impl Request {
    /// The conversation that ends with it, if the manager gets a hint.
    #[must_use]
    pub fn ends(&self) -> Option<&str> {
        self.session.as_deref().filter(|_| self.last)
    }

    /// Its prompt, of which `keep` real tokens stay to be computed.
    #[must_use]
    pub fn prompt(&self, keep: u64, weight: u64) -> Prompt<'_> {
        Prompt { tokens: &self.tokens, keep: self.keep(keep, weight) }
    }

    /// Tokens at the prompt's end that stay to be computed so that `keep` real ones do.
    ///
    /// Of hashes of `weight` real tokens each, all may be matched with a `keep` of 0, and otherwise
    /// those that end before the kept tokens.
    #[must_use]
    pub fn keep(&self, keep: u64, weight: u64) -> usize {
        if weight == 1 || keep == 0 {
            return usize::try_from(keep).unwrap_or(usize::MAX);
        }
        let usable = self.input.saturating_sub(keep) / weight;
        self.tokens.len().saturating_sub(usize::try_from(usable).unwrap_or(usize::MAX))
    }

    /// Tokens after the prompt to make room for. The last token of an answer is never written.
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
