//! Session ages: an index from blocks to the last use of their session, for policies that rank by
//! session age.
//!
//! A block belongs to the session of its last request. A request without a session counts as a
//! separate session. Invariant: a session has a row as long as it has a block. Cost: none if no
//! policy needs it. Otherwise O(blocks of the session · log n) per request, since all of them are
//! ranked again.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{BlockId, LeaseId};
use crate::policy::Needs;
use crate::time::{Nanos, Stamp, stamp};

use crate::manager::Manager;
use crate::manager::request::life::lease::Lease;
use crate::manager::request::life::session::SessionId;

/// Session, or nameless lease, that used a block last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum User {
    Session(SessionId),
    Lease(LeaseId),
}

/// Blocks last used by a session, and the time of its last use.
#[derive(Clone, Debug, Default)]
struct Used {
    last: Stamp,
    blocks: BTreeSet<BlockId>,
}

/// Index of sessions by block, and of blocks by session.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ages {
    users: BTreeMap<BlockId, User>,
    sessions: BTreeMap<User, Used>,
}

impl Ages {
    pub(crate) fn is_empty(&self) -> bool {
        self.users.is_empty()
    }

    /// The last use of a block's session, or `None` if no request used the block.
    pub(crate) fn last_use(&self, block: BlockId) -> Option<Stamp> {
        Some(self.sessions.get(self.users.get(&block)?)?.last)
    }

    /// Assigns blocks to the session using them now.
    fn take(&mut self, user: User, blocks: &[BlockId], at: Stamp) {
        // A block already assigned to the session costs a single lookup.
        for &block in blocks {
            if self.users.get(&block) != Some(&user) {
                self.forget(block);
                self.users.insert(block, user);
                self.sessions.entry(user).or_default().blocks.insert(block);
            }
        }
        if let Some(session) = self.sessions.get_mut(&user) {
            session.last = session.last.max(at);
        }
    }

    /// Removes a block that left the trie or moves to a different session.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let Some(user) = self.users.remove(&block) else { return };
        let Some(session) = self.sessions.get_mut(&user) else { return };
        session.blocks.remove(&block);
        if session.blocks.is_empty() {
            self.sessions.remove(&user);
        }
    }
}

impl Manager {
    /// Assigns the blocks of a lease's path from `from` on to its session.
    pub(crate) fn use_path(&mut self, id: LeaseId, from: usize, at: Nanos) {
        if self.tiers.need(Needs::SESSION_ACCESS) {
            let lease = &self.leases[&id];
            let (session, blocks) = (lease.session, lease.path.blocks()[from..].to_vec());
            self.use_session(id, session, &blocks, at);
        }
    }

    /// Assigns the blocks of an ending lease to its session.
    pub(crate) fn use_last(&mut self, lease: &Lease, at: Nanos) {
        // A suspended lease reads no block, so its end does not refresh its session's blocks.
        if self.tiers.need(Needs::SESSION_ACCESS) && !lease.suspended() {
            self.use_session(lease.id, lease.session, lease.path.blocks(), at);
        }
    }

    fn use_session(
        &mut self,
        id: LeaseId,
        session: Option<SessionId>,
        blocks: &[BlockId],
        at: Nanos,
    ) {
        let user = session.map_or(User::Lease(id), User::Session);
        self.ages.take(user, blocks, stamp(at));
        // The session's age changed for all of its blocks, including blocks unused now.
        let all = self.ages.sessions.get(&user).map(|known| known.blocks.clone());
        for block in all.into_iter().flatten() {
            self.refresh(block);
        }
    }
}
