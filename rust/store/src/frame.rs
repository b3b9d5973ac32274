//! Binary format of the manifest: header and frames, little-endian.
//!
//! ```text
//!   header  0 magic  8 checksum of 16..  16 version  20 length  24 identity  56 sequence
//!           64 layer_bytes  72 header page bytes  76 blocks  80 block_tokens  84 layers
//!           86 zero  88 about length  92 zero  96 about, zeros to 8
//!   frame   0 magic  4 length  8 checksum of 16..  16 sequence  24 slot  28 kind (1 PUT, 2 FREE)
//!           29 priority  30 zero                                          FREE ends here, at 32
//!           32 key  64 wall clock  72 age  80 ttl  88 cost  96 uses  100 session blocks
//!           104 layers.lo  106 layers.hi  108 record length  112 record, zeros to 8
//! ```
//!
//! Invariant: a frame is valid only if complete and in a manifest of its identity, used as the seed
//! of the checksums. Of two frames of a slot the higher sequence wins, in any order. With equal
//! sequences, where only metadata differs, the later frame wins. Cost: a hash per frame of about
//! 200 bytes.

use kvtrie_core::{BlockKey, Layers};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::meta::Meta;
use crate::page::{half, word};
use crate::settings::{Durability, HEAD_FIXED, PUT_FIXED, Settings};

const HEAD: [u8; 8] = *b"kvtrieM1";
const FRAME: [u8; 4] = *b"kvF1";
const PUT: u8 = 1;
const FREE: u8 = 2;

/// Version of the format.
pub(crate) const VERSION: u32 = 1;

/// Length of a FREE frame, the shortest frame.
pub(crate) const SMALLEST: usize = 32;

/// PUT frame: a block in a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Put<'a> {
    pub(crate) slot: u32,
    pub(crate) sequence: u64,
    pub(crate) layers: Layers,
    /// Wall clock of `meta`, in nanoseconds.
    pub(crate) stamp: u64,
    pub(crate) meta: Meta,
    pub(crate) key: BlockKey,
    pub(crate) record: &'a [u8],
}

/// A frame.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Frame<'a> {
    Put(Put<'a>),
    Free { slot: u32, sequence: u64 },
}

fn begin(out: &mut Vec<u8>, sequence: u64, slot: u32, kind: u8) -> usize {
    let start = out.len();
    out.extend(FRAME);
    out.extend([0; 12]);
    out.extend(sequence.to_le_bytes());
    out.extend(slot.to_le_bytes());
    out.extend([kind, 0, 0, 0]);
    start
}

