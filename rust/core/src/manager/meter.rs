//! What is counted: per tier what was found, moved and evicted, and per manager what was asked.
//!
//! Every count is taken here; the other files of the manager call in one line. Invariants: counts
//! only grow, `reset` included; every eviction has one cause and one reason, so both sum up to the
//! same, and so does the histogram of ages; `copies` and `clean` are what a look at every block
//! would find, which `audit` takes. Cost: O(1) per event and no allocation; one byte per block.

use crate::block::{BlockId, Layers, TierId};
use crate::histogram::Histogram;
use crate::tier::State;
use crate::time::{Nanos, stamp};

use super::Manager;
use super::lease::{Action, Plan, Step};
use super::log::Log;
use super::moves::{Move, MoveKind};
use super::report::Reason;

/// What made a copy leave a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Its room was wanted at once.
    #[default]
    Demand,
    /// Its room was wanted for something that is written down before its slot is needed.
    Ahead,
    /// Its lease was suspended.
    Suspended,
    /// A move failed: it could not be read, or stood behind what was lost.
    Failed,
    /// `mark` cleared it.
    Cleared,
    /// `reset` forgot it.
    Reset,
}

impl Cause {
    /// All of them, in the order of [`TierStats::evicted`].
    pub const ALL: [Self; 6] =
        [Self::Demand, Self::Ahead, Self::Suspended, Self::Failed, Self::Cleared, Self::Reset];

    /// The name users read.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Demand => "demand",
            Self::Ahead => "ahead",
            Self::Suspended => "suspended",
            Self::Failed => "failed",
            Self::Cleared => "cleared",
            Self::Reset => "reset",
        }
    }
}

/// Counters of one tier since the manager was made, and what stands there now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks that requests found here.
    pub hits: u64,
    /// Tokens that requests found here.
    pub tokens_hit: u64,
    /// Evictions by [`Cause`]. With layer slots each range of layers that leaves counts.
    pub evicted: [u64; Cause::ALL.len()],
    /// Evictions that were instant because a copy stands elsewhere.
    pub evicted_clean: u64,
    /// Evictions that had to be written first.
    pub evicted_dirty: u64,
    /// Evictions of last copies.
    pub dropped: u64,
    /// Stores of a block begun into this tier.
    pub demoted: u64,
    /// Loads of a block begun out of this tier.
    pub promoted: u64,
    /// Bytes that evictions gave back.
    pub bytes_freed: u64,
    /// Bytes read from here by moves.
    pub bytes_read: u64,
    /// Bytes written to here by moves.
    pub bytes_written: u64,
    /// Moves into this tier.
    pub moves: u64,
    /// Moves into this tier that failed.
    pub failed: u64,
    /// Time from begin to end, summed over moves into this tier.
    pub move_ns: u64,
    /// How often `audit` compared the next victim with that of the scan over all classes.
    pub compared: u64,
    /// How often the two differed.
    pub regrets: u64,
    /// Blocks that stand here now, with all or some of their layers.
    pub copies: u64,
    /// Those of them that could leave at once and without a loss: their layers stand below too,
    /// or, on the last tier, above.
    pub clean: u64,
    /// Those of them that a hint retains.
    pub retained: u64,
}

/// How times are spread on one tier.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TierTimes {
    /// Since the last use, of blocks that requests found here.
    pub hit_age: Histogram,
    /// Since the last use, of copies that left.
    pub evict_age: Histogram,
    /// From being handed out to the end, of loads that read from here.
    pub load: Histogram,
    /// Likewise of stores that wrote to here.
    pub store: Histogram,
    /// Likewise of copies within this tier.
    pub copy: Histogram,
}

/// Counters of all requests since the manager was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Requests that got a lease.
    pub requests: u64,
    /// Requests that did not fit.
    pub refused: u64,
    /// Full blocks of their prompts.
    pub blocks: u64,
    /// Tokens of their prompts.
    pub tokens: u64,
    /// Blocks that entered the trie.
    pub inserted: u64,
    /// Blocks that a second lease computed too.
    pub duplicates: u64,
}

/// What a manager has counted.
#[derive(Debug)]
pub(super) struct Meter {
    tiers: Vec<TierStats>,
    times: Vec<TierTimes>,
    pub(super) asked: RequestStats,
    /// By block id: on which tiers it is counted as standing, and above them as clean.
    seen: Vec<u8>,
    pub(super) log: Log,
}

/// Where the bits for clean copies begin.
const CLEAN: u8 = 4;

impl Meter {
    pub(super) fn new(tiers: usize, log: usize) -> Self {
        Self {
            tiers: vec![TierStats::default(); tiers],
            times: vec![TierTimes::default(); tiers],
            asked: RequestStats::default(),
            seen: Vec::new(),
            log: Log::new(log),
        }
    }

