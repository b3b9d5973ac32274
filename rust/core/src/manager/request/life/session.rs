//! Sessions: a table of conversations, with the end of each path and its length in blocks.
//!
//! A name belongs to a scope, as blocks do: a name used by two tenants or two adapters has two
//! sessions. Invariant: a session has a lease or ends in a living block. At most [`MOST_IDLE`]
//! sessions without a lease end in the same block, so sessions are limited by blocks and leases. A
//! session's tip is the last living block of its path. The lengths of the sessions through a block
//! are tracked only if a policy ranks by them, at O(path) per extension. Cost: O(log sessions) per
//! start, growth or end of a lease, per removed run of blocks and per session that ended there. Its
//! states:
//!
//! ```text
//! open --> held by leases --last lease ends--> idle, ends in a block --ninth idle one--> removed
//!              ^                                 |        | all its path was evicted --> removed
//!              +--------- a new lease -----------+
//! finished while held: removed with its last lease, unless a request comes before
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use crate::block::{BlockId, LeaseId};
use crate::policy::Needs;
use crate::scope::ScopeId;
use crate::visits;

use crate::manager::Manager;
use crate::manager::hints::coming::{LoadKey, WaitingLoads};
use crate::manager::request::life::session_lengths::SessionLengths;

/// Id of a session.
pub(crate) type SessionId = u64;

/// Maximum number of sessions without a lease that end in the same block. Above it, the least
/// recently used session is removed.
pub(crate) const MOST_IDLE: usize = 8;

/// Value of `ended` while a session has a lease.
const HELD: u64 = u64::MAX;

/// Conversation: its leases, and the end of its path.
#[derive(Clone, Debug)]
struct Session {
    name: Option<(ScopeId, Arc<str>)>,
    /// Length in blocks of its path, living or not, or the expected length if it is larger.
    length: u32,
    /// Number of blocks expected by the user.
    expected: u32,
    tip: Option<BlockId>,
    /// Ordinal of the end of its last lease, or [`HELD`] while it has a lease.
    ended: u64,
    /// Whether the user finished it and no request has come since: then its last lease removes it.
    finished: bool,
    /// The next request, if announced by a hint, in the encoding of
    /// [`expected_use`](crate::policy::expected_use).
    next: Option<u32>,
}

/// Sessions by id, with their indexes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sessions {
    all: BTreeMap<SessionId, Session>,
    names: BTreeMap<ScopeId, BTreeMap<Arc<str>, SessionId>>,
    held: BTreeSet<(SessionId, LeaseId)>,
    /// Index by tip, and by the end of the last lease.
    tips: BTreeSet<(BlockId, u64, SessionId)>,
    /// Blocks with too many sessions without a lease that end there.
    crowded: BTreeSet<BlockId>,
    /// Waiting loads of sessions, until their next request, and of leases and sequences.
    pub(crate) coming: WaitingLoads,
    lengths: SessionLengths,
    next: SessionId,
    ends: u64,
}

impl Sessions {
    /// Opens the session of a name for a lease, or a nameless session to track the lease's path.
    pub(crate) fn open(
        &mut self,
        scope: ScopeId,
        name: Option<&str>,
        track: bool,
        lease: LeaseId,
    ) -> Option<SessionId> {
        if let Some(known) = name.and_then(|name| self.find(scope, name)) {
            if let Some(session) = self.all.get_mut(&known) {
                session.finished = false;
            }
            self.hold(known, lease);
            return Some(known);
        }
        if name.is_none() && !track {
            return None;
        }
        let id = self.next;
        self.next += 1;
        let name = name.map(|name| (scope, Arc::from(name)));
        if let Some((_, name)) = &name {
            self.names.entry(scope).or_default().insert(Arc::clone(name), id);
        }
        self.all.insert(
            id,
            Session {
                name,
                length: 0,
                expected: 0,
                tip: None,
                ended: HELD,
                finished: false,
                next: None,
            },
        );
        self.held.insert((id, lease));
        Some(id)
    }

