//! Interning table of digests: each pair of token and digest has a number, which replaces the token
//! in the trie.
//!
//! A number is derived from its pair's hash. A returning pair gets its old number, so ghosts, keyed
//! by tokens, match exactly this pair. Invariant: a number has a single pair as long as it is
//! written anywhere, and is not a real token. Cost: O(log digests), and a hash for a digest without
//! a number.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::block::Token;
use crate::error::{Error, Result};
use crate::memory;

use super::Scope;

/// First number of a digest. Real tokens stay below it once a digest is in use.
pub const FIRST_DIGEST: Token = 1 << 31;

/// Count of numbers. The largest token is not included: it means an unknown digest.
const NUMBERS: Token = Token::MAX - FIRST_DIGEST;

/// A token and the digest at its offset.
type TokenDigest = (Token, Vec<u8>);

#[derive(Clone, Debug)]
struct DigestEntry {
    pair: Arc<TokenDigest>,
    /// Reference count: number of places with this number.
    uses: u64,
}

/// All digests in use.
#[derive(Clone, Debug)]
pub(crate) struct Digests {
    numbers: BTreeMap<Arc<TokenDigest>, Token>,
    entries: BTreeMap<Token, DigestEntry>,
    /// Real tokens of the upper half cached before the first use of a digest.
    real: BTreeSet<Token>,
    /// Whether a digest was ever in use.
    begun: bool,
    /// Digests reserved for future writes of held leases.
    promised: usize,
    /// Range of numbers, and the maximum in use at once.
    span: Token,
    most: usize,
}

impl Default for Digests {
    fn default() -> Self {
        Self::with_room(NUMBERS, NUMBERS as usize / 2)
    }
}

impl Digests {
    fn with_room(span: Token, most: usize) -> Self {
        Self {
            numbers: BTreeMap::new(),
            entries: BTreeMap::new(),
            real: BTreeSet::new(),
            begun: false,
            promised: 0,
            span,
            most,
        }
    }

    /// Whether a digest was ever in use.
    #[must_use]
    pub(crate) fn begun(&self) -> bool {
        self.begun
    }

    /// Begins to use digests. No digest gets a number among these tokens.
    pub(crate) fn begin(&mut self, cached: impl Iterator<Item = Token>) {
        self.begun = true;
        self.real.extend(cached.filter(|&token| token >= FIRST_DIGEST));
    }

    /// Number of pairs.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no pair has a number.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Refuses tokens in the range of digests.
    ///
    /// # Errors
    /// [`Error::Config`] naming the first refused token.
    pub(crate) fn check(&self, scope: &Scope, tokens: &[Token]) -> Result<()> {
        if self.plain(scope) {
            return Ok(());
        }
        // Putting digests in place copies the tokens.
        memory::check(2 * size_of_val(tokens), || format!("a copy of {} tokens", tokens.len()))?;
        match tokens.iter().position(|&token| token >= FIRST_DIGEST) {
            Some(at) => Err(Error::config(format!(
                "token {} at {at} is not below {FIRST_DIGEST}, the limit while digests are in use",
                tokens[at]
            ))),
            None => Ok(()),
        }
    }

    /// Whether all tokens are real, because no digest is in use.
    #[must_use]
    pub(crate) fn plain(&self, scope: &Scope) -> bool {
        !self.begun && scope.extra.is_empty()
    }

    /// Refuses a lease if too few numbers are left for the digests of its commit.
    ///
    /// # Errors
    /// [`Error::Config`] if all numbers are in use or promised.
    pub(crate) fn check_room(&self, scope: &Scope) -> Result<()> {
        let wanted = scope.extra.len();
        if wanted > 0 && self.entries.len() + self.promised + wanted > self.most {
            return Err(self.crowded(wanted));
        }
        Ok(())
    }

    fn crowded(&self, wanted: usize) -> Error {
        Error::config(format!(
            "{wanted} digests, where {} are in use and {} more are promised to leases: at most {} \
             can be at once",
            self.entries.len(),
            self.promised,
            self.most
        ))
    }

    /// Reserves numbers for the digests of a lease's scope.
    pub(crate) fn promise(&mut self, scope: &Scope) {
        self.promised += scope.extra.len();
    }

    /// Undoes a [`Digests::promise`].
    pub(crate) fn retract(&mut self, scope: &Scope) {
        self.promised -= scope.extra.len();
    }

