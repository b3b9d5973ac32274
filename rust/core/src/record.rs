//! Record: block metadata kept in a store next to the bytes. With it, any manager can find and
//! verify the block and insert it into its trie.
//!
//! Keys are chained as in a Merkle tree: a block's key is the hash of its parent's key and its own
//! content, and the first block's parent is its scope. A record therefore proves itself: it belongs
//! to the block if and only if its hash is the key it is stored under. Invariant: equal content
//! gives equal keys on every machine and in every process. Decoding accepts exactly the output of
//! encoding. Cost: a hash of about `4 * block_tokens` bytes.

use smallvec::SmallVec;

use crate::block::{Structure, Token};
use crate::hint::{HIGHEST, Priority};
use crate::time::Nanos;

/// Key of a block, or a scope, in stores and between machines: a cryptographic hash.
pub type BlockKey = [u8; 32];

/// Tenant that computed a block, as a keyed hash.
pub type Producer = u64;

const VERSION: u8 = 1;

/// Scope of a first block and of all blocks after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeOwner {
    /// The tenant's salt.
    pub tenant: Vec<u8>,
    /// The adapter's name.
    pub lora: String,
    /// Whether holes are allowed, if set. Not part of the key.
    pub structure: Option<Structure>,
}

/// Policy inputs of a block at the time of its write.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Nanoseconds since its last use.
    pub age: Nanos,
    /// Number of uses.
    pub uses: u32,
    /// Blocks of its session. 0 without a session.
    pub session_blocks: u32,
    /// Priority by hints, if any.
    pub wanted: Option<Wanted>,
    /// User-defined price per token, finite and above 0, if any.
    pub cost: Option<f64>,
}

/// The price if it is finite and above 0.
#[must_use]
pub fn sound(cost: f64) -> Option<f64> {
    (cost.is_finite() && cost > 0.0).then_some(cost)
}

/// Priority of a block, with its time to live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Priority.
    pub priority: Priority,
    /// Time to live in nanoseconds. [`Nanos::MAX`] means forever.
    pub ttl: Nanos,
}

impl Wanted {
    /// Stored form: the priority plus 1, or 0 for none, and the time to live.
    #[must_use]
    pub fn encode(wanted: Option<Self>) -> (u8, Nanos) {
        wanted.map_or((0, Nanos::MAX), |wanted| (wanted.priority.saturating_add(1), wanted.ttl))
    }

    /// Inverse of [`Wanted::encode`]. `None` if expired or not set.
    #[must_use]
    pub fn found((kept, ttl): (u8, Nanos)) -> Option<Self> {
        let priority = kept.checked_sub(1)?.min(HIGHEST);
        (ttl > 0).then_some(Self { priority, ttl })
    }
}

/// Label of a block in a store: its record and its policy inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Label {
    /// Content and place.
    pub record: Record,
    /// Policy inputs.
    pub usage: Usage,
}

/// Content of one block and its place, by the key of its parent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Key of the previous block, or of the scope for a first block.
    pub parent: BlockKey,
    /// Scope, for the first block of a scope.
    pub scope: Option<Box<ScopeOwner>>,
    /// Tokens.
    pub tokens: Vec<Token>,
    /// Digests of non-token input, each with its offset in the block.
    pub digests: Vec<(u32, Vec<u8>)>,
    /// Tenants allowed to match the block until it is shared. Not part of the key.
    pub producers: Option<Vec<Producer>>,
}

/// Key of a scope, the parent of its first blocks.
#[must_use]
pub fn scope_key(fingerprint: &str, block_tokens: u32, tenant: &[u8], lora: &str) -> BlockKey {
    let mut hasher = blake3::Hasher::new();
    for part in [fingerprint.as_bytes(), tenant, lora.as_bytes()] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.update(&block_tokens.to_le_bytes());
    *hasher.finalize().as_bytes()
}

/// Keys of the full blocks of a sequence of plain tokens, chained to the key of its scope. Hashed
/// lazily.
pub fn keys_of(
    scope: BlockKey,
    tokens: &[Token],
    block_tokens: usize,
) -> impl Iterator<Item = BlockKey> + '_ {
    keys_with(scope, tokens, block_tokens, Vec::new())
}

