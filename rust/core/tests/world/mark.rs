//! Blocks appear and vanish without a request, and a tier is found again from its index.
//!
//! Invariant: bytes appear only where nothing reads them and nothing else stands.

use std::collections::BTreeMap;

use kvtrie_core::block::{Handle, Layers, Slot, TierId, Token};
use kvtrie_core::manager::{Manager, Mark, MatchedBlock, Row};
use kvtrie_core::record::{Key, scope_key};
use kvtrie_core::scope::Scope;

use super::World;

/// An index that was written down: the rows whose sequences are known, and these.
pub(super) struct Index {
    tier: TierId,
    rows: Vec<(Row, Vec<Token>)>,
}

impl World {
    pub(super) fn mark(&mut self, a: usize, b: usize) {
        if self.manager.settings().tiers.len() < 2 {
            return;
        }
        let tokens = Self::sequence(a, b);
        let tier = 1 + b % (self.manager.settings().tiers.len() - 1);
        self.clear(&tokens, tier);
    }

    fn clear(&mut self, tokens: &[Token], tier: TierId) {
        let scope = Scope::default();
        let mark = Mark { tokens, scope, tier, present: false, ready: None, first: None };
        self.attempt("mark", |m, now| m.mark(&mark, now));
    }

    /// Blocks appear on a tier, and their bytes with them.
    pub(super) fn appear(&mut self, a: usize, b: usize) {
        let (tokens, tier) = (Self::sequence(a, b), b / 13 % self.manager.settings().tiers.len());
        let full = tokens.len() / self.size();
        let all = Layers::new(0, self.manager.settings().layers);
        let rows = self.manager.settings().tiers[tier].layer_slots;
        let units = full * usize::from(if rows { all.hi } else { 1 });
        if self.manager.occupancy(tier).free < units as u64 {
            // A store may still read what they would be written over.
            return;
        }
        let scope = Scope::default();
        let there = |m: &Manager, blocks: &[Handle]| {
            let copy = |block: MatchedBlock| block.copies.into_iter().find(|c| c.tier == tier);
            m.describe(blocks, 0).into_iter().map(copy).collect::<Vec<_>>()
        };
        let known = self.manager.known(&tokens, &scope).expect("a good scope");
        let before = there(&self.manager, &known);
        let ready = a.is_multiple_of(3).then_some(self.now + 5);
        let mark = Mark { tokens: &tokens, scope, tier, present: true, ready, first: None };
        let Some(blocks) = self.attempt("appear", |m, now| m.mark(&mark, now)) else { return };
        assert_eq!(blocks.len(), full, "all of them are there or will be");
        for (at, copy) in there(&self.manager, &blocks).into_iter().enumerate() {
            let copy = copy.unwrap_or_else(|| panic!("block {at} is not on tier {tier}"));
            assert_eq!(copy.coming, all, "block {at} on tier {tier}");
            let old = before.get(at).copied().flatten().map_or(Layers::NONE, |copy| copy.coming);
            let slots = self.manager.copy_slots(blocks[at], &copy);
            for layer in all.iter().filter(|&layer| !old.contains(layer)) {
                let slot = slots[if rows { usize::from(layer) } else { 0 }];
                let end = (at + 1) * self.size();
                self.put(tier, slot, layer, (tokens[..end].to_vec(), layer));
            }
        }
    }

    /// A tier's index is written down, or that which was is read, often by a tier that has lost some.
    pub(super) fn index(&mut self, a: usize, b: usize) {
        let read = self.index.take_if(|_| !a.is_multiple_of(4));
        let tier = read.as_ref().map_or(b % self.manager.settings().tiers.len(), |old| old.tier);
        for (_, tokens) in read.iter().flat_map(|old| old.rows.iter().rev().take(b % 4)) {
            self.clear(tokens, tier);
        }
        let Some(rows) = self.attempt("index", |m, now| m.index(tier, now)) else { return };
        let Some(index) = read else {
            self.index = Some(Index { tier, rows: self.sequences(tier, rows) });
            return;
        };
        let lines: Vec<Row> = index.rows.iter().map(|(row, _)| row.clone()).collect();
        let found = self.attempt("load index", |m, now| m.load_index(tier, &lines, now));
        let Some(found) = found else { return };
        let stood: Vec<Slot> = rows.iter().map(|row| row.slot).collect();
        let stand = self.attempt("index", |m, now| m.index(tier, now)).expect("it was given");
        let fresh: Vec<&Row> = stand.iter().filter(|row| !stood.contains(&row.slot)).collect();
        assert_eq!(fresh.len(), found, "as many are there as were found");
        for row in fresh {
            let known = index.rows.iter().find(|(known, _)| known.slot == row.slot);
            let (_, tokens) = known.expect("it was written down");
            for layer in row.layers.iter() {
                self.put(tier, row.slot, layer, (tokens.clone(), layer));
            }
            self.count("found again");
        }
        self.index = Some(index);
    }

    /// The sequences of rows whose parents are among them all the way, without what hints say.
    /// Their bytes stand in their slots.
    fn sequences(&self, tier: TierId, rows: Vec<Row>) -> Vec<(Row, Vec<Token>)> {
        let settings = self.manager.settings();
        let mut known: BTreeMap<Key, Vec<Token>> = BTreeMap::new();
        let mut all = Vec::new();
        for mut row in rows {
            let record = &row.label.record;
            let first = record.scope.as_ref().is_some_and(|owner| {
                let (name, size) = (&settings.fingerprint, settings.block_tokens);
                record.parent == scope_key(name, size, &owner.tenant, &owner.lora)
            });
            let before = if first { Some(Vec::new()) } else { known.get(&record.parent).cloned() };
            let Some(mut tokens) = before else { continue };
            tokens.extend(&record.tokens);
            known.insert(record.key(), tokens.clone());
            for layer in row.layers.iter() {
                let stands = self.get(tier, row.slot, layer);
                assert_eq!(stands, Some((tokens.clone(), layer)), "{row:?} on tier {tier}");
            }
            row.label.standing.wanted = None;
            all.push((row, tokens));
        }
        all
    }
}
