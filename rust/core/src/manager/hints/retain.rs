//! Retain hints: priorities for the blocks of a path, present and future.
//!
//! Invariant: blocks not cached yet count as left and are pending. Blocks beyond a tier's share
//! count as left and rank as without a hint until their next use. Cost: O(log n) per block of the
//! range.

use std::sync::Arc;

use crate::block::{BlockId, LeaseId, Token};
use crate::error::{Error, Result};
use crate::hint::{Answer, HintCode, HintReply, NORMAL, Priority, Retain, Target};
use crate::scope::{Scope, ScopeId};
use crate::time::Nanos;

use super::pending::PendingHint;
use super::{check_priority, rejected};
use crate::manager::Manager;

/// Number of a hint's blocks, by result.
#[derive(Default)]
struct Reach {
    /// Blocks with a claim in force.
    blocks: u64,
    /// Blocks with a claim beyond a tier's share.
    clipped: u64,
    /// Blocks not cached yet.
    waiting: u64,
}

impl Manager {
    /// Fails for invalid ranges, priorities or times.
    pub(super) fn check_retain(&self, retain: &Retain) -> Result<()> {
        self.check_target(&retain.target)?;
        check_priority("priority", retain.priority)?;
        if let Some(priority) = retain.decode_priority {
            check_priority("decode_priority", priority)?;
        }
        if retain.end.is_some_and(|end| end < retain.start) {
            return Err(Error::config(format!(
                "the range of tokens ends at {}, before its start at {}",
                retain.end.unwrap_or(0),
                retain.start
            )));
        }
        if let Some(name) = match (retain.ttl, retain.decode_ttl) {
            (Some(0), _) => Some("ttl"),
            (_, Some(0)) => Some("decode_ttl"),
            _ => None,
        } {
            return Err(Error::config(format!("{name} is 0 ns, at least 1 wanted")));
        }
        let decode = retain.decode_priority.is_some();
        if retain.decode_ttl.is_some() && !decode {
            return Err(Error::config("decode_ttl is given without decode_priority"));
        }
        if decode && matches!(retain.target, Target::Tokens { .. }) {
            return Err(Error::config(
                "decode_priority is about a lease or a session; tokens that are given are no \
                 tokens to come",
            ));
        }
        Ok(())
    }

    /// Applies a retain hint.
    pub(super) fn retain(&mut self, retain: &Retain, now: Nanos) -> HintReply {
        let hint = self.to_pending(retain, now);
        match &retain.target {
            Target::Tokens { tokens, scope } => self.retain_tokens(tokens, scope, hint, now),
            Target::Lease(id) => match self.target_path(&retain.target) {
                Ok(path) => self.retain_lease(*id, &path, hint, now),
                Err(reason) => rejected(reason),
            },
            Target::Session { name, scope } => self.retain_session(name, scope, hint, now),
        }
    }

    /// The hint without its target, with absolute times.
    fn to_pending(&self, retain: &Retain, now: Nanos) -> PendingHint {
        let scope = self.target_scope(&retain.target);
        let (session, lease_session) = match &retain.target {
            Target::Tokens { .. } => (None, None),
            Target::Session { name, .. } => (Some(name.as_str()), None),
            Target::Lease(id) => {
                let lease = self.leases.get(id);
                (None, lease.and_then(|lease| self.sessions.name(lease.session?)))
            }
        };
        PendingHint {
            owner: match (&retain.owner, lease_session) {
                (None, Some(local)) => Arc::from(local),
                (owner, _) => self.hints.owner(&scope, owner.as_deref().or(session)),
            },
            start: retain.start,
            end: retain.end,
            priority: retain.priority,
            until: retain.ttl.map(|ttl| now.saturating_add(ttl)),
            decode: retain.decode_priority.map(|priority| (priority, retain.decode_ttl)),
        }
    }

    /// Claims the cached blocks of a sequence. The remaining blocks are pending.
    fn retain_tokens(
        &mut self,
        tokens: &[Token],
        scope: &Scope,
        hint: PendingHint,
        now: Nanos,
    ) -> HintReply {
        let size = self.block_tokens();
        let full = tokens.len() / size;
        let path = self.cached_path(scope, &tokens[..full * size]);
        let (len, at) = (tokens.len() as u64, path.last().copied());
        let mut reach = self.claim_path(&path, &hint, len, now);
        reach.waiting = self.blocks_in(&hint, path.len()..full, len, now);
        // All blocks of the range are cached: nothing is pending.
        if reach.waiting == 0 {
            return reach.reply("");
        }
        // Blocks after the range have no claim to wait for.
        let last = hint.end.map_or(full, |end| {
            full.min(usize::try_from(end).unwrap_or(usize::MAX).div_ceil(size))
        });
        let placed = self.place_hint(&tokens[..last * size], scope, now);
        match placed {
            Ok((scope, content)) => {
                self.scopes.hold(scope);
                self.hints.pending.await_sequence(scope, at, content, hint);
                reach.reply("")
            }
            Err(why) => reach.refuse(&why),
        }
    }

