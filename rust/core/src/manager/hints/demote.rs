//! Taking blocks down before their slots are needed.
//!
//! A step leads one tier down; a block that is to go further goes on when its step has ended.
//! Invariant: nothing is dropped for it: what cannot be written stays. Cost: O(log n) per block and
//! step; while blocks are on their way down further, those are looked at after each completion.

use std::cmp::Reverse;

use crate::block::{BlockId, TierId};
use crate::hint::{Answer, HintReply, Target};
use crate::tier::State;
use crate::time::Nanos;

use super::rejected;
use crate::manager::Manager;
use crate::manager::evict::set::Fate;
use crate::manager::kinds::Cause;

/// How a block stands to where it should go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Descent {
    /// Nothing of it stands above.
    Down,
    /// It goes there, or waits for what is under way.
    Going,
    /// It stays: somebody holds it, or there is nowhere to write it.
    Stays,
}

impl Manager {
    pub(super) fn lower_path(&mut self, target: &Target, to: TierId, now: Nanos) -> HintReply {
        let path = match self.named(target) {
            Ok(path) => path,
            Err(reason) => return rejected(reason),
        };
        let mut blocks = 0;
        for &block in path.iter().rev() {
            if self.blocks.trie().alive(block) {
                blocks += u64::from(self.lower(block, to, now) != Descent::Stays);
            }
        }
        let left = path.len() as u64 - blocks;
        let (answer, reason) = match (blocks, left) {
            (_, 0) if path.is_empty() => return rejected("no block of the path is cached"),
            (_, 0) => (Answer::Accepted, String::new()),
            (0, _) => (Answer::Rejected, why(left)),
            _ => (Answer::Clipped, why(left)),
        };
        HintReply { answer, blocks, left, reason }
    }

    /// Takes a block one step down, and notes that it is to go on.
    fn lower(&mut self, block: BlockId, to: TierId, now: Nanos) -> Descent {
        self.hints.demoting.remove(&block);
        for tier in 0..to {
            let here = self.residency(tier, block);
            match here.state {
                State::Absent => {}
                State::Resident if self.evictable(tier, block) => {
                    if !self.step_down(tier, block, now) {
                        return Descent::Stays;
                    }
                }
                _ if self.underway(tier, block) => {
                    self.hints.demoting.insert(block, to);
                    return Descent::Going;
                }
                _ => return Descent::Stays,
            }
        }
        if !self.blocks.trie().alive(block) {
            return Descent::Stays;
        }
        Descent::Down
    }

    /// Whether a block cannot leave a tier yet, but will.
    fn underway(&self, tier: TierId, block: BlockId) -> bool {
        let here = self.residency(tier, block);
        let held = tier == 0 && self.node(block).refs > 0;
        let moves = here.busy > 0 || here.state == State::Arriving;
        let behind = self.blocks.trie().children(block).any(|child| {
            self.residency(tier, child).state != State::Absent
                && self.hints.demoting.contains_key(&child)
        });
        here.state != State::Bad && !held && (moves || behind)
    }

    /// Takes all layers of a block off a tier, if none of them is lost.
    fn step_down(&mut self, tier: TierId, block: BlockId, now: Nanos) -> bool {
        while self.residency(tier, block).state == State::Resident && self.evictable(tier, block) {
            let mut set = self.eviction_set_for(Cause::Hinted);
            self.choose(&mut set, tier, block, now);
            let mine = set.victims.iter().filter(|victim| victim.block == block);
            let fates: Vec<Fate> = mine.map(|victim| victim.fate).collect();
            if fates.is_empty() || fates.contains(&Fate::Drop) {
                self.abandon(&set);
                return false;
            }
            self.apply(&set, now);
        }
        true
    }

    /// Moves have ended: what was to go further down goes on.
    pub(in crate::manager) fn continue_demotions(&mut self, now: Nanos) {
        if self.hints.demoting.is_empty() {
            return;
        }
        let mut all: Vec<(BlockId, TierId)> =
            self.hints.demoting.iter().map(|(&block, &to)| (block, to)).collect();
        all.sort_by_key(|&(block, _)| (Reverse(self.blocks.trie().depth(block)), block));
        for (block, to) in all {
            // A step of another block may have ended this one.
            if self.hints.demoting.contains_key(&block) {
                self.lower(block, to, now);
            }
        }
    }
}

fn why(left: u64) -> String {
    format!("{left} blocks stay: they are in use, or there is nowhere to write them")
}
