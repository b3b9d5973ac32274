//! Arrival order and times of requests.
//!
//! A request arrives at its trace time, or a pause after the end of its last parent request,
//! whichever is later. Open trace: parents are named in the trace. Closed trace: each of a number
//! of clients plays a conversation at a time. A turn waits for the previous answer, plus the
//! think time. At the end of a conversation the client starts the next conversation of the trace.
//! Invariant: an open trace is read a single request ahead. Of a closed trace, only the active
//! conversations and the first turn of the next are in memory. Cost: O(log n) per request with n
//! known requests, plus a stored time per finished request with possible children.

use std::collections::BTreeMap;

use kvtrie_core::{Error, Nanos, Result};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::event::{Event, Events, Kind};
use crate::request::Request;

/// Future requests.
#[derive(Debug)]
pub(super) struct Arrivals<I> {
    requests: I,
    /// Requests with a known arrival time, by trace position.
    coming: BTreeMap<u64, Request>,
    /// Requests waiting for parents, with the number of unfinished parents, by position.
    held: FxHashMap<u64, (Request, usize)>,
    /// Positions of the waiting children, by parent position.
    waiting: FxHashMap<u64, Vec<u64>>,
    /// Trace position of each running request, and whether it may have children, by id.
    running: FxHashMap<u64, (u64, bool)>,
    /// End times of finished requests with possible children, by position.
    ends: FxHashMap<u64, Nanos>,
    /// Position of the last read request.
    newest: Option<u64>,
    /// Number of arrived requests.
    numbered: u64,
    clients: Option<Clients>,
}

/// Clients of a closed trace.
#[derive(Debug)]
struct Clients {
    number: usize,
    /// First turn of the next conversation.
    ahead: Option<Request>,
    /// Positions of the last turns of the active conversations.
    last: FxHashSet<u64>,
}

impl<I: Iterator<Item = Result<Request>>> Arrivals<I> {
    /// Create the arrivals of a trace with `clients` clients (0: open trace).
    pub(super) fn new(requests: I, clients: usize) -> Self {
        let clients = (clients > 0).then(|| Clients {
            number: clients,
            ahead: None,
            last: FxHashSet::default(),
        });
        Self {
            requests,
            coming: BTreeMap::new(),
            held: FxHashMap::default(),
            waiting: FxHashMap::default(),
            running: FxHashMap::default(),
            ends: FxHashMap::default(),
            newest: None,
            numbered: 0,
            clients,
        }
    }

    /// Schedule the first events.
    ///
    /// # Errors
    /// Errors of the trace.
    pub(super) fn begin(&mut self, events: &mut Events) -> Result<()> {
        let Some(clients) = &mut self.clients else { return self.announce(0, events) };
        clients.ahead = self.requests.next().transpose()?;
        for _ in 0..clients.number {
            self.converse(0, events)?;
        }
        Ok(())
    }

    /// Return the request of an arrival event, unless it waits for parents. Schedules the next
    /// request of an open trace.
    ///
    /// # Errors
    /// Errors of the trace, or [`Error::Config`] if arrival times decrease.
    pub(super) fn take(
        &mut self,
        place: u64,
        now: Nanos,
        events: &mut Events,
    ) -> Result<Option<Request>> {
        let mut request = self.coming.remove(&place).expect("it was announced");
        if self.newest == Some(place) {
            self.announce(now, events)?;
        }
        let (mut due, mut left) = (now, 0);
        for parent in &request.after {
            if let Some(end) = self.ends.get(parent) {
                due = due.max(end.saturating_add(request.pause));
            } else {
                left += 1;
                self.waiting.entry(*parent).or_default().push(place);
            }
        }
        if left > 0 {
            self.held.insert(place, (request, left));
            return Ok(None);
        }
        if due > now {
            self.come(place, request, due, events);
            return Ok(None);
        }
        // Ids are in time order.
        (request.id, request.arrival) = (self.numbered, now);
        self.numbered += 1;
        self.running.insert(request.id, (place, request.named));
        Ok(Some(request))
    }

    /// End a request. Children without further parents arrive after their pauses.
    ///
    /// # Errors
    /// Errors of the trace.
    pub(super) fn ended(&mut self, id: u64, now: Nanos, events: &mut Events) -> Result<()> {
        let (place, named) = self.running.remove(&id).expect("it came in");
        if named {
            self.ends.insert(place, now);
        }
        for child in self.waiting.remove(&place).unwrap_or_default() {
            let (_, left) = self.held.get_mut(&child).expect("it waits");
            *left -= 1;
            if *left == 0
                && let Some((request, _)) = self.held.remove(&child)
            {
                let due = now.saturating_add(request.pause);
                self.come(child, request, due, events);
            }
        }
        let over = self.clients.as_mut().is_some_and(|clients| clients.last.remove(&place));
        if over { self.converse(now, events) } else { Ok(()) }
    }

    /// Check for requests still waiting at the end of the trace.
    ///
    /// # Errors
    /// [`Error::Config`] if requests wait for an unnamed parent.
    pub(super) fn finish(&self) -> Result<()> {
        self.held.keys().min().map_or(Ok(()), |place| {
            Err(Error::config(format!(
                "request {place} and {} more wait for requests that are not named",
                self.held.len() - 1
            )))
        })
    }

    /// Schedule a request without unfinished parents.
    fn come(&mut self, place: u64, mut request: Request, at: Nanos, events: &mut Events) {
        request.after.clear();
        self.coming.insert(place, request);
        events.push(Event { at, kind: Kind::Arrival, machine: 0, number: place });
    }

    /// Read and schedule the next request of an open trace.
    fn announce(&mut self, now: Nanos, events: &mut Events) -> Result<()> {
        let Some(request) = self.requests.next().transpose()? else {
            self.newest = None;
            return Ok(());
        };
        let (at, place) = (request.arrival, request.id);
        if at < now {
            return Err(Error::config(format!(
                "request {place} arrives at {at} ns, before the {now} ns of the request above"
            )));
        }
        if let Some(parent) = request.after.iter().find(|&&parent| parent >= place) {
            return Err(Error::config(format!(
                "request {place} waits for request {parent}, one above it wanted"
            )));
        }
        self.newest = Some(place);
        self.coming.insert(place, request);
        events.push(Event { at, kind: Kind::Arrival, machine: 0, number: place });
        Ok(())
    }

    /// Start the next conversation on a client. Each turn waits for the previous turn.
    fn converse(&mut self, now: Nanos, events: &mut Events) -> Result<()> {
        let Some(clients) = &mut self.clients else { return Ok(()) };
        let Some(first) = clients.ahead.take() else { return Ok(()) };
        let (begun, mut last) = (first.id, first.id);
        loop {
            match self.requests.next().transpose()? {
                Some(mut turn) if first.session.is_some() && turn.session == first.session => {
                    let place = turn.id;
                    turn.pause = turn.arrival;
                    self.waiting.insert(last, vec![place]);
                    self.held.insert(place, (turn, 1));
                    last = place;
                }
                other => {
                    clients.ahead = other;
                    break;
                }
            }
        }
        clients.last.insert(last);
        let at = now.saturating_add(first.arrival);
        self.come(begun, first, at, events);
        Ok(())
    }
}
