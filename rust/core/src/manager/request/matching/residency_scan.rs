//! Residency scan: lists the blocks of a matched path missing on the first tier, and decides
//! whether each is loaded or computed.
//!
//! Invariant: nothing changes here. Cost: O(listed blocks), plus the planner's cost.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::arrival::MoveIds;
use crate::block::{BlockId, Layers, TierId};
use crate::lane::LaneId;
use crate::plan::layerwise::Pass;
use crate::plan::{self, Source};
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::kinds::{Action, LoadMode, Span};
use crate::manager::request::life::lease::Plan;

/// Missing block: its absent layers, their sources, and the decision.
#[derive(Clone, Debug)]
pub(crate) struct MissingBlock {
    /// Its place on the path.
    pub(crate) at: usize,
    pub(crate) block: BlockId,
    /// Layers resident or arriving on the first tier.
    resident: Layers,
    /// The missing layers.
    pub(crate) lacks: Layers,
    /// Source tiers of the missing layers, in ascending order of layers.
    pub(crate) sources: SmallVec<[(TierId, Layers); 1]>,
    /// Layers of `lacks` to be computed by the engine.
    pub(crate) compute: Layers,
    /// Whether its layers are loaded.
    pub(crate) load: bool,
    /// Whether it is leaving the first tier and can be reclaimed without a move.
    pub(crate) reclaim: bool,
    /// Time when the `resident` layers are valid.
    ready: Nanos,
}

/// Request to the planner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefill {
    pub(crate) mode: LoadMode,
    /// Latest ready time of planned loads.
    pub(crate) deadline: Option<Nanos>,
    /// Time to compute the tokens after the match.
    pub(crate) rest: Nanos,
    /// Whether the engine computes a layer while the next layers are loaded.
    pub(crate) layerwise: bool,
}

impl Prefill {
    /// Load every loadable block, without later computation.
    pub(crate) const ALL: Self =
        Self { mode: LoadMode::All, deadline: None, rest: 0, layerwise: false };
}

/// Cached time to load a number of layers over a lane: usually equal along a path.
#[derive(Default)]
struct LoadTime {
    lane: LaneId,
    layers: u16,
    time: Nanos,
}

impl MissingBlock {
    /// A block absent from the first tier and fully resident on a lower tier.
    fn absent(at: usize, block: BlockId, tier: TierId, all: Layers, now: Nanos) -> Self {
        let (resident, compute) = (Layers::NONE, Layers::NONE);
        let sources = smallvec![(tier, all)];
        let (load, reclaim) = (false, false);
        Self { at, block, resident, lacks: all, sources, compute, load, reclaim, ready: now }
    }

    /// The layers to load, with their tiers.
    pub(crate) fn loads(&self) -> impl Iterator<Item = (TierId, Layers)> + '_ {
        // Layers below a gap are computed with it.
        let from = if self.compute.is_empty() { self.lacks.lo } else { self.compute.hi };
        let wanted = Layers::new(from, self.lacks.hi);
        let clip = move |&(tier, layers): &(TierId, Layers)| (tier, layers.meet(wanted));
        self.sources.iter().map(clip).filter(|(_, layers)| !layers.is_empty())
    }
}

impl Manager {
    /// Lists the blocks of a path that are not fully resident on the first tier.
    pub(crate) fn scan(&self, path: &[BlockId], now: Nanos) -> Vec<MissingBlock> {
        let mut missing = Vec::new();
        // The usual case of a cache that is not full yet: no table is read.
        if self.holds_all(0) && !self.tiers.engine_owned() {
            return missing;
        }
        let (mut at, all) = (0, self.all_layers());
        for run in self.runs(path) {
            let lacks = self.blocks.table(0).first_not_full(run.clone());
            let rest = if self.tiers.engine_owned() { run.clone() } else { lacks..run.end };
            let lacking = (at + (rest.start - run.start) as usize..).zip(rest.clone());
            // Usually a run was evicted as a whole: all its blocks get equal entries.
            if let Some(tier) = self.idle_below(&rest) {
                let absent = |(at, block)| MissingBlock::absent(at, block, tier, all, now);
                missing.extend(lacking.map(absent));
            } else {
                let lacking = lacking.filter(|&(_, block)| !self.fully_resident(block));
                missing.extend(lacking.map(|(at, block)| self.reclaim_or_miss(at, block, now)));
            }
            at += run.len();
        }
        missing
    }

