//! Persistent index: a saved list of a tier's blocks, and its recovery by a new manager.
//!
//! Invariant: a row is recovered only if its chain of keys reaches a scope of this model. Cost:
//! O(blocks · log n), and a hash per block. `index_of` costs only its given blocks.

use crate::block::{BlockId, GroupId, Handle, Layers, NO_SLOT, Place, Slot, Structure, TierId};
use crate::error::{Error, Result};
use crate::memory;
use crate::record::{BlockKey, Label, Record};
use crate::scope::Scope;
use crate::tier::ResidencyState;
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::keys::BlockName;
use crate::manager::node::Node;
use crate::manager::points::Stay;
use crate::manager::request::matching::path::path_border;
use crate::manager::settings::DropOrder;

/// Row of a persistent index: a resident block.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its identity, and the figures that rank it.
    pub label: Label,
    /// Its slot.
    pub slot: Slot,
    /// The resident layers.
    pub layers: Layers,
    /// Group of layers.
    pub group: u8,
}

impl Manager {
    /// Lists the resident blocks of a tier, parents before their children, for
    /// [`Manager::load_index`].
    ///
    /// # Errors
    /// [`Error::Config`] for a nonexistent tier or a tier with layer slots.
    pub fn index(&mut self, tier: TierId, now: Nanos) -> Result<Vec<Row>> {
        self.open()?;
        self.check_index(tier)?;
        let now = self.tick(now);
        let mut blocks: Vec<BlockId> =
            self.scopes.all().flat_map(|(_, scope)| self.trie().first_blocks(scope.root)).collect();
        let mut rows = Vec::new();
        while let Some(block) = blocks.pop() {
            blocks.extend(self.trie().children(block));
            rows.extend(self.row(tier, block, now));
            rows.extend(self.group_rows(tier, block, now));
        }
        Ok(rows)
    }

    /// Lists the rows of the given blocks, in their order. Skips blocks not resident on the tier
    /// and blocks that left the trie: handles are never reused.
    ///
    /// # Errors
    /// The errors of [`Manager::index`].
    pub fn index_of(&mut self, tier: TierId, blocks: &[Handle], now: Nanos) -> Result<Vec<Row>> {
        self.open()?;
        self.check_index(tier)?;
        let now = self.tick(now);
        let mut rows = Vec::with_capacity(blocks.len());
        for block in
            blocks.iter().filter_map(|&block| self.trie().resolve(block)).collect::<Vec<_>>()
        {
            rows.extend(self.row(tier, block, now));
            rows.extend(self.group_rows(tier, block, now));
        }
        Ok(rows)
    }

    /// The rows of a block's parts held by resume points on a tier, in the groups after the first.
    fn group_rows(&mut self, tier: TierId, block: BlockId, now: Nanos) -> Vec<Row> {
        let listed = |&group: &GroupId| {
            let place = Place::new(tier, group);
            let residency = self.residency(place, block);
            residency.state == ResidencyState::Resident && self.blocks.holds(place, block) > 0
        };
        let listed: Vec<GroupId> = self.points.other_numbers().filter(listed).collect();
        let row = |group| {
            let residency = self.residency(Place::new(tier, group), block);
            let group = u8::try_from(group).expect("few groups");
            let (slot, layers) = (residency.slot, residency.have);
            Row { label: self.label(block, now), slot, layers, group }
        };
        listed.into_iter().map(row).collect()
    }

    /// The row of a block, if it is resident on a tier.
    fn row(&mut self, tier: TierId, block: BlockId, now: Nanos) -> Option<Row> {
        let residency = self.residency(tier, block);
        let listed = residency.state == ResidencyState::Resident && !residency.have.is_empty();
        let (slot, layers, group) = (residency.slot, residency.have, 0);
        listed.then(|| Row { label: self.label(block, now), slot, layers, group })
    }

