//! From a matched path to a plan: what each block has, what it lacks, and what to do about it.
//!
//! Blocks that stand whole on the first tier need nothing and are left out. Invariant: nothing
//! changes here. Cost: O(blocks that need something), plus the planner's.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::arrival::MoveIds;
use crate::block::{BlockId, Layers, TierId};
use crate::lane::LaneId;
use crate::plan::layerwise::Pass;
use crate::plan::{self, Source};
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::kinds::LoadMode;
use crate::manager::kinds::{Action, Span};
use crate::manager::request::lease::Plan;

/// What a block needs to stand on the first tier, and what was decided.
#[derive(Clone, Debug)]
pub(in crate::manager) struct MissingBlock {
    /// Where the block stands on the path.
    pub(in crate::manager) at: usize,
    pub(in crate::manager) block: BlockId,
    /// Layers that stand or arrive on the first tier.
    here: Layers,
    /// Layers that neither stand nor arrive on the first tier.
    pub(in crate::manager) lacks: Layers,
    /// Where those layers can be loaded from, in ascending order of layers.
    pub(in crate::manager) sources: SmallVec<[(TierId, Layers); 1]>,
    /// Layers of `lacks` that the engine must compute.
    pub(in crate::manager) compute: Layers,
    /// Whether it is loaded.
    pub(in crate::manager) load: bool,
    /// Whether it was leaving the first tier, and stays.
    pub(in crate::manager) reclaim: bool,
    /// When what stands or arrives on the first tier is there.
    ready: Nanos,
}

/// What a plan is asked for.
#[derive(Clone, Copy, Debug)]
pub(in crate::manager) struct Prefill {
    pub(in crate::manager) mode: LoadMode,
    /// Loads that would be ready later are not planned.
    pub(in crate::manager) deadline: Option<Nanos>,
    /// How long the tokens behind the match compute.
    pub(in crate::manager) rest: Nanos,
    /// Whether the engine computes a layer while the next ones are loaded.
    pub(in crate::manager) layerwise: bool,
}

impl Prefill {
    /// All is loaded that can be, and nothing follows.
    pub(in crate::manager) const ALL: Self =
        Self { mode: LoadMode::All, deadline: None, rest: 0, layerwise: false };
}

/// What loading so many layers over a lane takes: of a path mostly the same.
#[derive(Default)]
struct LoadTime {
    lane: LaneId,
    layers: u16,
    time: Nanos,
}

impl MissingBlock {
    /// All of a block, of which nothing is on the first tier and all on another one.
    fn whole(at: usize, block: BlockId, tier: TierId, all: Layers, now: Nanos) -> Self {
        let (here, compute) = (Layers::NONE, Layers::NONE);
        let sources = smallvec![(tier, all)];
        let (load, reclaim) = (false, false);
        Self { at, block, here, lacks: all, sources, compute, load, reclaim, ready: now }
    }

    /// The layers that come to the first tier from below.
    pub(in crate::manager) fn loads(&self) -> impl Iterator<Item = (TierId, Layers)> + '_ {
        let from = if self.compute.is_empty() { self.lacks.lo } else { self.compute.hi };
        let wanted = Layers::new(from, self.lacks.hi);
        let cut = move |&(tier, layers): &(TierId, Layers)| (tier, layers.meet(wanted));
        self.sources.iter().map(cut).filter(|(_, layers)| !layers.is_empty())
    }
}

impl Manager {
    /// The blocks of a path that do not stand whole on the first tier.
    pub(in crate::manager) fn scan(&self, path: &[BlockId], now: Nanos) -> Vec<MissingBlock> {
        let mut missing = Vec::new();
        if self.holds_all(0) && !self.engine_owned() {
            return missing;
        }
        let (mut at, all) = (0, self.all_layers());
        for run in self.runs(path) {
            let lacks = self.blocks.table(0).first_not_fully_resident(run.clone());
            let rest = if self.engine_owned() { run.clone() } else { lacks..run.end };
            let lacking = (at + (rest.start - run.start) as usize..).zip(rest.clone());
            if let Some(tier) = self.whole_below(&rest) {
                let whole = |(at, block)| MissingBlock::whole(at, block, tier, all, now);
                missing.extend(lacking.map(whole));
            } else {
                let lacking = lacking.filter(|&(_, block)| !self.stands(block));
                missing.extend(lacking.map(|(at, block)| self.reclaim_or_miss(at, block, now)));
            }
            at += run.len();
        }
        missing
    }

