//! Who may share blocks: tenant and adapter, and digests of what is not a token.
//!
//! Blocks of two scopes never match. A digest (of an image, say) stands at a token's offset: the
//! pair of token and digest is interned as one number from the top of the token range, so that
//! matching stays a memory comparison and sequences share what lies before the digest.
//! Invariant: an interned number never stands for two pairs. Cost: O(log scopes) per call.

use std::borrow::Cow;
use std::collections::BTreeMap;

use smallvec::SmallVec;

use crate::block::{Structure, Token};
use crate::error::{Error, Result};
use crate::memory;
use crate::trie::{RunId, Trie};

/// A scope's place in the table.
pub type ScopeId = u32;

/// Real tokens stay below this once a digest is in use; above it stand interned pairs.
pub const FIRST_INTERNED: Token = 0xFFFF_0000;

/// Who may share blocks with whom.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Scope {
    /// The tenant's salt.
    pub tenant: Vec<u8>,
    /// The adapter's name.
    pub lora: String,
    /// Digests at token offsets.
    pub extra: Vec<(u64, Vec<u8>)>,
    /// Whether holes may be made; `None` takes the manager's default.
    pub structure: Option<Structure>,
}

impl Scope {
    fn is_plain(&self) -> bool {
        self.tenant.is_empty() && self.lora.is_empty()
    }
}

/// A scope as the manager keeps it.
#[derive(Clone, Debug)]
pub struct Known {
    /// The tenant's salt.
    pub tenant: Vec<u8>,
    /// The adapter's name.
    pub lora: String,
    /// Where its blocks hang.
    pub root: RunId,
    /// Fixed at first use.
    pub structure: Structure,
    /// Whether its first user chose the structure.
    pub chosen: bool,
}

/// What tells one scope from another.
type Name = SmallVec<[u8; 64]>;

/// A scope's tenant behind its length, then its adapter.
fn name(scope: &Scope) -> Name {
    let mut name = Name::from_slice(&(scope.tenant.len() as u64).to_le_bytes());
    name.extend_from_slice(&scope.tenant);
    name.extend_from_slice(scope.lora.as_bytes());
    name
}

/// All scopes seen so far, and the interned digests.
#[derive(Clone, Debug, Default)]
pub struct Scopes {
    known: Vec<Known>,
    /// The scope without tenant and adapter, which most requests are of.
    plain: Option<ScopeId>,
    /// All others.
    ids: BTreeMap<Name, ScopeId>,
    pairs: Vec<(Token, Vec<u8>)>,
    interned: BTreeMap<(Token, Vec<u8>), Token>,
}

impl Scopes {
    /// The scope of that id.
    #[must_use]
    pub fn get(&self, id: ScopeId) -> &Known {
        &self.known[id as usize]
    }

    /// All scopes, in the order of their first use.
    #[must_use]
    pub fn all(&self) -> &[Known] {
        &self.known
    }

    /// The id of a scope that was used before.
    ///
    /// # Errors
    /// [`Error::Config`] if it was used with another structure.
    pub fn find(&self, scope: &Scope) -> Result<Option<ScopeId>> {
        let known = if scope.is_plain() { self.plain } else { self.ids.get(&name(scope)).copied() };
        let Some(id) = known else { return Ok(None) };
        let fixed = self.known[id as usize].structure;
        match scope.structure {
            Some(asked) if asked != fixed => Err(Error::config(format!(
                "scope has structure '{}' since its first use, not '{}'",
                fixed.name(),
                asked.name()
            ))),
            _ => Ok(Some(id)),
        }
    }

    /// Adds a scope that [`Scopes::find`] does not know.
    pub fn add<T: Copy + PartialEq + Default>(
        &mut self,
        scope: &Scope,
        default: Structure,
        trie: &mut Trie<T>,
    ) -> ScopeId {
        let id = u32::try_from(self.known.len()).expect("fewer than 2^32 scopes");
        self.known.push(Known {
            tenant: scope.tenant.clone(),
            lora: scope.lora.clone(),
            root: trie.add_root(),
            structure: scope.structure.unwrap_or(default),
            chosen: scope.structure.is_some(),
        });
        if scope.is_plain() {
            self.plain = Some(id);
        } else {
            self.ids.insert(name(scope), id);
        }
        id
    }