    /// Sets the expected length. It counts from the next `extend`.
    pub(crate) fn expect_blocks(&mut self, id: SessionId, blocks: u32) {
        if let Some(session) = self.all.get_mut(&id) {
            session.expected = blocks;
        }
    }

    /// Adds a lease to a session.
    pub(crate) fn hold(&mut self, id: SessionId, lease: LeaseId) {
        self.held.insert((id, lease));
        self.cancel_next(id);
        self.place(id, HELD);
    }

    /// The announced next request of a session.
    pub(crate) fn expected(&self, id: SessionId) -> Option<u32> {
        self.all.get(&id)?.next
    }

    /// Announces the next request of a session.
    pub(crate) fn expect(&mut self, id: SessionId, request: u32) {
        if let Some(session) = self.all.get_mut(&id) {
            session.next = Some(request);
        }
    }

    /// Cancels the announced next request of a session.
    fn cancel_next(&mut self, id: SessionId) {
        if let Some(session) = self.all.get_mut(&id) {
            session.next = None;
        }
        self.coming.remove(&LoadKey::Session(id));
    }

    /// Removes a lease from a session. Returns whether the session ends with it.
    pub(crate) fn leave(&mut self, id: SessionId, lease: LeaseId) -> bool {
        self.held.remove(&(id, lease));
        if self.leases(id).next().is_some() {
            return false;
        }
        self.ends += 1;
        self.place(id, self.ends);
        self.all.get(&id).is_some_and(|session| session.finished || session.tip.is_none())
    }

    /// Sets the ordinal of the end of a session's last lease.
    fn place(&mut self, id: SessionId, ended: u64) {
        let Some(session) = self.all.get_mut(&id) else { return };
        let before = std::mem::replace(&mut session.ended, ended);
        if let Some(tip) = session.tip {
            self.tips.remove(&(tip, before, id));
            self.list_tip(tip, ended, id);
        }
    }

    /// Lists a session at its tip.
    fn list_tip(&mut self, tip: BlockId, ended: u64, id: SessionId) {
        self.tips.insert((tip, ended, id));
        if ended < HELD && self.idle(tip).nth(MOST_IDLE).is_some() {
            self.crowded.insert(tip);
        }
    }