    /// Replaces tokens by the digests of `scope`. `tokens` start at offset `from`. A digest without
    /// a number becomes [`Token::MAX`], which matches nothing.
    #[must_use]
    pub(crate) fn content<'a>(
        &self,
        scope: &Scope,
        from: u64,
        tokens: &'a [Token],
    ) -> Cow<'a, [Token]> {
        let mut content = Cow::Borrowed(tokens);
        for (offset, digest) in &scope.extra {
            let Some(at) = place(*offset, from, tokens.len()) else { continue };
            let pair = (tokens[at], digest.clone());
            content.to_mut()[at] = self.numbers.get(&pair).copied().unwrap_or(Token::MAX);
        }
        content
    }

    /// Replaces tokens like [`Digests::content`], and assigns numbers to new digests. The result
    /// counts as written until it is passed to [`Digests::free`].
    ///
    /// # Errors
    /// [`Error::Config`] if all numbers are in use. Nothing has changed then.
    pub(crate) fn intern(
        &mut self,
        scope: &Scope,
        from: u64,
        tokens: &[Token],
    ) -> Result<Vec<Token>> {
        let mut content = tokens.to_vec();
        let mut new = Vec::new();
        for (offset, digest) in &scope.extra {
            let Some(at) = place(*offset, from, tokens.len()) else { continue };
            let pair = (tokens[at], digest.clone());
            match self.numbers.get(&pair) {
                Some(&number) => content[at] = number,
                None => new.push((at, Arc::new(pair))),
            }
        }
        if self.entries.len() + new.len() > self.most {
            return Err(self.crowded(new.len()));
        }
        for (at, pair) in new {
            // Two places may have the same pair.
            content[at] = self.numbers.get(&pair).copied().unwrap_or_else(|| self.draw(&pair));
        }
        self.hold(&content);
        Ok(content)
    }

    /// Counts one more copy of written tokens.
    pub(crate) fn hold(&mut self, content: &[Token]) {
        self.each(content, |entry| entry.uses += 1);
    }

    /// Counts one copy of written tokens less. Frees numbers without copies.
    pub(crate) fn free(&mut self, content: &[Token]) {
        self.each(content, |entry| entry.uses -= 1);
    }

    fn each(&mut self, content: &[Token], change: impl Fn(&mut DigestEntry)) {
        if self.entries.is_empty() {
            return;
        }
        for &number in content.iter().filter(|&&token| token >= FIRST_DIGEST) {
            // A token without an entry is a real token.
            let Some(entry) = self.entries.get_mut(&number) else { continue };
            change(entry);
            if entry.uses == 0 {
                self.numbers.remove(&entry.pair);
                self.entries.remove(&number);
            }
        }
    }

    /// Assigns a free number to a new pair, by linear probing from its hash.
    fn draw(&mut self, pair: &Arc<TokenDigest>) -> Token {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&pair.0.to_le_bytes());
        hasher.update(&pair.1);
        let hash = *hasher.finalize().as_bytes().first_chunk().expect("32 bytes");
        let first = u64::from_le_bytes(hash) % u64::from(self.span);
        let mut at = Token::try_from(first).expect("below the span");
        let number = loop {
            let number = FIRST_DIGEST + at;
            if !self.entries.contains_key(&number) && !self.real.contains(&number) {
                break number;
            }
            at = (at + 1) % self.span;
        };
        self.entries.insert(number, DigestEntry { pair: pair.clone(), uses: 0 });
        self.numbers.insert(pair.clone(), number);
        number
    }

    /// The token and digest of a number, or `None` for a real token.
    #[must_use]
    pub(crate) fn pair(&self, token: Token) -> Option<&(Token, Vec<u8>)> {
        if token < FIRST_DIGEST {
            return None;
        }
        self.entries.get(&token).map(|entry| &*entry.pair)
    }

    /// The content with each number replaced by its token.
    #[must_use]
    pub(crate) fn tokens(&self, content: Vec<Token>) -> Vec<Token> {
        let token = |&token: &Token| self.pair(token).map_or(token, |pair| pair.0);
        if self.entries.is_empty() { content } else { content.iter().map(token).collect() }
    }

    /// Broken invariants. `written` has all tokens written anywhere, and `promised` is the number
    /// of digests of all leases.
    #[must_use]
    pub(crate) fn audit(
        &self,
        written: impl Iterator<Item = Token>,
        promised: usize,
    ) -> Vec<String> {
        let mut broken = Vec::new();
        let mut seen: BTreeMap<Token, u64> = BTreeMap::new();
        for token in written.filter(|&token| token >= FIRST_DIGEST) {
            if self.entries.contains_key(&token) {
                *seen.entry(token).or_default() += 1;
            } else if self.begun && !self.real.contains(&token) {
                broken.push(format!("number {token} is written and has no digest"));
            }
        }
        for (number, entry) in &self.entries {
            let written = seen.get(number).copied().unwrap_or(0);
            if written != entry.uses || written == 0 {
                broken.push(format!("digest {number} counts {} uses of {written}", entry.uses));
            }
            if self.numbers.get(&entry.pair) != Some(number) || self.real.contains(number) {
                broken.push(format!("digest {number} is not found by its token and bytes"));
            }
        }
        if (self.numbers.len(), self.promised) != (self.entries.len(), promised) {
            broken.push(format!(
                "{} digests are found of {}, {} are promised of {promised}",
                self.numbers.len(),
                self.entries.len(),
                self.promised
            ));
        }
        broken
    }
}

