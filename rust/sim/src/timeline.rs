//! Timeline: the steps and transmissions of a run, and samples of its tiers, kept for pictures.
//!
//! Invariant: nothing is decided by it; a run that is not watched keeps nothing. A sample shows its
//! time before the events of that time, and at most one is taken between two events. Cost: one span
//! per step and transmission; O(tiers) per machine and sample.

use kvtrie_core::{LaneId, NEVER, Nanos};

use crate::event::MachineId;

/// Resource that a span ran on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The machine's engine.
    Step,
    /// A lane of the machine.
    Lane(LaneId),
    /// The network, towards the machine.
    Peers,
}

/// A step or a transmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Whose.
    pub machine: MachineId,
    /// Where.
    pub track: Track,
    /// Its begin, after the spans queued before it.
    pub start: Nanos,
    /// Its end.
    pub end: Nanos,
    /// Bytes of a transmission.
    pub bytes: u64,
}

/// How full a machine's tiers were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When.
    pub at: Nanos,
    /// Which machine.
    pub machine: MachineId,
    /// Resident blocks by tier; those of a store of all machines with machine 0.
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
    /// With `spans`, or a sample every `every` nanoseconds, 0 for none.
    pub(crate) fn new(spans: bool, every: Nanos) -> Self {
        let next = if every == 0 { NEVER } else { every };
        Self { spans: spans.then(Vec::new), samples: Vec::new(), every, next }
    }

    /// The time of the sample that is due before an event at `at`, the latest if there are several.
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