    pub(super) fn tier(&mut self, tier: TierId) -> &mut TierStats {
        &mut self.tiers[tier]
    }

    /// Blocks below `bound` exist.
    pub(super) fn grow(&mut self, bound: usize) {
        self.seen.resize(bound, 0);
    }

    fn see(&mut self, block: BlockId, now: u8) {
        let before = std::mem::replace(&mut self.seen[block as usize], now);
        for (tier, stats) in self.tiers.iter_mut().enumerate() {
            let bit = |bits: u8, at: usize| u64::from(bits >> at & 1);
            let clean = tier + usize::from(CLEAN);
            stats.copies = stats.copies + bit(now, tier) - bit(before, tier);
            stats.clean = stats.clean + bit(now, clean) - bit(before, clean);
        }
    }
}

impl Manager {
    /// The counters of a tier.
    #[must_use]
    pub fn stats(&self, tier: TierId) -> TierStats {
        self.meter.tiers[tier]
    }

    /// How times are spread on a tier.
    #[must_use]
    pub fn times(&self, tier: TierId) -> &TierTimes {
        &self.meter.times[tier]
    }

    /// The counters of all requests.
    #[must_use]
    pub fn asked(&self) -> RequestStats {
        self.meter.asked
    }

    /// How long a block has not been used.
    pub(super) fn idle(&self, block: BlockId, now: Nanos) -> Nanos {
        stamp(now).saturating_sub(self.nodes[block as usize].access)
    }

    /// A request for so many tokens found `path`, which was not touched yet. A block counts once,
    /// on a tier that some of it is loaded from if there is one; what is computed again, even in
    /// part, is no hit.
    pub(super) fn count_request(&mut self, tokens: usize, path: &[Step], plan: &Plan, now: Nanos) {
        let asked = &mut self.meter.asked;
        asked.requests += 1;
        asked.tokens += tokens as u64;
        asked.blocks += tokens as u64 / u64::from(self.settings.block_tokens);
        if let [all] = &plan.spans[..] {
            if all.action != Action::Recompute {
                let blocks = path[all.start as usize..all.stop as usize].iter();
                self.count_hits(all.tier, blocks.map(|step| step.block), now);
            }
            return;
        }
        let mut counted = vec![false; path.len()];
        let of = |action| plan.spans.iter().filter(move |span| span.action == action);
        for span in of(Action::Recompute) {
            counted[span.start as usize..span.stop as usize].fill(true);
        }
        for span in of(Action::Load).chain(of(Action::Reuse)) {
            let range = span.start as usize..span.stop as usize;
            let fresh = path[range.clone()].iter().zip(&mut counted[range]);
            let fresh = fresh.filter_map(|(step, counted)| {
                (!std::mem::replace(counted, true)).then_some(step.block)
            });
            self.count_hits(span.tier, fresh, now);
        }
    }

    /// Neighbours were mostly used together, so equal ages are recorded together.
    fn count_hits(&mut self, tier: TierId, blocks: impl Iterator<Item = BlockId>, now: Nanos) {
        let (now, ages) = (stamp(now), &mut self.meter.times[tier].hit_age);
        let (mut hits, mut run, mut last) = (0, 0, now);
        for block in blocks {
            let access = self.nodes[block as usize].access;
            if access != last && run > 0 {
                ages.record(now.saturating_sub(last), run);
                (hits, run) = (hits + run, 0);
            }
            (run, last) = (run + 1, access);
        }
        if run > 0 {
            ages.record(now.saturating_sub(last), run);
        }
        hits += run;
        let stats = &mut self.meter.tiers[tier];
        stats.hits += hits;
        stats.tokens_hit += hits * u64::from(self.settings.block_tokens);
    }

    /// Some layers of a block leave a tier where they still stand: every eviction, of whatever
    /// kind, is counted and logged here.
    pub(super) fn count_eviction(
        &mut self,
        (tier, block, layers): (TierId, BlockId, Layers),
        reason: Reason,
        cause: Cause,
        now: Nanos,
    ) {
        let idle = self.idle(block, now);
        let stats = &mut self.meter.tiers[tier];
        stats.evicted[cause as usize] += 1;
        match reason {
            Reason::Clean => stats.evicted_clean += 1,
            Reason::Demoted => stats.evicted_dirty += 1,
            Reason::Dropped => stats.dropped += 1,
        }
        stats.bytes_freed += u64::from(layers.len()) * self.settings.layer_bytes;
        self.meter.times[tier].evict_age.record(idle, 1);
        self.record((tier, block, layers), (reason, cause), idle, now);
        self.log_eviction((tier, block, layers), (reason, cause), now);
    }

