//! Meter: counters per tier and per manager.
//!
//! All counting is done here, in a single call per event, and events and evictions are logged here.
//! Invariants: counters only grow, also over `reset`. Every eviction has a single cause and reason,
//! so their sums and the histogram's count are equal. `copies` and `clean` equal the full scan of
//! `audit`. Cost: O(1) per event and per run of blocks, without allocation for a request without
//! loads.

pub(super) mod block_event;
pub(super) mod contents;
pub(super) mod late_hits;
pub(super) mod log;

use smallvec::SmallVec;

use crate::block::{BlockId, MoveId, TierId};
use crate::histogram::Histogram;
use crate::policy::Entry;
use crate::tier::ResidencyState;
use crate::time::{Nanos, Stamp, stamp};

use crate::manager::Manager;
use crate::manager::kinds::{Action, Cause, Evicted, Reason};
use crate::manager::meter::log::Log;
use crate::manager::moves::batch::MoveClass;
use crate::manager::request::life::lease::Plan;
use crate::transfer::InFlightMove;
use crate::transfer::MoveKind;

impl Cause {
    /// All causes, in the order of [`TierStats::evicted`].
    pub const ALL: [Self; 7] = [
        Self::Demand,
        Self::Ahead,
        Self::Suspended,
        Self::Failed,
        Self::Cleared,
        Self::Reset,
        Self::Hinted,
    ];

    /// Name of the cause in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Demand => "demand",
            Self::Ahead => "ahead",
            Self::Suspended => "suspended",
            Self::Failed => "failed",
            Self::Cleared => "cleared",
            Self::Reset => "reset",
            Self::Hinted => "hinted",
        }
    }
}

/// Counters of a tier since the manager's creation, and its present residencies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks found here by requests.
    pub hits: u64,
    /// Tokens found here by requests.
    pub tokens_hit: u64,
    /// Evictions by [`Cause`]. With layer slots, each evicted range of layers counts.
    pub evicted: [u64; Cause::ALL.len()],
    /// Evictions without a store, because a second copy is resident.
    pub evicted_clean: u64,
    /// Evictions with a write-back.
    pub evicted_dirty: u64,
    /// Evictions of last copies.
    pub dropped: u64,
    /// Stores of a block started into this tier.
    pub demoted: u64,
    /// Loads of a block started out of this tier.
    pub promoted: u64,
    /// Bytes freed by evictions.
    pub bytes_freed: u64,
    /// Bytes read from here by moves.
    pub bytes_read: u64,
    /// Bytes written to here by moves.
    pub bytes_written: u64,
    /// Moves into this tier.
    pub moves: u64,
    /// Failed moves into this tier.
    pub failed: u64,
    /// Stores into this shared tier dropped by eviction: their blocks left the tier above before a
    /// worker began to read them.
    pub stores_dropped: u64,
    /// Time from start to end, summed over moves into this tier.
    pub move_ns: u64,
    /// Number of times `audit` compared the next victim with the victim of a full scan.
    pub compared: u64,
    /// Number of times an entry was worth less than the victim by unrounded costs.
    pub regrets: u64,
    /// Blocks resident here now, with all or some of their layers.
    pub copies: u64,
    /// Resident blocks that can be evicted at once without loss: their layers are resident below
    /// too, or, on the last tier, above.
    pub clean: u64,
    /// Resident blocks retained by a hint.
    pub retained: u64,
}

/// Histograms of times on a tier.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TierTimes {
    /// Time since the last use, of blocks found here by requests.
    pub hit_age: Histogram,
    /// Time since the last use, of evicted copies.
    pub evict_age: Histogram,
    /// Time from issue to end, of loads from here.
    pub load: Histogram,
    /// Time from issue to end, of stores to here.
    pub store: Histogram,
    /// Time from issue to end, of copies within this tier.
    pub copy: Histogram,
}

/// Counters of all requests since the manager's creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Requests that became leases.
    pub requests: u64,
    /// Requests without room.
    pub refused: u64,
    /// Full blocks of the leased prompts.
    pub blocks: u64,
    /// Tokens of the leased prompts.
    pub tokens: u64,
    /// Blocks added to the trie.
    pub inserted: u64,
    /// Blocks computed by a second lease as well.
    pub duplicates: u64,
    /// Failures overwritten before the caller read them.
    pub failed_lost: u64,
    /// Blocks that a later `load` may still find: neither hits nor misses yet.
    pub undecided: u64,
}

/// Counters of a manager.
#[derive(Debug)]
pub(crate) struct Meter {
    pub(super) tiers: Vec<TierStats>,
    times: Vec<TierTimes>,
    pub(crate) requested: RequestStats,
    pub(crate) log: Log,
}

impl Meter {
    pub(crate) fn new(tiers: usize, log: usize) -> Self {
        Self {
            tiers: vec![TierStats::default(); tiers],
            times: vec![TierTimes::default(); tiers],
            requested: RequestStats::default(),
            log: Log::new(log),
        }
    }

    pub(crate) fn tier(&mut self, tier: TierId) -> &mut TierStats {
        &mut self.tiers[tier]
    }