fn place(offset: u64, from: u64, len: usize) -> Option<usize> {
    let at = usize::try_from(offset.checked_sub(from)?).ok()?;
    (at < len).then_some(at)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{Digests, FIRST_DIGEST};
    use crate::block::Token;
    use crate::scope::Scope;

    fn scope(extra: &[(u64, u8)]) -> Scope {
        let extra = extra.iter().map(|&(at, digest)| (at, vec![digest])).collect();
        Scope { extra, ..Scope::default() }
    }

    #[test]
    fn a_digest_changes_only_its_own_position() {
        let mut digests = Digests::default();
        let scope = scope(&[(5, 1)]);
        assert_eq!(digests.content(&scope, 4, &[7, 8])[..], [7, Token::MAX]);
        let content = digests.intern(&scope, 4, &[7, 8]).unwrap();
        assert!(content[0] == 7 && content[1] >= FIRST_DIGEST);
        assert_eq!(digests.content(&scope, 4, &[7, 8])[..], content);
        assert_eq!(digests.pair(content[1]), Some(&(8, vec![1])));
        assert_eq!(digests.tokens(content.clone()), [7, 8]);
        digests.begin(std::iter::empty());
        assert!(digests.check(&Scope::default(), &[FIRST_DIGEST]).is_err());
        digests.free(&content);
        assert!(digests.is_empty());
    }

    #[test]
    fn a_digest_that_comes_back_has_the_number_that_it_had() {
        let mut digests = Digests::default();
        let mut number = |digest: u8| {
            let content = digests.intern(&scope(&[(0, digest)]), 0, &[3]).unwrap();
            digests.free(&content);
            content[0]
        };
        let first: Vec<Token> = (0..50).map(&mut number).collect();
        let again: Vec<Token> = (0..50).rev().map(&mut number).collect();
        assert_eq!(first, again.into_iter().rev().collect::<Vec<_>>());
    }

    #[test]
    fn leases_are_refused_while_all_digests_are_in_use() {
        let mut digests = Digests::with_room(8, 3);
        let two = scope(&[(0, 1), (1, 2)]);
        assert!(digests.check_room(&two).is_ok());
        digests.promise(&two);
        let said = digests.check_room(&two).unwrap_err().to_string();
        assert!(said.contains("2 digests, where 0 are in use and 2 more are promised"), "{said}");
        let content = digests.intern(&two, 0, &[5, 5]).unwrap();
        digests.retract(&two);
        assert!(digests.check_room(&two).is_err() && digests.check_room(&scope(&[(0, 3)])).is_ok());
        assert!(digests.intern(&scope(&[(0, 3), (1, 4)]), 0, &[5, 5]).is_err());
        assert_eq!(digests.len(), 2, "a refused call has changed nothing");
        digests.free(&content);
        assert!(digests.check_room(&two).is_ok());
    }

    proptest! {
        /// Compares with a list of all written tokens. There are few numbers, so hashes often
        /// collide.
        #[test]
        fn a_number_stands_for_one_pair_as_long_as_it_is_written(
            real in prop::collection::vec(0..8_u32, 0..3),
            ops in prop::collection::vec((0..4_u8, 0..3_u32, 0..6_u8, any::<prop::sample::Index>()), 1..60),
        ) {
            let mut digests = Digests::with_room(8, 5);
            digests.begin(real.iter().map(|at| FIRST_DIGEST + at));
            let mut written: Vec<((u32, u8), Vec<Token>)> = Vec::new();
            for (kind, token, digest, which) in ops {
                let (mine, pair) = (scope(&[(1, digest)]), (token, digest));
                let living: BTreeMap<(u32, u8), Token> =
                    written.iter().map(|(pair, content)| (*pair, content[1])).collect();
                match kind {
                    0 | 1 => match digests.intern(&mine, 0, &[9, token, 9]) {
                        Ok(content) => {
                            let number = living.get(&pair);
                            prop_assert!(number.is_none_or(|&number| number == content[1]));
                            let taken = living.iter().any(|(other, &number)| *other != pair && number == content[1]);
                            prop_assert!(!taken && !real.contains(&(content[1] - FIRST_DIGEST)));
                            written.push((pair, content));
                        }
                        Err(_) => prop_assert!(living.len() == 5 && !living.contains_key(&pair)),
                    },
                    2 if !written.is_empty() => {
                        let copy = which.get(&written).clone();
                        digests.hold(&copy.1);
                        written.push(copy);
                    }
                    _ if !written.is_empty() => {
                        let gone = written.swap_remove(which.index(written.len()));
                        digests.free(&gone.1);
                    }
                    _ => {}
                }
                let all = written.iter().flat_map(|(_, content)| content.iter().copied());
                prop_assert_eq!(digests.audit(all, 0), Vec::<String>::new());
                for (pair, content) in &written {
                    prop_assert_eq!(digests.pair(content[1]), Some(&(pair.0, vec![pair.1])));
                    let (mine, tokens) = (scope(&[(1, pair.1)]), [9, pair.0, 9]);
                    prop_assert_eq!(&digests.content(&mine, 0, &tokens)[..], &content[..]);
                }
            }
        }
    }
}
