//! Kin: the children of a run, and how one of them is found.
//!
//! They hang on each other, the latest first. Invariant: exactly the runs that have a sibling are in
//! the tables, so that a chain of runs without a branch, as a conversation is, asks none. Cost: O(1)
//! to find, add or take away; a hash of a block's tokens where there are siblings.

use crate::block::Token;

use super::Trie;
use super::run::{NONE, Run, RunId, key};

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// The child of a run that begins with these tokens of one block.
    pub(super) fn find(&self, run: RunId, tokens: &[Token]) -> Option<RunId> {
        let home = &self.runs[run];
        if home.child == NONE {
            return None;
        }
        let only = &self.runs[home.child];
        if only.next == NONE {
            return (self.token_pages.of(only.first, 1) == tokens).then_some(home.child);
        }
        let same = |child: RunId| {
            let child = &self.runs[child];
            child.parent == run && self.token_pages.of(child.first, 1) == tokens
        };
        self.siblings.find(key(home.seed(run), tokens), same)
    }

    /// Hangs a run that has blocks behind its parent.
    pub(super) fn adopt(&mut self, run: RunId, child: RunId) {
        let next = std::mem::replace(&mut self.runs[run].child, child);
        let value = &mut self.runs[child];
        (value.parent, value.previous, value.next) = (run, NONE, next);
        if next == NONE {
            return;
        }
        self.runs[next].previous = child;
        if self.runs[next].next == NONE {
            self.enter(next);
        }
        self.enter(child);
    }

    /// Puts a run into the tables.
    fn enter(&mut self, run: RunId) {
        let Run { parent, first, .. } = self.runs[run];
        let key = key(self.runs[parent].seed(parent), self.token_pages.of(first, 1));
        self.runs[run].key = key;
        self.siblings.insert(key, run);
    }

    /// Takes a run out of the tables.
    fn leave(&mut self, run: RunId) {
        let known = self.siblings.remove(self.runs[run].key, |other| other == run);
        known.expect("a run that has a sibling");
    }

    /// Takes a run from its parent.
    pub(super) fn detach(&mut self, run: RunId) {
        let Run { parent, previous, next, .. } = self.runs[run];
        if (previous, next) == (NONE, NONE) {
            self.runs[parent].child = NONE;
            return;
        }
        self.leave(run);
        if previous == NONE {
            self.runs[parent].child = next;
        } else {
            self.runs[previous].next = next;
        }
        if next != NONE {
            self.runs[next].previous = previous;
        }
        let first = self.runs[parent].child;
        if self.runs[first].next == NONE {
            self.leave(first);
        }
    }

    /// A run and those that `next` leads to.
    pub(super) fn siblings(&self, first: RunId) -> impl Iterator<Item = RunId> + '_ {
        let link = |run: RunId| (run != NONE).then_some(run);
        std::iter::successors(link(first), move |&run| link(self.runs[run].next))
    }
}
