//! Bytes of the tiers of a model with several groups, as a map from slots to what was computed there.
//!
//! A page that is cut into slots of another group loses what it had. Invariant: a slot that is absent
//! from the map has no valid bytes. Cost: O(slots) per write.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use kvtrie_core::{Group, LeaseId, Manager, Move, NO_SLOT, Slot, TierId, Token, page_bytes};

use crate::rig::{GPU, SIZE};

/// Page of a tier, and group and slot in it.
type Place = (TierId, u32, usize, Slot);

/// Content of every slot.
pub(crate) struct Bytes {
    groups: Vec<Group>,
    /// Slots of each group in a page.
    per_page: Vec<u32>,
    /// Whether an engine numbers the slots of the first tier, each for one group.
    engine: bool,
    content: BTreeMap<Place, u64>,
}

impl Bytes {
    /// Nothing is written.
    pub(crate) fn new(groups: &[Group], engine: bool) -> Self {
        let sizes: Vec<u64> = groups.iter().map(|group| group.slot_bytes).collect();
        let page = page_bytes(&sizes).unwrap();
        let per_page = sizes.iter().map(|size| u32::try_from(page / size).unwrap()).collect();
        Self { groups: groups.to_vec(), per_page, engine, content: BTreeMap::new() }
    }

    fn place(&self, tier: TierId, group: usize, slot: Slot) -> Place {
        let whole = self.engine && tier == GPU;
        (tier, slot / if whole { 1 } else { self.per_page[group] }, group, slot)
    }

    fn put(&mut self, tier: TierId, group: usize, slot: Slot, content: Option<u64>) {
        let at = self.place(tier, group, slot);
        self.content.retain(|known, _| (known.0, known.1) != (at.0, at.1) || known.2 == group);
        match content {
            Some(content) => self.content.insert(at, content),
            None => self.content.remove(&at),
        };
    }

    /// The block tables of a lease on the first tier.
    pub(crate) fn tables(&self, manager: &mut Manager, id: LeaseId) -> Vec<Vec<Slot>> {
        (0..self.groups.len()).map(|group| manager.group_table(id, GPU, group).unwrap().1).collect()
    }

    /// Writes the tokens of a path after the first `known`. A block of which part is known is whole
    /// only if that part is there.
    pub(crate) fn write(&mut self, tables: &[Vec<Slot>], path: &[Token], known: usize) {
        for (group, table) in tables.iter().enumerate() {
            for at in known / SIZE..path.len().div_ceil(SIZE) {
                let Some(&slot) = table.get(at).filter(|&&slot| slot != NO_SLOT) else { continue };
                let before = self.content.get(&self.place(GPU, group, slot)).copied();
                let lost = at * SIZE < known && before != Some(content(&path[..known], at));
                self.put(GPU, group, slot, (!lost).then(|| content(path, at)));
            }
        }
    }

    /// Writes the tokens after the last full block of a path into slots that a commit has opened.
    pub(crate) fn write_rest(
        &mut self,
        (before, tables): (&[Vec<Slot>], &[Vec<Slot>]),
        path: &[Token],
    ) {
        let (at, rest) = (path.len() / SIZE, path.len() % SIZE);
        for (group, table) in tables.iter().enumerate().filter(|_| rest > 0) {
            let Some(&slot) = table.get(at).filter(|&&slot| slot != NO_SLOT) else { continue };
            if before[group].get(at) != Some(&slot) {
                self.put(GPU, group, slot, Some(content(path, at)));
            }
        }
    }

    /// Cuts a path of `known` tokens within its last block.
    pub(crate) fn cut(&mut self, tables: &[Vec<Slot>], path: &[Token], known: &[Token]) {
        let at = path.len() / SIZE;
        if path.len().is_multiple_of(SIZE) {
            return;
        }
        for (group, table) in tables.iter().enumerate() {
            let Some(&slot) = table.get(at).filter(|&&slot| slot != NO_SLOT) else { continue };
            let before = self.content.get(&self.place(GPU, group, slot)).copied();
            if before == Some(content(known, at)) {
                self.put(GPU, group, slot, Some(content(path, at)));
            }
        }
    }

    /// Fills a slot on any tier with a block of a path, as another machine would.
    pub(crate) fn fill(
        &mut self,
        (tier, group, slot): (TierId, usize, Slot),
        path: &[Token],
        at: usize,
    ) {
        self.put(tier, group, slot, Some(content(path, at)));
    }

    /// The content that a move reads.
    pub(crate) fn source(&self, known: &Move) -> Option<u64> {
        self.content.get(&self.place(known.src, usize::from(known.group), known.src_slot)).copied()
    }

    /// Gives the slot that a move writes a content.
    pub(crate) fn arrive(&mut self, known: &Move, content: Option<u64>) {
        self.put(known.dst, usize::from(known.group), known.dst_slot, content);
    }

    /// A slot has other bytes from now on.
    pub(crate) fn lose(&mut self, tier: TierId, group: usize, slot: Slot) {
        self.put(tier, group, slot, None);
    }

    /// Carries a move out; one that fails leaves no valid bytes.
    pub(crate) fn copy(&mut self, known: &Move, ok: bool) {
        self.arrive(known, self.source(known).filter(|_| ok));
    }

    /// Whether a move writes what another one reads: the slot, or another group's in its page.
    pub(crate) fn overwrites(&self, known: &Move, other: &Move) -> bool {
        let written = self.place(known.dst, usize::from(known.group), known.dst_slot);
        let read = self.place(other.src, usize::from(other.group), other.src_slot);
        (written.0, written.1) == (read.0, read.1) && (written.2 != read.2 || written.3 == read.3)
    }

    /// Every slot in a table has the bytes of its block.
    pub(crate) fn compare(&self, tables: &[Vec<Slot>], path: &[Token]) {
        for (group, table) in tables.iter().enumerate() {
            for at in 0..path.len().div_ceil(SIZE) {
                if let Some(&slot) = table.get(at).filter(|&&slot| slot != NO_SLOT) {
                    let found = self.content.get(&self.place(GPU, group, slot)).copied();
                    assert_eq!(found, Some(content(path, at)), "block {at} of group {group}");
                }
            }
        }
    }
}

/// What is computed for a block: it depends on all tokens up to its end.
pub(crate) fn content(path: &[Token], at: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    path[..path.len().min((at + 1) * SIZE)].hash(&mut hasher);
    hasher.finish()
}