    /// Rebuilds the residencies of a tier.
    ///
    /// Ages become times before `now`. A row is skipped if its chain of keys does not reach a scope
    /// of this model through earlier rows or known blocks, if it is no full block, if its slot is
    /// taken, or if its layers would make a forbidden hole. Returns the number of blocks made
    /// resident. With several groups, the rows of a group follow the rows of the first group, and a
    /// border resumable in all groups becomes a resume point again.
    ///
    /// # Errors
    /// [`Error::Config`] for a nonexistent tier, or a tier with layer slots or slots of an engine.
    pub fn load_index(&mut self, tier: TierId, rows: &[Row], now: Nanos) -> Result<usize> {
        self.open()?;
        self.check_tier(tier)?;
        self.check_index(tier)?;
        if self.blocks.arena(tier).is_some() {
            return self.load_group_index(tier, rows, now);
        }
        let bound = rows.iter().map(|row| row.slot.saturating_add(1)).max();
        self.check_memory(rows.len())?;
        let slots = bound.unwrap_or(0).min(self.blocks.space(tier).capacity()) as usize;
        // A flag per slot, and the list of the free slots.
        memory::check(slots.saturating_mul(1 + 2 * size_of::<Slot>()), || {
            format!("an index with slots up to {slots}")
        })?;
        let now = self.tick(now);
        self.scopes.sweep(&mut self.blocks);
        let mut known = self.by_key();
        known.reserve(rows.len());
        let mut free = self.blocks.reserve_below(tier, bound.unwrap_or(0));
        let mut loaded = 0;
        for row in rows {
            let parent = known.get(&row.label.record.parent).copied();
            // A slot beyond the tier, or named twice, has no free flag.
            let Some(slot) = free.get_mut(row.slot as usize).filter(|slot| **slot) else {
                continue;
            };
            let Some((block, fresh)) = self.load_row(tier, row, parent, now) else { continue };
            *slot = !fresh;
            loaded += usize::from(fresh);
            known.insert(self.note_key(block, parent, row), block);
        }
        // The unused slots become free again.
        self.blocks.put_back(tier, &free);
        Ok(loaded)
    }

    /// Rebuilds the residencies of a tier for a model with several groups.
    fn load_group_index(&mut self, tier: TierId, rows: &[Row], now: Nanos) -> Result<usize> {
        self.check_memory(rows.len())?;
        let now = self.tick(now);
        self.scopes.sweep(&mut self.blocks);
        let mut known = self.by_key();
        let (mut loaded, mut ends) = (0, Vec::new());
        for row in rows {
            let key = row.label.record.key();
            if row.group > 0 {
                let block = known.get(&key).copied();
                ends.extend(block.filter(|&block| self.load_window(tier, block, row)));
                continue;
            }
            let parent = known.get(&row.label.record.parent).copied();
            if row.layers != self.all_layers() || !self.blocks.claim_slot(tier.into(), row.slot) {
                continue;
            }
            let block = self.load_row(tier, row, parent, now);
            if let Some((block, _)) = block {
                known.insert(self.note_key(block, parent, row), block);
            }
            if block.is_some_and(|(_, fresh)| fresh) {
                loaded += 1;
            } else {
                self.blocks.give_slot(tier, row.slot);
            }
        }
        // Earlier points on a path first, so that newer points replace older points.
        ends.sort_by_key(|&block| (self.trie().depth(block), block));
        ends.dedup();
        for block in ends {
            let path = self.path_to(Some(block));
            self.add_point(tier, &path, path_border(&path), Stay::Newest);
        }
        Ok(loaded)
    }

    /// Caches the name of a row's block. Returns its key.
    fn note_key(&mut self, block: BlockId, parent: Option<BlockId>, row: &Row) -> BlockKey {
        let Record { scope, digests, .. } = &row.label.record;
        let own = scope.as_ref().is_some_and(|owner| !owner.tenant.is_empty());
        let private =
            own || !digests.is_empty() || parent.is_some_and(|parent| self.name(parent).private);
        let key = row.label.record.key();
        self.keys.put(block, self.trie().depth(block), BlockName { key, private });
        key
    }

    /// Makes a block resident in the group and the slot of a row, if it is absent there and the
    /// slot is free. Returns whether it became resident.
    fn load_window(&mut self, tier: TierId, block: BlockId, row: &Row) -> bool {
        let place = Place::new(tier, row.group.into());
        let layers = self.points.groups.get(place.group).map(|group| Layers::new(0, group.layers));
        let absent = layers == Some(row.layers) && self.residency(place, block).slot == NO_SLOT;
        if !absent || !self.blocks.claim_slot(place, row.slot) {
            return false;
        }
        self.blocks.put(place, block, row.slot);
        true
    }

    fn check_index(&self, tier: TierId) -> Result<()> {
        match self.tiers.get(tier) {
            None => {
                let count = self.tiers.len();
                Err(Error::config(format!("there is no tier {tier}, only {count}")))
            }
            Some(tier) if tier.spec.layer_slots => {
                Err(Error::config("a tier with layer_slots has no index"))
            }
            Some(_) => Ok(()),
        }
    }

