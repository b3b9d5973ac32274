//! Marks: blocks that become resident or absent without a request.
//!
//! Invariant: bytes are put only into slots that no move reads and no block holds.

use kvtrie_core::{Copy, Handle, Layers, Manager, Mark, MatchedBlock, Scope, Slot, TierId, Token};

use super::World;

impl World {
    pub(super) fn mark(&mut self, a: usize, b: usize) {
        if self.manager.settings().tiers.len() < 2 {
            return;
        }
        let tokens = Self::sequence(a, b);
        let tier = 1 + b % (self.manager.settings().tiers.len() - 1);
        self.clear(&tokens, tier);
    }

    pub(super) fn clear(&mut self, tokens: &[Token], tier: TierId) {
        let scope = Scope::default();
        let mark = Mark { tokens, scope, tier, present: false, ready: None, first: None };
        self.attempt("mark", |m, now| m.mark(&mark, now));
    }

    /// Marks blocks on a tier and puts their bytes there.
    pub(super) fn appear(&mut self, a: usize, b: usize) {
        let (tokens, tier) = (Self::sequence(a, b), b / 13 % self.manager.settings().tiers.len());
        let full = tokens.len() / self.size();
        let all = Layers::new(0, self.manager.settings().layers);
        let rows = self.manager.settings().tiers[tier].layer_slots;
        let units = full * usize::from(if rows { all.hi } else { 1 });
        if self.manager.occupancy(tier).free < units as u64 {
            // A store may still read the slot that they would overwrite.
            return;
        }
        let scope = Scope::default();
        let copies_of = |m: &Manager, blocks: &[Handle]| {
            let copy = |block: MatchedBlock| block.copies.into_iter().find(|c| c.tier == tier);
            m.describe(blocks, 0).into_iter().map(copy).collect::<Vec<_>>()
        };
        let known = self.manager.cached_blocks(&tokens, &scope).expect("a good scope");
        // A copy that leaves has its bytes in slots that the mark does not take over.
        let slots = |m: &Manager, block: Handle, copy: Option<&Copy>| -> Vec<(u16, Slot)> {
            let Some(copy) = copy else { return Vec::new() };
            // Without layer slots all layers have the one slot.
            let of = m.copy_slots(block, copy).into_iter().cycle();
            copy.coming.iter().zip(of).collect()
        };
        let copies = copies_of(&self.manager, &known);
        let before: Vec<_> = known
            .iter()
            .zip(&copies)
            .map(|(&block, copy)| slots(&self.manager, block, copy.as_ref()))
            .collect();
        let ready = a.is_multiple_of(3).then_some(self.now + 5);
        let mark = Mark { tokens: &tokens, scope, tier, present: true, ready, first: None };
        let Some(blocks) = self.attempt("appear", |m, now| m.mark(&mark, now)) else { return };
        assert_eq!(blocks.len(), full, "all of them are there or will be");
        for (at, copy) in copies_of(&self.manager, &blocks).into_iter().enumerate() {
            let copy = copy.unwrap_or_else(|| panic!("block {at} is not on tier {tier}"));
            assert_eq!(copy.coming, all, "block {at} on tier {tier}");
            let old = before.get(at).map_or(&[][..], Vec::as_slice);
            let fresh = slots(&self.manager, blocks[at], Some(&copy));
            for (layer, slot) in fresh.into_iter().filter(|one| !old.contains(one)) {
                let end = (at + 1) * self.size();
                self.put(tier, slot, layer, (tokens[..end].to_vec(), layer));
            }
        }
    }
}