    /// The sessions without a lease that end in a block, the least recently used first.
    fn idle(&self, block: BlockId) -> impl Iterator<Item = SessionId> + '_ {
        let range = (block, 0, 0)..(block, HELD, 0);
        self.tips.range(range).inspect(|_| visits::note(1)).map(|&(_, _, id)| id)
    }

    /// A surplus session at its tip.
    pub(crate) fn surplus(&mut self) -> Option<SessionId> {
        while let Some(&block) = self.crowded.first() {
            if self.idle(block).nth(MOST_IDLE).is_some() {
                return self.idle(block).next();
            }
            self.crowded.remove(&block);
        }
        None
    }

    /// Removes a session. Returns its length.
    pub(crate) fn end(&mut self, id: SessionId) -> Option<u32> {
        self.cancel_next(id);
        let session = self.all.remove(&id)?;
        if let Some(tip) = session.tip {
            self.tips.remove(&(tip, session.ended, id));
        }
        if let Some((scope, name)) = session.name
            && let Some(names) = self.names.get_mut(&scope)
        {
            names.remove(&name);
            if names.is_empty() {
                self.names.remove(&scope);
            }
        }
        Some(session.length)
    }

    /// Whether the table is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.lengths.is_empty()
    }

    /// Finds a session by name.
    pub(crate) fn find(&self, scope: ScopeId, name: &str) -> Option<SessionId> {
        self.names.get(&scope)?.get(name).copied()
    }

    /// Names and last blocks of the sessions of a scope without a lease.
    pub(crate) fn waiting(&self, scope: ScopeId) -> impl Iterator<Item = (&str, BlockId)> + '_ {
        let names = self.names.get(&scope).into_iter().flatten();
        names.filter_map(|(name, id)| {
            let session = self.all.get(id)?;
            let idle = session.ended != HELD && !session.finished;
            Some((&**name, session.tip.filter(|_| idle)?))
        })
    }

    /// The leases of a session.
    pub(crate) fn leases(&self, id: SessionId) -> impl Iterator<Item = LeaseId> + '_ {
        let mine = self.held.range((id, LeaseId::MIN)..=(id, LeaseId::MAX));
        mine.inspect(|_| visits::note(1)).map(|&(_, lease)| lease)
    }

    /// Finishes a session. Returns whether it ends at once. Otherwise it ends with its last lease,
    /// unless a request comes before.
    pub(crate) fn finish(&mut self, id: SessionId) -> bool {
        let Some(session) = self.all.get_mut(&id) else { return false };
        session.finished = true;
        session.ended < HELD
    }

    /// Whether an unfinished session ends in a block.
    pub(crate) fn end_in(&self, block: BlockId) -> bool {
        let range = (block, 0, 0)..=(block, HELD, SessionId::MAX);
        self.tips.range(range).inspect(|_| visits::note(1)).any(|(_, _, id)| !self.all[id].finished)
    }

    /// The length of the shortest session through a block: its position has the highest weight
    /// there.
    pub(crate) fn shortest(&self, block: BlockId) -> Option<u32> {
        self.lengths.shortest(block)
    }

    /// The last living block of a session's path.
    pub(crate) fn tip(&self, id: SessionId) -> Option<BlockId> {
        self.all.get(&id)?.tip
    }

    /// Sets a session's path. Returns the lengths before and now, if anything changed.
    pub(crate) fn extend(&mut self, id: SessionId, path: &[BlockId]) -> Option<(u32, u32)> {
        let session = self.all.get_mut(&id)?;
        let length = u32::try_from(path.len()).unwrap_or(u32::MAX).max(session.expected);
        let tip = path.last().copied();
        if session.length == length && session.tip == tip {
            return None;
        }
        let before = std::mem::replace(&mut session.length, length);
        let old = std::mem::replace(&mut session.tip, tip);
        let ended = session.ended;
        if let Some(old) = old {
            self.tips.remove(&(old, ended, id));
        }
        if let Some(tip) = tip {
            self.list_tip(tip, ended, id);
        }
        Some((before, length))
    }

    /// Updates the lengths through blocks after a session changed from length `before` along `old`
    /// to `length` along `new`. Returns the blocks with a changed shortest session.
    pub(crate) fn move_path(
        &mut self,
        (old, before): (&[BlockId], u32),
        (new, length): (&[BlockId], u32),
    ) -> Vec<BlockId> {
        let same = old.iter().zip(new).take_while(|(a, b)| a == b).count();
        let mut changed = Vec::new();
        let (before, length) = (Some(before), Some(length));
        self.lengths.change(&old[same..], before, None, &mut changed);
        self.lengths.change(&new[..same], before, length, &mut changed);
        self.lengths.change(&new[same..], None, length, &mut changed);
        changed
    }

    /// Removes consecutive blocks without remaining descendants. Sessions that ended there now end
    /// in `parent`.
    pub(crate) fn forget(&mut self, blocks: Range<BlockId>, parent: Option<BlockId>) {
        if !self.lengths.is_empty() {
            for block in blocks.clone() {
                self.lengths.forget(block);
            }
        }
        while let Some(&(tip, ended, id)) =
            self.tips.range((blocks.start, 0, 0)..(blocks.end, 0, 0)).next()
        {
            visits::note(1);
            self.tips.remove(&(tip, ended, id));
            if let Some(session) = self.all.get_mut(&id) {
                session.tip = parent;
            }
            if let Some(parent) = parent {
                self.list_tip(parent, ended, id);
            } else if ended < HELD {
                // A session without any block left is removed, unless a lease holds it.
                self.end(id);
            }
        }
    }

    /// The name of the latest session that ends in a block.
    pub(crate) fn ending_in(&self, block: BlockId) -> Option<&str> {
        let range = (block, 0, 0)..=(block, HELD, SessionId::MAX);
        let ids = self.tips.range(range).map(|&(_, _, id)| id);
        ids.filter(|&id| self.name(id).is_some()).max().and_then(|id| self.name(id))
    }

    /// The name of a session.
    pub(crate) fn name(&self, id: SessionId) -> Option<&str> {
        self.all.get(&id)?.name.as_ref().map(|(_, name)| &**name)
    }

    /// Name, length in blocks and tip of every named session of a scope, by name.
    pub(crate) fn named(
        &self,
        scope: ScopeId,
    ) -> impl Iterator<Item = (&str, u32, Option<BlockId>)> {
        self.names.get(&scope).into_iter().flatten().filter_map(|(name, id)| {
            let session = self.all.get(id)?;
            Some((&**name, session.length, session.tip))
        })
    }

    /// Checks the table against living blocks and leases.
    fn audit(
        &self,
        block: impl Fn(BlockId) -> bool,
        lease: impl Fn(SessionId, LeaseId) -> bool,
    ) -> Vec<String> {
        let mut broken = Vec::new();
        for (&id, session) in &self.all {
            let held = self.leases(id).next().is_some();
            let ends = session.tip.is_some_and(&block);
            if held != (session.ended == HELD) || !(held || ends) {
                broken.push(format!("session {id} has neither a lease nor a block: {session:?}"));
            }
            if session.tip.is_some_and(|tip| !self.tips.contains(&(tip, session.ended, id))) {
                broken.push(format!("session {id} is not listed where it ends: {session:?}"));
            }
            let named = session.name.as_ref();
            if named.is_some_and(|(scope, name)| self.find(*scope, name) != Some(id)) {
                broken.push(format!("session {id} is not found by its name: {session:?}"));
            }
        }
        let ending = self.all.values().filter(|session| session.tip.is_some()).count();
        let named = self.all.values().filter(|session| session.name.is_some()).count();
        let listed: usize = self.names.values().map(BTreeMap::len).sum();
        if (self.tips.len(), listed) != (ending, named) {
            broken.push(format!(
                "{ending} sessions end in a block and {named} have a name, {} and {listed} listed",
                self.tips.len()
            ));
        }
        let vain = self.held.iter().filter(|&&(id, held)| !lease(id, held));
        broken.extend(vain.map(|(id, held)| format!("lease {held} does not hold session {id}")));
        for &(tip, _, _) in &self.tips {
            let idle = self.idle(tip).count();
            if idle > MOST_IDLE && !self.crowded.contains(&tip) {
                broken.push(format!("{idle} sessions without a lease end in block {tip}"));
            }
        }
        broken
    }
}