    /// The uppermost tier where something of blocks of one run stands, if there all of them stand
    /// whole and quiet.
    fn whole_below(&self, blocks: &Range<BlockId>) -> Option<TierId> {
        let nowhere = |tier: &TierId| self.blocks.table(*tier).none_present(blocks.clone());
        let tier = (0..self.tiers.len()).find(|tier| !nowhere(tier))?;
        (tier > 0 && self.blocks.table(tier).all_idle(blocks.clone())).then_some(tier)
    }

    /// Whether every block that is known stands on a tier, whole.
    pub(in crate::manager) fn holds_all(&self, tier: TierId) -> bool {
        let here = &self.blocks.table(tier);
        here.overflow() == 0 && here.copies() == self.blocks.trie().len() as u64
    }

    /// Whether all layers of a block are there on the first tier.
    pub(in crate::manager) fn stands(&self, block: BlockId) -> bool {
        self.blocks.table(0).fully_resident(block) && !self.engine_owned()
    }

    /// Decides for every need whether it is reused, loaded or computed.
    pub(in crate::manager) fn decide_loads(
        &self,
        missing: &mut [MissingBlock],
        now: Nanos,
        ask: Prefill,
    ) -> Plan {
        let Prefill { mode, deadline, rest, layerwise } = ask;
        if missing.is_empty() {
            let (finish, exact) = (now.saturating_add(rest), mode == LoadMode::Plan);
            return Plan { spans: Vec::new(), stands: now, finish, exact };
        }
        let mut load_time = LoadTime::default();
        let steps: Vec<plan::Step> = missing
            .iter()
            .map(|miss| self.plan_step(miss, now, (mode, deadline), &mut load_time))
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
            let undecided = miss.compute.is_empty() || mode == LoadMode::None;
            if !miss.lacks.is_empty() && !miss.load && undecided {
                miss.compute = miss.lacks;
            }
            if !miss.compute.is_empty() && !miss.load && self.one_slot(miss.here) {
                miss.here = Layers::NONE;
                miss.lacks = self.all_layers();
                miss.compute.lo = 0;
            }
        }
        // Layer by layer the rest of the prompt is part of the same pass. Otherwise it follows, which
        // delays every choice alike.
        let stands = now.saturating_add(solution.finish);
        let finish = if layerwise { stands } else { stands.saturating_add(rest) };
        Plan { spans: Vec::new(), stands, finish, exact: solution.exact }
    }

    /// Has what would be loaded through host computed. Whether there is any.
    pub(in crate::manager) fn avoid_transit(&self, missing: &mut [MissingBlock]) -> bool {
        let mut any = false;
        for miss in missing {
            if miss.loads().any(|(tier, _)| self.transit(0, tier).is_some()) {
                miss.compute = miss.lacks;
                any = true;
            }
        }
        any
    }

    /// What one block needs; nothing if it leaves the first tier and can stay.
    fn reclaim_or_miss(&self, at: usize, block: BlockId, now: Nanos) -> MissingBlock {
        if self.engine_owned() || !self.can_reclaim(block) {
            return self.find_missing(at, block, now);
        }
        let (here, none) = (self.all_layers(), Layers::NONE);
        let sources = SmallVec::new();
        MissingBlock {
            at,
            block,
            here,
            lacks: none,
            sources,
            compute: none,
            load: false,
            reclaim: true,
            ready: now,
        }
    }

    /// What one block needs.
    pub(in crate::manager) fn find_missing(
        &self,
        at: usize,
        block: BlockId,
        now: Nanos,
    ) -> MissingBlock {
        let here = if self.engine_owned() { Layers::NONE } else { self.expected(0, block) };
        let lacks = self.lacks(here);
        let mut sources: SmallVec<[(TierId, Layers); 1]> = SmallVec::new();
        let mut gap_end = 0;
        let first = (1..self.tiers.len())
            .map(|tier| (tier, self.expected(tier, block)))
            .find(|(_, stands)| !stands.meet(lacks).is_empty());
        match first {
            _ if lacks.is_empty() => {}
            None => gap_end = lacks.hi,
            _ if self.stuck(0, block) => gap_end = lacks.hi,
            Some((tier, stands)) if stands.covers(lacks) => sources.push((tier, lacks)),
            Some(_) => gap_end = self.patch(block, lacks, &mut sources),
        }
        // A layer can only be computed through all layers below it.
        let compute = if gap_end > 0 { Layers::new(lacks.lo, gap_end) } else { Layers::NONE };
        let ready = self.arrival(0, block).map_or(now, |arrival| arrival.ready.max(now));
        let (load, reclaim) = (false, false);
        MissingBlock { at, block, here, lacks, sources, compute, load, reclaim, ready }
    }

    /// Finds the layers that a block lacks where they stand in parts; returns where the last gap
    /// ends, 0 if there is none.
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

    fn plan_step(
        &self,
        miss: &MissingBlock,
        now: Nanos,
        (mode, deadline): (LoadMode, Option<Nanos>),
        load_time: &mut LoadTime,
    ) -> plan::Step {
        if miss.lacks.is_empty() {
            return plan::Step { compute: 0, source: Source::Here { ready: miss.ready - now } };
        }
        let whole = || {
            let tokens =
                u64::from(self.settings.block_tokens) * u64::from(self.settings.token_weight);
            self.settings
                .cost
                .compute_ns(u64::from(self.blocks.trie().depth(miss.block)) * tokens, tokens)
        };
        if !miss.compute.is_empty() {
            let part = u128::from(whole()) * u128::from(miss.compute.hi)
                / u128::from(self.settings.layers);
            let compute = Nanos::try_from(part).unwrap_or(Nanos::MAX);
            return plan::Step { compute, source: Source::Missing };
        }
        let deepest = miss.sources.iter().map(|&(tier, _)| tier).max().unwrap_or(0);
        let lane = self.tiers[deepest].read;
        let start = self.lanes.free_at(lane).max(now);
        let layers = miss.lacks.len();
        if (load_time.lane, load_time.layers) != (lane, layers) {
            let bytes = self.settings.layer_bytes * u64::from(layers);
            let time = self.lanes.preview(lane, bytes, start, layers).end - start;
            *load_time = LoadTime { lane, layers, time };
        }
        let time = load_time.time;
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
        let source = if overdue && mode == LoadMode::Plan {
            Source::Missing
        } else {
            Source::Load { lane, time, from }
        };
        // What is loaded whatever it costs is not priced.
        let priced = mode != LoadMode::All;
        plan::Step { compute: if priced { whole() } else { 0 }, source }
    }

    /// Whether layers on the first tier are part of a block whose layers share one slot: what is
    /// computed goes into another slot, and all of the block with it.
    pub(in crate::manager) fn one_slot(&self, here: Layers) -> bool {
        !self.tiers[0].spec.layer_slots && !here.is_empty() && here != self.all_layers()
    }

    /// What a range on the first tier lacks. It starts at layer 0, but for a single tier that
    /// drops shallow layers first.
    pub(in crate::manager) fn lacks(&self, have: Layers) -> Layers {
        let all = self.all_layers();
        if have.lo > 0 { Layers::new(0, have.lo) } else { Layers::new(have.hi, all.hi) }
    }

    pub(in crate::manager) fn engine_owned(&self) -> bool {
        self.tiers[0].spec.owner == crate::tier::Owner::Engine
    }

    /// The spans of a plan over `blocks` blocks, from what was decided and the moves that were
    /// made for it. What needs nothing is reused.
    pub(in crate::manager) fn spans(
        &self,
        blocks: usize,
        missing: &[MissingBlock],
        moves: &[MoveIds],
        plan: &mut Plan,
        now: Nanos,
    ) {
        let number = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        let mut next = 0;
        let mut stand = |spans: &mut Vec<Span>, until: usize| {
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
            stand(&mut plan.spans, miss.at);
            let at = number(miss.at);
            let mut add = |layers: Layers, action, tier, first_ready, ready| {
                if !layers.is_empty() {
                    let span =
                        Span { start: at, stop: at + 1, layers, action, tier, first_ready, ready };
                    join(&mut plan.spans, span);
                }
            };
            add(miss.here, Action::Reuse, 0, now, miss.ready);
            if miss.load || (!miss.compute.is_empty() && !moves.is_empty()) {
                let times = moves.iter().filter_map(|&id| self.moves.get(id));
                let first = times.clone().map(|m| m.first).min().unwrap_or(now);
                let ready = times.map(|m| m.ready).max().unwrap_or(now);
                for (tier, layers) in miss.loads() {
                    add(layers, Action::Load, tier, first, ready);
                }
            }
            add(miss.compute, Action::Recompute, 0, plan.stands, plan.stands);
        }
        stand(&mut plan.spans, blocks);
        plan.spans.sort_by_key(|span| (span.start, span.layers));
    }
}

fn join(spans: &mut Vec<Span>, span: Span) {
    let same = |known: &&mut Span| {
        known.stop == span.start
            && (known.layers, known.action, known.tier) == (span.layers, span.action, span.tier)
    };
    match spans.iter_mut().rev().take(6).find(same) {
        Some(known) => {
            known.stop = span.stop;
            known.first_ready = known.first_ready.min(span.first_ready);
            known.ready = known.ready.max(span.ready);
        }
        None => spans.push(span),
    }
}
