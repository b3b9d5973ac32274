//! Scopes: namespaces of blocks, per tenant and adapter, and digests of non-token input.
//!
//! Blocks of two scopes never match. A digest, for example of an image, has a token offset. The
//! pair of token and digest maps to a number in the upper half of the token range. Matching
//! therefore stays a memory comparison, and sequences share the blocks before the digest. A scope
//! is in the table as long as it has a block, a lease or a hint. Then its id and root are reused.
//! Invariant: every scope with a block, lease or hint is in the table. Cost: O(log scopes) per
//! call. A salt is stored once.

mod digests;

use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::block::Structure;
use crate::error::{Error, Result};
use crate::record::ScopeOwner;
use crate::residency::Blocks;
use crate::trie::{RunId, Trie};
use crate::visits;

pub(crate) use digests::Digests;
pub use digests::FIRST_DIGEST;

/// Index of a scope in the table.
pub(crate) type ScopeId = u32;

/// Tenant of the shared scope, used for all scopes with `share_after`. The name is reserved.
pub const SHARED: &[u8] = b"kvtrie share_after";

/// Maximum number of producers required for sharing.
pub(crate) const MOST_PRODUCERS: u32 = 32;

/// Description of a scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Scope {
    /// The tenant's salt.
    pub tenant: Vec<u8>,
    /// The adapter's name.
    pub lora: String,
    /// Digests at token offsets.
    pub extra: Vec<(u64, Vec<u8>)>,
    /// Whether holes are allowed. `None` takes the manager's default.
    pub structure: Option<Structure>,
    /// Number of tenants required to produce a block before it is shared among them. 0 disables
    /// sharing.
    pub share_after: u32,
}

impl Scope {
    fn is_plain(&self) -> bool {
        self.tenant.is_empty() && self.lora.is_empty()
    }

    /// Whether blocks can become shared between tenants.
    #[must_use]
    pub fn shares(&self) -> bool {
        self.share_after > 0
    }

    /// Owning tenant of the blocks: the scope's tenant, or [`SHARED`].
    #[must_use]
    pub fn owner(&self) -> &[u8] {
        if self.shares() { SHARED } else { &self.tenant }
    }

    /// Scope of stored blocks by their owner. The tenant of a shared scope counts as no producer.
    #[must_use]
    pub fn of_owner(owner: &ScopeOwner) -> Self {
        let shared = owner.tenant == SHARED;
        Self {
            tenant: if shared { Vec::new() } else { owner.tenant.clone() },
            lora: owner.lora.clone(),
            extra: Vec::new(),
            structure: owner.structure,
            share_after: if shared { MOST_PRODUCERS } else { 0 },
        }
    }

    /// Name of a session or hint owner, qualified by tenant in a shared scope. Sessions and owners
    /// stay separate although blocks are shared.
    #[must_use]
    pub fn local<'a>(&self, name: &'a str) -> Cow<'a, str> {
        if self.shares() { Cow::Owned(self.prefix() + name) } else { Cow::Borrowed(name) }
    }

    /// Inverse of [`Scope::local`]. `None` for a name of a different tenant.
    #[must_use]
    pub fn named<'a>(&self, local: &'a str) -> Option<&'a str> {
        if self.shares() { local.strip_prefix(&self.prefix()) } else { Some(local) }
    }

    fn prefix(&self) -> String {
        format!("{}/", blake3::hash(&self.tenant).to_hex())
    }

    /// Fails for an invalid tenant name or number of producers.
    fn check(&self) -> Result<()> {
        if self.tenant == SHARED {
            return Err(Error::config(format!("tenant {SHARED:?} is reserved")));
        }
        let after = self.share_after;
        match after {
            0 => Ok(()),
            2..=MOST_PRODUCERS if !self.tenant.is_empty() => Ok(()),
            2..=MOST_PRODUCERS => {
                Err(Error::config(format!("share_after is {after} in a scope without a tenant")))
            }
            _ => Err(Error::config(format!(
                "share_after is {after}, 2 to {MOST_PRODUCERS} wanted, or 0 to share nothing"
            ))),
        }
    }
}

/// Owner of blocks: a tenant and an adapter, in a reference-counted allocation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Whose(Arc<[u8]>);

/// Key of a scope: the length of its tenant, its tenant, its adapter.
type Name = SmallVec<[u8; 64]>;

const LENGTH: usize = size_of::<u64>();

fn name(tenant: &[u8], lora: &str) -> Name {
    let mut name = Name::from_slice(&(tenant.len() as u64).to_le_bytes());
    name.extend_from_slice(tenant);
    name.extend_from_slice(lora.as_bytes());
    name
}

impl Whose {
    fn new(scope: &Scope) -> Self {
        Self(Arc::from(&*name(scope.owner(), &scope.lora)))
    }

    fn parts(&self) -> (&[u8], &[u8]) {
        let (length, rest) = self.0.split_first_chunk::<LENGTH>().expect("it begins with a length");
        rest.split_at(usize::try_from(u64::from_le_bytes(*length)).expect("a length in memory"))
    }

