//! Restoring a tier from its index.
//!
//! Invariant: a restored block has the bytes of its slot when the index was taken.

use std::collections::BTreeMap;

use kvtrie_core::{BlockKey, Row, Scope, Slot, TierId, Token, scope_key};

use super::World;

/// An index that was taken: the rows whose sequences are known, these sequences, and their scope's
/// written form.
pub(super) struct Index {
    tier: TierId,
    rows: Vec<(Row, Vec<Token>, Vec<Token>)>,
}

impl World {
    /// Takes a tier's index, or restores one, often in a tier that has lost some blocks.
    pub(super) fn index(&mut self, a: usize, b: usize) {
        let read = self.index.take_if(|_| !a.is_multiple_of(4));
        let tier = read.as_ref().map_or(b % self.manager.settings().tiers.len(), |old| old.tier);
        for (_, tokens, _) in read.iter().flat_map(|old| old.rows.iter().rev().take(b % 4)) {
            self.clear(tokens, tier);
        }
        let Some(rows) = self.attempt("index", |m, now| m.index(tier, now)) else { return };
        let Some(index) = read else {
            self.index = Some(Index { tier, rows: self.sequences(tier, rows) });
            return;
        };
        let lines: Vec<Row> = index.rows.iter().map(|(row, ..)| row.clone()).collect();
        let found = self.attempt("load index", |m, now| m.load_index(tier, &lines, now));
        let Some(found) = found else { return };
        let stood: Vec<Slot> = rows.iter().map(|row| row.slot).collect();
        let rows = self.attempt("index", |m, now| m.index(tier, now)).expect("it was given");
        let fresh: Vec<&Row> = rows.iter().filter(|row| !stood.contains(&row.slot)).collect();
        assert_eq!(fresh.len(), found, "as many are there as were found");
        for row in fresh {
            let known = index.rows.iter().find(|(known, ..)| known.slot == row.slot);
            let (.., written) = known.expect("it was written down");
            for layer in row.layers.iter() {
                self.put(tier, row.slot, layer, (written.clone(), layer));
            }
            self.count("found again");
        }
        self.index = Some(index);
    }

    /// The sequences of rows whose ancestors are all among them, without hints. Their bytes are in
    /// their slots.
    fn sequences(&self, tier: TierId, rows: Vec<Row>) -> Vec<(Row, Vec<Token>, Vec<Token>)> {
        let settings = self.manager.settings();
        let mut known: BTreeMap<BlockKey, (Scope, Vec<Token>)> = BTreeMap::new();
        let mut all = Vec::new();
        for mut row in rows {
            let record = &row.label.record;
            let first = record.scope.as_ref().is_some_and(|owner| {
                let (name, size) = (&settings.fingerprint, settings.block_tokens);
                record.parent == scope_key(name, size, &owner.tenant, &owner.lora)
            });
            let owner = record.scope.as_ref().filter(|_| first).map(|owner| {
                let (tenant, lora) = (owner.tenant.clone(), owner.lora.clone());
                (Scope { tenant, lora, ..Scope::default() }, Vec::new())
            });
            let before = owner.or_else(|| known.get(&record.parent).cloned());
            let Some((mut scope, mut tokens)) = before else { continue };
            let place = |at: u32| (tokens.len() + at as usize) as u64;
            scope
                .extra
                .extend(record.digests.iter().map(|(at, digest)| (place(*at), digest.clone())));
            tokens.extend(&record.tokens);
            let written = Self::written(&scope, &tokens);
            known.insert(record.key(), (scope, tokens.clone()));
            for layer in row.layers.iter() {
                let content = self.get(tier, row.slot, layer);
                assert_eq!(content, Some((written.clone(), layer)), "{row:?} on tier {tier}");
            }
            row.label.usage.wanted = None;
            all.push((row, tokens, written));
        }
        all
    }
}