    /// The block of a row with a free slot, and whether the row made it resident.
    fn load_row(
        &mut self,
        tier: TierId,
        row: &Row,
        parent: Option<BlockId>,
        now: Nanos,
    ) -> Option<(BlockId, bool)> {
        let Label { record, usage } = &row.label;
        let mut whose = match (&record.scope, parent) {
            // The first block of a scope is chained to the scope's key, a later block to its
            // parent.
            (Some(owner), _) if record.parent == self.scope_key(&owner.tenant, &owner.lora) => {
                Scope::of_owner(owner)
            }
            (None, Some(_)) => Scope::default(),
            _ => return None,
        };
        whose.extra = record.digests.iter().map(|(at, d)| (u64::from(*at), d.clone())).collect();
        let digests = record.digests.iter().all(|&(at, _)| (at as usize) < record.tokens.len());
        let sound = digests
            && record.tokens.len() == self.block_tokens()
            && !self.scopes.refuses(&whose)
            && self.scopes.digests.check(&whose, &record.tokens).is_ok();
        // A damaged row, or a row for different settings.
        if !sound || !self.fits(tier, row.layers) {
            return None;
        }
        let values = Node {
            uses: usage.uses.max(1),
            access: stamp(now).saturating_sub(usage.age),
            session_blocks: usage.session_blocks,
            ..Node::default()
        };
        let (block, known) = self.find_row(&whose, record, parent, row.layers, values)?;
        // An earlier row, or the tier above, has the block already.
        if self.residency(tier, block).state != ResidencyState::Absent {
            return Some((block, false));
        }
        // The block was known from a second tier: keep the newer figures of the two.
        if known {
            self.blocks.change_values(&[block], |_, node| {
                node.access = node.access.max(values.access);
                node.uses = node.uses.max(values.uses);
                node.session_blocks = values.session_blocks;
            });
        }
        self.place(tier, block, (row.slot, row.layers), None, None, now);
        if let Some(wanted) = usage.wanted {
            self.restore_hint(block, wanted, now);
        }
        if let Some(cost) = usage.cost {
            self.restore_price(block, cost);
        }
        self.refresh(block);
        Some((block, true))
    }

    /// Whether these layers can be a residency of a tier with a fixed end.
    fn fits(&self, tier: TierId, layers: Layers) -> bool {
        let all = self.all_layers();
        let lowest = match self.settings.drop_order {
            DropOrder::Shallow => layers.hi == all.hi,
            DropOrder::Seed => layers.lo == 0,
        };
        let edge = if tier == self.tiers.last() { lowest } else { tier > 0 || layers.lo == 0 };
        !layers.is_empty() && all.covers(layers) && edge
    }

    /// The block of a row, with the values of `values` if it is new, and whether it was known.
    /// `None` if its layers, or a missing parent, would make a forbidden hole.
    fn find_row(
        &mut self,
        scope: &Scope,
        record: &Record,
        parent: Option<BlockId>,
        layers: Layers,
        values: Node,
    ) -> Option<(BlockId, bool)> {
        let full = layers == self.all_layers();
        let known = match parent {
            Some(parent) => Some(self.node(parent).scope),
            None => self.scopes.known(scope),
        };
        let structure = known.map_or(scope.structure.unwrap_or(self.settings.structure), |id| {
            self.scopes.get(id).structure
        });
        // A leaf-only block needs all its layers and all its ancestors.
        let joins = || parent.is_none_or(|parent| self.missing(parent).is_empty());
        if structure == Structure::LeafOnly && !(full && joins()) {
            return None;
        }
        let content = self.intern(scope, 0, &record.tokens).ok()?;
        let id = match known {
            Some(id) => id,
            None => self.scopes.add(scope, self.settings.structure, &mut self.blocks),
        };
        let known = self.trie().child(self.scopes.get(id).root, parent, &content);
        let block = known.unwrap_or_else(|| {
            let mut path = Vec::with_capacity(1);
            self.new_nodes(Node { scope: id, ..values }, parent, &content, &mut path);
            path[0]
        });
        self.scopes.digests.free(&content);
        if known.is_none() {
            self.restore_producers(block, record.producers.as_deref());
        }
        Some((block, known.is_some()))
    }
}