    /// The tenant's salt.
    #[must_use]
    pub fn tenant(&self) -> &[u8] {
        self.parts().0
    }

    /// The adapter's name.
    #[must_use]
    pub fn lora(&self) -> &str {
        std::str::from_utf8(self.parts().1).expect("it was text")
    }

    /// This owner, if its scope has an adapter.
    #[must_use]
    pub fn with_adapter(&self) -> Option<Self> {
        (self.0.len() > LENGTH && !self.lora().is_empty()).then(|| self.clone())
    }

    /// [`Whose::seed`] of a scope, in the table or not.
    #[must_use]
    pub fn seed_of(scope: &Scope) -> u64 {
        Self::new(scope).seed()
    }

    /// Hash of the scope for the tags of blocks, stable across removal from the table. 0 for the
    /// plain scope. No match decision depends on it.
    fn seed(&self) -> u64 {
        if self.0.len() == LENGTH {
            return 0;
        }
        let hash = blake3::hash(&self.0);
        u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("32 bytes"))
    }
}

impl Borrow<[u8]> for Whose {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

/// Row of the table.
#[derive(Clone, Debug)]
pub(crate) struct ScopeEntry {
    /// Owner of its blocks.
    pub whose: Whose,
    /// Root of its blocks in the trie.
    pub root: RunId,
    /// Hash of the scope in the tags of blocks.
    pub seed: u64,
    /// Fixed at first use, until the scope leaves the table.
    pub structure: Structure,
    /// Whether the structure was chosen by the first user.
    pub chosen: bool,
    /// Whether the blocks are shared after a number of producers.
    pub shared: bool,
    /// Reference count: leases and hints, without its blocks.
    holders: u32,
    /// Whether it is in the list of possibly empty scopes.
    left: bool,
}

/// All scopes with a block, a lease or a hint, and the digests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scopes {
    entries: Vec<Option<ScopeEntry>>,
    /// Ids to be reused.
    free: Vec<ScopeId>,
    /// Possibly empty scopes, after the release of a holder or the removal of a block.
    left: Vec<ScopeId>,
    /// Scope without tenant and adapter, used by most requests.
    plain: Option<ScopeId>,
    ids: BTreeMap<Whose, ScopeId>,
    /// Numbers of digests.
    pub digests: Digests,
    /// Whether blocks outlive the manager without a secret for keying their producers.
    no_secret: bool,
}

impl Scopes {
    /// Creates an empty table. With `no_secret`, scopes with `share_after` are refused.
    #[must_use]
    pub(crate) fn new(no_secret: bool) -> Self {
        Self { no_secret, ..Self::default() }
    }

    /// The scope of an id in the table.
    #[must_use]
    pub(crate) fn get(&self, id: ScopeId) -> &ScopeEntry {
        self.entries[id as usize].as_ref().expect("a scope in use")
    }

    /// All scopes with their ids.
    pub(crate) fn all(&self) -> impl Iterator<Item = (ScopeId, &ScopeEntry)> {
        (0..).zip(&self.entries).filter_map(|(id, entry)| Some((id, entry.as_ref()?)))
    }

