//! Test fixtures of all policies: facts, simple loops and a small cache.
//!
//! Invariant: blocks hold 32 tokens and the model has 40 layers unless a test says otherwise. Cost:
//! full sorts and scans.

use std::collections::BTreeMap;

use super::{Entry, Facts, LastUse, Policy, Reload, by_name, class_of};
use crate::block::{BlockId, Departure, Layers};
use crate::cost::CostModel;
use crate::eviction::EvictionIndex;
use crate::hint::{Band, NORMAL, Priority};
use crate::time::Nanos;

/// A whole block, used once, about to be demoted.
pub(crate) fn facts(context: u64, block: u32, session_blocks: u32) -> Facts {
    Facts {
        id: BlockId::MAX,
        context,
        block,
        session_blocks,
        uses: 1,
        access: 0,
        arrival: 0,
        layers: Layers::new(0, 40),
        model_layers: 40,
        layer: None,
        departure: Departure::Demote,
        price: None,
        reload: Reload { tokens: 32, own_tier: 0, below: Some(20) },
        last_use: LastUse::default(),
    }
}

/// A layer of block `block` of a session of `session_blocks`.
pub(super) fn layer(layer: u16, model_layers: u16, block: u32, session_blocks: u32) -> Facts {
    Facts {
        layers: Layers::new(0, model_layers),
        model_layers,
        layer: Some(layer),
        ..facts(u64::from(block) * 32, block, session_blocks)
    }
}

/// The ids in the order of leaving.
pub(super) fn order(policy: &dyn Policy, mut entries: Vec<Entry>, now: Nanos) -> Vec<BlockId> {
    entries.sort_by(|a, b| policy.compare(a, b, now));
    entries.iter().map(|entry| entry.id).collect()
}

/// Evicts layer by layer until nothing is left, and returns (layer, id) of the victims.
///
/// Each block offers a layer at a time: the last layer for demotion, the first layer for drops.
/// `accesses` holds the last use of each block of each session.
pub(super) fn evict_all(
    policy: &dyn Policy,
    cost: &CostModel,
    model_layers: u16,
    accesses: &[Vec<Nanos>],
    departure: Departure,
    now: Nanos,
) -> Vec<(u16, BlockId)> {
    let mut blocks = Vec::new();
    for session in accesses {
        let number = u32::try_from(session.len()).unwrap_or(0);
        for (block, &access) in (0..).zip(session) {
            blocks.push((block, number, access, Layers::new(0, model_layers)));
        }
    }
    let mut victims = Vec::new();
    loop {
        let offers = (0..).zip(&blocks).filter(|(_, block)| !block.3.is_empty());
        let entries = offers.map(|(id, &(block, number, access, layers))| {
            let next = if departure == Departure::Demote { layers.hi - 1 } else { layers.lo };
            let facts = Facts { layers, departure, ..layer(next, model_layers, block, number) };
            (next, Entry { class: policy.class(&facts, cost), place: access, tie: 0, id })
        });
        let Some((next, entry)) = entries.min_by(|a, b| policy.compare(&a.1, &b.1, now)) else {
            return victims;
        };
        victims.push((next, entry.id));
        let layers = &mut blocks[entry.id as usize].3;
        *layers = layers.without(Layers::new(next, next + 1)).unwrap_or(Layers::NONE);
    }
}

#[derive(Clone, Copy)]
struct CachedBlock {
    parent: Option<BlockId>,
    facts: Facts,
}

/// A cache of whole paths under a policy.
///
/// A path is a list of block ids, each always after the same ids. The cost of a block is its depth
/// plus 1. A request takes ten nanoseconds.
pub(super) struct TestCache {
    /// Whether only leaves may leave.
    pub(super) leaves: bool,
    /// Blocks found by requests.
    pub(super) hits: usize,
    name: String,
    capacity: usize,
    eviction: EvictionIndex,
    cost: CostModel,
    blocks: BTreeMap<BlockId, CachedBlock>,
    requests: u64,
    /// Priorities of blocks, if not normal.
    pub(super) priorities: BTreeMap<BlockId, Priority>,
}

