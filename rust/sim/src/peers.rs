//! Peers: what one machine's memory or disk holds is brought to another one's host.
//!
//! A directory says whose resident blocks continue the own match farthest; of equal ones it is the
//! peer that reads fewest from its disk, then the lowest number. A peer that has them no more costs the
//! network's latency. All blocks of a request are one transmission over
//! the network, entered when their last byte has left the peer's disk; they are marked as arriving in
//! the host here, and then loaded like any. Invariant: what a peer reads stays pinned there until
//! the network has carried it. Cost: that of the directory, and O(blocks) per
//! request.

use std::ops::Range;

use kvtrie_core::{Handle, Kind, Nanos, PinId, Query, Result, Scope};

use crate::directory::{Directory, Sendable};
use crate::event::MachineId;
use crate::machine::{Machine, Sources};
use crate::network::Network;
use crate::request::Request;

/// Blocks of a peer that continue a match.
#[derive(Clone, Debug)]
pub struct Continuation {
    from: MachineId,
    /// Their places in the prompt.
    blocks: Range<usize>,
}

/// Blocks on their way between two machines.
#[derive(Debug)]
pub struct Fetch {
    from: MachineId,
    blocks: Range<usize>,
    pins: Vec<PinId>,
}

/// Tiers that peers send blocks from, and to.
#[derive(Debug)]
pub struct Peers {
    sources: Sources,
    keep: u64,
}

impl Peers {
    /// For machines of these tiers; `None` without a host to receive.
    #[must_use]
    pub fn new(kinds: &[Kind], keep: u64) -> Option<Self> {
        let tier = |kind| kinds.iter().position(|&known| known == kind);
        let sources = Sources { host: tier(Kind::Host)?, disk: tier(Kind::Disk) };
        Some(Self { sources, keep })
    }

    /// The machine that continues a request's match on `here` farthest, as a directory knows it.
    ///
    /// # Errors
    /// As [`Directory::sendable`].
    pub fn look<'a>(
        &self,
        request: &Request,
        here: &Machine,
        directory: &dyn Directory,
        machines: impl Iterator<Item = &'a Machine>,
        now: Nanos,
    ) -> Result<Option<Continuation>> {
        let weight = u64::from(here.calls.settings().token_weight);
        let prompt = request.prompt(self.keep, weight);
        let asked = Query::Tokens(prompt.tokens);
        // The directory may ask this manager too, so it must be unlocked by then.
        let own = here.calls.manager().probe(asked, &Scope::default(), prompt.keep)?.len();
        let sources = self.sources;
        let found = directory.sendable(prompt, own, sources, &mut { machines }, now)?;
        let rank = |one: &Sendable| (one.blocks, usize::MAX - one.on_disk);
        let others = found.into_iter().enumerate().filter(|(other, _)| *other != here.number);
        // Of equal ones the lowest number is the last.
        let best = others.rev().max_by_key(|(_, found)| rank(found));
        let best = best.filter(|(_, found)| found.blocks > 0);
        Ok(best.map(|(from, found)| Continuation { from, blocks: own..own + found.blocks }))
    }

    /// The peer begins to read those of the blocks that it has. Returns when its disk's last byte is
    /// there: now without any. `None` if the first of them has left since.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::pin_copies`].
    pub fn begin(
        &self,
        found: &Continuation,
        request: &Request,
        peer: &mut Machine,
        now: Nanos,
    ) -> Result<Option<(Fetch, Nanos)>> {
        let Continuation { from, ref blocks } = *found;
        let weight = u64::from(peer.calls.settings().token_weight);
        let prompt = request.prompt(self.keep, weight);
        let mut sent = peer.sendable(prompt, blocks.start, self.sources, now)?;
        sent.truncate(blocks.len());
        if sent.is_empty() {
            return Ok(None);
        }
        let of = |tier| -> Vec<Handle> {
            sent.iter().filter(|(_, from)| *from == tier).map(|&(block, _)| block).collect()
        };
        let (mut pins, mut end) = (Vec::new(), now);
        let host = of(self.sources.host);
        if !host.is_empty() {
            pins.push(peer.calls.pin(&host, self.sources.host, now)?);
        }
        if let Some(disk) = self.sources.disk
            && let on_disk = of(disk)
            && !on_disk.is_empty()
        {
            pins.push(peer.calls.pin(&on_disk, disk, now)?);
            let bytes = block_bytes(peer) * on_disk.len() as u64;
            let layers = peer.calls.settings().layers;
            end = peer.executor.read_for_peer(disk, bytes, now, layers);
        }
        let blocks = blocks.start..blocks.start + sent.len();
        Ok(Some((Fetch { from, blocks, pins }, end)))
    }

    /// The blocks enter the network and are marked here. Returns when they begin to move and
    /// when they are there; `None` if there is no room for them, or if the blocks that they
    /// continue have left since.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::mark_behind`].
    pub fn enter(
        &self,
        network: &mut Network,
        fetch: &Fetch,
        request: &Request,
        here: &mut Machine,
        now: Nanos,
    ) -> Result<Option<(Nanos, Nanos)>> {
        let settings = here.calls.settings();
        let (size, layers) = (settings.block_tokens as usize, settings.layers);
        let prompt = &request.tokens[..fetch.blocks.end * size];
        let known = here.calls.manager().matched(prompt, &Scope::default(), 0)? / size;
        if known < fetch.blocks.start {
            return Ok(None);
        }
        let way = (fetch.from, here.number);
        let bytes = block_bytes(here) * fetch.blocks.len() as u64;
        let coming = network.preview(way, bytes, now, layers);
        let skip = fetch.blocks.start;
        if !here.calls.mark(prompt, self.sources.host, skip, (coming.first, coming.end), now)? {
            return Ok(None);
        }
        Ok(Some(network.transmit(way, bytes, now, layers)))
    }

    /// The peer has nothing more to read.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::unpin_copies`].
    pub fn end(fetch: &Fetch, peer: &mut Machine, now: Nanos) -> Result<()> {
        for &pin in &fetch.pins {
            peer.calls.unpin(pin, now)?;
        }
        peer.take(now)
    }
}

impl Fetch {
    /// Places of the blocks in the prompt.
    #[must_use]
    pub fn blocks(&self) -> Range<usize> {
        self.blocks.clone()
    }

    /// Whose blocks.
    #[must_use]
    pub fn from(&self) -> MachineId {
        self.from
    }
}

impl Continuation {
    /// Whose blocks.
    #[must_use]
    pub fn from(&self) -> MachineId {
        self.from
    }
}

/// Bytes of a block on a machine.
pub(crate) fn block_bytes(machine: &Machine) -> u64 {
    let settings = machine.calls.settings();
    settings.layer_bytes * u64::from(settings.layers)
}