/// [`keys_of`] for a sequence with digests at token offsets, in any order.
pub(crate) fn keys_with(
    scope: BlockKey,
    tokens: &[Token],
    block_tokens: usize,
    mut digests: Vec<(u64, Vec<u8>)>,
) -> impl Iterator<Item = BlockKey> + '_ {
    digests.sort_by_key(|digest| digest.0);
    let mut digests = digests.into_iter().peekable();
    let blocks = tokens.chunks_exact(block_tokens).zip((0_u64..).step_by(block_tokens));
    blocks.scan(scope, move |parent, (tokens, start)| {
        let mut own = Vec::new();
        while let Some((at, digest)) = digests.next_if(|next| next.0 < start + tokens.len() as u64)
        {
            own.push((u32::try_from(at - start).expect("an offset in a block"), digest));
        }
        *parent = chained(*parent, tokens, &own);
        Some(*parent)
    })
}

/// Key of a block from its content.
pub(crate) fn chained(parent: BlockKey, tokens: &[Token], digests: &[(u32, Vec<u8>)]) -> BlockKey {
    // A single buffer, mostly on the stack: hashing piece by piece takes twice as long.
    let mut bytes: SmallVec<[u8; 128]> = SmallVec::from_elem(0, 40 + 4 * tokens.len());
    let (head, rest) = bytes.split_at_mut(40);
    head[..32].copy_from_slice(&parent);
    head[32..].copy_from_slice(&(tokens.len() as u64).to_le_bytes());
    for (four, token) in rest.chunks_exact_mut(4).zip(tokens) {
        four.copy_from_slice(&token.to_le_bytes());
    }
    for (offset, digest) in digests {
        bytes.extend_from_slice(&offset.to_le_bytes());
        bytes.extend_from_slice(&(digest.len() as u64).to_le_bytes());
        bytes.extend_from_slice(digest);
    }
    *blake3::hash(&bytes).as_bytes()
}

impl Record {
    /// The key of the block.
    #[must_use]
    pub fn key(&self) -> BlockKey {
        chained(self.parent, &self.tokens, &self.digests)
    }

    /// The record as bytes. Numbers are little-endian.
    ///
    /// - version `u8`
    /// - scope `u8`: 0 none, 1 follows, 2 follows and is leaf-only, 3 follows and may have holes
    /// - number of producers plus 1 as `u16`, or 0 without a list
    /// - number of digests `u32`, number of tokens `u32`
    /// - parent, tokens, producers `u64`
    /// - per digest: offset `u32`, length `u32`, bytes
    /// - tenant and adapter, each preceded by its length `u32`
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + 4 * self.tokens.len());
        out.extend([VERSION, self.scope.as_ref().map_or(0, |owner| form(owner.structure))]);
        let listed = self.producers.as_ref().map_or(0, |all| all.len() + 1);
        out.extend(u16::try_from(listed).unwrap_or(u16::MAX).to_le_bytes());
        out.extend(length(self.digests.len()));
        out.extend(length(self.tokens.len()));
        out.extend(self.parent);
        out.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        out.extend(self.producers.iter().flatten().flat_map(|one| one.to_le_bytes()));
        for (offset, digest) in &self.digests {
            out.extend(offset.to_le_bytes());
            out.extend(length(digest.len()));
            out.extend(digest);
        }
        if let Some(owner) = &self.scope {
            for part in [owner.tenant.as_slice(), owner.lora.as_bytes()] {
                out.extend(length(part.len()));
                out.extend(part);
            }
        }
        out
    }

    /// Inverse of [`Record::encode`]. `None` for malformed bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let [version, scoped, low, high] = *take(&mut rest, 4)? else { return None };
        let digests = number(&mut rest)?;
        let tokens = number(&mut rest)?;
        let parent = take(&mut rest, 32)?.try_into().ok()?;
        let tokens = take(&mut rest, tokens.checked_mul(4)?)?
            .chunks_exact(4)
            .map(|four| Token::from_le_bytes([four[0], four[1], four[2], four[3]]))
            .collect();
        let producers = match u16::from_le_bytes([low, high]).checked_sub(1) {
            None => None,
            Some(listed) => Some(numbers(&mut rest, listed.into())?),
        };
        let digests = (0..digests)
            .map(|_| {
                let offset = u32::try_from(number(&mut rest)?).ok()?;
                let length = number(&mut rest)?;
                Some((offset, take(&mut rest, length)?.to_vec()))
            })
            .collect::<Option<_>>()?;
        let mut part = || {
            let length = number(&mut rest)?;
            take(&mut rest, length)
        };
        let mut owner = |structure| {
            let tenant = part()?.to_vec();
            let lora = String::from_utf8(part()?.to_vec()).ok()?;
            Some(Box::new(ScopeOwner { tenant, lora, structure }))
        };
        let scope = match scoped {
            0 => None,
            1 => Some(owner(None)?),
            2 => Some(owner(Some(Structure::LeafOnly))?),
            3 => Some(owner(Some(Structure::Holes))?),
            _ => return None,
        };
        let known = version == VERSION && rest.is_empty();
        known.then_some(Self { parent, scope, tokens, digests, producers })
    }
}

