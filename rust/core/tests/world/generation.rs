//! Compares the generation with the naive answer: as long as it stays, a fixed set of lookups is
//! answered as before, but for predicted times.

use kvtrie_core::{Layers, Match, Slot, TierId};

use super::World;

/// The scopes and sequences that are looked up: shared stems, two scopes, one with a digest.
const PROBES: [(usize, usize, usize); 5] =
    [(7, 0, 12), (7, 16, 12), (7, 31, 12), (0, 1, 12), (1, 2, 9)];

/// Blocks of a match: which, and of each copy all but its times.
type Found = Vec<(u64, Vec<(TierId, Slot, Layers, Layers, bool, Vec<Slot>)>)>;

/// Results of the probes at a generation.
#[derive(Default)]
pub(super) struct Generation {
    seen: Option<(u64, Vec<Found>)>,
}

impl World {
    /// Looks up all probes, and compares them with what they found at the same generation.
    pub(super) fn check_generation(&mut self) {
        let generation = self.manager.generation();
        let found: Vec<Found> = PROBES
            .iter()
            .map(|&(scope, a, b)| {
                let (tokens, scope) = (Self::sequence(a, b), Self::scope(scope));
                self.found(
                    &self.manager.lookup(&tokens, self.now, &scope, 1).expect("a good lookup"),
                )
            })
            .collect();
        let stood = match &self.generation.seen {
            Some((before, answers)) if *before == generation => {
                assert!(
                    *answers == found,
                    "generation {generation} stood: {answers:?}, now {found:?}"
                );
                found.iter().any(|blocks| !blocks.is_empty())
            }
            _ => false,
        };
        if stood {
            self.count("generation stood");
        }
        self.generation.seen = Some((generation, found));
    }

    fn found(&self, found: &Match) -> Found {
        let copies = |block: &kvtrie_core::MatchedBlock| {
            let copy = |copy: &kvtrie_core::Copy| {
                let slots = self.manager.copy_slots(block.block, copy);
                (copy.tier, copy.slot, copy.layers, copy.coming, copy.leaving, slots)
            };
            (block.block.0, block.copies.iter().map(copy).collect())
        };
        found.blocks.iter().map(copies).collect()
    }
}