impl Manager {
    /// Extends the session of a lease to the end of its path.
    pub(crate) fn track_session(&mut self, id: LeaseId) {
        let lease = &self.leases[&id];
        let Some(session) = lease.session else { return };
        let path = lease.path.blocks();
        let old = self.ranked_path(session);
        let ranked = self.tiers.need(Needs::SESSION_BLOCKS);
        let Some((before, length)) = self.sessions.extend(session, path) else { return };
        if ranked {
            for block in self.sessions.move_path((&old, before), (path, length)) {
                self.refresh(block);
            }
        }
    }

    /// The living path of a session, if a policy ranks by it.
    fn ranked_path(&self, id: SessionId) -> Vec<BlockId> {
        if self.tiers.need(Needs::SESSION_BLOCKS) {
            self.path_to(self.sessions.tip(id))
        } else {
            Vec::new()
        }
    }

    /// Removes an ended lease from its session.
    pub(crate) fn leave_session(&mut self, session: Option<SessionId>, lease: LeaseId) {
        if let Some(id) = session
            && self.sessions.leave(id, lease)
        {
            self.end_session(id);
        }
    }

    /// Finishes a session for the user.
    pub(crate) fn finish_session(&mut self, id: SessionId) {
        if self.sessions.finish(id) {
            self.end_session(id);
        }
    }

