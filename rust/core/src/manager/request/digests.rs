//! Where digests are written and where they go: in blocks, in partial blocks of leases, in sequences
//! that hints wait for.
//!
//! Invariant: each place counts as one use, so that a digest's number is free when the last place is.
//! Cost: nothing before the first digest; then a look at every token that comes or goes, and once at
//! all that are cached.

use crate::block::{LeaseId, Token};
use crate::error::Result;
use crate::scope::Scope;

use crate::manager::Manager;
use crate::manager::request::lease::Hold;

impl Manager {
    /// How many scopes are known, and how many digests have a number: what is left of tenants,
    /// adapters and images.
    #[must_use]
    pub fn strangers(&self) -> (usize, usize) {
        let living =
            self.scopes.all().filter(|&(id, _)| self.scopes.in_use(id, self.blocks.trie()));
        (living.count(), self.scopes.digests.len())
    }

    /// Content with digests that is to be written; it counts as written until it is freed.
    ///
    /// # Errors
    /// [`crate::error::Error::Config`] if all numbers are in use; nothing has changed then.
    pub(in crate::manager) fn intern(
        &mut self,
        scope: &Scope,
        from: u64,
        tokens: &[Token],
    ) -> Result<Vec<Token>> {
        if !scope.extra.is_empty() && !self.scopes.digests.begun() {
            // What was cached before may be no digest's number.
            let mut cached: Vec<Token> = Vec::new();
            self.each_written(|token| cached.push(token));
            self.scopes.digests.begin(cached.into_iter());
        }
        self.scopes.digests.intern(scope, from, tokens)
    }

    /// Tokens at the end of a lease that fill no block yet.
    pub(in crate::manager) fn extend_tail(&mut self, id: LeaseId, tokens: &[Token]) {
        self.scopes.digests.hold(tokens);
        let size = self.block_tokens();
        let tail = &mut self.lease_mut(id).tail;
        tail.reserve_exact(size - tail.len());
        tail.extend_from_slice(tokens);
    }

    /// The same, but the first `kept`, are there no more.
    pub(in crate::manager) fn remove_tail(&mut self, id: LeaseId, kept: usize) {
        let lease = self.leases.get_mut(&id).expect("a lease that was just seen");
        self.scopes.digests.free(&lease.tail[kept..]);
        lease.tail.truncate(kept);
    }

    /// Every token that stands somewhere with digests in place.
    fn each_written(&self, mut tell: impl FnMut(Token)) {
        for block in self.living() {
            self.blocks.trie().tokens(block).iter().copied().for_each(&mut tell);
        }
        for lease in self.leases.values() {
            lease.tail.iter().copied().for_each(&mut tell);
        }
        self.hints.awaited().flat_map(|(_, content)| content).copied().for_each(&mut tell);
    }

    /// What is broken about digests.
    pub(in crate::manager) fn audit_digests(&self, broken: &mut Vec<String>) {
        let mut written = Vec::new();
        self.each_written(|token| written.push(token));
        let promised = self.leases.values().map(|lease| lease.scope.extra.len()).sum();
        broken.extend(self.scopes.digests.audit(written.into_iter(), promised));
        let suspended = self.leases.values().filter_map(|lease| match &lease.hold {
            Hold::Suspended(tokens) => Some(tokens),
            Hold::Active => None,
        });
        for tokens in suspended {
            if tokens.iter().any(|&token| self.scopes.digests.pair(token).is_some()) {
                broken.push("a suspended lease has numbers of digests".to_owned());
            }
        }
    }
}
