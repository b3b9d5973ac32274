//! Settings of a store, and the resulting layout.
//!
//! Invariant: equal settings give equal positions on every machine. No position depends on
//! `blocks`, so a budget can change without moving a byte. Cost: arithmetic.

use kvtrie_core::Layers;

use crate::error::{Error, Result};
use crate::pages::SIZE;

/// Alignment of offsets and strides, for direct I/O.
pub const PAGE: u64 = SIZE as u64;

/// Size limit of a segment, unless a slot is larger.
pub const SEGMENT: u64 = 1 << 30;

/// Dead bytes always allowed in a manifest before it is rewritten.
pub(crate) const SPARE: u64 = 64 << 10;

/// Bytes of a record beyond its tokens: parent, scope, digests.
pub(crate) const RECORD_ROOM: u64 = 1024;

/// Longest `about`. Included in every budget, so its length costs no blocks.
const MOST_ABOUT: usize = 16 << 10;

/// Bytes of a header page before the checksums of the layers.
pub(crate) const PAGE_FIXED: usize = 104;

/// Bytes of a PUT frame before its record.
pub(crate) const PUT_FIXED: usize = 112;

/// Bytes of a manifest's header before `about`.
pub(crate) const HEAD_FIXED: usize = 96;

/// Failure survived by a finished write. Details: `docs/design/disk.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// A clean close.
    None,
    /// The death of the process.
    #[default]
    Flush,
    /// The loss of power.
    Fsync,
}

/// Settings of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Digest of layout, model, block size and rank. Blocks of a different identity are not found.
    pub identity: [u8; 32],
    /// Description of the identity.
    pub about: String,
    /// Layers per block.
    pub layers: u16,
    /// Bytes per layer of a block.
    pub layer_bytes: usize,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Number of slots.
    pub blocks: u32,
    /// Failure survived by a finished write.
    pub durability: Durability,
}

impl Settings {
    /// Check the ranges of the settings.
    pub(crate) fn check(&self) -> Result<()> {
        for (name, value) in [
            ("layers", u64::from(self.layers)),
            ("layer_bytes", self.layer_bytes as u64),
            ("block_tokens", self.block_tokens.into()),
            ("blocks", self.blocks.into()),
        ] {
            if value == 0 {
                return Err(Error::config(format!("{name} is 0, at least 1")));
            }
        }
        for (name, value, most) in [
            ("layer_bytes", self.layer_bytes as u64, 1 << 40),
            ("block_tokens", self.block_tokens.into(), 1 << 24),
            ("blocks", self.blocks.into(), u64::from(u32::MAX) - 1),
            ("bytes of about", self.about.len() as u64, MOST_ABOUT as u64),
        ] {
            if value > most {
                return Err(Error::config(format!("{name} is {value}, at most {most}")));
            }
        }
        Ok(())
    }

    /// Name of the store's folder: 16 hex digits of its identity.
    #[must_use]
    pub fn folder_name(&self) -> String {
        hex(&self.identity[..8])
    }

