//! The engine's slot allocator, in worlds whose first tier is the engine's.
//!
//! Invariant: a slot is free, in one lease's table, or touched by a move that has not ended.

use std::collections::BTreeSet;

use kvtrie_core::{MoveId, Slot};

/// A stack of free slots.
#[derive(Default)]
pub(super) struct Engine {
    free: Vec<Slot>,
    fresh: Slot,
    leaving: Vec<(BTreeSet<MoveId>, Vec<Slot>)>,
}

impl Engine {
    /// Extends a table to `blocks` slots.
    pub(super) fn grow(&mut self, table: &mut Vec<Slot>, blocks: usize) {
        while table.len() < blocks {
            table.push(self.free.pop().unwrap_or_else(|| {
                self.fresh += 1;
                self.fresh
            }));
        }
    }

    /// Frees a table as soon as the moves that touch it have ended.
    pub(super) fn leave(&mut self, touching: Vec<MoveId>, table: Vec<Slot>) {
        self.leaving.push((touching.into_iter().collect(), table));
        self.free_untouched_tables();
    }

    /// Notes the end of a move, or that it never starts.
    pub(super) fn ended(&mut self, id: MoveId) {
        for (touching, _) in &mut self.leaving {
            touching.remove(&id);
        }
        self.free_untouched_tables();
    }

    fn free_untouched_tables(&mut self) {
        for (_, table) in self.leaving.extract_if(.., |(touching, _)| touching.is_empty()) {
            self.free.extend(table);
        }
    }
}