    /// The scope and content of a new pending sequence, if there is room for it.
    fn place_hint(
        &mut self,
        tokens: &[Token],
        scope: &Scope,
        now: Nanos,
    ) -> std::result::Result<(ScopeId, Vec<Token>), String> {
        let known = self.scopes.find(scope).map_err(|error| error.to_string())?;
        // Checked before a scope or digest is added.
        if let Some(id) = known
            && let Some(why) = self.hints.pending.full(id, tokens.len(), now)
        {
            return Err(why);
        }
        let content = self.intern(scope, 0, tokens).map_err(|error| error.to_string())?;
        let id = known
            .unwrap_or_else(|| self.scopes.add(scope, self.settings.structure, &mut self.blocks));
        Ok((id, content))
    }

    /// Claims a lease's blocks. Its future blocks are pending.
    fn retain_lease(
        &mut self,
        id: LeaseId,
        path: &[BlockId],
        hint: PendingHint,
        now: Nanos,
    ) -> HintReply {
        let size = self.block_tokens() as u64;
        let prompt = self.prompt(id);
        let mut reach = self.claim_path(path, &hint, prompt, now);
        let blocks = usize::try_from(prompt / size).unwrap_or(usize::MAX);
        reach.waiting = self.blocks_in(&hint, path.len()..blocks, prompt, now);
        let reaches = hint.end.unwrap_or(prompt) > path.len() as u64 * size;
        // The range ends within the cached path, and the hint excludes decoded blocks.
        if !reaches && hint.decode.is_none() {
            return reach.reply("");
        }
        let scope = self.leases[&id].scope_id;
        if let Some(why) = self.hints.pending.full(scope, 0, now) {
            return reach.refuse(&why);
        }
        self.hints.pending.follow_lease(scope, id, hint);
        reach.reply("its tokens are still to be committed")
    }

    /// Claims a session's blocks. Its future blocks are pending.
    fn retain_session(
        &mut self,
        name: &str,
        scope: &Scope,
        hint: PendingHint,
        now: Nanos,
    ) -> HintReply {
        let path = match self.session(name, scope) {
            Some(id) => self.path_to(self.sessions.tip(id)),
            None => Vec::new(),
        };
        let reach = self.claim_path(&path, &hint, u64::MAX, now);
        let local = scope.local(name);
        let scope = match self.place_hint(&[], scope, now) {
            Ok((scope, _)) => scope,
            Err(why) => return reach.refuse(&why),
        };
        // A pending hint keeps the scope alive without a block or a lease.
        if self.hints.pending.follow_session(scope, &local, hint) {
            self.scopes.hold(scope);
        }
        reach.reply("the session has no such block yet")
    }

    /// Claims the blocks of a path covered by a hint.
    fn claim_path(
        &mut self,
        path: &[BlockId],
        hint: &PendingHint,
        prompt: u64,
        now: Nanos,
    ) -> Reach {
        let size = self.block_tokens() as u64;
        let mut reach = Reach::default();
        for (first, &block) in (0..).step_by(self.block_tokens()).zip(path) {
            debug_assert_eq!(first % size, 0);
            let Some((priority, until)) = hint.claim_on(first, prompt, now) else { continue };
            if self.claim(block, &hint.owner, priority, until) {
                reach.clipped += 1;
            } else {
                reach.blocks += 1;
            }
        }
        reach
    }

    /// Sets a claim. Returns whether a tier's retained share is full.
    fn claim(
        &mut self,
        block: BlockId,
        owner: &Arc<str>,
        priority: Priority,
        until: Option<Nanos>,
    ) -> bool {
        let scope = self.node(block).scope;
        let priority = self.for_all(block, priority);
        self.hints.claims.claim(scope, block, owner, priority, until);
        self.reband(block) && priority > NORMAL
    }

    /// The priority of a tenant's claim on a block: a claim must not lower a block visible to
    /// several tenants.
    fn for_all(&self, block: BlockId, priority: Priority) -> Priority {
        let shared = self.scopes.get(self.node(block).scope).shared;
        let sole = || self.producers.of(block).is_some_and(|known| known.len() == 1);
        if shared && !sole() { priority.max(NORMAL) } else { priority }
    }

    /// Number of blocks of a range of the path covered by a hint.
    fn blocks_in(
        &self,
        hint: &PendingHint,
        blocks: std::ops::Range<usize>,
        prompt: u64,
        now: Nanos,
    ) -> u64 {
        let size = self.block_tokens() as u64;
        let claimed = |at: &usize| hint.claim_on(*at as u64 * size, prompt, now).is_some();
        blocks.filter(claimed).count() as u64
    }

