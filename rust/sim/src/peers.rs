//! Peers: what one machine's memory or disk holds is brought to another one's host.
//!
//! Asked is whose resident blocks continue the own match farthest; of equal ones the peer that reads
//! fewest from its disk, then the lowest number. All blocks of a request are one transmission over
//! the network, entered when their last byte has left the peer's disk; they are marked as arriving in
//! the host here, and then loaded like any. Invariant: what a peer reads stays pinned there until
//! the network has carried it. Cost: O(machines · blocks) per request.

use std::collections::BTreeMap;
use std::ops::Range;

use kvtrie_core::block::{Handle, TierId};
use kvtrie_core::error::Result;
use kvtrie_core::lane::{LaneId, LaneSpec, Lanes};
use kvtrie_core::manager::PinId;
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::Kind;
use kvtrie_core::time::Nanos;
use kvtrie_core::trie::Query;

use crate::event::MachineId;
use crate::machine::Machine;
use crate::record::LaneUse;
use crate::request::Request;

/// The name of the lanes between machines.
pub const LANE: &str = "peers";

/// What lies between machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerSpec {
    /// Bandwidth of each lane.
    pub bytes_per_s: u64,
    /// Latency of each transmission.
    pub latency_ns: u64,
    /// The queue that all pairs of machines stand in; each ordered pair has its own if `None`.
    pub shares: Option<String>,
}

/// Blocks of a peer that continue a match.
#[derive(Clone, Debug)]
pub struct Continuation {
    from: MachineId,
    /// Their places in the prompt.
    blocks: Range<usize>,
    host: Vec<Handle>,
    disk: Vec<Handle>,
}

/// Blocks on their way between two machines.
#[derive(Debug)]
pub struct Fetch {
    from: MachineId,
    blocks: Range<usize>,
    pins: Vec<PinId>,
}

/// The network and what it carries.
#[derive(Debug)]
pub struct Peers {
    spec: PeerSpec,
    host: TierId,
    disk: Option<TierId>,
    keep: u64,
    network: Lanes,
    waited: Nanos,
    pairs: BTreeMap<(MachineId, MachineId), LaneId>,
}

impl Peers {
    /// A network for machines of these tiers; `None` without a host to receive.
    #[must_use]
    pub fn new(spec: PeerSpec, kinds: &[Kind], keep: u64) -> Option<Self> {
        let tier = |kind| kinds.iter().position(|&known| known == kind);
        let (network, waited, pairs) = (Lanes::default(), 0, BTreeMap::new());
        let (host, disk) = (tier(Kind::Host)?, tier(Kind::Disk));
        Some(Self { spec, host, disk, keep, network, waited, pairs })
    }

    /// What the network has carried.
    #[must_use]
    pub fn carried(&self) -> LaneUse {
        let all = 0..self.network.len();
        let busy = all.clone().map(|lane| self.network.predicted(lane)).sum();
        let bytes = all.map(|lane| self.network.bytes(lane)).sum();
        LaneUse { bytes, busy, waited: self.waited }
    }

