//! Demotion hints: evict blocks to a lower tier before their slots are needed.
//!
//! A demotion moves a block to the next tier. A block with a lower destination continues after its
//! store has ended. Invariant: a demotion drops no copy, and a block that cannot be written stays.
//! Cost: O(log n) per block and tier. Each completion visits the unfinished demotions.

use std::cmp::Reverse;

use crate::block::{BlockId, TierId};
use crate::hint::{Answer, HintCode, HintReply, Target};
use crate::tier::ResidencyState;
use crate::time::{Nanos, Stamp};

use super::{accepted, rejected};
use crate::manager::Manager;
use crate::manager::evict::set::Fate;
use crate::manager::kinds::Cause;

/// State of a demotion.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Descent {
    /// No tier above the destination has any of its layers.
    Below,
    /// A move or a child keeps it for now. It continues afterwards.
    InFlight,
    /// It stays: it is pinned, or no tier below can take it.
    Stays,
}

impl Manager {
    /// Demotes the blocks of a target, children first.
    pub(super) fn lower_path(&mut self, target: &Target, to: TierId, now: Nanos) -> HintReply {
        let path = match self.target_path(target) {
            Ok(path) => path,
            Err(reason) => return rejected(reason),
        };
        let (mut blocks, scope) = (0, self.target_scope(target));
        for &block in path.iter().rev() {
            // Room for an earlier block may have evicted the last copy of this block.
            if self.trie().alive(block) && self.own(&scope, block) {
                blocks += u64::from(self.lower(block, to, now) != Descent::Stays);
            }
        }
        if scope.shares() && !path.is_empty() {
            return accepted(path.len() as u64);
        }
        let left = path.len() as u64 - blocks;
        let (answer, code, reason) = match (blocks, left) {
            (_, 0) if path.is_empty() => return rejected("no block of the path is cached"),
            (_, 0) => (Answer::Accepted, HintCode::Accepted, String::new()),
            (0, _) => (Answer::Rejected, HintCode::InUse, staying(left)),
            _ => (Answer::Clipped, HintCode::InUse, staying(left)),
        };
        HintReply { answer, blocks, not_applied: left, code, reason }
    }

    /// Demotes a block to the next tier, and lists it if its destination is lower.
    fn lower(&mut self, block: BlockId, to: TierId, now: Nanos) -> Descent {
        self.hints.demoting.remove(&block);
        for tier in 0..to {
            let residency = self.residency(tier, block);
            match residency.state {
                ResidencyState::Absent => {}
                // It leaves once the shared tier has it.
                ResidencyState::Resident
                    if self.tiers.writes_shared(tier)
                        && (tier > 0 || self.node(block).refs == 0)
                        && !self.on_shared(tier, block)
                        && self.waits_below(tier, block, now) =>
                {
                    self.hints.demoting.insert(block, to);
                    return Descent::InFlight;
                }
                ResidencyState::Resident if self.evictable(tier, block) => {
                    if !self.step_down(tier, block, now) {
                        return Descent::Stays;
                    }
                }
                _ if self.underway(tier, block) => {
                    self.hints.demoting.insert(block, to);
                    return Descent::InFlight;
                }
                _ => return Descent::Stays,
            }
        }
        if !self.trie().alive(block) {
            return Descent::Stays;
        }
        Descent::Below
    }

    /// Whether a block cannot leave a tier yet, but will later.
    fn underway(&self, tier: TierId, block: BlockId) -> bool {
        let residency = self.residency(tier, block);
        let held = tier == 0 && self.node(block).refs > 0;
        let moves = residency.busy > 0 || residency.state == ResidencyState::Arriving;
        let child = self.trie().children(block).any(|child| {
            self.residency(tier, child).state != ResidencyState::Absent
                && self.hints.demoting.contains_key(&child)
        });
        residency.state != ResidencyState::Bad && !held && (moves || child)
    }

    /// Whether the shared tier below has a block and its resume point.
    fn on_shared(&self, tier: TierId, block: BlockId) -> bool {
        let point = self.points.has_on(tier, block) && !self.points.has_on(tier + 1, block);
        self.blocks.is_clean(tier, block) && !point
    }

    /// Whether a block or its resume point waits to be written to the shared tier below, or is on
    /// its way there: then only its transit slot may be busy. Starts to wait if necessary.
    fn waits_below(&mut self, tier: TierId, block: BlockId, now: Nanos) -> bool {
        if self.points.has_on(tier, block) && !self.points.has_on(tier + 1, block) {
            self.copy_point(tier, block, now);
            if !self.shared_stores.contains_point(tier, block)
                && !self.points.has_on(tier + 1, block)
            {
                return false;
            }
        }
        self.write_down(tier, block, None, Stamp::MAX, now)
            || self.shared_stores.contains(tier, block)
            || self.arrival(tier + 1, block).is_some_and(|arrival| !arrival.moves.is_empty())
    }

    /// Evicts all layers of a block from a tier after its resume point, if nothing is lost.
    fn step_down(&mut self, tier: TierId, block: BlockId, now: Nanos) -> bool {
        if self.points.has_on(tier, block) {
            if (tier + 1..self.tiers.len()).any(|lower| self.points.has_on(lower, block)) {
                self.drop_point_on(tier, block);
            } else if !self.tiers.writes(tier)
                || self.tiers.above_shared(tier)
                || !self.copy_point_below(tier, block, true, now)
            {
                return false;
            }
        }
        // With layer slots a single range of layers leaves at a time.
        while self.residency(tier, block).state == ResidencyState::Resident
            && self.evictable(tier, block)
        {
            let mut set = self.eviction_set_for(Cause::Hinted);
            self.choose(&mut set, tier, block, now);
            let mine = set.victims.iter().filter(|victim| victim.block == block);
            let fates: Vec<Fate> = mine.map(|victim| victim.fate).collect();
            // A demotion must not drop a last copy.
            if fates.is_empty() || fates.contains(&Fate::Drop) {
                self.abandon(&set);
                return false;
            }
            self.apply(&set, now);
        }
        true
    }

    /// Continues demotions after moves have ended, children first.
    pub(crate) fn continue_demotions(&mut self, now: Nanos) {
        if self.hints.demoting.is_empty() {
            return;
        }
        let mut all: Vec<(BlockId, TierId)> =
            self.hints.demoting.iter().map(|(&block, &to)| (block, to)).collect();
        all.sort_by_key(|&(block, _)| (Reverse(self.trie().depth(block)), block));
        for (block, to) in all {
            // An earlier demotion may have ended this demotion.
            if self.hints.demoting.contains_key(&block) {
                self.lower(block, to, now);
            }
        }
    }
}

/// The reason of a reply about blocks that stay.
fn staying(left: u64) -> String {
    format!("{left} blocks stay: they are in use, or there is nowhere to write them")
}
