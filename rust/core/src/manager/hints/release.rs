//! Release hints: evict the blocks of a finished session, a sequence or an owner first, unless they
//! are still needed.
//!
//! A block is needed while a lease pins it, an unfinished session ends in it or below it, or an
//! owner retains it. Invariant: a used block is no longer released. Cost: O(path) and the visited
//! descendants, at most [`MOST_VISITS`]. An unvisited block counts as needed.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::block::{BlockId, Token};
use crate::hint::{Answer, HintCode, HintReply, Release};
use crate::scope::{Scope, ScopeId};

use super::{accepted, rejected};
use crate::manager::Manager;
use crate::manager::request::life::session::SessionId;

/// Maximum number of visited blocks per call.
const MOST_VISITS: usize = 10_000;

/// Search state of a call.
struct Search {
    /// Number of references from leases of the finished session, by block.
    held: FxHashMap<BlockId, u32>,
    /// Blocks without users in their subtree.
    unneeded: FxHashSet<BlockId>,
    left: usize,
}

impl Manager {
    /// Applies a release hint.
    pub(super) fn release_hint(&mut self, release: &Release) -> HintReply {
        match release {
            Release::Session { name, scope } => self.release_session(name, scope),
            Release::Owner { name, scope } => self.release_owner(name, scope),
            Release::Tokens { tokens, scope, owner } => {
                self.release_tokens(tokens, scope, owner.as_deref())
            }
        }
    }

    /// Finishes a session and releases its blocks.
    fn release_session(&mut self, name: &str, scope: &Scope) -> HintReply {
        let Ok(Some(id)) = self.scopes.find(scope) else {
            return rejected(format!("session '{name}' has no block and no hint"));
        };
        let local = scope.local(name);
        let pending = self.hints.pending.end_session(id, &local);
        let mine = self.withdraw_all(id, &local);
        // Without a path only the owner's claims are left to count.
        let Some(id) = self.sessions.find(id, &local) else {
            if pending + mine.len() == 0 {
                return rejected(format!("session '{name}' has no block and no hint"));
            }
            return if scope.shares() {
                accepted(mine.len() as u64)
            } else {
                reply(0, mine.len() as u64)
            };
        };
        let path = self.path_to(self.sessions.tip(id));
        let refs = self.lease_refs(id);
        self.finish_session(id);
        // The session may have claims on blocks off its present path.
        let others: Vec<BlockId> = mine.into_iter().filter(|block| !path.contains(block)).collect();
        self.release_blocks(scope, refs, path.into_iter().chain(others).collect())
    }

    /// Number of references from a session's leases, by block.
    fn lease_refs(&self, session: SessionId) -> FxHashMap<BlockId, u32> {
        let mut refs = FxHashMap::default();
        for id in self.sessions.leases(session) {
            for &block in self.leases[&id].path.blocks() {
                *refs.entry(block).or_default() += 1;
            }
        }
        refs
    }

    /// Ends an owner's claims and pending hints, and releases their blocks.
    fn release_owner(&mut self, owner: &str, scope: &Scope) -> HintReply {
        let Ok(Some(id)) = self.scopes.find(scope) else {
            return rejected(format!("owner '{owner}' has no hint"));
        };
        let local = scope.local(owner);
        let pending = self.hints.pending.end_owner(id, &local);
        let mine = self.withdraw_all(id, &local);
        if mine.is_empty() && pending == 0 {
            return rejected(format!("owner '{owner}' has no hint"));
        }
        self.release_blocks(scope, FxHashMap::default(), mine)
    }

    /// Releases the cached blocks of a sequence, and ends an owner's claims on them.
    fn release_tokens(
        &mut self,
        tokens: &[Token],
        scope: &Scope,
        owner: Option<&str>,
    ) -> HintReply {
        let path = self.cached_path(scope, tokens);
        if path.is_empty() {
            return rejected("no block of the sequence is cached");
        }
        let owner: Arc<str> = self.hints.owner(scope, owner);
        for &block in &path {
            if self.hints.claims.withdraw(block, &owner) {
                self.reband(block);
            }
        }
        self.release_blocks(scope, FxHashMap::default(), path)
    }

    /// Removes all claims of an owner. Returns their blocks.
    fn withdraw_all(&mut self, scope: ScopeId, owner: &str) -> Vec<BlockId> {
        let mine = self.hints.claims.of(scope, owner);
        let owner: Arc<str> = Arc::from(owner);
        for &block in &mine {
            self.hints.claims.withdraw(block, &owner);
            self.reband(block);
        }
        mine
    }

    /// Marks unneeded blocks as released. The reply does not reveal to a tenant whether its blocks
    /// are shared.
    fn release_blocks(
        &mut self,
        scope: &Scope,
        held: FxHashMap<BlockId, u32>,
        mut blocks: Vec<BlockId>,
    ) -> HintReply {
        // Descendants first: their result is reused for the blocks above.
        blocks.sort_by_key(|&block| std::cmp::Reverse(self.trie().depth(block)));
        let mut search = Search { held, unneeded: FxHashSet::default(), left: MOST_VISITS };
        let (mut released, mut wanted) = (0, 0);
        for block in blocks {
            // A remaining claim outweighs the release.
            if self.hints.claims.claimed(block)
                || !self.own(scope, block)
                || self.wanted(block, &mut search)
            {
                wanted += 1;
            } else {
                self.hints.claims.release(block);
                self.reband(block);
                released += 1;
            }
        }
        if scope.shares() { accepted(released + wanted) } else { reply(released, wanted) }
    }

    /// Whether a lease or a session needs a block or a descendant.
    fn wanted(&self, block: BlockId, search: &mut Search) -> bool {
        let mut seen = Vec::new();
        let mut next = vec![block];
        while let Some(block) = next.pop() {
            // Visited before, as a descendant of a previous block.
            if search.unneeded.contains(&block) {
                continue;
            }
            let leased = search.held.get(&block).copied().unwrap_or(0);
            // Out of budget: keeping a block is the safe answer.
            if search.left == 0 || self.node(block).refs > leased || self.sessions.end_in(block) {
                return true;
            }
            search.left -= 1;
            seen.push(block);
            next.extend(self.trie().children(block));
        }
        search.unneeded.extend(seen);
        false
    }
}

/// The reply about released and needed blocks.
fn reply(released: u64, wanted: u64) -> HintReply {
    let answer = match (released, wanted) {
        (0, 1..) => Answer::Rejected,
        (_, 1..) => Answer::Clipped,
        _ => Answer::Accepted,
    };
    let (code, reason) = match wanted {
        0 => (HintCode::Accepted, String::new()),
        _ => (HintCode::InUse, format!("{wanted} blocks are wanted by others")),
    };
    HintReply { answer, blocks: released, not_applied: wanted, code, reason }
}