impl TestCache {
    pub(super) fn new(name: &str, capacity: u32) -> Self {
        let policy = by_name(name, true).expect("a known name");
        Self {
            leaves: true,
            hits: 0,
            name: name.to_owned(),
            capacity: capacity as usize,
            eviction: EvictionIndex::new(policy, 0.0),
            cost: CostModel::default_curve(1.0).expect("good numbers"),
            blocks: BTreeMap::new(),
            requests: 0,
            priorities: BTreeMap::new(),
        }
    }

    /// Serves a path: resident blocks are hits, missing blocks become resident. Returns and checks
    /// the victims.
    pub(super) fn request(&mut self, path: &[BlockId]) -> Vec<BlockId> {
        self.eviction.on_request(self.requests, None);
        self.requests += 1;
        let now = self.requests * 10;
        for id in path {
            self.eviction.unlink(*id);
        }
        let missing = path.iter().filter(|id| !self.blocks.contains_key(id)).count();
        let mut victims = Vec::new();
        while self.blocks.len() + missing > self.capacity {
            let victim = self.eviction.victim(now).expect("something may leave");
            let order = self.eviction.order(now);
            assert_eq!(order.iter().find(|entry| self.offered(entry)), Some(&victim));
            assert!(!path.contains(&victim.id));
            assert!(!self.leaves || self.leaf(victim.id));
            let lowest = order.iter().map(|entry| self.priority(entry.id)).min();
            assert_eq!(lowest, Some(self.priority(victim.id)));
            self.eviction.unlink(victim.id);
            let evicted = self.blocks.remove(&victim.id).expect("it was cached");
            self.relink(evicted.parent.into_iter().collect(), path);
            victims.push(victim.id);
        }
        for (depth, &id) in (0_u32..).zip(path) {
            let cached = self.blocks.contains_key(&id);
            let parent = depth.checked_sub(1).map(|at: u32| path[at as usize]);
            let fresh = Facts { id, uses: 0, ..facts(u64::from(depth) * 10_700, depth, 9) };
            let block = self.blocks.entry(id).or_insert(CachedBlock { parent, facts: fresh });
            block.facts.uses += 1;
            block.facts.access = now;
            let request = u32::try_from(self.requests).expect("a short trace");
            let end = depth as usize + 1 == path.len();
            let (weight, class) = (1.0 + 0.5 * real(depth), class_of(0, block.facts.uses - 1, end));
            block.facts.last_use = LastUse { request, weight, class, turn: 0 };
            block.facts.arrival = if cached { block.facts.arrival } else { self.requests };
            self.hits += usize::from(cached);
        }
        self.relink(path.to_vec(), &[]);
        victims
    }

    /// Whether the policy considers an entry: `learned` considers only the first and last of each
    /// class.
    fn offered(&self, entry: &Entry) -> bool {
        let rank = |entry: &Entry| (self.priority(entry.id), entry.class);
        let same = self.eviction.entries().filter(|other| rank(other) == rank(entry));
        let keys: Vec<_> = same.map(|other| other.key()).collect();
        let end = keys.first() == Some(&entry.key()) || keys.last() == Some(&entry.key());
        end || self.name != "learned"
    }

    fn priority(&self, id: BlockId) -> Priority {
        self.priorities.get(&id).copied().unwrap_or(NORMAL)
    }

    fn leaf(&self, id: BlockId) -> bool {
        self.blocks.values().all(|other| other.parent != Some(id))
    }

    /// Links all evictable blocks not in use, at their current cost.
    fn relink(&mut self, ids: Vec<BlockId>, used: &[BlockId]) {
        for id in ids {
            self.eviction.unlink(id);
            let Some(&CachedBlock { facts, .. }) = self.blocks.get(&id) else { continue };
            if !used.contains(&id) && (!self.leaves || self.leaf(id)) {
                let entry = self.eviction.entry(&facts, 99 - facts.block, &self.cost);
                let priority = self.priority(id);
                self.eviction.link(entry, Band { priority, ..Band::NORMAL });
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "depths are small")]
fn real(depth: u32) -> f32 {
    depth as f32
}
