//! Table of blocks by slot, mirroring the manifest.
//!
//! Invariant: changes only together with the manifest, under the manifest's lock. Reads take only
//! the table's lock, never held during I/O. Cost: 56 bytes per slot up to the highest used slot.
//! Tokens and checksums stay on the device.

use kvtrie_core::{BlockKey, Layers};

/// Table entry: block and frame of a slot.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Entry {
    pub(crate) key: BlockKey,
    /// Sequence of the slot's last frame, and of its header page if it has a block.
    pub(crate) sequence: u64,
    /// Offset of the frame in the manifest.
    pub(crate) at: u64,
    /// Length of the frame, or 0 for a free slot.
    pub(crate) length: u32,
    pub(crate) layers: Layers,
}

/// Table of all slots.
#[derive(Debug, Default)]
pub(crate) struct Table {
    slots: Vec<Entry>,
    live: u64,
    last: u64,
}

impl Table {
    /// Block in a slot.
    pub(crate) fn get(&self, slot: u32) -> Option<Entry> {
        self.slots.get(slot as usize).copied().filter(|entry| entry.length > 0)
    }

    /// Apply a frame, unless a later frame of the slot was applied.
    pub(crate) fn apply(&mut self, slot: u32, entry: Entry) {
        self.last = self.last.max(entry.sequence);
        let at = slot as usize;
        if at >= self.slots.len() {
            self.slots.resize(at + 1, Entry::default());
        }
        let old = &mut self.slots[at];
        // Also if equal: `forget` frees a slot under its old sequence.
        if old.sequence <= entry.sequence {
            self.live = self.live - u64::from(old.length) + u64::from(entry.length);
            *old = entry;
        }
    }

    /// Free a slot.
    pub(crate) fn free(&mut self, slot: u32, sequence: u64) {
        self.apply(slot, Entry { sequence, ..Entry::default() });
    }

    /// Free a slot without writing a frame.
    pub(crate) fn forget(&mut self, slot: u32) {
        let sequence = self.slots.get(slot as usize).map_or(0, |entry| entry.sequence);
        self.free(slot, sequence);
    }

    /// Set the layers of a block after a failed extension.
    pub(crate) fn shrink(&mut self, slot: u32, layers: Layers) {
        if layers.is_empty() {
            self.forget(slot);
        } else if let Some(entry) = self.slots.get_mut(slot as usize) {
            entry.layers = layers;
        }
    }

    /// Update the position of a frame.
    pub(crate) fn moved(&mut self, slot: u32, at: u64, length: u32) {
        let entry = &mut self.slots[slot as usize];
        self.live = self.live - u64::from(entry.length) + u64::from(length);
        (entry.at, entry.length) = (at, length);
    }

    /// Allocate the next sequence.
    pub(crate) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Highest seen or allocated sequence.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Exclude sequences up to `last` from allocation.
    pub(crate) fn skip_to(&mut self, last: u64) {
        self.last = self.last.max(last);
    }

    /// Bytes of live frames.
    pub(crate) fn live(&self) -> u64 {
        self.live
    }

    /// All blocks, by slot.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u32, Entry)> + '_ {
        (0..).zip(&self.slots).filter(|(_, entry)| entry.length > 0).map(|(at, &entry)| (at, entry))
    }

    /// All blocks, by the offset of their frames.
    pub(crate) fn by_frame(&self) -> Vec<(u32, Entry)> {
        let mut all: Vec<_> = self.blocks().collect();
        all.sort_unstable_by_key(|(_, entry)| entry.at);
        all
    }
}