    /// Counts `blocks` hits of `tokens` tokens and equal age on a tier.
    pub(crate) fn count_hits(&mut self, tier: TierId, age: Nanos, blocks: u64, tokens: u32) {
        self.times[tier].hit_age.record(age, blocks);
        self.tiers[tier].hits += blocks;
        self.tiers[tier].tokens_hit += blocks * u64::from(tokens);
    }

    /// Adds bytes and their time to the tiers of a route.
    fn count(&mut self, (_, src, dst): MoveClass, bytes: u64, took: Nanos) {
        self.tiers[src].bytes_read += bytes;
        self.tiers[dst].bytes_written += bytes;
        self.tiers[dst].move_ns += took;
    }

    /// The duration histogram of a kind of move.
    fn durations(&mut self, (kind, src, dst): MoveClass) -> &mut Histogram {
        match kind {
            MoveKind::Load => &mut self.times[src].load,
            MoveKind::Store => &mut self.times[dst].store,
            MoveKind::Copy => &mut self.times[dst].copy,
        }
    }
}

impl Manager {
    /// The histograms of a tier.
    #[must_use]
    pub fn times(&self, tier: TierId) -> &TierTimes {
        &self.meter.times[tier]
    }

    /// The counters of all requests.
    #[must_use]
    pub fn requested(&self) -> RequestStats {
        self.meter.requested
    }

    /// Time since the last use of a block.
    pub(crate) fn idle(&self, block: BlockId, now: Nanos) -> Nanos {
        stamp(now).saturating_sub(self.node(block).access)
    }

    /// Counts a request that found `path`. Call it before `touch`. A block counts once, on a tier
    /// it is partly loaded from, if any. A block recomputed even in part is no hit.
    pub(crate) fn count_request(
        &mut self,
        tokens: usize,
        path: &[BlockId],
        plan: &Plan,
        now: Nanos,
    ) {
        let stats = &mut self.meter.requested;
        stats.requests += 1;
        stats.tokens += tokens as u64;
        stats.blocks += tokens as u64 / u64::from(self.settings.block_tokens);
        // The usual case, without a buffer: all blocks are on a single tier.
        if let [all] = &plan.spans[..] {
            if all.action != Action::Recompute {
                self.count_hits(all.tier, &path[all.start as usize..all.stop as usize], now);
            }
            return;
        }
        let mut counted = vec![false; path.len()];
        let of = |action| plan.spans.iter().filter(move |span| span.action == action);
        for span in of(Action::Recompute) {
            counted[span.start as usize..span.stop as usize].fill(true);
        }
        for span in of(Action::Load).chain(of(Action::Reuse)) {
            let mut at = span.start as usize;
            for piece in counted[at..span.stop as usize].chunk_by_mut(|a, b| a == b) {
                // Part of the span was counted for a computed or loaded piece.
                if !piece[0] {
                    self.count_hits(span.tier, &path[at..at + piece.len()], now);
                    piece.fill(true);
                }
                at += piece.len();
            }
        }
    }

    /// Counts blocks found on a tier. The blocks of a run have the same last use.
    fn count_hits(&mut self, tier: TierId, path: &[BlockId], now: Nanos) {
        let size = self.settings.block_tokens;
        for (run, node) in self.blocks.trie().along(path) {
            let age = stamp(now).saturating_sub(node.access);
            self.meter.count_hits(tier, age, u64::from(run.end - run.start), size);
        }
    }

    /// Counts and logs the eviction of some layers of each block of a run, before they leave. Every
    /// eviction is counted here. The last block leaves first.
    pub(crate) fn count_eviction(&mut self, evicted: &Evicted, now: Nanos) {
        if self.tiers.above_shared(evicted.tier) {
            self.count_dropped_stores(evicted);
        }
        let Evicted { tier, blocks: ref run, layers, reason, cause } = *evicted;
        let (number, idle) = (u64::from(run.end - run.start), self.idle(run.start, now));
        let stats = &mut self.meter.tiers[tier];
        stats.evicted[cause as usize] += number;
        match reason {
            Reason::Clean => stats.evicted_clean += number,
            Reason::Demoted => stats.evicted_dirty += number,
            Reason::Dropped => stats.dropped += number,
        }
        stats.bytes_freed += u64::from(layers.len()) * self.settings.layer_bytes * number;
        self.meter.times[tier].evict_age.record(idle, number);
        // Events need an entry per block, counters only an entry per run.
        if self.settings.events == 0 && self.settings.eviction_log == 0 {
            return;
        }
        for block in run.clone().rev() {
            self.record(evicted, block, idle, now);
            self.log_eviction(evicted, block, now);
        }
    }

    /// Counts the victims lost before their store to a shared tier.
    fn count_dropped_stores(&mut self, evicted: &Evicted) {
        let Evicted { tier, blocks: ref run, reason, cause, .. } = *evicted;
        let evicts = matches!(cause, Cause::Demand | Cause::Ahead | Cause::Hinted);
        if reason != Reason::Dropped || !evicts || !self.tiers.writes(tier) {
            return;
        }
        // Blocks of a run share their number of uses.
        if self.node(run.start).uses >= self.tiers[tier].spec.admit_after {
            let below = self.blocks.table(tier + 1);
            let dropped = run.clone().filter(|&block| below.none_present(block..block + 1)).count();
            self.meter.tier(tier + 1).stores_dropped += dropped as u64;
        }
    }

