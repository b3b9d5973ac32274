//! Values of a shared store: a header, then the layers of a block at fixed offsets.
//!
//! ```text
//!   0 magic  8 checksum of 24..  24 version  28 check  32 layers  36 record length
//!  40 bytes of a layer  48 name  80 checksum per layer, 16 bytes each
//!     then the record, zeros to whole pages, then the layers
//! ```
//!
//! Checksums are XXH3-128, or keyed BLAKE3-128 with a secret, for a store writable by third
//! parties. Invariant: a value is accepted only under its name, with a record hashing to the
//! block's key and with every requested layer unchanged. Lengths are compared before use. Equal
//! blocks give equal values. Cost: a hash of the header and of each layer.

use kvtrie_core::{BlockKey, Layers, Record};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, Result};
use crate::page::{half, word};
use crate::settings::{PAGE, RECORD_ROOM, hex, small};

pub(crate) const MAGIC: [u8; 8] = *b"kvtrieV1";
const VERSION: u32 = 1;

/// Bytes before the checksums of the layers.
const FIXED: usize = 80;

/// Bytes needed by [`name_in`].
pub(crate) const HEAD: usize = FIXED;

/// Bytes of a checksum.
const SUM: usize = 16;

/// Name in the first bytes of a value of any format. `None` if they are not of a value.
pub(crate) fn name_in(head: &[u8]) -> Option<&[u8]> {
    head.get(48..HEAD).filter(|_| head.starts_with(&MAGIC))
}

/// Format of the values and names of a deployment, layout and rank.
#[derive(Clone)]
pub struct ValueFormat {
    layers: u16,
    layer_bytes: usize,
    block_tokens: u32,
    /// Hasher of names, with everything except the block's key.
    names: blake3::Hasher,
    /// Key of the checksums.
    secret: Option<[u8; 32]>,
}

impl ValueFormat {
    /// Create a format.
    ///
    /// `meaning` is a digest of the layout, the rank and the number of ranks. Blocks with a
    /// different meaning or secret have different names.
    ///
    /// # Errors
    /// [`Error::Config`] for a size of 0 or beyond 2^40 bytes, or an empty secret.
    pub fn new(
        layers: u16,
        layer_bytes: usize,
        block_tokens: u32,
        meaning: &[u8; 32],
        secret: Option<&[u8]>,
    ) -> Result<Self> {
        for (name, value, most) in [
            ("layers", u64::from(layers), u64::from(u16::MAX)),
            ("layer_bytes", layer_bytes as u64, 1 << 40),
            ("block_tokens", block_tokens.into(), 1 << 24),
            ("bytes of the secret", secret.map_or(1, <[u8]>::len) as u64, 1 << 16),
        ] {
            if !(1..=most).contains(&value) {
                return Err(Error::config(format!("{name} is {value}, 1 to {most} wanted")));
            }
        }
        let key = |purpose| secret.map(|secret| blake3::derive_key(purpose, secret));
        let mut names = key("kvtrie names of values 1")
            .map_or_else(blake3::Hasher::new, |key| blake3::Hasher::new_keyed(&key));
        names.update(&MAGIC);
        names.update(&VERSION.to_le_bytes());
        names.update(meaning);
        let secret = key("kvtrie checksums of values 1");
        Ok(Self { layers, layer_bytes, block_tokens, names, secret })
    }