fn end(out: &mut Vec<u8>, start: usize, seed: u64) -> u32 {
    out.resize(start + (out.len() - start).next_multiple_of(8), 0);
    let length = u32::try_from(out.len() - start).unwrap_or(u32::MAX);
    // The length is outside the hashed bytes, so it goes into the seed.
    let sum = xxh3_64_with_seed(&out[start + 16..], seed ^ u64::from(length));
    out[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
    out[start + 8..start + 16].copy_from_slice(&sum.to_le_bytes());
    length
}

/// Append a PUT frame. Returns its length.
pub(crate) fn put(out: &mut Vec<u8>, seed: u64, put: &Put<'_>) -> u32 {
    let start = begin(out, put.sequence, put.slot, PUT);
    out[start + 29] = put.meta.priority;
    out.extend(put.key);
    for number in [put.stamp, put.meta.age, put.meta.ttl, put.meta.cost.to_bits()] {
        out.extend(number.to_le_bytes());
    }
    out.extend(put.meta.uses.to_le_bytes());
    out.extend(put.meta.session_blocks.to_le_bytes());
    out.extend(put.layers.lo.to_le_bytes());
    out.extend(put.layers.hi.to_le_bytes());
    out.extend(u32::try_from(put.record.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend(put.record);
    end(out, start, seed)
}

/// Append a FREE frame. Returns its length.
pub(crate) fn free(out: &mut Vec<u8>, seed: u64, slot: u32, sequence: u64) -> u32 {
    let start = begin(out, sequence, slot, FREE);
    end(out, start, seed)
}

/// Stated length of a frame at the start of `bytes`, if a frame can start there.
pub(crate) fn stated(bytes: &[u8]) -> Option<usize> {
    let length = (bytes.len() >= SMALLEST && bytes[..4] == FRAME).then(|| half(bytes, 4))?;
    (length as usize >= SMALLEST && length % 8 == 0).then_some(length as usize)
}

/// Decode a valid frame at the start of `bytes`. Returns it with its length.
pub(crate) fn decode(bytes: &[u8], seed: u64) -> Option<(Frame<'_>, usize)> {
    let length = stated(bytes)?;
    let bytes = bytes.get(..length)?;
    if xxh3_64_with_seed(&bytes[16..], seed ^ length as u64) != word(bytes, 8) {
        return None;
    }
    let (sequence, slot) = (word(bytes, 16), half(bytes, 24));
    match bytes[28] {
        FREE => Some((Frame::Free { slot, sequence }, length)),
        PUT if length >= PUT_FIXED => {
            let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
            let record = PUT_FIXED;
            let record = bytes.get(record..record.checked_add(half(bytes, 108) as usize)?)?;
            let meta = Meta {
                age: word(bytes, 72),
                ttl: word(bytes, 80),
                priority: bytes[29],
                cost: f64::from_bits(word(bytes, 88)),
                uses: half(bytes, 96),
                session_blocks: half(bytes, 100),
            };
            let put = Put {
                slot,
                sequence,
                layers: Layers::new(number(104), number(106)),
                stamp: word(bytes, 64),
                meta,
                key: std::array::from_fn(|at| bytes[32 + at]),
                record,
            };
            Some((Frame::Put(put), length))
        }
        _ => None,
    }
}

/// Encode the manifest's header. All later sequences are above `sequence`.
pub(crate) fn head(settings: &Settings, sequence: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(settings.head_bytes());
    let length = u32::try_from(settings.head_bytes()).unwrap_or(u32::MAX);
    out.extend(HEAD);
    out.extend([0; 8]);
    out.extend(VERSION.to_le_bytes());
    out.extend(length.to_le_bytes());
    out.extend(settings.identity);
    out.extend(sequence.to_le_bytes());
    out.extend((settings.layer_bytes as u64).to_le_bytes());
    out.extend(u32::try_from(settings.header_bytes()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend(settings.blocks.to_le_bytes());
    out.extend(settings.block_tokens.to_le_bytes());
    out.extend(settings.layers.to_le_bytes());
    out.extend([0; 2]);
    out.extend(u32::try_from(settings.about.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend([0; 4]);
    out.extend(settings.about.as_bytes());
    out.resize(settings.head_bytes(), 0);
    let sum = xxh3_64(&out[16..]);
    out[8..16].copy_from_slice(&sum.to_le_bytes());
    out
}

/// Result of reading a manifest's header.
#[derive(Debug)]
pub(crate) enum Head {
    /// Valid header with the highest sequence before it and its length.
    Good(Box<Settings>, u64, usize),
    /// Valid header of a different format version.
    Version(u32),
    /// Valid header of a store in two folders.
    TwoFolders,
    /// No valid header, with the reason.
    Bad(String),
}

/// Stated length of a header at the start of `bytes`, if any.
pub(crate) fn head_length(bytes: &[u8]) -> Option<usize> {
    let known = bytes.len() >= HEAD_FIXED && bytes[..8] == HEAD;
    known.then(|| half(bytes, 20) as usize).filter(|&length| length >= HEAD_FIXED)
}

/// Decode the header at the start of `bytes`.
pub(crate) fn decode_head(bytes: &[u8]) -> Head {
    let Some(bytes) = head_length(bytes).and_then(|length| bytes.get(..length)) else {
        return Head::Bad("no complete header".into());
    };
    if xxh3_64(&bytes[16..]) != word(bytes, 8) {
        return Head::Bad("wrong checksum of the header".into());
    }
    let version = half(bytes, 16);
    if version != VERSION {
        return Head::Version(version);
    }
    // Earlier versions supported a second folder, with the length of its path in these bytes.
    if bytes[86..88] != [0; 2] {
        return Head::TwoFolders;
    }
    let about = bytes.get(HEAD_FIXED..HEAD_FIXED + half(bytes, 88) as usize);
    let about = about.and_then(|about| String::from_utf8(about.to_vec()).ok());
    let layer_bytes = usize::try_from(word(bytes, 64));
    let (Some(about), Ok(layer_bytes)) = (about, layer_bytes) else {
        return Head::Bad("wrong lengths in the header".into());
    };
    let settings = Settings {
        identity: std::array::from_fn(|at| bytes[24 + at]),
        about,
        layers: u16::from_le_bytes([bytes[84], bytes[85]]),
        layer_bytes,
        block_tokens: half(bytes, 80),
        blocks: half(bytes, 76),
        durability: Durability::default(),
    };
    let pages = half(bytes, 72);
    if settings.check().is_err() || settings.header_bytes() != pages as usize {
        return Head::Bad(format!("header pages of {pages} bytes do not fit its numbers"));
    }
    Head::Good(Box::new(settings), word(bytes, 56), bytes.len())
}