    /// Number of tokens of a lease's prompt, in full blocks.
    fn prompt(&self, id: LeaseId) -> u64 {
        u64::from(self.leases[&id].request.prompt_blocks()) * self.block_tokens() as u64
    }

    /// Claims the new blocks of a lease's path from `from` on, by its pending hints.
    pub(crate) fn grant(&mut self, id: LeaseId, from: usize, now: Nanos) {
        self.grant_shared(id);
        if !self.hints.pending.followed() {
            return;
        }
        let lease = &self.leases[&id];
        let session = lease.session.and_then(|session| self.sessions.name(session));
        let pending = self.hints.pending.about(id, lease.scope_id, session);
        if pending.is_empty() {
            return;
        }
        let path: Vec<BlockId> = lease.path.blocks()[from..].to_vec();
        let prompt = self.prompt(id);
        for (at, &block) in (from..).zip(&path) {
            let first = (at * self.block_tokens()) as u64;
            for hint in &pending {
                if let Some((priority, until)) = hint.claim_on(first, prompt, now) {
                    self.claim(block, &hint.owner, priority, until);
                }
            }
        }
    }

    /// Claims new blocks of the trie, and advances the sequences waiting for them. In scopes with
    /// sharing, a hint waits until its own tenant has a block.
    pub(crate) fn grant_new(
        &mut self,
        scope: ScopeId,
        parent: Option<BlockId>,
        blocks: &[BlockId],
    ) {
        if self.hints.pending.awaited() && !self.scopes.get(scope).shared {
            self.grant_to(scope, "", parent, blocks);
        }
        self.free_ended();
    }

    /// Claims the blocks of a lease's path for waiting hints of its tenant, in scopes with sharing.
    fn grant_shared(&mut self, id: LeaseId) {
        if !self.hints.pending.awaited() {
            return;
        }
        let lease = &self.leases[&id];
        if lease.scope.shares() {
            let (scope, mine) = (lease.scope_id, lease.scope.local("").into_owned());
            let path = lease.path.blocks().to_vec();
            self.grant_to(scope, &mine, None, &path);
            self.free_ended();
        }
    }

    /// Claims blocks below `parent` for pending hints of owners with the name prefix `mine`.
    fn grant_to(
        &mut self,
        scope: ScopeId,
        mine: &str,
        parent: Option<BlockId>,
        blocks: &[BlockId],
    ) {
        let mut parent = parent;
        for &block in blocks {
            // Each block may have been the last block of the last pending hint.
            if !self.hints.pending.awaited() {
                break;
            }
            let before = self.blocks.trie().depth(block) as usize * self.block_tokens();
            let tokens = self.blocks.trie().tokens(block);
            let pending = self.hints.pending.arrived((scope, mine), parent, block, tokens, before);
            for hint in pending {
                let claim = hint.claim_on(before as u64, u64::MAX, self.clock.last());
                if let Some((priority, until)) = claim {
                    let priority = self.for_all(block, priority);
                    self.hints.claims.claim(scope, block, &hint.owner, priority, until);
                }
            }
            parent = Some(block);
        }
    }
}

impl Reach {
    /// The reply if all absent blocks are pending. `empty` is the reason if the hint covered no
    /// block.
    fn reply(self, empty: &str) -> HintReply {
        let Self { blocks, clipped, waiting } = self;
        let mut reason = Vec::new();
        if clipped > 0 {
            reason.push(format!("{clipped} blocks are beyond a tier's retained_share"));
        }
        if waiting > 0 {
            reason.push(format!("{waiting} blocks are not cached yet"));
        }
        if blocks + clipped + waiting == 0 && !empty.is_empty() {
            reason.push(empty.to_owned());
        }
        let (answer, code) = match (clipped, reason.is_empty()) {
            (1.., _) => (Answer::Clipped, HintCode::Share),
            (0, false) => (Answer::Deferred, HintCode::Waiting),
            (0, true) if blocks == 0 => {
                return rejected("no full block begins in that range");
            }
            (0, true) => (Answer::Accepted, HintCode::Accepted),
        };
        let (not_applied, reason) = (clipped + waiting, reason.join("; "));
        HintReply { answer, blocks, not_applied, code, reason }
    }

    /// The reply if absent blocks cannot be pending.
    fn refuse(self, why: &str) -> HintReply {
        let answer = if self.blocks > 0 { Answer::Clipped } else { Answer::Rejected };
        let not_applied = self.clipped + self.waiting;
        HintReply {
            answer,
            blocks: self.blocks,
            not_applied,
            code: HintCode::Full,
            reason: why.to_owned(),
        }
    }
}
