//! Copies of blocks in a story: marked, lost, evicted, and as the block events report them.

use std::collections::BTreeSet;

use kvtrie_core::{BlockEventKind, Copy, Handle, Kind, Mark, Move, Place, Scope, TierId, Token};

use crate::group_story::{Step, Story, branch, resumes};
use crate::rig::{GPU, SIZE};

impl Story {
    /// The copies of each block of the longest usable prefix.
    pub(super) fn copies(&self, tokens: &[Token]) -> Vec<Vec<Copy>> {
        let found = self.rig.manager.lookup(tokens, self.rig.now, &Scope::default(), 0).unwrap();
        found.blocks.into_iter().map(|block| block.copies).collect()
    }

    /// A sequence is marked on a tier, or cleared there.
    pub(super) fn mark(&mut self, (what, stem, shared, more, extra): Step) {
        let tier = stem as usize % self.rig.manager.settings().tiers.len();
        if self.engine.is_some() && tier == GPU {
            return;
        }
        let shared = shared.min(self.last.len() / SIZE);
        let tokens = branch(&self.last, shared, stem + 90, more % 4);
        let present = what == 15;
        let ready = (extra % 3 == 0).then_some(self.rig.now + 700);
        let before = self.copies(&tokens);
        let scope = Scope::default();
        let mark = Mark { tokens: &tokens, scope, tier, present, ready, first: None };
        // Marks of one group come from a shared store, which may have any of them.
        let one = extra % 4 == 1 && self.rig.manager.settings().tiers[tier].kind == Kind::Remote;
        let alone = one.then_some(more % self.groups.len());
        self.learn(&tokens);
        let marked = self.rig.call(|m, now| match alone {
            Some(group) => m.mark_group(&mark, group, 0, now),
            None => m.mark(&mark, now),
        });
        if marked.is_err() {
            return;
        }
        let found = self.rig.manager.lookup(&tokens, self.rig.now, &Scope::default(), 0).unwrap();
        let found = found.blocks;
        let after: Vec<Vec<Copy>> = found.iter().map(|block| block.copies.clone()).collect();
        for (at, copies) in after.iter().enumerate() {
            let known = before.get(at).map_or(&[][..], |known| known);
            let new = copies.iter().filter(|copy| copy.tier == tier && !known.contains(copy));
            for copy in new.filter(|_| present) {
                let place = (tier, usize::from(copy.group), copy.slot);
                let path = tokens[..(at + 1) * SIZE].to_vec();
                if self.bytes.is_some() {
                    self.unwritten.push((found[at].block, place, path));
                }
            }
            let of = |copy: &Copy| {
                copy.tier == tier && alone.is_none_or(|group| usize::from(copy.group) == group)
            };
            assert!(present || !copies.iter().any(of), "{copies:?}");
        }
        if present && alone.is_none() {
            // The end resumes with what this tier alone has.
            let border = u32::try_from(after.len()).unwrap();
            assert_eq!(after.len() * SIZE, tokens.len());
            let has = |at: usize, place: u32| {
                let matched = |copy: &Copy| (copy.tier, usize::from(copy.group)) == (tier, at);
                after[place as usize].iter().any(matched)
            };
            assert!(resumes(&self.groups, border, has), "{after:?}");
        }
        if self.bytes.is_some() {
            // Moves that began earlier may still read the slots that a mark has taken.
            self.end_all_moves();
            self.write_marked(None);
        }
    }

    /// Writes the bytes of marked blocks, or those that a move reads. Moves that began earlier may
    /// still read such a slot, with the bytes of another block.
    pub(super) fn write_marked(&mut self, before: Option<&Move>) {
        let Some(bytes) = &mut self.bytes else { return };
        self.unwritten.retain(|&(marked, place, ref path)| {
            let now = before.is_none_or(|known| {
                let from = (known.src, usize::from(known.group), known.src_slot);
                (known.block, from) == (Some(marked), place)
            });
            if now {
                bytes.fill(place, path, path.len() / SIZE - 1);
            }
            !now
        });
    }