    /// The uppermost tier with any of these blocks, if all of them are fully resident and idle
    /// there.
    fn idle_below(&self, blocks: &Range<BlockId>) -> Option<TierId> {
        let nowhere = |tier: &TierId| self.blocks.table(*tier).none_present(blocks.clone());
        let tier = (0..self.tiers.len()).find(|tier| !nowhere(tier))?;
        (tier > 0 && self.blocks.table(tier).all_idle(blocks.clone())).then_some(tier)
    }

    /// Whether a block is fully resident on the first tier.
    pub(crate) fn fully_resident(&self, block: BlockId) -> bool {
        self.blocks.table(0).fully_resident(block) && !self.tiers.engine_owned()
    }

    /// Decides whether each missing block is loaded or computed.
    pub(crate) fn decide_loads(
        &self,
        missing: &mut [MissingBlock],
        now: Nanos,
        ask: Prefill,
    ) -> Plan {
        let Prefill { mode, deadline, rest, layerwise } = ask;
        // All resident: only the rest of the prompt is left to compute.
        if missing.is_empty() {
            let (finish, exact) = (now.saturating_add(rest), mode == LoadMode::Plan);
            return Plan { spans: Vec::new(), resident_at: now, finish, exact };
        }
        let mut load_time = LoadTime::default();
        let steps: Vec<plan::Step> = missing
            .iter()
            .map(|miss| self.plan_step(miss, now, mode, deadline, &mut load_time))
            .collect();
        let free: Vec<Nanos> = (0..self.lanes.len())
            .map(|lane| self.lanes.free_at(lane).saturating_sub(now))
            .collect();
        let pass = Pass { rest, layers: self.settings.layers };
        let solution = match mode {
            LoadMode::Plan if layerwise => plan::layerwise::solve(&steps, &free, pass),
            LoadMode::Plan => plan::solve(&steps, &free),
            LoadMode::All | LoadMode::None => {
                let load: Vec<bool> = steps
                    .iter()
                    .map(|step| mode == LoadMode::All && matches!(step.source, Source::Load { .. }))
                    .collect();
                let finish = if layerwise {
                    plan::layerwise::evaluate(&steps, &load, &free, pass)
                } else {
                    plan::evaluate(&steps, &load, &free)
                };
                plan::Solution { load, finish, exact: false }
            }
        };
        for ((miss, step), load) in missing.iter_mut().zip(&steps).zip(&solution.load) {
            miss.load = *load && matches!(step.source, Source::Load { .. });
            // Under `None` a later `load` may still use a source: until then everything is to be
            // computed.
            let undecided = miss.compute.is_empty() || mode == LoadMode::None;
            if !miss.lacks.is_empty() && !miss.load && undecided {
                miss.compute = miss.lacks;
            }
            // The resident part shares its slot, so computing any layer needs a new slot for all
            // layers.
            if !miss.compute.is_empty() && !miss.load && self.one_slot(miss.resident) {
                miss.resident = Layers::NONE;
                miss.lacks = self.all_layers();
                miss.compute.lo = 0;
            }
        }
        // Layer by layer, the rest of the prompt is part of the same pass. Otherwise it follows,
        // and delays every choice equally.
        let resident_at = now.saturating_add(solution.finish);
        let finish = if layerwise { resident_at } else { resident_at.saturating_add(rest) };
        Plan { spans: Vec::new(), resident_at, finish, exact: solution.exact }
    }

    /// Switches blocks with loads through host to computation. Returns whether there are any.
    pub(crate) fn avoid_transit(&self, missing: &mut [MissingBlock]) -> bool {
        let mut any = false;
        for miss in missing {
            if miss.loads().any(|(tier, _)| self.transit(0, tier).is_some()) {
                miss.compute = miss.lacks;
                any = true;
            }
        }
        any
    }

