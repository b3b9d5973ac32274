//! Peer fetches: copy blocks from a different machine's host memory or disk to the local host tier.
//!
//! The directory gives the machine extending the local match farthest. Ties go to the peer with the
//! fewest disk reads, then to the lowest number. A stale answer costs the network latency. All
//! blocks of a request are one transmission, entering the network after the peer's last disk read.
//! The blocks are marked as arriving in the local host tier and are loaded normally from there.
//! Invariant: blocks stay pinned on the peer until the network has carried them. Cost: the
//! directory's query, plus O(blocks) per request.

use std::ops::Range;

use kvtrie_core::{Handle, Kind, Nanos, PinId, Query, Result, Scope};

use crate::directory::{Directory, Sendable};
use crate::event::MachineId;
use crate::machine::{Machine, Sources};
use crate::network::Network;
use crate::request::Request;

/// Blocks of a peer extending a match.
#[derive(Clone, Debug)]
pub struct Continuation {
    from: MachineId,
    /// Block positions in the prompt.
    blocks: Range<usize>,
}

/// Blocks in flight between two machines.
#[derive(Debug)]
pub struct Fetch {
    from: MachineId,
    blocks: Range<usize>,
    pins: Vec<PinId>,
}

/// Source and destination tiers of peer fetches.
#[derive(Debug)]
pub struct Peers {
    sources: Sources,
    keep: u64,
}

impl Peers {
    /// Create for machines with these tiers. Returns `None` without a host tier.
    #[must_use]
    pub fn new(kinds: &[Kind], keep: u64) -> Option<Self> {
        let tier = |kind| kinds.iter().position(|&known| known == kind);
        let sources = Sources { host: tier(Kind::Host)?, disk: tier(Kind::Disk) };
        Some(Self { sources, keep })
    }

    /// Find the machine extending a request's match on the `receiver` farthest, by a directory.
    ///
    /// # Errors
    /// As [`Directory::sendable`].
    pub fn look<'a>(
        &self,
        request: &Request,
        receiver: &Machine,
        directory: &dyn Directory,
        machines: impl Iterator<Item = &'a Machine>,
        now: Nanos,
    ) -> Result<Option<Continuation>> {
        let weight = u64::from(receiver.calls.settings().token_weight);
        let prompt = request.prompt(self.keep, weight);
        let asked = Query::Tokens(prompt.tokens);
        // The directory may query this manager, so the lock is released first.
        let own = receiver.calls.manager().probe(asked, &Scope::default(), prompt.keep)?.len();
        let sources = self.sources;
        let found = directory.sendable(prompt, own, sources, &mut { machines }, now)?;
        let rank = |one: &Sendable| (one.blocks, usize::MAX - one.on_disk);
        let others = found.into_iter().enumerate().filter(|(other, _)| *other != receiver.number);
        // On a tie, `max_by_key` takes the last element: the lowest number.
        let best = others.rev().max_by_key(|(_, found)| rank(found));
        let best = best.filter(|(_, found)| found.blocks > 0);
        Ok(best.map(|(from, found)| Continuation { from, blocks: own..own + found.blocks }))
    }

    /// Start reading the blocks on the peer, as far as present. Returns the end of the disk reads
    /// (`now` without any), or `None` if the first block is no longer there.
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

    /// Transmit the blocks and mark them as arriving. Returns the start and end of the
    /// transmission, or `None` if there is no room or the preceding blocks were evicted.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::mark_after`].
    pub fn enter(
        &self,
        network: &mut Network,
        fetch: &Fetch,
        request: &Request,
        receiver: &mut Machine,
        now: Nanos,
    ) -> Result<Option<(Nanos, Nanos)>> {
        let settings = receiver.calls.settings();
        let (size, layers) = (settings.block_tokens as usize, settings.layers);
        let prompt = &request.tokens[..fetch.blocks.end * size];
        let known = receiver.calls.manager().matched(prompt, &Scope::default(), 0)? / size;
        if known < fetch.blocks.start {
            return Ok(None);
        }
        let way = (fetch.from, receiver.number);
        let bytes = block_bytes(receiver) * fetch.blocks.len() as u64;
        let coming = network.preview(way, bytes, now, layers);
        let skip = fetch.blocks.start;
        if !receiver.calls.mark(prompt, self.sources.host, skip, (coming.first, coming.end), now)? {
            return Ok(None);
        }
        Ok(Some(network.transmit(way, bytes, now, layers)))
    }

    /// Release the peer's pins.
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
    /// Block positions in the prompt.
    #[must_use]
    pub fn blocks(&self) -> Range<usize> {
        self.blocks.clone()
    }

    /// Source machine.
    #[must_use]
    pub fn from(&self) -> MachineId {
        self.from
    }
}

impl Continuation {
    /// Source machine.
    #[must_use]
    pub fn from(&self) -> MachineId {
        self.from
    }
}

/// Bytes of a block.
pub(crate) fn block_bytes(machine: &Machine) -> u64 {
    let settings = machine.calls.settings();
    settings.layer_bytes * u64::from(settings.layers)
}