    /// Removes surplus sessions at their tips.
    pub(crate) fn trim_sessions(&mut self) {
        while let Some(id) = self.sessions.surplus() {
            self.end_session(id);
        }
    }

    /// Removes a session, and ranks the blocks of its path again.
    fn end_session(&mut self, id: SessionId) {
        let path = self.ranked_path(id);
        let Some(length) = self.sessions.end(id) else { return };
        for block in self.sessions.move_path((&path, length), (&[], 0)) {
            self.refresh(block);
        }
    }

    /// Checks the sessions against leases and the trie.
    pub(crate) fn audit_sessions(&self, broken: &mut Vec<String>) {
        let holds = |id, lease| self.leases.get(&lease).is_some_and(|l| l.session == Some(id));
        broken.extend(self.sessions.audit(|block| self.trie().alive(block), holds));
        let alive = |id| self.sessions.all.contains_key(&id);
        broken.extend(self.sessions.coming.audit(alive, |id| self.leases.contains_key(&id)));
        for lease in self.leases.values() {
            if lease.session.is_some_and(|id| !self.sessions.leases(id).any(|l| l == lease.id)) {
                broken.push(format!("lease {} has session {:?}", lease.id, lease.session));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::Sessions;
    use crate::block::BlockId;

    proptest! {
        /// Compares with a list of the remaining path of every session. Blocks of a tree are
        /// numbered in the order they are added, and leaves are removed.
        #[test]
        fn the_shortest_session_through_a_block_is_known(
            steps in prop::collection::vec((0_usize..4, prop::collection::vec(0_u8..2, 0..5), any::<bool>()), 1..60),
        ) {
            let mut sessions = Sessions::default();
            let ids: Vec<_> = (0..4).filter_map(|at| sessions.open(0, None, true, at)).collect();
            // Two sessions have an expected length.
            let expected = [0, 3, 0, 9];
            for (&id, blocks) in ids.iter().zip(expected) {
                sessions.expect_blocks(id, blocks);
            }
            let mut held: [(Vec<BlockId>, u32); 4] = Default::default();
            let (mut tree, mut next) = (BTreeMap::<Vec<u8>, BlockId>::new(), 0);
            for (who, way, removes) in steps {
                if removes {
                    let leaf = |at: &Vec<u8>| !tree.keys().any(|other| other.len() > at.len() && other.starts_with(at));
                    let Some(removed) = tree.keys().find(|at| at.starts_with(&way) && leaf(at)).cloned() else { continue };
                    let parent = tree.get(&removed[..removed.len() - 1]).copied();
                    let block = tree.remove(&removed).unwrap();
                    sessions.forget(block..block + 1, parent);
                    for (path, _) in &mut held {
                        if path.last() == Some(&block) {
                            path.pop();
                        }
                    }
                } else {
                    let new: Vec<BlockId> = (1..=way.len()).map(|to| {
                        *tree.entry(way[..to].to_vec()).or_insert_with(|| { next += 1; next })
                    }).collect();
                    let (path, length) = &mut held[who];
                    if let Some((before, after)) = sessions.extend(ids[who], &new) {
                        prop_assert_eq!(before, *length);
                        let shortest = |sessions: &Sessions| -> Vec<_> {
                            (0..=next).map(|block| sessions.shortest(block)).collect()
                        };
                        let then = shortest(&sessions);
                        let mut changed = sessions.move_path((path, before), (&new, after));
                        changed.sort_unstable();
                        let now = shortest(&sessions);
                        let differ: Vec<BlockId> = (0..=next).filter(|&at| then[at as usize] != now[at as usize]).collect();
                        prop_assert_eq!(changed, differ);
                        prop_assert_eq!(after, u32::try_from(new.len()).unwrap().max(expected[who]));
                        *length = after;
                    }
                    *path = new;
                }
                for &block in tree.values() {
                    let through = held.iter().filter(|(path, _)| path.contains(&block));
                    prop_assert_eq!(sessions.shortest(block), through.map(|held| held.1).min());
                }
            }
        }
    }
}