    /// Whether digests play no part: every token is what it is.
    #[must_use]
    pub fn plain(&self, scope: &Scope) -> bool {
        self.pairs.is_empty() && scope.extra.is_empty()
    }

    /// Refuses tokens that could be taken for interned pairs.
    ///
    /// # Errors
    /// [`Error::Config`] naming the first such token.
    pub fn check(&self, scope: &Scope, tokens: &[Token]) -> Result<()> {
        if self.plain(scope) {
            return Ok(());
        }
        // Where digests are put in place, tokens are copied.
        memory::check(2 * size_of_val(tokens), || format!("a copy of {} tokens", tokens.len()))?;
        match tokens.iter().position(|&token| token >= FIRST_INTERNED) {
            Some(at) => Err(Error::config(format!(
                "token {} at {at} is not below {FIRST_INTERNED}, as it must be where digests are \
                 in use",
                tokens[at]
            ))),
            None => Ok(()),
        }
    }

    /// `tokens`, which start at offset `from`, with the digests of `scope` in place. A digest
    /// that is not known yet becomes a number that matches nothing.
    #[must_use]
    pub fn content<'a>(&self, scope: &Scope, from: u64, tokens: &'a [Token]) -> Cow<'a, [Token]> {
        let mut content = Cow::Borrowed(tokens);
        for (offset, digest) in &scope.extra {
            let Some(at) = place(*offset, from, tokens.len()) else { continue };
            let pair = (tokens[at], digest.clone());
            let number = self.interned.get(&pair).copied().unwrap_or(Token::MAX);
            content.to_mut()[at] = number;
        }
        content
    }

    /// Gives every digest that lies in `tokens` a number.
    ///
    /// # Errors
    /// [`Error::Config`] when the numbers are used up.
    pub fn intern(&mut self, scope: &Scope, from: u64, tokens: &[Token]) -> Result<()> {
        for (offset, digest) in &scope.extra {
            let Some(at) = place(*offset, from, tokens.len()) else { continue };
            let pair = (tokens[at], digest.clone());
            if self.interned.contains_key(&pair) {
                continue;
            }
            let room = (Token::MAX - FIRST_INTERNED) as usize;
            if self.pairs.len() >= room {
                return Err(Error::config(format!("more than {room} digests in one manager")));
            }
            let number = FIRST_INTERNED + u32::try_from(self.pairs.len()).unwrap_or(0);
            self.pairs.push(pair.clone());
            self.interned.insert(pair, number);
        }
        Ok(())
    }

    /// The token and digest behind an interned number.
    #[must_use]
    pub fn pair(&self, token: Token) -> Option<&(Token, Vec<u8>)> {
        self.pairs.get(token.checked_sub(FIRST_INTERNED)? as usize)
    }
}

fn place(offset: u64, from: u64, len: usize) -> Option<usize> {
    let at = usize::try_from(offset.checked_sub(from)?).ok()?;
    (at < len).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::{FIRST_INTERNED, Scope, Scopes};
    use crate::block::{Structure, Token};
    use crate::trie::Trie;

    #[test]
    fn a_digest_changes_only_its_own_position() {
        let mut scopes = Scopes::default();
        let scope = Scope { extra: vec![(5, vec![1])], ..Scope::default() };
        assert_eq!(scopes.content(&scope, 4, &[7, 8])[..], [7, Token::MAX]);
        scopes.intern(&scope, 4, &[7, 8]).unwrap();
        assert_eq!(scopes.content(&scope, 4, &[7, 8])[..], [7, FIRST_INTERNED]);
        assert_eq!(scopes.pair(FIRST_INTERNED), Some(&(8, vec![1])));
        assert!(scopes.check(&Scope::default(), &[FIRST_INTERNED]).is_err());
    }

    #[test]
    fn a_scope_keeps_the_structure_of_its_first_use() {
        let mut trie = Trie::<()>::new(4);
        let mut scopes = Scopes::default();
        let scope = Scope { structure: Some(Structure::Holes), ..Scope::default() };
        let id = scopes.add(&scope, Structure::LeafOnly, &mut trie);
        assert_eq!(scopes.find(&Scope::default()), Ok(Some(id)));
        let other = Scope { structure: Some(Structure::LeafOnly), ..Scope::default() };
        assert!(scopes.find(&other).is_err());
    }
}
