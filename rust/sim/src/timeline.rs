//! Timeline of a run for plots: steps, transmissions and tier samples.
//!
//! Invariant: never affects a decision, and records nothing unless enabled. A sample has the state
//! before the events of its time, with at most one sample between two events. Cost: a span per
//! step and transmission, O(tiers) per machine and sample.

use kvtrie_core::{LaneId, NEVER, Nanos};

use crate::event::MachineId;

/// Resource of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The machine's engine.
    Step,
    /// A lane of the machine.
    Lane(LaneId),
    /// Network lane to the machine.
    Peers,
}

/// A step or a transmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Machine of the span.
    pub machine: MachineId,
    /// Resource of the span.
    pub track: Track,
    /// Start, after the spans queued before.
    pub start: Nanos,
    /// End of the span.
    pub end: Nanos,
    /// Transmitted bytes.
    pub bytes: u64,
}

/// Tier occupancy of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Sample time.
    pub at: Nanos,
    /// Machine number.
    pub machine: MachineId,
    /// Resident blocks by tier. Blocks of a shared store count for machine 0.
    pub resident: Vec<u64>,
}

/// Recorded steps, transfers and samples of a run.
#[derive(Debug)]
pub struct Timeline {
    /// Steps and transfers between machines, if spans are kept.
    pub(crate) spans: Option<Vec<Span>>,
    pub(crate) samples: Vec<Sample>,
    every: Nanos,
    next: Nanos,
}

impl Timeline {
    /// Record spans if `spans`, and a sample every `every` nanoseconds (0 disables samples).
    pub(crate) fn new(spans: bool, every: Nanos) -> Self {
        let next = if every == 0 { NEVER } else { every };
        Self { spans: spans.then(Vec::new), samples: Vec::new(), every, next }
    }

    /// Time of the latest sample due before an event at `at`.
    pub(crate) fn next_sample(&mut self, at: Nanos) -> Option<Nanos> {
        if at < self.next {
            return None;
        }
        let due = at - at % self.every;
        self.next = due.saturating_add(self.every);
        Some(due)
    }

    pub(crate) fn span(
        &mut self,
        machine: MachineId,
        track: Track,
        time: (Nanos, Nanos),
        bytes: u64,
    ) {
        if let Some(spans) = &mut self.spans {
            spans.push(Span { machine, track, start: time.0, end: time.1, bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Timeline;

    #[test]
    fn a_sample_is_due_once_per_grid_time_that_an_event_passes() {
        let mut timeline = Timeline::new(false, 10);
        let due: Vec<_> = [3, 9, 10, 10, 19, 47, 48, 50].map(|at| timeline.next_sample(at)).into();
        assert_eq!(due, [None, None, Some(10), None, None, Some(40), None, Some(50)]);
        assert_eq!(Timeline::new(true, 0).next_sample(u64::MAX - 1), None);
    }
}
