//! Conversations that are over, agents that are gone: what nobody else wants leaves first.
//!
//! A block is wanted while a lease holds it, a session that is not over ends in it or behind it, or
//! somebody retains it. Invariant: a block that is used again is not released any more. Cost: O(path)
//! and the blocks behind it that are looked at, at most [`LOOKS`]; what is not looked at counts as
//! wanted.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::block::{BlockId, Token};
use crate::hint::{Answer, HintReply, Release};
use crate::scope::{Scope, ScopeId};

use super::rejected;
use crate::manager::Manager;
use crate::manager::request::session::SessionId;

/// So many blocks are looked at in one call.
const LOOKS: usize = 10_000;

/// What was found in one call.
struct Look {
    /// How many leases of the session that is over hold a block.
    held: FxHashMap<BlockId, u32>,
    /// Blocks that nobody wants, nor what stands behind them.
    idle: FxHashSet<BlockId>,
    left: usize,
}

impl Manager {
    pub(super) fn release_hint(&mut self, release: &Release) -> HintReply {
        match release {
            Release::Session { name, scope } => self.release_session(name, scope),
            Release::Owner { name, scope } => self.release_owner(name, scope),
            Release::Tokens { tokens, scope, owner } => {
                self.release_tokens(tokens, scope, owner.as_deref())
            }
        }
    }

    fn release_session(&mut self, name: &str, scope: &Scope) -> HintReply {
        let Ok(Some(scope)) = self.scopes.find(scope) else {
            return rejected(format!("session '{name}' has no block and no hint"));
        };
        let waited = self.hints.pending.end_session(scope, name);
        let mine = self.withdraw_all(scope, name);
        let Some(id) = self.sessions.find(scope, name) else {
            if waited + mine.len() == 0 {
                return rejected(format!("session '{name}' has no block and no hint"));
            }
            return told(0, mine.len() as u64);
        };
        let path = self.path_to(self.sessions.tip(id));
        let held = self.held_by(id);
        self.finish_session(id);
        let others: Vec<BlockId> = mine.into_iter().filter(|block| !path.contains(block)).collect();
        self.release_blocks(held, path.into_iter().chain(others).collect())
    }

    /// How many leases of a session hold each block.
    fn held_by(&self, session: SessionId) -> FxHashMap<BlockId, u32> {
        let mut held = FxHashMap::default();
        for id in self.sessions.leases(session) {
            for &block in self.leases[&id].path.blocks() {
                *held.entry(block).or_default() += 1;
            }
        }
        held
    }

    fn release_owner(&mut self, owner: &str, scope: &Scope) -> HintReply {
        let Ok(Some(scope)) = self.scopes.find(scope) else {
            return rejected(format!("owner '{owner}' has no hint"));
        };
        let waited = self.hints.pending.end_owner(scope, owner);
        let mine = self.withdraw_all(scope, owner);
        if mine.is_empty() && waited == 0 {
            return rejected(format!("owner '{owner}' has no hint"));
        }
        self.release_blocks(FxHashMap::default(), mine)
    }

    fn release_tokens(
        &mut self,
        tokens: &[Token],
        scope: &Scope,
        owner: Option<&str>,
    ) -> HintReply {
        let path = self.there(scope, tokens);
        if path.is_empty() {
            return rejected("no block of the sequence is cached");
        }
        let owner: Arc<str> = self.hints.owner(owner);
        for &block in &path {
            if self.hints.claims.withdraw(block, &owner) {
                self.reband(block);
            }
        }
        self.release_blocks(FxHashMap::default(), path)
    }

    /// Everything that an owner of a scope said is over. Returns the blocks that it was about.
    fn withdraw_all(&mut self, scope: ScopeId, owner: &str) -> Vec<BlockId> {
        let mine = self.hints.claims.of(scope, owner);
        let owner: Arc<str> = Arc::from(owner);
        for &block in &mine {
            self.hints.claims.withdraw(block, &owner);
            self.reband(block);
        }
        mine
    }

    /// Marks those of the blocks that nobody wants.
    fn release_blocks(
        &mut self,
        held: FxHashMap<BlockId, u32>,
        mut blocks: Vec<BlockId>,
    ) -> HintReply {
        // What stands behind a block is known before the block is looked at.
        blocks.sort_by_key(|&block| std::cmp::Reverse(self.blocks.trie().depth(block)));
        let mut look = Look { held, idle: FxHashSet::default(), left: LOOKS };
        let (mut released, mut wanted) = (0, 0);
        for block in blocks {
            if self.hints.claims.claimed(block) || self.wanted(block, &mut look) {
                wanted += 1;
            } else {
                self.hints.claims.release(block);
                self.reband(block);
                released += 1;
            }
        }
        told(released, wanted)
    }

    /// Whether a lease or a session needs a block or something behind it.
    fn wanted(&self, block: BlockId, look: &mut Look) -> bool {
        let mut seen = Vec::new();
        let mut next = vec![block];
        while let Some(block) = next.pop() {
            if look.idle.contains(&block) {
                continue;
            }
            let held = look.held.get(&block).copied().unwrap_or(0);
            if look.left == 0 || self.node(block).refs > held || self.sessions.end_in(block) {
                return true;
            }
            look.left -= 1;
            seen.push(block);
            next.extend(self.blocks.trie().children(block));
        }
        look.idle.extend(seen);
        false
    }
}

fn told(released: u64, wanted: u64) -> HintReply {
    let answer = match (released, wanted) {
        (0, 1..) => Answer::Rejected,
        (_, 1..) => Answer::Clipped,
        _ => Answer::Accepted,
    };
    let reason = match wanted {
        0 => String::new(),
        _ => format!("{wanted} blocks are wanted by others"),
    };
    HintReply { answer, blocks: released, left: wanted, reason }
}
