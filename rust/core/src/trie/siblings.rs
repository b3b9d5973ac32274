//! Children of a run: a doubly linked list, and a hash table for runs with several children.
//!
//! Invariant: the table holds exactly the runs with a sibling, so chains without branches (a
//! conversation) need no probe. Cost: O(1) to find, add or remove. A hash of a block's tokens if
//! there are siblings.

use crate::block::Token;

use super::Trie;
use super::run::{NONE, Run, RunId, key};

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// The child of a run starting with these tokens of a block.
    pub(super) fn find(&self, run: RunId, tokens: &[Token]) -> Option<RunId> {
        let parent = &self.runs[run];
        if parent.child == NONE {
            return None;
        }
        let only = &self.runs[parent.child];
        // An only child is not in the table.
        if only.next == NONE {
            return (self.token_pages.of(only.first, 1) == tokens).then_some(parent.child);
        }
        // The hash has 32 bits, and the table holds children of all parents.
        let same = |child: RunId| {
            let child = &self.runs[child];
            child.parent == run && self.token_pages.of(child.first, 1) == tokens
        };
        self.siblings.find(key(parent.seed(run), tokens), same)
    }

    /// Links the non-empty run `child` as a child of `run`.
    pub(super) fn adopt(&mut self, run: RunId, child: RunId) {
        let next = std::mem::replace(&mut self.runs[run].child, child);
        let link = &mut self.runs[child];
        (link.parent, link.previous, link.next) = (run, NONE, next);
        if next == NONE {
            return;
        }
        self.runs[next].previous = child;
        // The former only child has a sibling now.
        if self.runs[next].next == NONE {
            self.index(next);
        }
        self.index(child);
    }

    /// Adds a run to the hash table.
    fn index(&mut self, run: RunId) {
        let Run { parent, first, .. } = self.runs[run];
        let key = key(self.runs[parent].seed(parent), self.token_pages.of(first, 1));
        self.runs[run].key = key;
        self.siblings.insert(key, run);
    }

    /// Removes a run from the hash table.
    fn unindex(&mut self, run: RunId) {
        // By the stored key, without hashing tokens again.
        let known = self.siblings.remove(self.runs[run].key, |other| other == run);
        known.expect("a run that has a sibling");
    }

    /// Unlinks a run from its parent.
    pub(super) fn detach(&mut self, run: RunId) {
        let Run { parent, previous, next, .. } = self.runs[run];
        if (previous, next) == (NONE, NONE) {
            self.runs[parent].child = NONE;
            return;
        }
        self.unindex(run);
        if previous == NONE {
            self.runs[parent].child = next;
        } else {
            self.runs[previous].next = next;
        }
        if next != NONE {
            self.runs[next].previous = previous;
        }
        let first = self.runs[parent].child;
        // The remaining sibling is an only child now.
        if self.runs[first].next == NONE {
            self.unindex(first);
        }
    }

    /// A run and its later siblings in the list.
    pub(super) fn siblings(&self, first: RunId) -> impl Iterator<Item = RunId> + '_ {
        let link = |run: RunId| (run != NONE).then_some(run);
        std::iter::successors(link(first), move |&run| link(self.runs[run].next))
    }
}
