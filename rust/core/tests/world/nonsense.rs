//! Invalid calls: they are refused and change nothing.

use kvtrie_core::{Acquire, Outcome, Scope, Structure};

use super::World;

impl World {
    pub(super) fn nonsense(&mut self, a: usize, b: usize) {
        match a % 5 {
            0 => {
                self.attempt("nonsense", |m, now| {
                    m.complete(&[1 << 40], &Outcome::default(), now).map(|_| ())
                });
            }
            1 => {
                self.attempt("nonsense", |m, now| m.commit(1 << 40, &[1], now).map(|_| ()));
            }
            2 => {
                let Some(at) = self.pick(b) else { return };
                let id = self.held[at].id;
                self.attempt("nonsense", |m, now| m.truncate(id, 1 << 30, now));
            }
            3 => {
                let scope = Scope { structure: Some(Structure::LeafOnly), ..Scope::default() };
                let ask = Acquire { tokens: &[1, 2, 3, 4], scope, ..Acquire::default() };
                if let Some(id) = self.ask("nonsense", &ask) {
                    self.attempt("release", |m, now| m.release(id, now));
                }
            }
            _ => {
                let Some(&id) = self.running.keys().next() else { return };
                let rank = self.manager.settings().ranks;
                let outcome = Outcome { rank, ..Outcome::default() };
                self.attempt("nonsense", |m, now| m.complete(&[id], &outcome, now).map(|_| ()));
            }
        }
    }
}
