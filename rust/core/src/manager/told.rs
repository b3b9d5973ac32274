//! What policies with a memory are told, and what is remembered for them.
//!
//! Invariant: a policy that watches knows exactly the blocks that stand on its tier; prints and
//! turns are kept only if a policy asks. Cost: nothing where no policy of the manager has a memory;
//! otherwise O(1) per block that comes, goes or is used, beside the policy's own.

use crate::block::{BlockId, TierId};
use crate::column::Column;
use crate::policy::Seen;
use crate::retention::{Gone, Retention};
use crate::tier::State;
use crate::trie::Part;

use super::{Manager, Tier};

/// What policies may know of the request that is served.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Visit {
    /// Its number.
    number: u64,
    /// By how many requests one after the other the path was made that it found.
    turn: u32,
    /// Blocks that it adds to the path.
    added: u32,
    /// Blocks of its prompt.
    blocks: u32,
}

impl Visit {
    /// Full blocks of its prompt.
    pub(super) fn prompt_blocks(self) -> u32 {
        self.blocks
    }
}

/// What is kept for policies that have a memory.
#[derive(Debug)]
pub(super) struct Told {
    /// Whether a policy watches its tier.
    pub(super) watched: bool,
    /// Whether a policy counts the turns of conversations.
    turning: bool,
    /// How many requests took their path.
    requests: u64,
    /// The one that is served.
    pub(super) visit: Visit,
    /// The prints of blocks by id, if a policy watches: it asks for them often.
    prints: Column<u64>,
    /// By block id: by how many requests one after the other the path to it was made, and the
    /// number of the last of them.
    turns: Column<(u32, u64)>,
    /// Uses of blocks that are gone, if a policy counts them.
    gone: Option<Gone>,
}

impl Told {
    /// What the policies of these tiers ask for.
    pub(super) fn new(tiers: &[Tier]) -> Self {
        let rules = || tiers.iter().map(|tier| (tier.retention.policy(), tier.spec.blocks));
        let remembered = rules().filter(|(rule, _)| rule.remembers());
        let remembered: u64 = remembered.map(|(_, blocks)| u64::from(blocks)).sum();
        let watched = rules().any(|(rule, _)| rule.watches());
        Self {
            watched,
            turning: rules().any(|(rule, _)| rule.turns()),
            requests: 0,
            visit: Visit::default(),
            prints: Column::new(0),
            turns: Column::new((0, 0)),
            gone: (remembered > 0).then(|| Gone::new(remembered)),
        }
    }

    /// It will be asked for the print of a block.
    pub(super) fn warm_known(&self, block: BlockId) {
        self.prints.warm(block);
    }

    /// It will be asked for, or told of, a part.
    pub(super) fn warm(&self, part: &Part) {
        if let Some(gone) = &self.gone {
            gone.warm(part);
        }
    }

    /// Tells how often blocks that come were used in a former life, so many one after the other so
    /// often; it is remembered no longer.
    pub(super) fn recall(&mut self, part: &Part, tell: impl FnMut(usize, u32)) {
        if let Some(gone) = &mut self.gone {
            gone.recall(part, tell);
        }
    }

    /// A block is new in the trie.
    pub(super) fn meet(&mut self, parent: Option<BlockId>, block: BlockId, print: u64) {
        if self.watched {
            self.prints.put(block, print);
        }
        if self.turning {
            let (turn, by) = parent.map_or((0, u64::MAX), |parent| self.turns[parent]);
            let turn = turn + u32::from(by != self.visit.number);
            self.turns.put(block, (turn, self.visit.number));
        }
    }

    /// Whether something is remembered.
    pub(super) fn recalls(&self) -> bool {
        self.gone.as_ref().is_some_and(|gone| !gone.is_empty())
    }

    /// Whether it wants to meet what is new.
    pub(super) fn meets(&self) -> bool {
        self.watched || self.turning
    }

    /// Whether it wants to know what leaves the trie.
    pub(super) fn remembers(&self) -> bool {
        self.gone.is_some()
    }

    /// Blocks leave the trie.
    pub(super) fn remember(&mut self, part: &Part, uses: u32) {
        if let Some(gone) = &mut self.gone {
            gone.remember(part, uses);
        }
    }

