//! Bringing blocks up before somebody asks for them.
//!
//! Room is made as for a request; what is on its way cannot be given up until it has arrived, so at
//! most a quarter of a tier is. Invariant: nothing that the path needs leaves for the rest of it.
//! Cost: that of a request's loads.

use crate::block::{BlockId, Layers, LeaseId, NO_MOVE, TierId};
use crate::hint::{Answer, HintReply, Target};
use crate::tier::State;
use crate::time::Nanos;

use super::rejected;
use crate::manager::Manager;
use crate::manager::kinds::{End, MoveKind};
use crate::manager::moves::NewMove;
use crate::manager::request::path::PathBlock;
use crate::manager::request::residency_scan::Prefill;

/// One in so many slots of a tier may be taken by what is on its way unasked.
const PART: u64 = 4;

/// Nobody waits for these moves.
const NOBODY: LeaseId = NO_MOVE;

/// What became of one block.
enum Brought {
    /// It is there or on its way.
    Yes,
    /// It stays where it is.
    No(&'static str),
}

impl Manager {
    pub(super) fn prefetch(
        &mut self,
        target: &Target,
        tier: TierId,
        deadline: Option<Nanos>,
        now: Nanos,
    ) -> HintReply {
        let path = match self.named(target) {
            Ok(path) => path,
            Err(reason) => return rejected(reason),
        };
        if path.is_empty() {
            return rejected("no block of the path is cached");
        }
        let mut brought = 0;
        let mut why = "";
        self.pin(&path);
        for &block in &path {
            let one = if tier == 0 {
                self.fetch_first(block, deadline, now)
            } else {
                self.fetch(block, tier, deadline, now)
            };
            match one {
                Brought::Yes => brought += 1,
                Brought::No(reason) => {
                    why = reason;
                    if self.breaks(block) {
                        break;
                    }
                }
            }
        }
        self.unpin(&path, None);
        let left = path.len() as u64 - brought;
        let answer = match (brought, left) {
            (_, 0) => Answer::Accepted,
            (0, _) => Answer::Rejected,
            _ => Answer::Clipped,
        };
        let reason = if left > 0 { format!("{left} blocks stay: {why}") } else { String::new() };
        HintReply { answer, blocks: brought, left, reason }
    }

    /// Whether more blocks may be on their way to a tier.
    fn crowded(&self, tier: TierId) -> bool {
        let arrivals = self.blocks.table(tier).arrivals() as u64;
        (arrivals + 1) * PART > u64::from(self.tiers[tier].spec.blocks)
    }

    /// Whether layers from a tier would be there after a deadline.
    fn late(&self, from: TierId, layers: Layers, deadline: Option<Nanos>, now: Nanos) -> bool {
        let bytes = self.settings.layer_bytes * u64::from(layers.len());
        let ready = self.lanes.preview(self.tiers[from].read, bytes, now, layers.len()).end;
        deadline.is_some_and(|deadline| ready > deadline)
    }

    /// Begins the loads of a block to the first tier, as a request would.
    fn fetch_first(&mut self, block: BlockId, deadline: Option<Nanos>, now: Nanos) -> Brought {
        if self.stands(block) {
            return Brought::Yes;
        }
        let mut missing = [self.find_missing(0, block, now)];
        if missing[0].lacks.is_empty() {
            return Brought::Yes;
        }
        self.decide_loads(&mut missing, now, Prefill::ALL);
        let [miss] = &missing;
        if !miss.load || !miss.compute.is_empty() {
            return Brought::No("they cannot be loaded");
        }
        if miss.loads().any(|(from, layers)| self.late(from, layers, deadline, now)) {
            return Brought::No("they would come too late");
        }
        if self.crowded(0) {
            return Brought::No("a quarter of the tier is on its way already");
        }
        let units = self.units(0, miss.lacks);
        let Ok(mut transit) = self.open_transit(&missing, units, now) else {
            return Brought::No("there is no room");
        };
        let mut step = PathBlock::shared(block);
        self.begin_load(&missing[0], &mut step, NOBODY, &mut transit, now);
        self.close_transit(transit);
        Brought::Yes
    }

    /// Begins the loads of a whole block to a lower tier, from the nearest one below it.
    fn fetch(
        &mut self,
        block: BlockId,
        tier: TierId,
        deadline: Option<Nanos>,
        now: Nanos,
    ) -> Brought {
        let all = self.all_layers();
        if (0..=tier).any(|upper| self.expected(upper, block) == all) {
            return Brought::Yes;
        }
        let whole = |from: &TierId| {
            let here = self.residency(*from, block);
            here.state == State::Resident && here.have == all && self.transit(tier, *from).is_none()
        };
        let Some(from) = (tier + 1..self.tiers.len()).find(whole) else {
            return Brought::No("they do not stand whole on a tier that it reads from");
        };
        if self.residency(tier, block).state != State::Absent {
            return Brought::No("a part of them stands there");
        }
        if self.late(from, all, deadline, now) {
            return Brought::No("they would come too late");
        }
        if self.crowded(tier) {
            return Brought::No("a quarter of the tier is on its way already");
        }
        let units = self.units(tier, all);
        if self.make_room(&[(tier, units)], &[(from, block..block + 1)], now).is_err() {
            return Brought::No("there is no room");
        }
        let row = self.blocks.take_slots(tier, self.residency(tier, block).slot, all);
        self.blocks.alter(tier, block, |here| here.slot = row);
        let mut moves = Vec::new();
        for layers in self.pieces(from, tier, None, all) {
            let dst = self.slot_of(tier, block, layers.lo);
            let new = NewMove {
                kind: MoveKind::Load,
                lease: NOBODY,
                block: Some(block),
                src: (from, self.slot_of(from, block, layers.lo), End::Here),
                dst: (tier, dst, End::Here),
                layers,
                tokens: self.settings.block_tokens,
                deps: self.blocks.space(tier).drained_by(dst).into_iter().collect(),
            };
            moves.push(self.add_move(new, now));
        }
        self.expect(tier, block, all, &moves);
        Brought::Yes
    }
}
