//! Events: what happens next, in one total order.
//!
//! Invariant: the order is (time, kind, machine, number), so no run depends on the order of
//! insertion. Cost: O(log events) per event.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvtrie_core::Nanos;

/// A machine's number.
pub type MachineId = usize;

/// Kind of an event; events of one time run in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The last byte of a transmission is there.
    TransmissionEnds,
    /// An engine's step is computed.
    StepEnds,
    /// The directory learns of a change on a machine.
    DirectoryUpdate,
    /// A tool reports when it will have ended.
    Report,
    /// Loads that wait for their latest start are due.
    LoadsDue,
    /// A request comes in.
    Arrival,
    /// An engine may begin a step.
    StepBegins,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event {
    /// When.
    pub at: Nanos,
    /// What.
    pub kind: Kind,
    /// The machine; 0 for an arrival, which is not routed yet.
    pub machine: MachineId,
    /// The number of the transmission or of the request; 0 where there is none.
    pub number: u64,
}

/// The events to come.
#[derive(Debug, Default)]
pub struct Events(BinaryHeap<Reverse<Event>>);

impl Events {
    /// Adds an event.
    pub fn push(&mut self, event: Event) {
        self.0.push(Reverse(event));
    }

    /// Number of events to come.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Takes the next event.
    pub fn pop(&mut self) -> Option<Event> {
        self.0.pop().map(|Reverse(event)| event)
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, Events, Kind};

    #[test]
    fn at_one_time_copies_end_before_steps_and_steps_begin_last() {
        let kinds = [
            Kind::TransmissionEnds,
            Kind::StepEnds,
            Kind::DirectoryUpdate,
            Kind::Report,
            Kind::LoadsDue,
            Kind::Arrival,
            Kind::StepBegins,
        ];
        let mut events = Events::default();
        for at in [7, 3] {
            for machine in [1, 0] {
                for number in [5, 4] {
                    for &kind in kinds.iter().rev() {
                        events.push(Event { at, kind, machine, number });
                    }
                }
            }
        }
        let mut order = Vec::new();
        while let Some(event) = events.pop() {
            order.push((event.at, event.kind, event.machine, event.number));
        }
        assert_eq!(order.len(), 56);
        assert!(order.is_sorted());
        assert_eq!(order[0], (3, Kind::TransmissionEnds, 0, 4));
        assert_eq!(order[55], (7, Kind::StepBegins, 1, 5));
    }
}