impl Label {
    /// The label as bytes: age `u64`, time to live `u64`, uses `u32`, blocks of the session `u32`,
    /// priority `u8` as in [`Wanted::encode`], 1 or 0 as `u8` with or without a cost, six zero
    /// bytes, the cost as a float if present, then the record.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let Usage { age, uses, session_blocks, wanted, cost } = self.usage;
        let (priority, ttl) = Wanted::encode(wanted);
        let mut out = age.to_le_bytes().to_vec();
        out.extend(ttl.to_le_bytes());
        out.extend(uses.to_le_bytes());
        out.extend(session_blocks.to_le_bytes());
        out.extend([priority, u8::from(cost.is_some()), 0, 0, 0, 0, 0, 0]);
        out.extend(cost.iter().flat_map(|cost| cost.to_le_bytes()));
        out.extend(self.record.encode());
        out
    }

    /// Inverse of [`Label::encode`]. `None` for malformed bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let mut eight = || Some(Nanos::from_le_bytes(take(&mut rest, 8)?.try_into().ok()?));
        let (age, ttl) = (eight()?, eight()?);
        let mut four = || Some(u32::from_le_bytes(take(&mut rest, 4)?.try_into().ok()?));
        let (uses, session_blocks) = (four()?, four()?);
        let [priority, priced, 0, 0, 0, 0, 0, 0] = *take(&mut rest, 8)? else { return None };
        let cost = match priced {
            0 => None,
            1 => Some(sound(f64::from_le_bytes(take(&mut rest, 8)?.try_into().ok()?))?),
            _ => return None,
        };
        let wanted = Wanted::found((priority, ttl));
        let record = Record::decode(rest)?;
        Some(Self { record, usage: Usage { age, uses, session_blocks, wanted, cost } })
    }
}

fn form(structure: Option<Structure>) -> u8 {
    match structure {
        None => 1,
        Some(Structure::LeafOnly) => 2,
        Some(Structure::Holes) => 3,
    }
}

/// A length as stored. Nothing longer than 4 GiB reaches a record.
fn length(len: usize) -> [u8; 4] {
    u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes()
}

fn number(rest: &mut &[u8]) -> Option<usize> {
    let bytes = take(rest, 4)?.try_into().ok()?;
    usize::try_from(u32::from_le_bytes(bytes)).ok()
}