    /// All scopes of a tenant.
    pub(crate) fn of<'a>(&'a self, tenant: &'a [u8]) -> impl Iterator<Item = &'a ScopeEntry> + 'a {
        let first = name(tenant, "");
        let from = (Bound::Included(&*first), Bound::Unbounded);
        let all: Vec<ScopeId> = self
            .ids
            .range::<[u8], _>(from)
            .take_while(|(whose, _)| whose.tenant() == tenant)
            .map(|(_, &id)| id)
            .collect();
        visits::note(all.len());
        all.into_iter().map(|id| self.get(id))
    }

    /// Adds a holder, until [`Scopes::release`].
    pub(crate) fn hold(&mut self, id: ScopeId) {
        self.entries[id as usize].as_mut().expect("a scope in use").holders += 1;
    }

    /// Undoes one [`Scopes::hold`].
    pub(crate) fn release(&mut self, id: ScopeId) {
        self.entries[id as usize].as_mut().expect("a scope in use").holders -= 1;
        self.emptied(id);
    }

    /// Notes that a scope may have lost its last block.
    pub(crate) fn emptied(&mut self, id: ScopeId) {
        let entry = self.entries[id as usize].as_mut().expect("a scope in use");
        if !std::mem::replace(&mut entry.left, true) {
            self.left.push(id);
        }
    }

    /// Whether a scope has a block or a holder.
    #[must_use]
    pub(crate) fn in_use<T: Copy + PartialEq + Default>(
        &self,
        id: ScopeId,
        trie: &Trie<T>,
    ) -> bool {
        let entry = self.entries[id as usize].as_ref();
        entry.is_some_and(|entry| entry.holders > 0 || !trie.has_no_blocks(entry.root))
    }

    /// Removes empty scopes. Called at the beginning of calls that may add a scope, when no id of
    /// an empty scope is in use, since ids are reused.
    pub(crate) fn sweep<T: Copy + PartialEq + Default>(&mut self, blocks: &mut Blocks<T>) {
        while let Some(id) = self.left.pop() {
            let used = self.in_use(id, blocks.trie());
            let slot = &mut self.entries[id as usize];
            let Some(gone) = slot.take_if(|entry| {
                entry.left = false;
                !used
            }) else {
                continue;
            };
            blocks.remove_root(gone.root);
            self.ids.remove(&gone.whose);
            self.free.push(id);
            if self.plain == Some(id) {
                self.plain = None;
            }
        }
    }

    /// Broken invariants. `held` is the expected number of holders per scope.
    #[must_use]
    pub(crate) fn audit<T: Copy + PartialEq + Default>(
        &self,
        trie: &Trie<T>,
        mut held: BTreeMap<ScopeId, u32>,
    ) -> Vec<String> {
        let mut broken = Vec::new();
        for (id, entry) in self.all() {
            let seen = held.remove(&id).unwrap_or(0);
            if seen != entry.holders {
                broken.push(format!("scope {id} counts {} holders, {seen} hold it", entry.holders));
            }
            if !self.in_use(id, trie) && !self.left.contains(&id) {
                broken.push(format!("scope {id} is of no use and kept"));
            }
            if self.ids.get(&entry.whose) != Some(&id) {
                broken.push(format!("scope {id} is not found"));
            }
        }
        broken.extend(held.keys().map(|id| format!("scope {id} is held and not in the table")));
        if self.ids.len() + self.free.len() != self.entries.len() {
            broken.push(format!(
                "{} scopes and {} free ids of {}",
                self.ids.len(),
                self.free.len(),
                self.entries.len()
            ));
        }
        broken
    }

    /// Whether a scope needs keyed producers and the secret is missing.
    #[must_use]
    pub(crate) fn refuses(&self, scope: &Scope) -> bool {
        scope.shares() && self.no_secret
    }

    /// Id of a known scope, whatever its structure.
    #[must_use]
    pub(crate) fn known(&self, scope: &Scope) -> Option<ScopeId> {
        self.ids.get(&*name(scope.owner(), &scope.lora)).copied()
    }

    /// Id of a known scope.
    ///
    /// # Errors
    /// [`Error::Config`] if the scope has a different structure, or for an invalid scope.
    pub(crate) fn find(&self, scope: &Scope) -> Result<Option<ScopeId>> {
        let found = if scope.is_plain() && !scope.shares() {
            self.plain
        } else {
            scope.check()?;
            if self.refuses(scope) {
                return Err(Error::config(
                    "share_after with a disk or a shared store needs a secret: producers are kept \
                     with the blocks",
                ));
            }
            self.known(scope)
        };
        let Some(id) = found else { return Ok(None) };
        let fixed = self.get(id).structure;
        match scope.structure {
            Some(asked) if asked != fixed => Err(Error::config(format!(
                "scope has structure '{}' since its first use, not '{}'",
                fixed.name(),
                asked.name()
            ))),
            _ => Ok(Some(id)),
        }
    }

    /// Adds a scope unknown to [`Scopes::find`]. The next call removes it unless it has a holder or
    /// a block by then.
    pub(crate) fn add<T: Copy + PartialEq + Default>(
        &mut self,
        scope: &Scope,
        default: Structure,
        blocks: &mut Blocks<T>,
    ) -> ScopeId {
        let whose = Whose::new(scope);
        let entry = ScopeEntry {
            root: blocks.add_root(),
            seed: whose.seed(),
            structure: scope.structure.unwrap_or(default),
            chosen: scope.structure.is_some(),
            shared: scope.shares(),
            holders: 0,
            left: false,
            whose: whose.clone(),
        };
        let id = if let Some(id) = self.free.pop() {
            self.entries[id as usize] = Some(entry);
            id
        } else {
            self.entries.push(Some(entry));
            ScopeId::try_from(self.entries.len() - 1).expect("fewer than 2^32 scopes")
        };
        if scope.is_plain() && !scope.shares() {
            self.plain = Some(id);
        }
        self.ids.insert(whose, id);
        self.emptied(id);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::{Scope, Scopes};
    use crate::block::Structure;
    use crate::residency::Blocks;

    #[test]
    fn a_scope_keeps_the_structure_of_its_first_use() {
        let mut blocks = Blocks::<()>::new(4, 1, &[]);
        let mut scopes = Scopes::default();
        let scope = Scope { structure: Some(Structure::Holes), ..Scope::default() };
        let id = scopes.add(&scope, Structure::LeafOnly, &mut blocks);
        assert_eq!(scopes.find(&Scope::default()), Ok(Some(id)));
        let other = Scope { structure: Some(Structure::LeafOnly), ..Scope::default() };
        assert!(scopes.find(&other).is_err());
    }
}
