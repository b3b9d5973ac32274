//! The table: which block stands in which slot, as the manifest says.
//!
//! Invariant: it changes only together with the manifest, under the manifest's lock; it is read
//! under its own, which is never held while a device works. Cost: 56 bytes per slot up to the
//! highest one used; tokens and checksums stay on the device.

use kvtrie_core::block::Layers;
use kvtrie_core::record::Key;

/// A slot's block and its frame.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    /// Of the last frame of the slot; of its header page too, if a block stands there.
    pub(crate) sequence: u64,
    /// Where the frame starts in the manifest.
    pub(crate) at: u64,
    /// How long the frame is; 0 if the slot is free.
    pub(crate) length: u32,
    pub(crate) layers: Layers,
}

/// All slots.
#[derive(Debug, Default)]
pub(crate) struct Table {
    slots: Vec<Entry>,
    live: u64,
    last: u64,
}

impl Table {
    /// The block in a slot.
    pub(crate) fn get(&self, slot: u32) -> Option<Entry> {
        self.slots.get(slot as usize).copied().filter(|entry| entry.length > 0)
    }

    /// Puts what a frame says, unless a later frame of the slot was seen.
    pub(crate) fn apply(&mut self, slot: u32, entry: Entry) {
        self.last = self.last.max(entry.sequence);
        let at = slot as usize;
        if at >= self.slots.len() {
            self.slots.resize(at + 1, Entry::default());
        }
        let old = &mut self.slots[at];
        if old.sequence <= entry.sequence {
            self.live = self.live - u64::from(old.length) + u64::from(entry.length);
            *old = entry;
        }
    }

    /// Frees a slot.
    pub(crate) fn free(&mut self, slot: u32, sequence: u64) {
        self.apply(slot, Entry { sequence, ..Entry::default() });
    }

    /// Frees a slot whose block is known no longer.
    pub(crate) fn forget(&mut self, slot: u32) {
        let sequence = self.slots.get(slot as usize).map_or(0, |entry| entry.sequence);
        self.free(slot, sequence);
    }

    /// The layers of a block that remain after an extension failed.
    pub(crate) fn shrink(&mut self, slot: u32, layers: Layers) {
        if layers.is_empty() {
            self.forget(slot);
        } else if let Some(entry) = self.slots.get_mut(slot as usize) {
            entry.layers = layers;
        }
    }

    /// A frame has moved.
    pub(crate) fn moved(&mut self, slot: u32, at: u64, length: u32) {
        let entry = &mut self.slots[slot as usize];
        self.live = self.live - u64::from(entry.length) + u64::from(length);
        (entry.at, entry.length) = (at, length);
    }

    /// Whether a block stands in the second of two folders.
    pub(crate) fn in_second(&self) -> bool {
        self.slots.iter().skip(1).step_by(2).any(|entry| entry.length > 0)
    }

    /// The next sequence; never given twice.
    pub(crate) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The highest sequence seen or given.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Sequences up to `last` are given.
    pub(crate) fn skip_to(&mut self, last: u64) {
        self.last = self.last.max(last);
    }

    /// Bytes of the manifest that are still needed.
    pub(crate) fn live(&self) -> u64 {
        self.live
    }

    /// All blocks, by slot.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u32, Entry)> + '_ {
        (0..).zip(&self.slots).filter(|(_, entry)| entry.length > 0).map(|(at, &entry)| (at, entry))
    }

    /// All blocks, in the order of their frames.
    pub(crate) fn by_frame(&self) -> Vec<(u32, Entry)> {
        let mut all: Vec<_> = self.blocks().collect();
        all.sort_unstable_by_key(|(_, entry)| entry.at);
        all
    }
}