    /// Bytes of a header, in whole pages.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        let room = 4 * u64::from(self.block_tokens) + RECORD_ROOM;
        (FIXED + SUM * usize::from(self.layers) + small(room)).next_multiple_of(small(PAGE))
    }

    /// Bytes of a value.
    #[must_use]
    pub fn value_bytes(&self) -> u64 {
        self.header_bytes() as u64 + u64::from(self.layers) * self.layer_bytes as u64
    }

    /// Offset of a layer in a value.
    #[must_use]
    pub fn layer_at(&self, layer: u16) -> u64 {
        self.header_bytes() as u64 + u64::from(layer) * self.layer_bytes as u64
    }

    /// Name of a block.
    #[must_use]
    pub fn name(&self, key: &BlockKey) -> BlockKey {
        *self.names.clone().update(key).finalize().as_bytes()
    }

    /// Encode the header of a block. `memory` has all layers.
    ///
    /// # Errors
    /// [`Error::Config`] for a wrong length of `memory` or a record not fitting.
    pub fn header(&self, key: &BlockKey, record: &Record, memory: &[u8]) -> Result<Vec<u8>> {
        let wanted = usize::from(self.layers) * self.layer_bytes;
        if memory.len() != wanted {
            let given = memory.len();
            return Err(Error::config(format!("{given} bytes of layers, {wanted} wanted")));
        }
        if record.key() != *key {
            let key = hex(&key[..8]);
            return Err(Error::config(format!("the record is not that of block {key}")));
        }
        let record = record.encode();
        let mut out = Vec::with_capacity(self.header_bytes());
        out.extend(MAGIC);
        out.extend([0; SUM]);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.check().to_le_bytes());
        out.extend(u32::from(self.layers).to_le_bytes());
        out.extend(u32::try_from(record.len()).unwrap_or(u32::MAX).to_le_bytes());
        out.extend((self.layer_bytes as u64).to_le_bytes());
        out.extend(self.name(key));
        out.extend(memory.chunks_exact(self.layer_bytes).flat_map(|layer| self.sum(layer)));
        out.extend(&record);
        if out.len() > self.header_bytes() {
            let (length, room) = (out.len(), self.header_bytes());
            return Err(Error::config(format!("the header takes {length} bytes of {room}")));
        }
        out.resize(self.header_bytes(), 0);
        let sum = self.sum(&out[8 + SUM..]);
        out[8..8 + SUM].copy_from_slice(&sum);
        Ok(out)
    }

    /// Verify a header and layers read with it.
    ///
    /// # Errors
    /// Description of the difference.
    pub fn verify(
        &self,
        key: &BlockKey,
        header: &[u8],
        layers: Layers,
        memory: &[u8],
    ) -> std::result::Result<(), String> {
        let sums = self.verify_header(key, header)?;
        let wanted = usize::from(layers.len()) * self.layer_bytes;
        if layers.hi > self.layers || memory.len() != wanted {
            let given = memory.len();
            return Err(format!("layers {layers} in {given} bytes, {wanted} of {}", self.layers));
        }
        for (layer, bytes) in layers.iter().zip(memory.chunks_exact(self.layer_bytes)) {
            let at = SUM * usize::from(layer);
            if sums[at..at + SUM] != self.sum(bytes) {
                return Err(format!("checksum of layer {layer}"));
            }
        }
        Ok(())
    }

    /// Verify a header. Returns the checksums of the layers.
    fn verify_header<'a>(
        &self,
        key: &BlockKey,
        header: &'a [u8],
    ) -> std::result::Result<&'a [u8], String> {
        let wanted = self.header_bytes();
        if header.len() != wanted {
            return Err(format!("header of {} bytes, {wanted} wanted", header.len()));
        }
        if header[..8] != MAGIC {
            return Err("no header".into());
        }
        for (name, found, wanted) in [
            ("format", half(header, 24), VERSION),
            ("checksum kind", half(header, 28), self.check()),
            ("layers", half(header, 32), u32::from(self.layers)),
        ] {
            if found != wanted {
                return Err(format!("{name} {found}, not {wanted}"));
            }
        }
        if header[8..8 + SUM] != self.sum(&header[8 + SUM..]) {
            return Err("checksum of the header".into());
        }
        let layer = word(header, 40);
        if layer != self.layer_bytes as u64 {
            return Err(format!("layers of {layer} bytes, not {}", self.layer_bytes));
        }
        if header[48..FIXED] != self.name(key) {
            return Err("name of another block".into());
        }
        let sums = FIXED + SUM * usize::from(self.layers);
        let end = sums.saturating_add(half(header, 36) as usize);
        let record = header.get(sums..end).and_then(Record::decode);
        let Some(record) = record.filter(|record| record.key() == *key) else {
            return Err("record of another block".into());
        };
        // Only blocks shared by all tenants of the scope are written.
        if record.producers.is_some() {
            return Err("a block that is not shared".into());
        }
        Ok(&header[FIXED..sums])
    }

    fn check(&self) -> u32 {
        if self.secret.is_some() { 2 } else { 1 }
    }

    fn sum(&self, bytes: &[u8]) -> [u8; SUM] {
        match &self.secret {
            None => xxh3_128(bytes).to_le_bytes(),
            Some(key) => {
                let hash = blake3::keyed_hash(key, bytes);
                *hash.as_bytes().first_chunk().expect("32 bytes")
            }
        }
    }
}