    /// The entry of a block, reclaimed if it is leaving the first tier.
    fn reclaim_or_miss(&self, at: usize, block: BlockId, now: Nanos) -> MissingBlock {
        if self.tiers.engine_owned() || !self.can_reclaim(block) {
            return self.find_missing(at, block, now);
        }
        let (resident, none) = (self.all_layers(), Layers::NONE);
        let sources = SmallVec::new();
        MissingBlock {
            at,
            block,
            resident,
            lacks: none,
            sources,
            compute: none,
            load: false,
            reclaim: true,
            ready: now,
        }
    }

    /// The entry of a block.
    pub(crate) fn find_missing(&self, at: usize, block: BlockId, now: Nanos) -> MissingBlock {
        let owned = self.tiers.engine_owned();
        let resident = if owned { Layers::NONE } else { self.expected(0, block) };
        let lacks = self.lacks(resident);
        let mut sources: SmallVec<[(TierId, Layers); 1]> = SmallVec::new();
        let mut gap_end = 0;
        // The uppermost tier with any of the layers is the fastest source.
        let first = (1..self.tiers.len())
            .map(|tier| (tier, self.expected(tier, block)))
            .find(|(_, found)| !found.meet(lacks).is_empty());
        match first {
            _ if lacks.is_empty() => {}
            None => gap_end = lacks.hi,
            // A failed move may still write the slot: nothing can be loaded there.
            _ if self.stuck(0, block) => gap_end = lacks.hi,
            Some((tier, found)) if found.covers(lacks) => sources.push((tier, lacks)),
            Some(_) => gap_end = self.patch(block, lacks, &mut sources),
        }
        // Computing a layer requires computing all layers below it.
        let compute = if gap_end > 0 { Layers::new(lacks.lo, gap_end) } else { Layers::NONE };
        let ready = self.arrival(0, block).map_or(now, |arrival| arrival.ready.max(now));
        let (load, reclaim) = (false, false);
        MissingBlock { at, block, resident, lacks, sources, compute, load, reclaim, ready }
    }

    /// Finds source tiers for single layers if no tier has them all. Returns the end of the last
    /// gap, or 0.
    fn patch(
        &self,
        block: BlockId,
        lacks: Layers,
        sources: &mut SmallVec<[(TierId, Layers); 1]>,
    ) -> u16 {
        let mut gap_end = 0;
        for layer in lacks.iter() {
            let tier = (1..self.tiers.len()).find(|&t| self.expected(t, block).contains(layer));
            match (tier, sources.last_mut()) {
                (None, _) => gap_end = layer + 1,
                (Some(tier), Some((last, run))) if *last == tier && run.hi == layer => {
                    run.hi = layer + 1;
                }
                (Some(tier), _) => sources.push((tier, Layers::new(layer, layer + 1))),
            }
        }
        gap_end
    }

