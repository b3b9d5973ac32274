//! Hints: user knowledge of the future that ranks, loads and demotes blocks.
//!
//! Hints are in side tables, so blocks without hints cost nothing. Invariant: a block's band on a
//! tier follows from its strongest living claim, the tier's share of retained blocks and the
//! tenant's quota, and every entry is linked in its band. Hints pin nothing. Cost: O(log n) per
//! hinted block, per arriving or evicted hinted block, and per expiring claim. A retain hint:
//!
//! ```text
//! hint --block cached------------> claim --strongest, share left--> retained: higher band
//!   |                                | expired, withdrawn, block removed --> no claim
//!   +--not cached yet--> pending ----+ once the block is committed
//! ```

mod borders;
pub(super) mod coming;
mod demote;
mod fetch;
mod late;
mod pending;
mod progress;
mod quota;
mod release;
mod retain;
pub(super) mod versions;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::block::{BlockId, Handle, LeaseId, Structure, TierId, Token};
use crate::error::{Error, Result};
use crate::hint::{
    Answer, HIGHEST, Hint, HintCode, HintReply, NORMAL, Priority, Release, Share, Target,
};
use crate::record::Wanted;
use crate::scope::{Scope, ScopeId};
use crate::tier::{ResidencyState, TierSpec};
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::request::life::session::SessionId;

use crate::manager::bands::claims::{self, Claims};
use crate::manager::bands::quotas::Quotas;

use coming::LoadKey;
use pending::PendingHints;

/// Side tables of hints.
#[derive(Debug)]
pub(super) struct Hints {
    pub(super) claims: Claims,
    pub(super) pending: PendingHints,
    pub(super) quotas: Quotas,
    /// Retained blocks and their maximum number, per tier.
    pub(super) retained: Vec<(BTreeSet<BlockId>, u64)>,
    /// Blocks on their way several tiers down, with their destination.
    pub(super) demoting: BTreeMap<BlockId, TierId>,
    /// Owner of hints without an owner.
    anonymous: Arc<str>,
}

impl Hints {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of at most one of a capacity below 2^32"
    )]
    pub(super) fn new(tiers: &[TierSpec]) -> Self {
        let most = |tier: &TierSpec| (f64::from(tier.blocks) * tier.retained_share) as u64;
        Self {
            claims: Claims::default(),
            pending: PendingHints::default(),
            quotas: Quotas::default(),
            retained: tiers.iter().map(|tier| (BTreeSet::new(), most(tier))).collect(),
            demoting: BTreeMap::new(),
            anonymous: Arc::from(""),
        }
    }

    /// Whether every block is in the normal band.
    pub(super) fn all_normal(&self) -> bool {
        self.claims.is_empty()
            && self.quotas.is_empty()
            && self.retained.iter().all(|(retained, _)| retained.is_empty())
    }

    /// The scopes held by pending hints, with their contents.
    pub(super) fn awaited(&self) -> impl Iterator<Item = (ScopeId, &[Token])> {
        self.pending.contents()
    }

    /// Whether no block has a hint, demotion or pending hint.
    pub(super) fn is_empty(&self) -> bool {
        self.claims.is_empty() && self.demoting.is_empty() && !self.pending.awaited()
    }

    fn owner(&self, scope: &Scope, name: Option<&str>) -> Arc<str> {
        match name {
            None if !scope.shares() => self.anonymous.clone(),
            _ => Arc::from(&*scope.local(name.unwrap_or_default())),
        }
    }
}

impl Manager {
    /// Takes hints and returns a reply to each. All hints are checked before the first is applied.
    /// Without hints it only ends expired hints.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid hint. Nothing has changed then.
    pub fn hint(&mut self, hints: &[Hint], now: Nanos) -> Result<Vec<HintReply>> {
        self.open()?;
        self.scopes.sweep(&mut self.blocks);
        for (at, hint) in hints.iter().enumerate() {
            self.check_hint(hint).map_err(|error| match error {
                Error::Config(said) => Error::Config(format!("hint {at}: {said}")),
                other => other,
            })?;
        }
        let now = self.tick(now);
        let replies = hints.iter().map(|hint| self.take_hint(hint, now)).collect();
        self.free_ended();
        self.start_due_loads(now);
        if !hints.is_empty() {
            self.write_ahead(now);
        }
        Ok(replies)
    }

    /// The priority of a block, by its strongest living hint.
    ///
    /// # Errors
    /// [`Error::Config`] if the block is not cached.
    pub fn priority(&self, block: Handle) -> Result<Priority> {
        self.open()?;
        Ok(self.hints.claims.priority(self.resolve(block)?))
    }

    /// The blocks of a sequence in the trie, resident or not.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid scope or invalid tokens.
    #[doc(hidden)]
    pub fn cached_blocks(&self, tokens: &[Token], scope: &Scope) -> Result<Vec<Handle>> {
        self.open()?;
        self.check_named(scope, tokens)?;
        Ok(self.trie().handles(&self.cached_path(scope, tokens)))
    }

