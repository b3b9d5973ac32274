//! Audit of a trie: every link, count and table, checked from scratch.
//!
//! Invariant: it changes nothing. Cost: O(blocks).

use super::Trie;
use super::run::NONE;

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// A sentence per broken invariant.
    #[must_use]
    pub(crate) fn audit(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let (mut seen, mut siblings, mut alone) = (0, 0, 0);
        for id in 0..self.bound {
            let run = &self.runs[id];
            alone += usize::from(run.child != NONE && self.runs[run.child].next == NONE);
            for block in (0..run.blocks).map(|at| run.first + at) {
                seen += 1;
                if self.ids.run_of(block) != id {
                    broken.push(format!("block {block} is not where run {id} says"));
                }
                if self.ids.is_free(block) {
                    broken.push(format!("block {block} of run {id} is free"));
                }
            }
            let mut previous = NONE;
            for child in self.siblings(run.child).take(self.bound as usize) {
                siblings += 1;
                let next = &self.runs[child];
                if next.parent != id || next.blocks == 0 {
                    broken.push(format!("run {child} is not a child of run {id}"));
                } else if self.find(next.parent, self.token_pages.of(next.first, 1)) != Some(child)
                {
                    broken.push(format!("run {child} is not found below run {id}"));
                } else if next.depth != run.depth + run.blocks {
                    broken.push(format!("run {child} has depth {}", next.depth));
                }
                if next.previous != previous {
                    broken.push(format!("run {child} comes after run {}", next.previous));
                }
                previous = child;
            }
        }
        if siblings != self.runs() {
            broken.push(format!("{siblings} runs have a parent, {} are counted", self.runs()));
        }
        let known = self.siblings.len();
        if siblings - alone != known {
            broken.push(format!(
                "{} runs have a sibling, {known} are in the tables",
                siblings - alone
            ));
        }
        if seen != self.len() {
            broken.push(format!("{seen} blocks in runs, {} are counted", self.len()));
        }
        broken
    }
}
