//! Header page of a slot: names the block and has the checksums of its layers.
//!
//! ```text
//!   0 magic  8 checksum of 16..  16 version  20 record length  24 sequence  32 identity  64 key
//!   96 slot  100 layers.lo  102 layers.hi  104 checksum per layer  then the record, zeros to pages
//! ```
//!
//! A slot has two header pages, so an extension can write the unused page. Invariant: a page is
//! valid only if complete, in its slot and store. Readers take the valid page of their key with the
//! highest sequence. Cost: a hash of about 4 KiB.

use kvtrie_core::{BlockKey, Layers, Record};
use xxhash_rust::xxh3::xxh3_64;

use crate::settings::{PAGE_FIXED, Settings, hex};

const MAGIC: [u8; 8] = *b"kvtrieP1";
const VERSION: u32 = 1;

/// Valid header page.
#[derive(Clone, Debug)]
pub(crate) struct Page<'a> {
    pub(crate) sequence: u64,
    pub(crate) key: BlockKey,
    pub(crate) layers: Layers,
    /// Checksum per layer of the model. Zero for missing layers.
    sums: &'a [u8],
    pub(crate) record: &'a [u8],
}

impl Page<'_> {
    /// Checksum of a layer.
    pub(crate) fn sum(&self, layer: u16) -> u64 {
        word(self.sums, 8 * usize::from(layer))
    }

    /// Checksums of all layers.
    pub(crate) fn sums(&self) -> Vec<u64> {
        (0..self.sums.len() / 8).map(|at| word(self.sums, 8 * at)).collect()
    }

    /// Whether the record hashes to the key.
    pub(crate) fn is_valid(&self) -> bool {
        Record::decode(self.record).is_some_and(|record| record.key() == self.key)
    }
}

/// Contents of a page to write.
pub(crate) struct Contents<'a> {
    pub(crate) sequence: u64,
    pub(crate) key: &'a BlockKey,
    pub(crate) slot: u32,
    pub(crate) layers: Layers,
    pub(crate) sums: &'a [u64],
    pub(crate) record: &'a [u8],
}

/// Encode a page.
pub(crate) fn encode(settings: &Settings, page: &Contents<'_>) -> Vec<u8> {
    let mut out = Vec::with_capacity(2 * settings.header_bytes());
    out.extend(MAGIC);
    out.extend([0; 8]);
    out.extend(VERSION.to_le_bytes());
    out.extend(u32::try_from(page.record.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend(page.sequence.to_le_bytes());
    out.extend(settings.identity);
    out.extend(page.key);
    out.extend(page.slot.to_le_bytes());
    out.extend(page.layers.lo.to_le_bytes());
    out.extend(page.layers.hi.to_le_bytes());
    out.extend(page.sums.iter().flat_map(|sum| sum.to_le_bytes()));
    out.extend(page.record);
    out.resize(settings.header_bytes(), 0);
    let sum = xxh3_64(&out[16..]);
    out[8..16].copy_from_slice(&sum.to_le_bytes());
    out
}

/// Decode a page. The error names the defect.
pub(crate) fn decode<'a>(
    settings: &Settings,
    slot: u32,
    bytes: &'a [u8],
) -> Result<Page<'a>, String> {
    if bytes[..8] != MAGIC {
        return Err(if bytes.iter().all(|&byte| byte == 0) {
            "empty".into()
        } else {
            "no header".into()
        });
    }
    let (stated, found) = (word(bytes, 8), xxh3_64(&bytes[16..]));
    if stated != found {
        return Err(format!("header checksum {found:#018x}, not {stated:#018x}"));
    }
    let version = half(bytes, 16);
    if version != VERSION {
        return Err(format!("header of format {version}, not {VERSION}"));
    }
    if bytes[32..64] != settings.identity {
        return Err(format!("identity {}, not {}", hex(&bytes[32..40]), settings.folder_name()));
    }
    if half(bytes, 96) != slot {
        return Err(format!("header of slot {}", half(bytes, 96)));
    }
    let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let layers = Layers::new(number(100), number(102));
    let sums = PAGE_FIXED;
    let record = sums + 8 * usize::from(settings.layers);
    let end = record.saturating_add(half(bytes, 20) as usize);
    if layers.is_empty() || layers.hi > settings.layers || end > bytes.len() {
        return Err(format!("layers {layers} and a record up to byte {end} do not fit"));
    }
    Ok(Page {
        sequence: word(bytes, 24),
        key: std::array::from_fn(|at| bytes[64 + at]),
        layers,
        sums: &bytes[sums..record],
        record: &bytes[record..end],
    })
}

/// Choose the valid page of `key` with the highest sequence, or with exactly `sequence`. Returns
/// its index and the page, or the reasons if there is none.
pub(crate) fn choose<'a>(
    settings: &Settings,
    slot: u32,
    key: &BlockKey,
    sequence: Option<u64>,
    both: &'a [u8],
) -> Result<(usize, Page<'a>), String> {
    let mut best: Option<(usize, Page<'a>)> = None;
    let mut reasons = Vec::new();
    for (which, bytes) in both.chunks_exact(settings.header_bytes()).enumerate() {
        match decode(settings, slot, bytes) {
            Ok(page) if page.key != *key => {
                reasons.push(format!("holds block {}", hex(&page.key[..8])));
            }
            Ok(page) if sequence.is_some_and(|wanted| page.sequence != wanted) => {
                reasons.push(format!("sequence {}", page.sequence));
            }
            Ok(page) => {
                if best.as_ref().is_none_or(|(_, other)| other.sequence < page.sequence) {
                    best = Some((which, page));
                }
            }
            Err(reason) => reasons.push(reason),
        }
    }
    let (which, page) = best
        .ok_or_else(|| format!("no header of block {}: {}", hex(&key[..8]), reasons.join("; ")))?;
    if page.is_valid() {
        Ok((which, page))
    } else {
        Err(format!("the record of block {} does not give its key", hex(&key[..8])))
    }
}

/// Eight bytes at `at`, as an integer.
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

/// Four bytes at `at`, as an integer.
pub(crate) fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}
