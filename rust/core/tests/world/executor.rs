//! The executor: runs moves late, in any order, and not always well.
//!
//! Invariant: a move starts only after those it waits for have ended well; from then on its
//! destination is garbage until it ends, and a hung one may write there at any time.

use kvtrie_core::{Kind, Move, MoveId, MoveKind, Outcome, Token};

use super::{Running, World};

impl World {
    pub(super) fn hand_out(&mut self, limit: usize) {
        // Workers ask for stores to a shared tier whenever they can begin some.
        let shared = [usize::MAX, 0, 1, 2][if limit < 64 { limit % 4 } else { 0 }];
        let give = |known: &Move, lease| Move { lease, ..known.clone() };
        let moves = self.attempt("hand out", |m, _| m.hand_out(limit, shared, give));
        for move_ in moves.expect("moves never fail") {
            self.check_shared_store(&move_);
            assert!(
                move_.after == 0
                    || self.running.contains_key(&move_.after)
                    || self.ended_ok.contains(&move_.after),
                "move {} waits for {}, which was not handed out",
                move_.id,
                move_.after
            );
            if move_.kind == MoveKind::Store && move_.block.is_none() {
                assert_eq!((move_.src, move_.dst, move_.after), (0, 1, 0), "it goes at once");
                self.count("handed out ahead");
            }
            self.log.push(move_.clone());
            self.tally.handed(&move_, self.manager.now());
            let fresh = Running { move_, started: false, hung: false, elsewhere: false };
            assert!(self.running.insert(fresh.move_.id, fresh).is_none(), "handed out twice");
        }
    }

    /// No slot waits for a store to a shared tier: only a load of what that brings does.
    fn check_shared_store(&mut self, move_: &Move) {
        if self.stores_to_shared(move_) {
            self.count("stored to a shared tier");
        }
        let waits = self.running.get(&move_.after).map(|running| &running.move_);
        if let Some(after) = waits.filter(|after| self.stores_to_shared(after)) {
            assert_eq!(
                (move_.kind, move_.src, move_.src_slot),
                (MoveKind::Load, after.dst, after.dst_slot),
                "{move_:?} waits for {after:?}"
            );
        }
    }

    /// Whether a move writes to a tier that machines share.
    pub(super) fn stores_to_shared(&self, move_: &Move) -> bool {
        let kind = self.manager.settings().tiers[move_.dst].kind;
        move_.kind == MoveKind::Store && kind == Kind::Remote
    }

    pub(super) fn start(&mut self, a: usize) {
        if self.running.is_empty() {
            return;
        }
        let id = *self.running.keys().nth(a % self.running.len()).unwrap();
        self.begin(id);
    }

    /// Starts a move after those it waits for: its destination is garbage from now on.
    fn begin(&mut self, id: MoveId) {
        let running = &self.running[&id];
        let after = running.move_.after;
        if running.started || (after != 0 && !self.ended_ok.contains(&after)) {
            return;
        }
        let move_ = running.move_.clone();
        self.running.get_mut(&id).unwrap().started = true;
        for layer in move_.layers.iter() {
            self.put(move_.dst, move_.dst_slot, layer, (vec![Token::MAX], layer));
        }
    }

    /// Ends everything handed out well.
    pub(super) fn run_all(&mut self) {
        self.run_from(0);
        let ids: Vec<MoveId> = self.running.keys().copied().collect();
        for id in ids {
            self.begin(id);
            self.end(id, true);
        }
    }

    /// Runs the runnable moves from an id on, and reports their ends in one call.
    fn run_from(&mut self, first: MoveId) {
        let ids: Vec<MoveId> = self.running.range(first..).map(|(&id, _)| id).collect();
        for &id in &ids {
            self.begin(id);
        }
        let runs = |id: &MoveId| self.running[id].started && !self.running[id].hung;
        let ids: Vec<MoveId> = ids.into_iter().filter(runs).collect();
        for id in &ids {
            let move_ = self.running[id].move_.clone();
            for layer in move_.layers.iter() {
                self.copy(&move_, layer);
            }
        }
        for rank in 0..self.manager.settings().ranks {
            let outcome = Outcome { rank, ..Outcome::default() };
            self.attempt("complete together", |m, now| m.complete(&ids, &outcome, now));
        }
        for id in ids {
            self.ended_well(id);
        }
    }

    fn copy(&mut self, move_: &Move, layer: u16) {
        let content = self.get(move_.src, move_.src_slot, layer);
        let content = content.unwrap_or_else(|| panic!("{move_:?} reads nothing"));
        self.put(move_.dst, move_.dst_slot, layer, content);
    }

    fn ended_well(&mut self, id: MoveId) {
        self.forget(id);
        self.ended_ok.insert(id);
        self.tally.ended(id, self.manager.settings().layer_bytes, self.now);
    }

