//! Arrivals: which request comes in next, and when.
//!
//! Open: each at its time, whatever becomes of the others. Closed: a number of clients, each with one
//! conversation at a time, of which the next turn comes in when the last answer has ended and the time
//! to think is over; then the next conversation of the trace begins.
//! Invariant: of an open trace the next request is known and no later one; of a closed one the
//! conversations that are open, and the first turn of one more. Cost: O(log clients) per request.

use std::collections::{BTreeMap, VecDeque};

use kvtrie_core::{Error, Nanos, Result};
use rustc_hash::FxHashMap;

use crate::event::{Event, Kind};
use crate::request::Request;

/// Requests to come.
#[derive(Debug)]
pub(super) struct Arrivals<I> {
    requests: I,
    /// By place in the trace: those whose time is known.
    coming: BTreeMap<u64, Request>,
    clients: Option<Clients>,
}

/// Clients that send a request only after the last answer.
#[derive(Debug)]
struct Clients {
    /// By client: turns of its conversation that are left.
    turns: Vec<VecDeque<Request>>,
    /// The first turn of the next conversation.
    ahead: Option<Request>,
    /// The client that sends a request, by its place in the trace, and the one that waits for it,
    /// by its number.
    sends: FxHashMap<u64, usize>,
    waits: FxHashMap<u64, usize>,
    /// Number of requests that have arrived.
    numbered: u64,
}

impl<I: Iterator<Item = Result<Request>>> Arrivals<I> {
    /// Requests of a trace, by `clients` clients; 0 for an open trace.
    pub(super) fn new(requests: I, clients: usize) -> Self {
        let clients = (clients > 0).then(|| Clients {
            turns: vec![VecDeque::new(); clients],
            ahead: None,
            sends: FxHashMap::default(),
            waits: FxHashMap::default(),
            numbered: 0,
        });
        Self { requests, coming: BTreeMap::new(), clients }
    }

    /// The first events.
    ///
    /// # Errors
    /// What the trace fails with.
    pub(super) fn begin(&mut self) -> Result<Vec<Event>> {
        let Some(clients) = &mut self.clients else {
            return Ok(self.announce(0)?.into_iter().collect());
        };
        clients.ahead = self.requests.next().transpose()?;
        let mut events = Vec::new();
        for client in 0..clients.turns.len() {
            events.extend(self.next_request(client, 0)?);
        }
        Ok(events)
    }

    /// The request of an event, and of an open trace the event of the next one.
    ///
    /// # Errors
    /// What the trace fails with; [`Error::Config`] for a time before this one.
    pub(super) fn take(&mut self, place: u64, now: Nanos) -> Result<(Request, Option<Event>)> {
        let mut request = self.coming.remove(&place).expect("it was announced");
        let Some(clients) = &mut self.clients else {
            return Ok((request, self.announce(now)?));
        };
        // Numbers are in the order of time, as those of an open trace are.
        (request.id, request.arrival) = (clients.numbered, now);
        clients.numbered += 1;
        let client = clients.sends.remove(&place).expect("somebody sends it");
        clients.waits.insert(request.id, client);
        Ok((request, None))
    }

    /// A request has ended: its client thinks about the next one.
    ///
    /// # Errors
    /// What the trace fails with.
    pub(super) fn ended(&mut self, id: u64, now: Nanos) -> Result<Option<Event>> {
        let client = self.clients.as_mut().and_then(|clients| clients.waits.remove(&id));
        client.map_or(Ok(None), |client| self.next_request(client, now))
    }

    /// The next request of an open trace will come in.
    fn announce(&mut self, now: Nanos) -> Result<Option<Event>> {
        let Some(request) = self.requests.next().transpose()? else { return Ok(None) };
        let (at, number) = (request.arrival, request.id);
        if at < now {
            return Err(Error::config(format!(
                "request {number} arrives at {at} ns, before the {now} ns of the one above"
            )));
        }
        self.coming.insert(number, request);
        Ok(Some(Event { at, kind: Kind::Arrival, machine: 0, number }))
    }

    /// The next turn of a client, or the first one of the next conversation.
    fn next_request(&mut self, client: usize, now: Nanos) -> Result<Option<Event>> {
        let Some(clients) = &mut self.clients else { return Ok(None) };
        let turns = &mut clients.turns[client];
        if turns.is_empty() {
            let Some(first) = clients.ahead.take() else { return Ok(None) };
            let session = first.session.clone();
            turns.push_back(first);
            loop {
                let next = self.requests.next().transpose()?;
                match next {
                    Some(next) if session.is_some() && next.session == session => {
                        turns.push_back(next);
                    }
                    other => {
                        clients.ahead = other;
                        break;
                    }
                }
            }
        }
        let Some(request) = turns.pop_front() else { return Ok(None) };
        let (at, number) = (now.saturating_add(request.arrival), request.id);
        clients.sends.insert(number, client);
        self.coming.insert(number, request);
        Ok(Some(Event { at, kind: Kind::Arrival, machine: 0, number }))
    }
}