    /// A request of so many blocks found `path` and is served from now on.
    pub(super) fn visit(&mut self, path: &[BlockId], blocks: usize) {
        let count = |blocks: usize| u32::try_from(blocks).unwrap_or(u32::MAX);
        let turn = path.last().and_then(|&last| self.turns.get(last));
        self.requests += 1;
        self.visit = Visit {
            number: self.requests,
            turn: turn.map_or(0, |turn| turn.0),
            added: count(blocks.saturating_sub(path.len())),
            blocks: count(blocks),
        };
    }
}

impl Manager {
    /// A tier's policy will be told that a block comes or goes.
    pub(super) fn foresee(&self, tier: TierId, block: BlockId) {
        if self.told.watched {
            self.tiers[tier].retention.policy().warm_print(self.told.prints[block]);
        }
    }

    /// Tells a tier's policy, if it watches, that a block has come or gone.
    pub(super) fn notice(&mut self, tier: TierId, block: BlockId) {
        if !self.told.watched || !self.tiers[tier].retention.policy().watches() {
            return;
        }
        let stands = self.residency(tier, block).state != State::Absent;
        if stands == self.tiers[tier].retention.holds(block) {
            return;
        }
        let moved = if stands {
            self.tell(tier, block, Retention::arrived)
        } else {
            let print = self.told.prints[block];
            self.tiers[tier].retention.left(block, print)
        };
        for block in moved {
            self.refresh_on(tier, block);
        }
    }

    /// New blocks stand on a tier: policies that watch and what was said of them take note.
    pub(super) fn greet(&mut self, tier: TierId, blocks: &[BlockId]) {
        if self.told.watched {
            for &block in blocks {
                self.notice(tier, block);
            }
        }
        self.attend_all(tier, blocks.iter().copied());
    }

    /// Tells the policies that watch that a block on their tiers is used.
    pub(super) fn notice_use(&mut self, block: BlockId) {
        if !self.told.watched {
            return;
        }
        for tier in 0..self.tiers.len() {
            let retention = &self.tiers[tier].retention;
            if retention.policy().watches() && retention.holds(block) {
                for block in self.tell(tier, block, Retention::touched) {
                    self.refresh_on(tier, block);
                }
            }
        }
    }

    fn tell(
        &mut self,
        tier: TierId,
        block: BlockId,
        what: impl FnOnce(&mut Retention, &Seen<'_>) -> Vec<BlockId>,
    ) -> Vec<BlockId> {
        let facts = self.facts(tier, block, self.all_layers());
        let Visit { turn, added, blocks, .. } = self.told.visit;
        let seen = Seen {
            print: self.told.prints[block],
            request: self.told.requests,
            used: self.node(block).refs > 0,
            turn,
            added,
            last: facts.block + 1 == blocks,
            facts: &facts,
            cost: &self.settings.cost,
        };
        what(&mut self.tiers[tier].retention, &seen)
    }
}

#[cfg(test)]
mod tests {
    use super::Told;
    use crate::trie::Part;

    #[test]
    fn a_turn_is_a_request_that_made_the_path_longer() {
        let mut told = Told { turning: true, watched: true, ..Told::new(&[]) };
        told.visit(&[], 2);
        assert_eq!((told.visit.turn, told.visit.added, told.visit.blocks), (0, 2, 2));
        told.meet(None, 0, 1);
        told.meet(Some(0), 1, 2);
        let first = told.visit;
        told.visit(&[0], 3);
        assert_eq!((told.visit.turn, told.visit.added), (1, 2));
        told.meet(Some(0), 2, 7);
        told.visit(&[0, 2], 2);
        assert_eq!((told.visit.turn, told.visit.added), (2, 0));
        // The first request goes on: still its own turn.
        told.visit = first;
        told.meet(Some(1), 3, 3);
        assert_eq!(told.turns.stretch(0, 4), [(1, 1), (1, 1), (2, 2), (1, 1)]);
        assert_eq!(told.prints.stretch(0, 4), [1, 2, 7, 3]);
    }

    #[test]
    fn nothing_is_kept_if_nobody_asks() {
        let mut told = Told::new(&[]);
        told.visit(&[], 9);
        told.meet(None, 5, 1);
        let part = Part { group: 1, places: 0..1, checks: 0 };
        told.remember(&part, 3);
        told.recall(&part, |_, _| unreachable!("nothing is kept"));
        assert!(!told.recalls());
        assert_eq!((told.prints.get(0), told.turns.get(0)), (None, None));
    }
}