    /// Number of retained blocks of a tier, and the maximum.
    #[doc(hidden)]
    #[must_use]
    pub fn retained(&self, tier: TierId) -> (u64, u64) {
        let (retained, most) = &self.hints.retained[tier];
        (retained.len() as u64, *most)
    }

    /// Fails for a hint that can never be applied.
    fn check_hint(&self, hint: &Hint) -> Result<()> {
        match hint {
            Hint::Retain(retain) => self.check_retain(retain),
            Hint::Release(Release::Tokens { tokens, scope, .. }) => self.check_named(scope, tokens),
            Hint::Release(Release::Session { scope, .. } | Release::Owner { scope, .. }) => {
                self.scopes.find(scope).map(drop)
            }
            Hint::Prefetch { target, tier, .. } => {
                self.check_target(target)?;
                self.check_tier(*tier)?;
                // The last tier has no tier below to load from, the first tier none above to demote
                // from.
                self.check_way(*tier, *tier == self.tiers.last(), "below")
            }
            Hint::Demote { target, tier } => {
                self.check_target(target)?;
                self.tiers.check(*tier)?;
                self.check_way(*tier, *tier == 0, "above")
            }
            Hint::ResumeAt { target, borders } => self.check_borders(target, borders),
            Hint::Progress { scope, tier, .. } => {
                self.check_tier(*tier)?;
                self.scopes.find(scope).map(drop)
            }
            Hint::Quota { tier, share, .. } => {
                self.check_tier(*tier)?;
                match share {
                    Some(share) if !(0.0..=1.0).contains(share) => {
                        Err(Error::config(format!("a share is {share}, 0 to 1 wanted")))
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    /// Fails if a tier is the `end` of the hierarchy in the direction of the hint.
    fn check_way(&self, tier: TierId, end: bool, side: &str) -> Result<()> {
        if end {
            let name = self.tiers[tier].spec.kind.name();
            return Err(Error::config(format!(
                "nothing can be moved to tier '{name}': there is no tier {side} it"
            )));
        }
        Ok(())
    }

    fn check_target(&self, target: &Target) -> Result<()> {
        match target {
            Target::Tokens { tokens, scope } => self.check_named(scope, tokens),
            Target::Session { scope, .. } => self.scopes.find(scope).map(drop),
            Target::Lease(_) => Ok(()),
        }
    }

    fn check_named(&self, scope: &Scope, tokens: &[Token]) -> Result<()> {
        self.scopes.digests.check(scope, tokens)?;
        self.scopes.find(scope).map(drop)
    }

    /// Applies a checked hint.
    fn take_hint(&mut self, hint: &Hint, now: Nanos) -> HintReply {
        match hint {
            Hint::Retain(retain) => self.retain(retain, now),
            Hint::Release(release) => self.release_hint(release),
            Hint::Prefetch { target, tier, deadline } => {
                self.prefetch(target, *tier, *deadline, now)
            }
            Hint::Demote { target, tier } => self.lower_path(target, *tier, now),
            Hint::ResumeAt { target, borders } => self.keep_borders(target, borders),
            Hint::Progress { name, scope, tier, eta } => {
                self.expect_session((name, scope), *tier, *eta, now)
            }
            Hint::Quota { tenant, tier, blocks, share } => {
                self.set_quota(tenant, *tier, *blocks, *share)
            }
        }
    }

    /// The cached blocks of a hint's target, first to last.
    fn target_path(&self, target: &Target) -> std::result::Result<Vec<BlockId>, String> {
        match target {
            Target::Tokens { tokens, scope } => Ok(self.cached_path(scope, tokens)),
            Target::Lease(id) => match self.leases.get(id) {
                None => Err(format!("lease {id} is not held")),
                Some(lease) if lease.suspended() => Err(format!("lease {id} is suspended")),
                Some(lease) => Ok(lease.path.blocks().to_vec()),
            },
            Target::Session { name, scope } => match self.session(name, scope) {
                None => Err(format!("session '{name}' has no block in its scope")),
                Some(id) => Ok(self.path_to(self.sessions.tip(id))),
            },
        }
    }

    /// Finds a session by name and scope.
    fn session(&self, name: &str, scope: &Scope) -> Option<SessionId> {
        self.sessions.find(self.scopes.find(scope).ok()??, &scope.local(name))
    }

    /// The scope of a hint's target.
    fn target_scope(&self, target: &Target) -> Scope {
        match target {
            Target::Tokens { scope, .. } | Target::Session { scope, .. } => scope.clone(),
            Target::Lease(id) => {
                self.leases.get(id).map_or_else(Scope::default, |lease| lease.scope.clone())
            }
        }
    }

    /// The cached blocks of a sequence visible to its scope.
    fn cached_path(&self, scope: &Scope, tokens: &[Token]) -> Vec<BlockId> {
        if self.scopes.find(scope).is_err() {
            return Vec::new();
        }
        self.visible_path(scope, &self.scopes.digests.content(scope, 0, tokens))
    }

    /// Frees the scopes and digests of ended pending hints.
    fn free_ended(&mut self) {
        for (scope, content) in self.hints.pending.take_ended() {
            self.scopes.release(scope);
            self.scopes.digests.free(&content);
        }
    }

    /// Drops the pending hints of an ended lease, and loads the blocks of expected sessions.
    pub(super) fn end_lease_hints(&mut self, scope: ScopeId, id: LeaseId, now: Nanos) {
        self.hints.pending.end_lease(scope, id);
        self.sessions.coming.remove(&LoadKey::Lease(id));
        self.start_due_loads(now);
    }

    /// Restores a stored hint without an owner, unless the block has a newer hint.
    pub(super) fn restore_hint(&mut self, block: BlockId, wanted: Wanted, now: Nanos) {
        let Wanted { priority, ttl } = wanted;
        // A new claim is newer than the stored hint.
        if self.hints.claims.claimed(block) {
            return;
        }
        // Only a release has this priority without an end.
        if priority == claims::RELEASED && ttl == Nanos::MAX {
            self.hints.claims.release(block);
        } else {
            let until = (ttl < Nanos::MAX).then(|| now.saturating_add(ttl));
            let anonymous = self.hints.anonymous.clone();
            let scope = self.node(block).scope;
            self.hints.claims.claim(scope, block, &anonymous, priority, until);
        }
        self.reband(block);
    }

    /// Whether a missing block of a path makes the blocks after it useless.
    fn breaks(&self, block: BlockId) -> bool {
        self.departures(block) == Structure::LeafOnly
    }

    /// Writes the state of all hints, for comparison.
    pub(super) fn write_hints(&self, out: &mut String) -> std::fmt::Result {
        use std::fmt::Write;
        writeln!(out, "{:?}", self.hints)
    }

    /// Checks the side tables.
    pub(super) fn audit_hints(&self, broken: &mut Vec<String>) {
        let hints = &self.hints;
        broken.extend(hints.claims.audit(self.clock.last()));
        let alive = |block| self.trie().alive(block);
        broken.extend(hints.pending.audit(alive, |lease| self.leases.contains_key(&lease)));
        let named = hints.claims.blocks().chain(hints.demoting.keys().copied());
        let removed = named.filter(|&block| !self.trie().alive(block));
        broken.extend(removed.map(|block| format!("block {block} left the trie and is hinted")));
        for (tier, (retained, most)) in hints.retained.iter().enumerate() {
            let wrong = retained.iter().find(|&&block| {
                !self.trie().alive(block)
                    || self.residency(tier, block).state == ResidencyState::Absent
                    || hints.claims.priority(block) <= NORMAL
            });
            if retained.len() as u64 > *most || wrong.is_some() {
                broken.push(format!(
                    "tier {tier} retains {} blocks of {most}, wrongly {wrong:?}",
                    retained.len()
                ));
            }
        }
        let mut mine: BTreeMap<(Share, TierId), BTreeSet<BlockId>> = BTreeMap::new();
        for block in self.living().filter(|_| !hints.quotas.is_empty()) {
            for tier in 0..self.tiers.len() {
                let share = self.tenant_share(tier, block);
                if share > 0 && self.residency(tier, block).state != ResidencyState::Absent {
                    mine.entry((share, tier)).or_default().insert(block);
                }
            }
        }
        for (share, tier, held) in hints.quotas.counted() {
            if *held != mine.remove(&(share, tier)).unwrap_or_default() {
                broken.push(format!("share {share} of tier {tier} counts {held:?}"));
            }
        }
    }

    /// Ends expired claims and pending hints.
    pub(super) fn expire_hints(&mut self, now: Nanos) {
        while let Some(block) = self.hints.claims.expire(now) {
            self.reband(block);
        }
        self.hints.pending.expire(now);
        if self.hints.pending.any_ended() {
            self.free_ended();
        }
    }
}

/// The reply about blocks shared by tenants. It is independent of the producers.
fn accepted(blocks: u64) -> HintReply {
    HintReply {
        answer: Answer::Accepted,
        blocks,
        not_applied: 0,
        code: HintCode::Accepted,
        reason: String::new(),
    }
}

/// The reply to a hint without a target.
fn rejected(reason: impl Into<String>) -> HintReply {
    HintReply {
        answer: Answer::Rejected,
        blocks: 0,
        not_applied: 0,
        code: HintCode::Absent,
        reason: reason.into(),
    }
}

/// Fails for a priority above the highest.
fn check_priority(name: &str, priority: Priority) -> Result<()> {
    if priority > HIGHEST {
        return Err(Error::config(format!("{name} is {priority}, 0 to {HIGHEST} wanted")));
    }
    Ok(())
}
