//! Table entry of a slot: its block and the checksum of its bytes.
//!
//! ```text
//!   0 generation * 4 + state (0 empty, 1 writing, 2 sealed)  8 checksum of 16..32 and the record
//!   16 checksum of the layers  24 layers.lo  26 layers.hi  28 record length
//!   32 metadata: wall clock  40 age  48 ttl  56 cost  64 uses  68 session blocks  72 priority
//!   73 zero  80 checksum of 32..80  88 zero  96 record
//! ```
//!
//! Invariant: the first checksum is seeded with identity, slot and the word at 0, so an entry is
//! good only in its slot, file and generation. The metadata changes while the entry is sealed and
//! has a separate checksum: torn metadata loses age and uses, not the block. Cost: a hash of about
//! 200 bytes.

use kvtrie_core::{Layers, Record};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::head::ENTRY_FIXED;
use crate::meta::Meta;
use crate::page::{half, word};

pub(super) const EMPTY: u64 = 0;
pub(super) const WRITING: u64 = 1;
pub(super) const SEALED: u64 = 2;
pub(super) const USAGE: usize = 32;
const USAGE_END: usize = 80;

/// Word of a generation and a state.
pub(super) const fn joined(generation: u64, state: u64) -> u64 {
    (generation << 2) | state
}

/// Generation and state of a word.
pub(super) const fn split(word: u64) -> (u64, u64) {
    (word >> 2, word & 3)
}

/// A good entry.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) record: Record,
    pub(super) layers: Layers,
    pub(super) sum: u64,
    pub(super) stamp: u64,
    pub(super) meta: Meta,
}

fn sum(entry: &[u8], record: &[u8], seed: u64) -> u64 {
    xxh3_64_with_seed(record, xxh3_64_with_seed(&entry[16..USAGE], seed))
}

/// Encoded metadata.
pub(super) fn usage(meta: &Meta, stamp: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(USAGE_END + 8 - USAGE);
    for number in [stamp, meta.age, meta.ttl, meta.cost.to_bits()] {
        out.extend(number.to_le_bytes());
    }
    out.extend(meta.uses.to_le_bytes());
    out.extend(meta.session_blocks.to_le_bytes());
    out.extend([meta.priority, 0, 0, 0, 0, 0, 0, 0]);
    out.extend(xxh3_64_with_seed(&out, 0).to_le_bytes());
    out
}

/// Encode an entry, without its word.
pub(super) fn encode(
    seed: u64,
    layers: Layers,
    layers_sum: u64,
    record: &[u8],
    meta: &Meta,
    stamp: u64,
) -> Vec<u8> {
    let mut out = vec![0; 16];
    out.extend(layers_sum.to_le_bytes());
    out.extend(layers.lo.to_le_bytes());
    out.extend(layers.hi.to_le_bytes());
    out.extend(u32::try_from(record.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend(usage(meta, stamp));
    out.resize(ENTRY_FIXED, 0);
    out.extend(record);
    let sum = sum(&out, record, seed);
    out[8..16].copy_from_slice(&sum.to_le_bytes());
    out.drain(..8);
    out
}

/// Record length in an entry's fixed part. `None` if out of range.
pub(super) fn record_length(fixed: &[u8], most: usize) -> Option<usize> {
    let length = half(fixed, 28) as usize;
    (length <= most).then_some(length)
}

/// Decode an entry from its fixed part and its record, if it is good.
pub(super) fn decode(fixed: &[u8], record: &[u8], seed: u64) -> Option<Entry> {
    if sum(fixed, record, seed) != word(fixed, 8) {
        return None;
    }
    let number = |at: usize| u16::from_le_bytes([fixed[at], fixed[at + 1]]);
    let usage = &fixed[USAGE..USAGE_END];
    let whole = xxh3_64_with_seed(usage, 0) == word(fixed, USAGE_END);
    let (stamp, meta) = if whole {
        let cost = f64::from_bits(word(usage, 24));
        let meta = Meta {
            age: word(usage, 8),
            ttl: word(usage, 16),
            cost,
            uses: half(usage, 32),
            session_blocks: half(usage, 36),
            priority: usage[40],
        };
        (word(usage, 0), meta)
    } else {
        (u64::MAX, Meta::default())
    };
    Some(Entry {
        record: Record::decode(record)?,
        layers: Layers::new(number(24), number(26)),
        sum: word(fixed, 16),
        stamp,
        meta,
    })
}
