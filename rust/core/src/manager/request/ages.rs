//! When the session of each block was last used, where a policy ages by session.
//!
//! A block belongs to the session whose request used it last; requests without a session are each one
//! of their own. Invariant: a session is known here as long as it has a block. Cost: nothing where no
//! policy asks; else O(blocks of the session · log n) per request, since all of them rank anew.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{BlockId, LeaseId};
use crate::policy::Needs;
use crate::time::{Nanos, Stamp, stamp};

use crate::manager::Manager;
use crate::manager::request::lease::Lease;
use crate::manager::request::session::SessionId;

/// Whose request used a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum User {
    Session(SessionId),
    Lease(LeaseId),
}

/// What one session used last, and when it used anything.
#[derive(Clone, Debug, Default)]
struct Used {
    last: Stamp,
    blocks: BTreeSet<BlockId>,
}

/// The sessions of blocks.
#[derive(Clone, Debug, Default)]
pub(in crate::manager) struct Ages {
    users: BTreeMap<BlockId, User>,
    sessions: BTreeMap<User, Used>,
}

impl Ages {
    pub(in crate::manager) fn is_empty(&self) -> bool {
        self.users.is_empty()
    }

    /// When the session of a block was last used; `None` if no request used the block.
    pub(in crate::manager) fn last_use(&self, block: BlockId) -> Option<Stamp> {
        Some(self.sessions.get(self.users.get(&block)?)?.last)
    }

    /// A session uses these blocks.
    fn take(&mut self, user: User, blocks: &[BlockId], at: Stamp) {
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

    /// A block is gone, or another session's.
    pub(in crate::manager) fn forget(&mut self, block: BlockId) {
        let Some(user) = self.users.remove(&block) else { return };
        let Some(session) = self.sessions.get_mut(&user) else { return };
        session.blocks.remove(&block);
        if session.blocks.is_empty() {
            self.sessions.remove(&user);
        }
    }
}

impl Manager {
    /// A lease uses the blocks of its path from `from` on: its session is as old as this use.
    pub(in crate::manager) fn use_path(&mut self, id: LeaseId, from: usize, at: Nanos) {
        if self.ages_by_session() {
            let lease = &self.leases[&id];
            let (session, blocks) = (lease.session, lease.path.blocks()[from..].to_vec());
            self.use_session(id, session, &blocks, at);
        }
    }

    /// The same for a lease that ends.
    pub(in crate::manager) fn use_last(&mut self, lease: &Lease, at: Nanos) {
        if self.ages_by_session() {
            self.use_session(lease.id, lease.session, lease.path.blocks(), at);
        }
    }

    fn ages_by_session(&self) -> bool {
        self.tiers.iter().any(|tier| tier.eviction.needs(Needs::SESSION_ACCESS))
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
        let all = self.ages.sessions.get(&user).map(|known| known.blocks.clone());
        for block in all.into_iter().flatten() {
            self.refresh(block);
        }
    }
}
