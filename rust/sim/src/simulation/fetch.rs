//! Peer fetches for the next requests of an engine.
//!
//! Invariant: a request starts after its fetch has ended or failed. Cost: a directory query per
//! request.

use std::ops::Range;

use kvtrie_core::{Nanos, Result};

use super::{Server, Simulation};
use crate::event::{Event, Kind, MachineId};
use crate::network::Network;
use crate::peers::{Fetch, Peers, block_bytes};
use crate::timeline::Track;

/// State of the fetch for an engine's next request.
#[derive(Debug, Default)]
pub(super) enum Fetching {
    #[default]
    None,
    /// Reading from the peer's disk.
    Disk(Fetch),
    /// Waiting for the peer's negative answer.
    Refused,
    /// Fetched blocks.
    Done(Range<usize>),
}

/// First number of transmissions between machines. Local transmissions have smaller numbers.
pub(super) const FIRST_FETCH: u64 = 1 << 63;

impl Simulation {
    /// Begin a step of an engine. Blocks of its next requests are fetched from peers first.
    pub(super) fn step_begins(&mut self, machine_id: MachineId) -> Result<()> {
        let now = self.now;
        let Server { machine, engine, .. } = &mut self.servers[machine_id];
        engine.step_begins(machine, now)?;
        while self.servers[machine_id].engine.head(now).is_some() {
            if matches!(self.servers[machine_id].fetch, Fetching::None) {
                self.fetch(machine_id)?;
            }
            let Server { machine, engine, fetch, .. } = &mut self.servers[machine_id];
            let fetched = match std::mem::take(fetch) {
                Fetching::None => 0..0,
                Fetching::Done(fetched) => fetched,
                waits @ (Fetching::Disk(_) | Fetching::Refused) => {
                    *fetch = waits;
                    break;
                }
            };
            if !engine.begin(machine, fetched.clone(), now)? {
                // The request waits for room and does not fetch again.
                *fetch = Fetching::Done(fetched);
                break;
            }
        }
        self.servers[machine_id].engine.go_on(now);
        Ok(())
    }

    /// Fetch from the machine extending the next request's match farthest.
    pub(super) fn fetch(&mut self, machine_id: MachineId) -> Result<()> {
        let Some(peers) = &self.peers else { return Ok(()) };
        let Server { machine, engine, .. } = &mut self.servers[machine_id];
        let Some(request) = engine.head(self.now) else { return Ok(()) };
        // Peers send only blocks missing in the shared store.
        let weight = u64::from(machine.calls.settings().token_weight);
        machine.find(&request.tokens, request.keep(self.keep, weight), self.now)?;
        let Server { machine, engine, .. } = &self.servers[machine_id];
        let Some(request) = engine.head(self.now) else { return Ok(()) };
        let (machines, now) = (self.servers.iter().map(|server| &server.machine), self.now);
        let found = peers.look(request, machine, &*self.directory, machines, now)?;
        let Some(found) = found else { return Ok(()) };
        let two = self.servers.get_disjoint_mut([machine_id, found.from()]);
        let [Server { engine, .. }, Server { machine: peer, .. }] =
            two.expect("a machine is not its own peer");
        let Some(request) = engine.head(now) else { return Ok(()) };
        let begun = peers.begin(&found, request, peer, now)?;
        // A negative answer takes the network latency.
        let latency = self.network.as_ref().map_or(0, Network::latency);
        let refused = now.saturating_add(latency);
        self.follow(found.from())?;
        let Some((fetch, at)) = begun else {
            // The peer no longer has the first block.
            let server = &mut self.servers[machine_id];
            if refused == now {
                server.fetch = Fetching::Done(0..0);
            } else {
                server.fetch = Fetching::Refused;
                self.announce_fetch(machine_id, refused);
            }
            return Ok(());
        };
        if at == now {
            return self.send(machine_id, fetch);
        }
        self.servers[machine_id].fetch = Fetching::Disk(fetch);
        self.announce_fetch(machine_id, at);
        Ok(())
    }

    pub(super) fn announce_fetch(&mut self, machine: MachineId, at: Nanos) -> u64 {
        let number = self.next_fetch;
        self.next_fetch += 1;
        self.events.push(Event { at, kind: Kind::TransmissionEnds, machine, number });
        number
    }

    /// Transmit the blocks. The waiting request may start.
    pub(super) fn send(&mut self, machine_id: MachineId, fetch: Fetch) -> Result<()> {
        let Server { machine, engine, fetch: state, .. } = &mut self.servers[machine_id];
        let (Some(peers), Some(network), Some(request)) =
            (&self.peers, &mut self.network, engine.next())
        else {
            return Ok(());
        };
        if let Some((start, end)) = peers.enter(network, &fetch, request, machine, self.now)? {
            let bytes = block_bytes(machine) * fetch.blocks().len() as u64;
            self.timeline.span(machine_id, Track::Peers, (start, end), bytes);
            *state = Fetching::Done(fetch.blocks());
            let number = self.announce_fetch(machine_id, end);
            self.fetches.insert(number, fetch);
            return Ok(());
        }
        *state = Fetching::Done(0..0);
        let peer = fetch.from();
        Peers::end(&fetch, &mut self.servers[peer].machine, self.now)?;
        self.follow(peer)?;
        Ok(())
    }

    /// Continue a fetch after its disk read or its transmission.
    pub(super) fn fetch_goes_on(&mut self, machine_id: MachineId, number: u64) -> Result<()> {
        let now = self.now;
        if self.pull_ends(machine_id, number)? {
            return Ok(());
        }
        let Some(fetch) = self.fetches.remove(&number) else {
            let read = std::mem::take(&mut self.servers[machine_id].fetch);
            match read {
                Fetching::Disk(fetch) => self.send(machine_id, fetch)?,
                Fetching::Refused => self.servers[machine_id].fetch = Fetching::Done(0..0),
                Fetching::None | Fetching::Done(_) => return Ok(()),
            }
            self.servers[machine_id].engine.wake(now);
            return Ok(());
        };
        let peer = fetch.from();
        Peers::end(&fetch, &mut self.servers[peer].machine, now)?;
        self.follow(peer)?;
        let machine = &mut self.servers[machine_id].machine;
        machine.calls.complete(&[], now)?;
        machine.take(now)
    }
}
