//! Future events in a total order.
//!
//! Invariant: the order is (time, kind, machine, number), independent of insertion order. Cost:
//! O(log events) per event.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvtrie_core::Nanos;

/// Machine number.
pub type MachineId = usize;

/// Event kind. Events at the same time run in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Last byte of a transmission has arrived.
    TransmissionEnds,
    /// An engine has computed its step.
    StepEnds,
    /// The directory gets a change of a machine.
    DirectoryUpdate,
    /// A tool reports its remaining time.
    Report,
    /// Loads with a deadline have to start.
    LoadsDue,
    /// A request arrives.
    Arrival,
    /// An engine may begin a step.
    StepBegins,
}

/// A future event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event {
    /// Time of the event.
    pub at: Nanos,
    /// Kind of the event.
    pub kind: Kind,
    /// Its machine, or 0 for an arrival, before routing.
    pub machine: MachineId,
    /// Number of the transmission or request, or 0.
    pub number: u64,
}

/// Queue of future events.
#[derive(Debug, Default)]
pub struct Events(BinaryHeap<Reverse<Event>>);

impl Events {
    /// Add an event.
    pub fn push(&mut self, event: Event) {
        self.0.push(Reverse(event));
    }

    /// Number of future events.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Take the next event.
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