    /// A whole copy is taken off a tier otherwise than by eviction for room.
    pub(super) fn count_loss(&mut self, tier: TierId, block: BlockId, cause: Cause, now: Nanos) {
        let here = self.residency(tier, block);
        if here.have.is_empty() {
            return;
        }
        let clean =
            self.meter.seen[block as usize] >> tier >> CLEAN & 1 == 1 || here.state == State::Bad;
        let reason = if clean { Reason::Clean } else { Reason::Dropped };
        self.count_eviction((tier, block, here.have), reason, cause, now);
    }

    /// A move has ended well.
    pub(super) fn count_move(&mut self, known: &Move, now: Nanos) {
        let bytes = self.settings.layer_bytes * u64::from(known.layers.len());
        self.meter.tiers[known.src].bytes_read += bytes;
        self.meter.tiers[known.dst].bytes_written += bytes;
        self.meter.tiers[known.dst].move_ns += now.saturating_sub(known.started);
        let times = match known.kind {
            MoveKind::Load => &mut self.meter.times[known.src].load,
            MoveKind::Store => &mut self.meter.times[known.dst].store,
            MoveKind::Copy => &mut self.meter.times[known.dst].copy,
        };
        times.record(now.saturating_sub(known.handed), 1);
    }

    /// What stands of a block has changed.
    pub(super) fn recount(&mut self, block: BlockId) {
        if let [only] = &mut self.meter.tiers[..] {
            // No tier but this one could make a copy clean.
            let stands = self.tiers[0].here[block as usize].state == State::Resident;
            let seen = &mut self.meter.seen[block as usize];
            only.copies = only.copies + u64::from(stands) - u64::from(*seen);
            *seen = u8::from(stands);
            return;
        }
        let now = self.standing(block);
        if now != self.meter.seen[block as usize] {
            self.meter.see(block, now);
        }
    }

    /// On which tiers a block stands, and above these bits where it is clean.
    fn standing(&self, block: BlockId) -> u8 {
        let stands = |tier: TierId| self.residency(tier, block).state == State::Resident;
        let usable = |tier: TierId| {
            if stands(tier) { self.residency(tier, block).have } else { Layers::NONE }
        };
        let mut bits = 0;
        for tier in (0..self.tiers.len()).filter(|&tier| stands(tier)) {
            let others = if tier == self.last() { 0..tier } else { tier + 1..self.tiers.len() };
            let left = others.into_iter().try_fold(usable(tier), |left, t| left.without(usable(t)));
            bits |= (1 | u8::from(left.is_some_and(Layers::is_empty)) << CLEAN) << tier;
        }
        bits
    }

    /// All counters stay when everything is forgotten, and what stood counts as evicted.
    pub(super) fn count_reset(&mut self) {
        let now = self.clock.last();
        self.meter.log = Log::new(self.settings.eviction_log);
        for block in self.living().collect::<Vec<_>>() {
            for tier in 0..self.tiers.len() {
                self.count_loss(tier, block, Cause::Reset, now);
            }
            self.meter.see(block, 0);
        }
        self.meter.log = Log::new(self.settings.eviction_log);
        self.meter.seen = Vec::new();
        for tier in &mut self.meter.tiers {
            tier.retained = 0;
        }
    }

    /// Compares the next victim of a tier with that of its simple twin.
    pub(super) fn compare_victims(&mut self, tier: TierId) {
        let now = stamp(self.clock.last());
        let retention = &mut self.tiers[tier].retention;
        let differs = retention.victim(now) != retention.scan(now);
        let stats = self.meter.tier(tier);
        stats.compared += 1;
        stats.regrets += u64::from(differs);
    }

    /// What was counted of copies is what stands.
    pub(super) fn audit_meter(&self, broken: &mut Vec<String>) {
        let mut found = vec![(0, 0); self.tiers.len()];
        for block in self.living() {
            let bits = self.standing(block);
            if bits != self.meter.seen[block as usize] {
                broken.push(format!("block {block} stands as {bits:#b} and is counted otherwise"));
            }
            for (tier, (copies, clean)) in found.iter_mut().enumerate() {
                *copies += u64::from(bits >> tier & 1);
                *clean += u64::from(bits >> tier >> CLEAN & 1);
            }
        }
        for (tier, (stats, times)) in self.meter.tiers.iter().zip(&self.meter.times).enumerate() {
            let evicted: u64 = stats.evicted.iter().sum();
            let reasons = stats.evicted_clean + stats.evicted_dirty + stats.dropped;
            let ages = (times.hit_age.count(), times.evict_age.count());
            let wrong = (stats.copies, stats.clean) != found[tier]
                || evicted != reasons
                || ages != (stats.hits, evicted);
            if wrong {
                let stands = found[tier];
                broken.push(format!("tier {tier} holds {stands:?} and counts {stats:?}, {ages:?}"));
            }
        }
    }
}