    /// Maximum length of a record.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        small(4 * u64::from(self.block_tokens) + RECORD_ROOM)
    }

    /// Bytes of each of a slot's two header pages.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        let used = PAGE_FIXED + 8 * usize::from(self.layers) + self.record_bytes();
        used.next_multiple_of(small(PAGE))
    }

    /// Distance between consecutive layers.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.layer_bytes.next_multiple_of(small(PAGE))
    }

    /// Bytes of a slot: two header pages and the layers.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        2 * self.header_bytes() as u64 + u64::from(self.layers) * self.stride() as u64
    }

    /// Number of slots per segment.
    #[must_use]
    pub fn per_segment(&self) -> u32 {
        u32::try_from(SEGMENT / self.slot_bytes()).unwrap_or(u32::MAX).max(1)
    }

    /// Upper bound of the files' bytes for `blocks` blocks: slots, the manifest during a rewrite,
    /// and the file system's blocks.
    #[must_use]
    pub fn bytes_for(&self, blocks: u32) -> u64 {
        let slots = u64::from(blocks).saturating_mul(self.slot_bytes());
        let segments = u64::from(blocks.div_ceil(self.per_segment()));
        let frames = u64::from(blocks).saturating_mul(self.frame_bytes());
        slots
            .saturating_add(slots / 1024 + segments * 4 * PAGE)
            .saturating_add(frames.saturating_mul(3))
            .saturating_add(2 * (HEAD_FIXED + MOST_ABOUT) as u64 + SPARE + self.frame_bytes())
            .saturating_add(6 * PAGE)
    }

    /// Number of blocks in a budget of `bytes`, the inverse of [`Settings::bytes_for`].
    #[must_use]
    pub fn blocks_in(&self, bytes: u64) -> u32 {
        let (mut fits, mut over) = (0, u32::MAX);
        while over - fits > 1 {
            let middle = fits + (over - fits) / 2;
            if self.bytes_for(middle) <= bytes {
                fits = middle;
            } else {
                over = middle;
            }
        }
        fits
    }

    /// Upper bound of a manifest's length.
    pub(crate) fn manifest_bytes(&self, blocks: u32) -> u64 {
        self.head_bytes() as u64 + 2 * u64::from(blocks) * self.frame_bytes() + SPARE
    }

    /// Maximum length of a manifest frame.
    pub(crate) fn frame_bytes(&self) -> u64 {
        (PUT_FIXED + self.record_bytes()).next_multiple_of(8) as u64
    }

    /// Length of the manifest's header.
    pub(crate) fn head_bytes(&self) -> usize {
        (HEAD_FIXED + self.about.len()).next_multiple_of(8)
    }

    /// Seed of the manifest's checksums. A frame of a different identity fails its checksum.
    pub(crate) fn seed(&self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|at| self.identity[at]))
    }

    /// Offset of a layer in its slot.
    pub(crate) fn layer_at(&self, layer: u16) -> u64 {
        2 * self.header_bytes() as u64 + u64::from(layer) * self.stride() as u64
    }

    /// Bytes of layers in the caller's memory.
    #[must_use]
    pub fn bytes_of(&self, layers: Layers) -> usize {
        usize::from(layers.len()) * self.layer_bytes
    }
}

/// Convert a size known to fit a 64-bit machine's memory.
pub(crate) fn small(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Format bytes as hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

#[cfg(test)]
mod tests {
    use super::{Durability, Settings};

    fn settings(layers: u16, layer_bytes: usize, block_tokens: u32) -> Settings {
        Settings {
            identity: [7; 32],
            about: "{}".into(),
            layers,
            layer_bytes,
            block_tokens,
            blocks: 1,
            durability: Durability::None,
        }
    }

    #[test]
    fn places_are_multiples_of_a_page() {
        for (layers, layer_bytes, tokens) in [(1, 1, 1), (32, 65_536, 16), (80, 5_000, 4_096)] {
            let settings = settings(layers, layer_bytes, tokens);
            assert_eq!(settings.slot_bytes() % 4096, 0);
            assert_eq!(settings.layer_at(layers - 1) % 4096, 0);
            assert!(u64::from(settings.per_segment()) * settings.slot_bytes() <= 1 << 30);
        }
    }

    #[test]
    fn blocks_in_is_the_inverse_of_bytes_for() {
        for (layers, layer_bytes) in [(1, 1), (32, 65_536), (61, 1 << 28)] {
            let settings = settings(layers, layer_bytes, 16);
            for blocks in [0, 1, 2, 511, 512, 100_000, 40_000_000] {
                let bytes = settings.bytes_for(blocks);
                assert_eq!(settings.blocks_in(bytes), blocks);
                assert_eq!(settings.blocks_in(bytes + 4095), blocks);
                assert_eq!(settings.blocks_in(bytes - 1), blocks.saturating_sub(1));
            }
        }
    }
}