impl std::fmt::Debug for ValueFormat {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ValueFormat")
            .field("layers", &self.layers)
            .field("layer_bytes", &self.layer_bytes)
            .field("block_tokens", &self.block_tokens)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use kvtrie_core::{Layers, Record, scope_key};
    use proptest::prelude::*;

    use super::{ValueFormat, small};

    const LAYERS: u16 = 3;
    const LAYER: usize = 100;

    fn format(meaning: u8, secret: Option<&[u8]>) -> ValueFormat {
        ValueFormat::new(LAYERS, LAYER, 4, &[meaning; 32], secret).unwrap()
    }

    fn record(token: u32) -> Record {
        let parent = scope_key("model", 4, b"", "");
        Record { parent, tokens: vec![token; 4], ..Record::default() }
    }

    fn memory() -> Vec<u8> {
        (0..usize::from(LAYERS) * LAYER).map(|at| u8::try_from(at % 251).unwrap()).collect()
    }

    #[test]
    fn names_differ_by_meaning_secret_and_key() {
        let formats =
            [format(1, None), format(2, None), format(1, Some(b"a")), format(1, Some(b"b"))];
        let mut names: Vec<_> =
            formats.iter().flat_map(|of| [of.name(&[0; 32]), of.name(&[1; 32])]).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 8);
    }

    #[test]
    fn a_format_has_sizes_and_its_debug_text_no_secret() {
        assert!(ValueFormat::new(0, 1, 1, &[0; 32], None).is_err());
        assert!(ValueFormat::new(1, 0, 1, &[0; 32], None).is_err());
        assert!(ValueFormat::new(1, 1, 0, &[0; 32], None).is_err());
        assert!(ValueFormat::new(1, 1, 1, &[0; 32], Some(b"")).is_err());
        let text = format!("{:?}", format(0, Some(b"hunter2")));
        assert!(!text.contains("hunter2") && !text.contains("secret"), "{text}");
    }

    #[test]
    fn a_record_of_another_block_or_of_any_length_is_refused() {
        let format = format(0, None);
        let mut long = record(1);
        assert!(format.header(&record(2).key(), &long, &memory()).is_err());
        assert!(format.header(&long.key(), &long, &memory()[1..]).is_err());
        long.digests = vec![(0, vec![7; 5000])];
        let said = format.header(&long.key(), &long, &memory()).unwrap_err().to_string();
        assert!(said.contains("bytes of 4096"), "{said}");
    }

    proptest! {
        #[test]
        fn every_changed_byte_is_found(at in 0_usize..4396, bit in 0_u8..8, secret in any::<bool>()) {
            let format = format(0, secret.then_some(b"s"));
            let (record, mut memory) = (record(1), memory());
            let key = record.key();
            let mut header = format.header(&key, &record, &memory).unwrap();
            let all = Layers::new(0, LAYERS);
            prop_assert_eq!(format.verify(&key, &header, all, &memory), Ok(()));
            let wrong = format.verify(&self::record(2).key(), &header, all, &memory);
            prop_assert!(wrong.is_err());
            match at.checked_sub(header.len()) {
                None => header[at] ^= 1 << bit,
                Some(at) => memory[at] ^= 1 << bit,
            }
            prop_assert!(format.verify(&key, &header, all, &memory).is_err());
            let (first, rest) = memory.split_at(LAYER);
            let one = format.verify(&key, &header, Layers::new(0, 1), first);
            prop_assert_eq!(one.is_ok(), (4096 + LAYER..).contains(&at));
            let rest = format.verify(&key, &header, Layers::new(1, LAYERS), rest);
            prop_assert_eq!(rest.is_ok(), (4096..4096 + LAYER).contains(&at));
        }

        /// A fuzz target: neither a header nor a length is trusted.
        #[test]
        fn any_bytes_are_refused(
            header in prop::collection::vec(any::<u8>(), 0..200), magic in any::<bool>(),
            whole in any::<bool>(), layers in (0_u16..9, 0_u16..9), length in 0_usize..500,
        ) {
            let format = format(0, None);
            let mut header = header;
            if magic {
                header.splice(..header.len().min(8), super::MAGIC);
            }
            if whole {
                header.resize(4096, 0);
            }
            let layers = Layers::new(layers.0.min(layers.1), layers.1);
            prop_assert!(format.verify(&[0; 32], &header, layers, &vec![0; length]).is_err());
        }

        #[test]
        fn a_signed_header_of_any_content_is_refused_or_right(
            edits in prop::collection::vec((24_usize..300, any::<u8>()), 1..9),
        ) {
            let format = format(0, None);
            let (record, memory) = (record(1), memory());
            let mut header = format.header(&record.key(), &record, &memory).unwrap();
            let before = header.clone();
            for (at, byte) in edits {
                header[at] = byte;
            }
            let sum = format.sum(&header[24..]);
            header[8..24].copy_from_slice(&sum);
            let all = Layers::new(0, LAYERS);
            let found = format.verify(&record.key(), &header, all, &memory);
            // Bytes after the record are ignored.
            let end = super::FIXED + 48 + record.encode().len();
            prop_assert_eq!(found.is_ok(), header[24..end] == before[24..end]);
        }

        /// A fuzz target: values cut, extended, moved, mixed or overwritten.
        #[test]
        fn a_value_after_any_edits_is_refused_or_unchanged(
            edits in prop::collection::vec((0_u8..5, 0_usize..4400, 0_usize..4400, 1_usize..300), 0..6),
            layers in (0_u16..3, 1_u16..4), secret in any::<bool>(),
        ) {
            let format = format(0, secret.then_some(b"s"));
            let value = |token| {
                let memory: Vec<u8> = memory().iter().map(|byte| byte ^ u8::try_from(token).unwrap()).collect();
                let record = record(token);
                let mut value = format.header(&record.key(), &record, &memory).unwrap();
                value.extend(memory);
                value
            };
            let (right, other) = (value(1), value(2));
            let mut edited = right.clone();
            for (kind, at, from, length) in edits {
                let at = at.min(edited.len());
                let end = (at + length).min(edited.len());
                let part = from.min(other.len())..(from + length).min(other.len());
                match kind {
                    0 => { edited.drain(at..end); }
                    1 => { edited.splice(at..at, other[part].iter().copied()); }
                    2 => { edited.splice(at..end, other[part].iter().copied()); }
                    3 => edited.truncate(at),
                    _ => edited[at..end].rotate_left(length % (end - at).max(1)),
                }
            }
            // A back end refuses a value of a wrong length.
            edited.resize(right.len(), 0);
            let layers = Layers::new(layers.0.min(layers.1 - 1), layers.1);
            let bytes = small(format.layer_at(layers.lo))..small(format.layer_at(layers.hi));
            let found =
                format.verify(&record(1).key(), &edited[..4096], layers, &edited[bytes.clone()]);
            let end = super::FIXED + 48 + record(1).encode().len();
            let same = edited[..end] == right[..end] && edited[bytes.clone()] == right[bytes];
            prop_assert!(found.is_err() || same);
            prop_assert!(found.is_ok() || edited != right);
        }
    }
}
