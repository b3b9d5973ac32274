//! Priorities for the blocks of a path, now and when they come.
//!
//! Invariant: what is not there yet is counted as left, and waits; what a tier has no share for is
//! counted as left, and is ranked as if nothing had been said until it is used again. Cost: O(log n)
//! per block of the range.

use std::sync::Arc;

use crate::block::{BlockId, LeaseId, Token};
use crate::error::{Error, Result};
use crate::hint::{Answer, HintReply, NORMAL, Priority, Retain, Target};
use crate::scope::{Scope, ScopeId};
use crate::time::Nanos;

use super::pending::PendingHint;
use super::{check_priority, rejected};
use crate::manager::Manager;

/// How far a hint got.
#[derive(Default)]
struct Reach {
    /// Blocks for which it is in force.
    blocks: u64,
    /// Blocks for which a tier has no share.
    clipped: u64,
    /// Blocks that are not there yet.
    waiting: u64,
}

impl Manager {
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

    pub(super) fn retain(&mut self, retain: &Retain, now: Nanos) -> HintReply {
        let hint = self.to_pending(retain, now);
        match &retain.target {
            Target::Tokens { tokens, scope } => self.retain_tokens(tokens, scope, hint, now),
            Target::Lease(id) => match self.named(&retain.target) {
                Ok(path) => self.retain_lease(*id, &path, hint, now),
                Err(reason) => rejected(reason),
            },
            Target::Session { name, scope } => self.retain_session(name, scope, hint, now),
        }
    }

    fn to_pending(&self, retain: &Retain, now: Nanos) -> PendingHint {
        let session = match &retain.target {
            Target::Tokens { .. } => None,
            Target::Session { name, .. } => Some(name.as_str()),
            Target::Lease(id) => {
                let lease = self.leases.get(id);
                lease.and_then(|lease| self.sessions.name(lease.session?))
            }
        };
        PendingHint {
            owner: self.hints.owner(retain.owner.as_deref().or(session)),
            start: retain.start,
            end: retain.end,
            priority: retain.priority,
            until: retain.ttl.map(|ttl| now.saturating_add(ttl)),
            decode: retain.decode_priority.map(|priority| (priority, retain.decode_ttl)),
        }
    }

    fn retain_tokens(
        &mut self,
        tokens: &[Token],
        scope: &Scope,
        hint: PendingHint,
        now: Nanos,
    ) -> HintReply {
        let size = self.block_tokens();
        let full = tokens.len() / size;
        let path = self.there(scope, &tokens[..full * size]);
        let (len, at) = (tokens.len() as u64, path.last().copied());
        let mut reach = self.claim_path(&path, &hint, len, now);
        reach.waiting = self.blocks_in(&hint, path.len()..full, len, now);
        if reach.waiting == 0 {
            return reach.reply("");
        }
        // What stands behind the range need not come.
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

    /// The scope of a sequence that is to wait and its content, if it can.
    fn place_hint(
        &mut self,
        tokens: &[Token],
        scope: &Scope,
        now: Nanos,
    ) -> std::result::Result<(ScopeId, Vec<Token>), String> {
        let known = self.scopes.find(scope).map_err(|error| error.to_string())?;
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
        let scope = match self.place_hint(&[], scope, now) {
            Ok((scope, _)) => scope,
            Err(why) => return reach.refuse(&why),
        };
        if self.hints.pending.follow_session(scope, name, hint) {
            self.scopes.hold(scope);
        }
        reach.reply("the session has no such block yet")
    }

    /// Claims what a wish says of the blocks of a path.
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
            let Some((priority, until)) = hint.says(first, prompt, now) else { continue };
            if self.claim(block, &hint.owner, priority, until) {
                reach.clipped += 1;
            } else {
                reach.blocks += 1;
            }
        }
        reach
    }

    /// Returns whether some tier may retain no more blocks.
    fn claim(
        &mut self,
        block: BlockId,
        owner: &Arc<str>,
        priority: Priority,
        until: Option<Nanos>,
    ) -> bool {
        let scope = self.node(block).scope;
        self.hints.claims.claim((scope, block), owner, priority, until);
        self.reband(block) && priority > NORMAL
    }

    fn blocks_in(
        &self,
        hint: &PendingHint,
        blocks: std::ops::Range<usize>,
        prompt: u64,
        now: Nanos,
    ) -> u64 {
        let size = self.block_tokens() as u64;
        let said = |at: &usize| hint.says(*at as u64 * size, prompt, now).is_some();
        blocks.filter(said).count() as u64
    }

    /// Tokens of a lease's prompt, in full blocks.
    fn prompt(&self, id: LeaseId) -> u64 {
        u64::from(self.leases[&id].request.prompt_blocks()) * self.block_tokens() as u64
    }

    /// Blocks of a lease's path from `from` on have come: what hints say of them holds now.
    pub(in crate::manager) fn grant(&mut self, id: LeaseId, from: usize, now: Nanos) {
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
                if let Some((priority, until)) = hint.says(first, prompt, now) {
                    self.claim(block, &hint.owner, priority, until);
                }
            }
        }
    }

    /// Blocks are new in the trie, one behind the other: sequences that waited for them go on, and
    /// hold for them.
    pub(in crate::manager) fn grant_new(
        &mut self,
        scope: ScopeId,
        parent: Option<BlockId>,
        blocks: &[BlockId],
    ) {
        let mut parent = parent;
        for &block in blocks {
            if !self.hints.pending.awaited() {
                break;
            }
            let before = self.blocks.trie().depth(block) as usize * self.block_tokens();
            let tokens = self.blocks.trie().tokens(block);
            let pending = self.hints.pending.arrived(scope, parent, block, tokens, before);
            for hint in pending {
                let said = hint.says(before as u64, u64::MAX, self.clock.last());
                if let Some((priority, until)) = said {
                    self.hints.claims.claim((scope, block), &hint.owner, priority, until);
                }
            }
            parent = Some(block);
        }
        self.leave_ended();
    }
}

impl Reach {
    /// The answer if all that is not there waits; `empty` says why nothing was there at all.
    fn reply(self, empty: &str) -> HintReply {
        let Self { blocks, clipped, waiting } = self;
        let mut reason = Vec::new();
        if clipped > 0 {
            reason.push(format!("{clipped} blocks are beyond a tier's retained_share"));
        }
        if waiting > 0 {
            reason.push(format!("{waiting} blocks are not there yet"));
        }
        if blocks + clipped + waiting == 0 && !empty.is_empty() {
            reason.push(empty.to_owned());
        }
        let answer = match (clipped, reason.is_empty()) {
            (1.., _) => Answer::Clipped,
            (0, false) => Answer::Deferred,
            (0, true) if blocks == 0 => {
                return rejected("no full block begins in that range");
            }
            (0, true) => Answer::Accepted,
        };
        HintReply { answer, blocks, left: clipped + waiting, reason: reason.join("; ") }
    }

    /// The answer if what is not there cannot wait.
    fn refuse(self, why: &str) -> HintReply {
        let answer = if self.blocks > 0 { Answer::Clipped } else { Answer::Rejected };
        let left = self.clipped + self.waiting;
        HintReply { answer, blocks: self.blocks, left, reason: why.to_owned() }
    }
}