    /// A block amid a path is lost on every tier, if nothing uses it.
    pub(super) fn lose(&mut self, (_, _, shared, more, _): Step) {
        let place = (shared + more) % (self.last.len() / SIZE).max(1);
        let tokens = self.last[..((place + 1) * SIZE).min(self.last.len())].to_vec();
        for tier in 0..self.rig.manager.settings().tiers.len() {
            let (tokens, scope) = (&tokens, Scope::default());
            let mark = Mark { tokens, scope, tier, present: false, ready: None, first: None };
            self.rig.call(|m, now| m.mark_after(&mark, place, now)).ok();
        }
    }

    /// The block events give the copies of each group.
    pub(super) fn check_events(&mut self) {
        let events = self.rig.call(|m, _| m.take_block_events()).unwrap();
        for event in events {
            let name = (event.block, event.tier, event.group);
            let news = match event.kind {
                BlockEventKind::Stored => self.reported.insert(name),
                BlockEventKind::Removed => self.reported.remove(&name),
            };
            assert!(news, "{event:?}");
        }
        let found = self.rig.manager.lookup(&self.last, self.rig.now, &Scope::default(), 0);
        for block in found.unwrap().blocks {
            let valid = |copy: &&Copy| !copy.leaving && !copy.layers.is_empty();
            let valid = block.copies.iter().filter(valid);
            let valid = valid.map(|copy| (block.block, copy.tier, copy.group));
            let this = (block.block, 0, 0)..(Handle(block.block.0 + 1), 0, 0);
            let known: Vec<_> = self.reported.range(this).copied().collect();
            assert_eq!(valid.collect::<Vec<_>>(), known);
        }
    }

    /// Blocks leave a tier on request, all of them or none. Without a victim that has its last copy
    /// there, blocks after it leave all tiers, this one too.
    pub(super) fn evict(&mut self, tier: TierId, count: u64) {
        let tier = tier % self.rig.manager.settings().tiers.len();
        if let Ok(left) = self.rig.call(|m, now| m.evict_blocks(tier, count, &[], now)) {
            let gone: BTreeSet<Handle> = left.iter().copied().collect();
            assert!(gone.len() == left.len() && left.len() as u64 >= count);
            let matched = self.rig.manager.lookup(&self.last, self.rig.now, &Scope::default(), 0);
            let blocks = matched.unwrap().blocks;
            for block in blocks.iter().filter(|block| gone.contains(&block.block)) {
                let copy = block.copies.iter().find(|copy| (copy.tier, copy.group) == (tier, 0));
                assert!(copy.is_none_or(|copy| copy.leaving), "{copy:?}");
            }
        }
    }

    /// Parts of blocks leave a tier on request, and their blocks stay.
    pub(super) fn evict_parts(&mut self, (_, stem, shared, more, _): Step) {
        let tier = stem as usize % self.rig.manager.settings().tiers.len();
        let group = 1 + shared % (self.groups.len() - 1);
        let count = more as u64;
        let place = Place::new(tier, group);
        let before = self.rig.manager.known(&self.last, &Scope::default()).unwrap();
        if let Ok(left) = self.rig.call(|m, now| m.evict_parts(place, count, now)) {
            let gone: BTreeSet<Handle> = left.iter().copied().collect();
            assert!(gone.len() == left.len() && left.len() as u64 <= count);
            assert_eq!(self.rig.manager.known(&self.last, &Scope::default()).unwrap(), before);
            let matched = self.rig.manager.lookup(&self.last, self.rig.now, &Scope::default(), 0);
            let blocks = matched.unwrap().blocks;
            for block in blocks.iter().filter(|block| gone.contains(&block.block)) {
                let of = |copy: &&Copy| (copy.tier, usize::from(copy.group)) == (tier, group);
                let copy = block.copies.iter().find(of);
                assert!(copy.is_none_or(|copy| copy.leaving), "{copy:?}");
            }
        }
    }
}