    pub(super) fn finish(&mut self, a: usize, b: usize) {
        if self.running.is_empty() {
            return;
        }
        let id = *self.running.keys().nth(a % self.running.len()).unwrap();
        // A move that others wait for fails more often, so that skipped moves are frequent too.
        let awaited = self.running.values().any(|other| other.move_.after == id);
        let ok = b.is_multiple_of(4) == awaited;
        if ok && b.is_multiple_of(3) {
            return self.run_from(id);
        }
        if !self.running[&id].started {
            self.begin(id);
        }
        self.end(id, ok);
        if b.is_multiple_of(5) && !self.running.contains_key(&id) {
            self.attempt("complete again", |m, now| {
                m.complete(&[id], &Outcome { ok, ..Outcome::default() }, now)
            });
        }
    }

    fn end(&mut self, id: MoveId, ok: bool) {
        let running = &self.running[&id];
        if !running.started {
            let after = running.move_.after;
            if !self.running.contains_key(&after) && !self.ended_ok.contains(&after) {
                // A move that it waited for failed: it never runs.
                self.forget(id);
                self.count("skipped after a failure");
            }
            return;
        }
        let move_ = running.move_.clone();
        let (was_hung, started) = (running.hung, running.started);
        let ranks = self.manager.settings().ranks;
        if !ok && !was_hung {
            let hung = id.is_multiple_of(3);
            let cancelled = !hung && id.is_multiple_of(5);
            // It has ended on one rank only.
            let elsewhere = !hung && ranks > 1 && id.is_multiple_of(2);
            let what = if cancelled { "cancelled move" } else { "failed move" };
            self.count(if hung { "hung move" } else { what });
            if started && !cancelled && id.is_multiple_of(4) && move_.layers.len() > 1 {
                // It breaks off after its first layer.
                let layer = move_.layers.lo;
                if let Some(content) = self.get(move_.src, move_.src_slot, layer) {
                    self.put(move_.dst, move_.dst_slot, layer, content);
                    for rank in 0..ranks {
                        let some = Outcome { layers_done: Some(1), rank, ..Outcome::default() };
                        self.attempt("progress", |m, now| m.complete(&[id], &some, now));
                    }
                    self.count("broke off");
                }
            }
            let error = Some("EIO");
            let outcome = Outcome { ok: false, hung, cancelled, error, ..Outcome::default() };
            self.attempt("complete", |m, now| m.complete(&[id], &outcome, now));
            self.after_failure();
            if hung || elsewhere {
                let running = self.running.get_mut(&id).unwrap();
                (running.hung, running.elsewhere) = (true, elsewhere);
                return;
            }
            for rank in 1..ranks {
                let outcome = Outcome { ok: false, rank, ..Outcome::default() };
                self.attempt("complete", |m, now| m.complete(&[id], &outcome, now));
            }
            self.forget(id);
            return;
        }
        if was_hung {
            // Until it ends it may write anything.
            for layer in move_.layers.iter() {
                self.put(move_.dst, move_.dst_slot, layer, (vec![Token::MAX], layer));
            }
            for rank in 0..ranks {
                let outcome = Outcome { ok: false, rank, ..Outcome::default() };
                self.attempt("complete", |m, now| m.complete(&[id], &outcome, now));
            }
            self.forget(id);
            return;
        }
        let done = move_.layers.len();
        let partly = if id.is_multiple_of(2) { 1.min(done) } else { done };
        for part in [partly, done] {
            for at in 0..part {
                self.copy(&move_, move_.layers.lo + at);
            }
            for rank in 0..ranks {
                let outcome = Outcome { layers_done: Some(part), rank, ..Outcome::default() };
                self.attempt("complete", |m, now| m.complete(&[id], &outcome, now));
            }
        }
        self.ended_well(id);
    }

    fn forget(&mut self, id: MoveId) {
        self.running.remove(&id);
        self.slots.ended(id);
    }

    /// Leases compute lost blocks; those with a truncated match compute the rest.
    fn after_failure(&mut self) {
        let failed = self.attempt("failed", |m, _| m.failed()).expect("failed never fails");
        for row in failed {
            let Some(at) = self.held.iter().position(|held| held.id == row.lease) else { continue };
            self.count("lease replanned");
            let known = self.manager.lease_tokens(row.lease).unwrap();
            let lost = usize::try_from(row.start).unwrap() / self.size();
            let held = &mut self.held[at];
            held.known.iter_mut().for_each(|slots| slots.truncate(lost));
            if known < held.tokens.len() {
                held.todo = held.tokens[known..].to_vec();
            }
            self.bind(at);
        }
    }
}