    /// Counts the loss of a whole copy on a tier, except by eviction for room.
    pub(crate) fn count_loss(&mut self, tier: TierId, block: BlockId, cause: Cause, now: Nanos) {
        let residency = self.residency(tier, block);
        if residency.have.is_empty() {
            return;
        }
        // A bad copy was useless, so nothing is lost.
        let clean = residency.state == ResidencyState::Bad || self.blocks.is_clean(tier, block);
        let reason = if clean { Reason::Clean } else { Reason::Dropped };
        let blocks = block..block + 1;
        self.count_eviction(&Evicted { tier, blocks, layers: residency.have, reason, cause }, now);
    }

    /// Counts a successful move.
    pub(crate) fn count_move(&mut self, known: &InFlightMove, now: Nanos) {
        let bytes = self.settings.move_bytes(known.group, known.layers);
        let class = (known.kind, known.src, known.dst);
        self.meter.count(class, bytes, now.saturating_sub(known.started));
        self.meter.durations(class).record(now.saturating_sub(known.handed), 1);
    }

    /// Counts moves of full blocks over a route, and removes them.
    pub(crate) fn end_moves(&mut self, class: MoveClass, ids: &[MoveId], now: Nanos) {
        let bytes = self.settings.layer_bytes * u64::from(self.settings.layers);
        let mut took = 0;
        // Most moves were issued together, so a single histogram entry serves them all.
        let mut handed: SmallVec<[(Nanos, u64); 2]> = SmallVec::new();
        self.moves.forget(ids, |known| {
            took += now.saturating_sub(known.started);
            match handed.last_mut() {
                Some((then, number)) if *then == known.handed => *number += 1,
                _ => handed.push((known.handed, 1)),
            }
        });
        self.meter.count(class, bytes * ids.len() as u64, took);
        for (then, number) in handed {
            self.meter.durations(class).record(now.saturating_sub(then), number);
        }
    }

    /// Counts all copies as evicted by `reset`. The counters stay.
    pub(crate) fn count_reset(&mut self) {
        let now = self.clock.last();
        self.meter.log = Log::new(0);
        for block in self.living().collect::<Vec<_>>() {
            for tier in 0..self.tiers.len() {
                self.count_loss(tier, block, Cause::Reset, now);
            }
        }
        self.meter.log = Log::new(self.settings.eviction_log);
    }

    /// Compares the next victim of a tier with the victim of the reference scan: they must be
    /// equal. Counts a regret if an entry was worth less by unrounded costs.
    pub(crate) fn compare_victims(&mut self, tier: TierId, broken: &mut Vec<String>) {
        let now = stamp(self.clock.last());
        let index = &mut self.tiers[tier].eviction;
        let (victim, twin) = (index.victim(now), index.scan(now));
        if victim != twin {
            broken.push(format!("tier {tier} gives up {victim:?}, a scan {twin:?}"));
        }
        let regret = victim.is_some_and(|victim| self.regrets(tier, &victim, now));
        let stats = self.meter.tier(tier);
        stats.compared += 1;
        stats.regrets += u64::from(regret);
    }

    /// Whether any entry is worth less than the victim by unrounded costs.
    fn regrets(&self, tier: TierId, victim: &Entry, now: Stamp) -> bool {
        let index = &self.tiers[tier].eviction;
        let unrounded = |entry: &Entry| {
            let facts = self.facts(tier, entry.id, self.residency(tier, entry.id).have);
            index.unrounded(&facts, entry.tie, &self.settings.cost)
        };
        let taken = unrounded(victim);
        let mut others = index.entries();
        others.any(|other| index.worth_less(&unrounded(&other), &taken, now))
    }

    /// Checks that the counters of copies equal a full scan.
    pub(crate) fn audit_meter(&self, broken: &mut Vec<String>) {
        for tier in 0..self.tiers.len() {
            let resident =
                |&block: &BlockId| self.residency(tier, block).state == ResidencyState::Resident;
            let copies = self.living().filter(resident).count() as u64;
            let clean =
                self.living().filter(|&block| self.blocks.is_clean(tier, block)).count() as u64;
            let (stats, times) = (self.stats(tier), self.times(tier));
            let evicted: u64 = stats.evicted.iter().sum();
            let reasons = stats.evicted_clean + stats.evicted_dirty + stats.dropped;
            let ages = (times.hit_age.count(), times.evict_age.count());
            let wrong = (stats.copies, stats.clean) != (copies, clean)
                || evicted != reasons
                || ages != (stats.hits, evicted);
            if wrong {
                broken.push(format!(
                    "tier {tier} holds {copies} copies, {clean} clean, and counts {stats:?}, {ages:?}"
                ));
            }
        }
    }
}
