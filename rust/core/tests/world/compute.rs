//! The engine's part: writes slots and commits the tokens.
//!
//! Invariant: it writes only slots of its lease, and only when none of the moves that the lease
//! awaits is in flight.

use kvtrie_core::{Committed, Token};

use super::World;

impl World {
    /// Computes holes and some of the remaining tokens, and commits.
    pub(super) fn compute(&mut self, a: usize, b: usize) {
        let Some(at) = self.pick(a) else { return };
        let id = self.held[at].id;
        self.held[at].known.clear();
        if self.held[at].suspended {
            self.attempt("commit", |m, now| m.commit(id, &[5], now));
            return;
        }
        self.bind(at);
        if !self.manager.awaits(id).unwrap().is_empty() {
            return;
        }
        let mut fresh = self.held[at].todo.clone();
        if fresh.is_empty() {
            fresh = (0..=(b % 4)).map(|i| u32::try_from(9000 + (b + i) % 3).unwrap()).collect();
        }
        fresh.truncate(1 + b % 7);
        let room = self.manager.room_left(id).unwrap();
        if fresh.len() > room {
            self.attempt("commit", |m, now| m.commit(id, &fresh, now));
            return;
        }
        let Some(begun) = self.begin_ahead(at, &fresh, b) else { return };
        let sealed = self.prepare(at, &fresh);
        if self.gives_up(at, b) {
            return;
        }
        let moves = |world: &Self| if begun > 0 { world.manager.stats(1).moves } else { 0 };
        let before = moves(self);
        let done = self.attempt("commit", |m, now| m.commit(id, &fresh, now));
        let done = done.expect("a commit with room and without open moves goes through");
        self.took_over(begun, done.new.len(), (before, moves(self)));
        self.committed(at, fresh.len(), sealed, &done);
    }

    /// Computes the next token of every lease that may continue, and commits them as one batch.
    pub(super) fn compute_many(&mut self, b: usize) {
        let mut batch = Vec::new();
        for at in 0..self.held.len() {
            let id = self.held[at].id;
            self.held[at].known.clear();
            if self.held[at].suspended {
                continue;
            }
            self.bind(at);
            let waits = !self.manager.awaits(id).unwrap().is_empty();
            if waits || self.manager.room_left(id).unwrap() == 0 {
                continue;
            }
            let next = self.held[at].todo.first().copied();
            batch.push((at, id, vec![next.unwrap_or(9000 + u32::try_from(b % 3).unwrap())]));
        }
        let mut asked: Vec<_> = batch.iter().map(|(_, id, next)| (*id, next.clone())).collect();
        if b.is_multiple_of(5) {
            // One of them cannot commit: none does.
            let twice = asked.first().map_or((1 << 40, vec![1]), Clone::clone);
            asked.push(twice);
            let refused = self.attempt("commit many", |m, now| m.commit_many(&asked, now));
            assert!(refused.is_none(), "a batch with a bad lease went through");
            return;
        }
        let sealed: Vec<_> = batch.iter().map(|(at, _, next)| self.prepare(*at, next)).collect();
        let done = self.attempt("commit many", |m, now| m.commit_many(&asked, now));
        let done = done.expect("each of these commits would go through");
        for ((at, _, next), (sealed, done)) in batch.iter().zip(sealed.into_iter().zip(&done)) {
            self.committed(*at, next.len(), sealed, done);
        }
    }

    /// Writes the tokens of the next commit. Returns how many blocks they will fill and how many
    /// were full before.
    fn prepare(&mut self, at: usize, fresh: &[Token]) -> (usize, usize) {
        let id = self.held[at].id;
        self.write_holes(at);
        let from = self.manager.lease_tokens(id).unwrap();
        self.held[at].tokens.truncate(from);
        assert_eq!(self.held[at].tokens.len(), from, "the world lost count of a lease's tokens");
        self.held[at].tokens.extend_from_slice(fresh);
        self.write(at, from);
        let size = self.size();
        let sealed = (from + fresh.len()) / size - from / size;
        let whose = Self::scope(self.held[at].scope);
        let known = self.manager.cached_blocks(&self.held[at].tokens, &whose).unwrap();
        self.hints.used(known.into_iter().skip(from / size).take(sealed));
        (sealed, from / size)
    }

    fn committed(&mut self, at: usize, tokens: usize, full: (usize, usize), done: &Committed) {
        let reported = done.new.len().max(done.duplicate.len());
        assert!(reported <= full.0 + full.1, "more blocks reported than filled");
        let todo = &mut self.held[at].todo;
        todo.drain(..tokens.min(todo.len()));
    }

    fn write_holes(&mut self, at: usize) {
        let id = self.held[at].id;
        let size = self.size();
        let holes: Vec<_> = self.manager.lease(id).unwrap().recompute().collect();
        if !holes.is_empty() {
            self.count("hole computed");
        }
        let (rows, table) = self.manager.slots(id, 0).unwrap();
        let blocks = table.len() / rows;
        let written = Self::written(&Self::scope(self.held[at].scope), &self.held[at].tokens);
        for (block, layers) in holes {
            for layer in layers.iter() {
                let row = if rows == 1 { 0 } else { usize::from(layer) };
                let slot = table[row * blocks + block as usize];
                let tokens = written[..(block as usize + 1) * size].to_vec();
                self.put(0, slot, layer, (tokens, layer));
            }
        }
    }

    /// Writes the KV of a lease's tokens from `from` on.
    fn write(&mut self, at: usize, from: usize) {
        let held = &self.held[at];
        let size = self.size();
        let (rows, table) = self.manager.slots(held.id, 0).unwrap();
        let blocks = table.len() / rows;
        let layers = self.manager.settings().layers;
        let tokens = Self::written(&Self::scope(held.scope), &held.tokens);
        for block in from / size..tokens.len().div_ceil(size) {
            for layer in 0..layers {
                let row = if rows == 1 { 0 } else { usize::from(layer) };
                let slot = table[row * blocks + block];
                let end = tokens.len().min((block + 1) * size);
                if from > block * size {
                    let (old, _) = self.get(0, slot, layer).expect("the tail was written");
                    assert!(
                        old.starts_with(&tokens[..from]),
                        "the tail of lease {} was {old:?}",
                        self.held[at].id
                    );
                }
                self.put(0, slot, layer, (tokens[..end].to_vec(), layer));
            }
        }
    }
}
