//! Arrivals: which request comes in next, and when.
//!
//! A request comes in at its time, or a pause after the last of the requests that it waits for has ended,
//! whichever is later. Open: a request of the trace waits for those that it names. Closed: a number of clients
//! have one conversation each at a time; a turn waits for the answer before it and the pause is the time to
//! think. Then the next conversation of the trace begins.
//! Invariant: of an open trace the next request is known and no later one; of a closed one the
//! conversations that are open, and the first turn of one more. Cost: O(log n) per request of n that are
//! known, and a time for each request that has ended and that others may wait for.

use std::collections::BTreeMap;

use kvtrie_core::{Error, Nanos, Result};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::event::{Event, Events, Kind};
use crate::request::Request;

/// Requests to come.
#[derive(Debug)]
pub(super) struct Arrivals<I> {
    requests: I,
    /// By place in the trace: those whose time is known.
    coming: BTreeMap<u64, Request>,
    /// By place: those that wait for others, and for how many.
    held: FxHashMap<u64, (Request, usize)>,
    /// By place of a request: the places of those that wait for it.
    waiting: FxHashMap<u64, Vec<u64>>,
    /// By number: the place of a request that runs, and whether later ones may wait for it.
    running: FxHashMap<u64, (u64, bool)>,
    /// By place: when a request has ended that later ones may wait for.
    ends: FxHashMap<u64, Nanos>,
    /// Place of the request that was read last.
    newest: Option<u64>,
    /// Number of requests that have arrived.
    numbered: u64,
    clients: Option<Clients>,
}

/// Clients that begin a conversation only after the last answer of another.
#[derive(Debug)]
struct Clients {
    number: usize,
    /// The first turn of the next conversation.
    ahead: Option<Request>,
    /// Places of the last turns of the conversations that are open.
    last: FxHashSet<u64>,
}

impl<I: Iterator<Item = Result<Request>>> Arrivals<I> {
    /// Requests of a trace, by `clients` clients; 0 for an open trace.
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

    /// Adds the first events.
    ///
    /// # Errors
    /// What the trace fails with.
    pub(super) fn begin(&mut self, events: &mut Events) -> Result<()> {
        let Some(clients) = &mut self.clients else { return self.announce(0, events) };
        clients.ahead = self.requests.next().transpose()?;
        for _ in 0..clients.number {
            self.converse(0, events)?;
        }
        Ok(())
    }

    /// The request of an event, unless it waits for others; adds the event of the next one of an open
    /// trace.
    ///
    /// # Errors
    /// What the trace fails with; [`Error::Config`] for a time before this one.
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
        // Numbers are in the order of time.
        (request.id, request.arrival) = (self.numbered, now);
        self.numbered += 1;
        self.running.insert(request.id, (place, request.named));
        Ok(Some(request))
    }

    /// A request has ended: those that waited for it last come in after their pauses.
    ///
    /// # Errors
    /// What the trace fails with.
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

    /// All requests have come in.
    ///
    /// # Errors
    /// [`Error::Config`] for requests that wait for one that no later request may wait for.
    pub(super) fn finish(&self) -> Result<()> {
        self.held.keys().min().map_or(Ok(()), |place| {
            Err(Error::config(format!(
                "request {place} and {} more wait for requests that are not named",
                self.held.len() - 1
            )))
        })
    }

    /// A request will come in; it waits for none any more.
    fn come(&mut self, place: u64, mut request: Request, at: Nanos, events: &mut Events) {
        request.after.clear();
        self.coming.insert(place, request);
        events.push(Event { at, kind: Kind::Arrival, machine: 0, number: place });
    }

    /// The next request of an open trace will come in.
    fn announce(&mut self, now: Nanos, events: &mut Events) -> Result<()> {
        let Some(request) = self.requests.next().transpose()? else {
            self.newest = None;
            return Ok(());
        };
        let (at, place) = (request.arrival, request.id);
        if at < now {
            return Err(Error::config(format!(
                "request {place} arrives at {at} ns, before the {now} ns of the one above"
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

    /// A client begins the next conversation, of which each turn waits for the one before.
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