/// Numbers of eight bytes.
fn numbers(rest: &mut &[u8], count: usize) -> Option<Vec<Producer>> {
    let bytes = take(rest, count.checked_mul(8)?)?.chunks_exact(8);
    Some(bytes.map(|eight| Producer::from_le_bytes(eight.try_into().expect("8 bytes"))).collect())
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(length)?;
    *rest = left;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Label, Record, ScopeOwner, Usage, Wanted, keys_with, scope_key};
    use crate::block::Structure;

    fn records() -> impl Strategy<Value = Record> {
        let digest = (any::<u32>(), prop::collection::vec(any::<u8>(), 0..9));
        let structure =
            prop::sample::select(vec![None, Some(Structure::LeafOnly), Some(Structure::Holes)]);
        let scope = (prop::collection::vec(any::<u8>(), 0..5), "[a-z]{0,4}", structure)
            .prop_map(|(tenant, lora, structure)| Box::new(ScopeOwner { tenant, lora, structure }));
        (
            any::<[u8; 32]>(),
            prop::option::of(scope),
            prop::collection::vec(any::<u32>(), 0..20),
            prop::collection::vec(digest, 0..4),
            prop::option::of(prop::collection::vec(any::<u64>(), 0..4)),
        )
            .prop_map(|(parent, scope, tokens, digests, producers)| Record {
                parent,
                scope,
                tokens,
                digests,
                producers,
            })
    }

    proptest! {
        #[test]
        fn decoding_is_the_inverse_of_encoding(
            record in records(), age in any::<u64>(), uses in any::<u32>(),
        ) {
            let bytes = record.encode();
            prop_assert_eq!(Record::decode(&bytes), Some(record.clone()));
            for cut in 0..bytes.len() {
                prop_assert_eq!(Record::decode(&bytes[..cut]), None);
            }
            let wanted = (uses % 3 > 0).then_some(Wanted {
                priority: u8::try_from(uses % 101).expect("at most 100"),
                ttl: age.max(1),
            });
            let cost = (uses % 2 > 0).then(|| f64::from(uses) / 7.0);
            let usage = Usage { age, uses, session_blocks: !uses, wanted, cost };
            let label = Label { record, usage };
            prop_assert_eq!(Label::decode(&label.encode()), Some(label));
        }

        #[test]
        fn decoding_any_bytes_is_safe(bytes in prop::collection::vec(any::<u8>(), 0..99)) {
            if let Some(record) = Record::decode(&bytes) {
                prop_assert_eq!(record.encode(), bytes);
            }
        }

        #[test]
        fn keys_of_a_sequence_are_those_of_its_records(
            tokens in prop::collection::vec(0_u32..9, 0..30),
            digests in prop::collection::btree_map(0_u64..40, any::<u8>(), 0..6),
            size in 1_usize..6,
        ) {
            let given: Vec<_> = digests.iter().rev().map(|(&at, &one)| (at, vec![one])).collect();
            let mut parent = scope_key("model", 4, b"", "");
            let found: Vec<_> = keys_with(parent, &tokens, size, given).collect();
            prop_assert_eq!(found.len(), tokens.len() / size);
            for (block, (key, tokens)) in found.iter().zip(tokens.chunks_exact(size)).enumerate() {
                let start = (block * size) as u64;
                let own = digests.range(start..start + size as u64);
                let own = own.map(|(&at, &one)| (u32::try_from(at - start).unwrap(), vec![one]));
                let digests = own.collect();
                let tokens = tokens.to_vec();
                let record = Record { parent, tokens, digests, ..Record::default() };
                prop_assert_eq!(*key, record.key());
                parent = record.key();
            }
        }

        #[test]
        fn different_content_has_different_keys(a in records(), b in records()) {
            let content = |r: &Record| (r.parent, r.tokens.clone(), r.digests.clone());
            prop_assert_eq!(a.key() == b.key(), content(&a) == content(&b));
        }
    }

    #[test]
    fn a_digest_cannot_pass_for_a_token() {
        let record = |tokens: &[u32], digests: &[(u32, &[u8])]| Record {
            parent: [0; 32],
            scope: None,
            tokens: tokens.to_vec(),
            digests: digests.iter().map(|&(at, digest)| (at, digest.to_vec())).collect(),
            producers: None,
        };
        let (seven, eight) = (7_u32.to_le_bytes(), 8_u32.to_le_bytes());
        let digested = record(&[1, 2], &[(0, &seven), (1, &eight)]);
        assert_ne!(digested.key(), record(&[1, 7], &[(1, &eight)]).key());
        assert_ne!(digested.key(), record(&[1, 2], &[(0, &eight), (1, &seven)]).key());
    }

    #[test]
    fn keys_are_the_same_in_every_process() {
        let parent = scope_key("model", 4, b"tenant", "");
        assert_eq!(hex(&parent), "58e4266b");
        let record = Record { parent, tokens: vec![1, 2, 3, 4], ..Record::default() };
        assert_eq!(hex(&record.key()), "b738cf4c");
        assert_ne!(parent, scope_key("model", 4, b"", "tenant"));
    }

    fn hex(key: &super::BlockKey) -> String {
        format!("{:08x}", u32::from_be_bytes([key[0], key[1], key[2], key[3]]))
    }
}