    /// Who continues a request's match on `here` farthest.
    ///
    /// # Errors
    /// As [`kvtrie_core::manager::Manager::probe`].
    pub fn look<'a>(
        &self,
        request: &Request,
        here: &Machine,
        others: impl Iterator<Item = &'a Machine>,
        now: Nanos,
    ) -> Result<Option<Continuation>> {
        let settings = here.calls.manager().settings();
        let keep = request.keep(self.keep, u64::from(settings.token_weight));
        let (asked, scope) = (|| Query::Tokens(&request.tokens), Scope::default());
        let own = here.calls.manager().probe(asked(), &scope, keep)?.len();
        let mut best: Option<Continuation> = None;
        for other in others.filter(|other| other.number != here.number) {
            let known = other.calls.manager().probe(asked(), &scope, keep)?;
            let found = self.stands(other, known.get(own..).unwrap_or_default(), own, now);
            let farther = best.as_ref().is_none_or(|best| {
                let rank = |one: &Continuation| (one.blocks.len(), usize::MAX - one.disk.len());
                rank(&found) > rank(best)
            });
            if farther && !found.blocks.is_empty() {
                best = Some(found);
            }
        }
        Ok(best)
    }

    /// The blocks at the front of some that stand whole in a machine's host or on its disk.
    fn stands(&self, other: &Machine, blocks: &[Handle], own: usize, now: Nanos) -> Continuation {
        let layers = other.calls.manager().settings().layers;
        let (mut host, mut disk) = (Vec::new(), Vec::new());
        for block in other.calls.manager().describe(blocks, now) {
            let whole = |tier| {
                let here = block.copies.iter().find(|copy| copy.tier == tier);
                here.is_some_and(|copy| !copy.leaving && copy.layers.len() == layers)
            };
            if whole(self.host) {
                host.push(block.block);
            } else if self.disk.is_some_and(whole) {
                disk.push(block.block);
            } else {
                break;
            }
        }
        let blocks = own..own + host.len() + disk.len();
        Continuation { from: other.number, blocks, host, disk }
    }

    /// The peer begins to read. Returns when its disk's last byte is there: now without any.
    ///
    /// # Errors
    /// As [`kvtrie_core::manager::Manager::pin_copies`].
    pub fn begin(
        &self,
        found: &Continuation,
        peer: &mut Machine,
        now: Nanos,
    ) -> Result<(Fetch, Nanos)> {
        let (mut pins, mut end) = (Vec::new(), now);
        if !found.host.is_empty() {
            pins.push(peer.calls.pin(&found.host, self.host, now)?);
        }
        if let (Some(disk), false) = (self.disk, found.disk.is_empty()) {
            pins.push(peer.calls.pin(&found.disk, disk, now)?);
            let bytes = block_bytes(peer) * found.disk.len() as u64;
            let layers = peer.calls.manager().settings().layers;
            end = peer.executor.read_for_peer(disk, bytes, now, layers);
        }
        Ok((Fetch { from: found.from, blocks: found.blocks.clone(), pins }, end))
    }

    /// The blocks enter the network and are marked here. Returns when they begin to move and
    /// when they are there; `None` if there is no room for them, or what they continue has left meanwhile.
    ///
    /// # Errors
    /// As [`kvtrie_core::manager::Manager::mark_behind`].
    pub fn enter(
        &mut self,
        fetch: &Fetch,
        request: &Request,
        here: &mut Machine,
        now: Nanos,
    ) -> Result<Option<(Nanos, Nanos)>> {
        let settings = here.calls.manager().settings();
        let (size, layers) = (settings.block_tokens as usize, settings.layers);
        let prompt = &request.tokens[..fetch.blocks.end * size];
        let known = here.calls.manager().matched(prompt, &Scope::default(), 0)? / size;
        if known < fetch.blocks.start {
            return Ok(None);
        }
        let lane = self.lane(fetch.from, here.number);
        let bytes = block_bytes(here) * fetch.blocks.len() as u64;
        let coming = self.network.preview(lane, bytes, now, layers);
        let skip = fetch.blocks.start;
        if !here.calls.mark(prompt, self.host, skip, (coming.first, coming.end), now)? {
            return Ok(None);
        }
        let start = now.max(self.network.free_at(lane));
        self.waited = self.waited.saturating_add(start - now);
        Ok(Some((start, self.network.transmit(lane, bytes, now, layers).end)))
    }

    /// The peer has nothing more to read.
    ///
    /// # Errors
    /// As [`kvtrie_core::manager::Manager::unpin_copies`].
    pub fn end(fetch: &Fetch, peer: &mut Machine, now: Nanos) -> Result<()> {
        for &pin in &fetch.pins {
            peer.calls.unpin(pin, now)?;
        }
        peer.take(now)
    }

    fn lane(&mut self, from: MachineId, to: MachineId) -> LaneId {
        let (spec, network) = (&self.spec, &mut self.network);
        *self.pairs.entry((from, to)).or_insert_with(|| {
            let own = || format!("{LANE} {from} {to}");
            network.add(LaneSpec {
                name: LANE.into(),
                bytes_per_s: spec.bytes_per_s,
                latency_ns: spec.latency_ns,
                shares: Some(spec.shares.clone().unwrap_or_else(own)),
            })
        })
    }
}

impl Fetch {
    /// Where the blocks stand in the prompt.
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
    let settings = machine.calls.manager().settings();
    settings.layer_bytes * u64::from(settings.layers)
}
