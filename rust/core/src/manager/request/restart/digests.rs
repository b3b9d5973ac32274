//! Digest references: counts the digests in blocks, in leases' tails and in pending hints.
//!
//! Invariant: each occurrence counts as a reference, so a digest's number is free after its last
//! occurrence. Cost: none before the first digest. Then a lookup per added or removed token, and a
//! single scan of all cached tokens.

use crate::block::{LeaseId, Token};
use crate::error::Result;
use crate::scope::Scope;

use crate::manager::Manager;
use crate::manager::request::life::lease::Hold;

impl Manager {
    /// Number of scopes in use, and of digests with a number.
    #[doc(hidden)]
    #[must_use]
    pub fn scope_and_digest_counts(&self) -> (usize, usize) {
        let living = self.scopes.all().filter(|&(id, _)| self.scopes.in_use(id, self.trie()));
        (living.count(), self.scopes.digests.len())
    }

    /// The tokens of a sequence with its digests replaced by numbers. Each number has a reference
    /// until freed.
    ///
    /// # Errors
    /// [`crate::error::Error::Config`] if all numbers are in use. Nothing has changed then.
    pub(crate) fn intern(
        &mut self,
        scope: &Scope,
        from: u64,
        tokens: &[Token],
    ) -> Result<Vec<Token>> {
        if !scope.extra.is_empty() && !self.scopes.digests.begun() {
            // A number in place of a token must differ from all cached tokens.
            let mut cached: Vec<Token> = Vec::new();
            self.each_written(|token| cached.push(token));
            self.scopes.digests.begin(cached.into_iter());
        }
        self.scopes.digests.intern(scope, from, tokens)
    }

    /// Appends tokens to a lease's tail. The tail stays shorter than a block.
    pub(crate) fn extend_tail(&mut self, id: LeaseId, tokens: &[Token]) {
        self.scopes.digests.hold(tokens);
        let size = self.block_tokens();
        let tail = &mut self.lease_mut(id).tail;
        // A tail never outgrows a block, so its memory is allocated once.
        tail.reserve_exact(size - tail.len());
        tail.extend_from_slice(tokens);
    }

    /// Removes the tokens of a lease's tail after the first `kept`.
    pub(crate) fn remove_tail(&mut self, id: LeaseId, kept: usize) {
        let lease = self.leases.get_mut(&id).expect("a lease that was just seen");
        self.scopes.digests.free(&lease.tail[kept..]);
        lease.tail.truncate(kept);
    }

    /// Visits every stored token, with digests replaced.
    fn each_written(&self, mut visit: impl FnMut(Token)) {
        for block in self.living() {
            self.trie().tokens(block).iter().copied().for_each(&mut visit);
        }
        for lease in self.leases.values() {
            lease.tail.iter().copied().for_each(&mut visit);
        }
        self.hints.awaited().flat_map(|(_, content)| content).copied().for_each(&mut visit);
    }

    /// Checks the references of digests.
    pub(crate) fn audit_digests(&self, broken: &mut Vec<String>) {
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