    /// The planner's step of a block.
    fn plan_step(
        &self,
        miss: &MissingBlock,
        now: Nanos,
        mode: LoadMode,
        deadline: Option<Nanos>,
        load_time: &mut LoadTime,
    ) -> plan::Step {
        // Resident or arriving: the planner only waits for it.
        if miss.lacks.is_empty() {
            return plan::Step { compute: 0, source: Source::Resident { ready: miss.ready - now } };
        }
        let full = || {
            let tokens =
                u64::from(self.settings.block_tokens) * u64::from(self.settings.token_weight);
            self.settings.cost.compute_ns(u64::from(self.trie().depth(miss.block)) * tokens, tokens)
        };
        // Layers above a gap can be loaded, but the gap is always computed.
        if !miss.compute.is_empty() {
            let part =
                u128::from(full()) * u128::from(miss.compute.hi) / u128::from(self.settings.layers);
            let compute = Nanos::try_from(part).unwrap_or(Nanos::MAX);
            return plan::Step { compute, source: Source::Missing };
        }
        // The slowest source decides when the block is ready.
        let deepest = miss.sources.iter().map(|&(tier, _)| tier).max().unwrap_or(0);
        let lane = self.tiers[deepest].read;
        let start = self.lanes.free_at(lane).max(now);
        let layers = miss.lacks.len();
        // The preview is computed once per lane and layer count.
        if (load_time.lane, load_time.layers) != (lane, layers) {
            let bytes = self.settings.layer_bytes * u64::from(layers);
            let time = self.lanes.preview(lane, bytes, start, layers).end - start;
            *load_time = LoadTime { lane, layers, time };
        }
        let time = load_time.time;
        // An arriving source delays the load.
        let from = miss
            .sources
            .iter()
            .filter_map(|&(tier, _)| self.arrival(tier, miss.block))
            .map(|arrival| arrival.ready.saturating_sub(now))
            .max()
            .unwrap_or(0);
        let overdue = deadline.is_some_and(|deadline| {
            start.max(now.saturating_add(from)).saturating_add(time) > deadline
        });
        // A load that misses the deadline is no source for the planner.
        let source = if overdue && mode == LoadMode::Plan {
            Source::Missing
        } else {
            Source::Load { lane, time, from }
        };
        // Always loaded, so the planner needs no price.
        let priced = mode != LoadMode::All;
        plan::Step { compute: if priced { full() } else { 0 }, source }
    }

    /// The layers missing in `have`: after it, or before it on a single tier that drops shallow
    /// layers first.
    pub(crate) fn lacks(&self, have: Layers) -> Layers {
        let all = self.all_layers();
        if have.lo > 0 { Layers::new(0, have.lo) } else { Layers::new(have.hi, all.hi) }
    }

    /// Fills a plan's spans over `blocks` blocks, from the decisions and their moves. Blocks absent
    /// from `missing` are reused.
    pub(crate) fn spans(
        &self,
        blocks: usize,
        missing: &[MissingBlock],
        moves: &[MoveIds],
        plan: &mut Plan,
        now: Nanos,
    ) {
        let number = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        let mut next = 0;
        let mut reuse = |spans: &mut Vec<Span>, until: usize| {
            let (start, stop) = (number(next), number(until));
            next = until + 1;
            if start < stop {
                let (layers, action) = (self.all_layers(), Action::Reuse);
                let span =
                    Span { start, stop, layers, action, tier: 0, first_ready: now, ready: now };
                join(spans, span);
            }
        };
        for (miss, moves) in missing.iter().zip(moves) {
            reuse(&mut plan.spans, miss.at);
            let at = number(miss.at);
            let mut add = |layers: Layers, action, tier, first_ready, ready| {
                if !layers.is_empty() {
                    let span =
                        Span { start: at, stop: at + 1, layers, action, tier, first_ready, ready };
                    join(&mut plan.spans, span);
                }
            };
            add(miss.resident, Action::Reuse, 0, now, miss.ready);
            if miss.load || (!miss.compute.is_empty() && !moves.is_empty()) {
                let times = moves.iter().filter_map(|&id| self.moves.get(id));
                let first = times.clone().map(|m| m.first).min().unwrap_or(now);
                let ready = times.map(|m| m.ready).max().unwrap_or(now);
                for (tier, layers) in miss.loads() {
                    add(layers, Action::Load, tier, first, ready);
                }
            }
            add(miss.compute, Action::Recompute, 0, plan.resident_at, plan.resident_at);
        }
        reuse(&mut plan.spans, blocks);
        plan.spans.sort_by_key(|span| (span.start, span.layers));
    }
}

/// Appends a span, or extends an earlier span of equal layers, action and tier.
fn join(spans: &mut Vec<Span>, span: Span) {
    let same = |known: &&mut Span| {
        known.stop == span.start
            && (known.layers, known.action, known.tier) == (span.layers, span.action, span.tier)
    };
    // A block has few spans, so an earlier block's span is among the last six.
    match spans.iter_mut().rev().take(6).find(same) {
        Some(known) => {
            known.stop = span.stop;
            known.first_ready = known.first_ready.min(span.first_ready);
            known.ready = known.ready.max(span.ready);
        }
        None => spans.push(span),
    }
}
