//! The index of a tier that outlives its manager: what is written down of it, and how it is found
//! again.
//!
//! Invariant: a row that is taken in is proved by its chain of keys up to a scope of this model.
//! Cost: O(blocks · log n), and one hash each.

use crate::block::{BlockId, Layers, Slot, Structure, TierId};
use crate::error::{Error, Result};
use crate::memory;
use crate::record::{Label, Record};
use crate::scope::Scope;
use crate::tier::State;
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::node::Node;
use crate::manager::settings::DropOrder;

/// One block of a tier that outlives its manager.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What it is and how it stood.
    pub label: Label,
    /// Its slot.
    pub slot: Slot,
    /// The layers that are there.
    pub layers: Layers,
}

impl Manager {
    /// What stands on a tier, parents before their children: all that [`Manager::load_index`]
    /// needs to find it again.
    ///
    /// # Errors
    /// [`Error::Config`] for a tier that does not exist or has layer slots.
    pub fn index(&mut self, tier: TierId, now: Nanos) -> Result<Vec<Row>> {
        self.open()?;
        self.check_index(tier)?;
        let now = self.tick(now);
        let mut blocks: Vec<BlockId> = self
            .scopes
            .all()
            .flat_map(|(_, scope)| self.blocks.trie().first_blocks(scope.root))
            .collect();
        let mut rows = Vec::new();
        while let Some(block) = blocks.pop() {
            blocks.extend(self.blocks.trie().children(block));
            let here = self.residency(tier, block);
            if here.state == State::Resident && !here.have.is_empty() {
                let label = self.label(block, now);
                rows.push(Row { label, slot: here.slot, layers: here.have });
            }
        }
        Ok(rows)
    }

    /// Rebuilds what a tier held. Ages become times before `now`. A row is left out if its key's
    /// chain does not reach a scope of this model through rows before it or blocks that are known,
    /// if it is no full block, if its slot is taken, or if its layers would make a hole where none
    /// may be. Returns how many blocks are found again.
    ///
    /// # Errors
    /// [`Error::Config`] for a tier that does not exist, has layer slots or slots of an engine.
    pub fn load_index(&mut self, tier: TierId, rows: &[Row], now: Nanos) -> Result<usize> {
        self.open()?;
        self.check_tier(tier)?;
        self.check_index(tier)?;
        let bound = rows.iter().map(|row| row.slot.saturating_add(1)).max();
        self.check_memory(rows.len())?;
        let slots = bound.unwrap_or(0).min(self.blocks.space(tier).capacity()) as usize;
        // Whether each is free, and the list of those that stay so.
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
            let Some(slot) = free.get_mut(row.slot as usize).filter(|slot| **slot) else {
                continue;
            };
            let Some((block, fresh)) = self.load_row(tier, row, parent, now) else { continue };
            *slot = !fresh;
            loaded += usize::from(fresh);
            let key = row.label.record.key();
            self.keys.put(block, self.blocks.trie().depth(block), key);
            known.insert(key, block);
        }
        self.blocks.put_back(tier, &free);
        Ok(loaded)
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

    /// The block of a row whose slot is free, and whether the row brought it to the tier.
    fn load_row(
        &mut self,
        tier: TierId,
        row: &Row,
        parent: Option<BlockId>,
        now: Nanos,
    ) -> Option<(BlockId, bool)> {
        let Label { record, standing } = &row.label;
        let mut whose = match (&record.scope, parent) {
            (Some(owner), _) if record.parent == self.scope_key(&owner.tenant, &owner.lora) => {
                Scope {
                    tenant: owner.tenant.clone(),
                    lora: owner.lora.clone(),
                    structure: owner.structure,
                    extra: Vec::new(),
                }
            }
            (None, Some(_)) => Scope::default(),
            _ => return None,
        };
        whose.extra = record.digests.iter().map(|(at, d)| (u64::from(*at), d.clone())).collect();
        let digests = record.digests.iter().all(|&(at, _)| (at as usize) < record.tokens.len());
        let sound = digests
            && record.tokens.len() == self.block_tokens()
            && self.scopes.digests.check(&whose, &record.tokens).is_ok();
        if !sound || !self.fits(tier, row.layers) {
            return None;
        }
        let stood = Node {
            uses: standing.uses.max(1),
            access: stamp(now).saturating_sub(standing.age),
            session_blocks: standing.session_blocks,
            ..Node::default()
        };
        let (block, known) = self.find_row(&whose, record, parent, row.layers, stood)?;
        if self.residency(tier, block).state != State::Absent {
            return Some((block, false));
        }
        if known {
            self.blocks.change_values(&[block], |_, node| {
                node.access = node.access.max(stood.access);
                node.uses = node.uses.max(stood.uses);
                node.session_blocks = stood.session_blocks;
            });
        }
        self.place(tier, block, (row.slot, row.layers), None, None, now);
        if let Some(wanted) = standing.wanted {
            self.want_again(block, wanted, now);
        }
        if let Some(cost) = standing.cost {
            self.price_again(block, cost);
        }
        self.refresh(block);
        Some((block, true))
    }

    /// Whether a tier may hold these layers of a block and no others.
    fn fits(&self, tier: TierId, layers: Layers) -> bool {
        let all = self.all_layers();
        let lowest = match self.settings.drop_order {
            DropOrder::Shallow => layers.hi == all.hi,
            DropOrder::Seed => layers.lo == 0,
        };
        let edge = if tier == self.last() { lowest } else { tier > 0 || layers.lo == 0 };
        !layers.is_empty() && all.covers(layers) && edge
    }

    /// The block of a row, made if it is new as it `stood`, and whether it was known; `None` if a
    /// part of a block, or what stands behind a lost one, would make a hole where none may be.
    fn find_row(
        &mut self,
        scope: &Scope,
        record: &Record,
        parent: Option<BlockId>,
        layers: Layers,
        stood: Node,
    ) -> Option<(BlockId, bool)> {
        let whole = layers == self.all_layers();
        let known = match parent {
            Some(parent) => Some(self.node(parent).scope),
            None => self.scopes.find(&Scope { structure: None, ..scope.clone() }).ok()?,
        };
        let structure = known.map_or(scope.structure.unwrap_or(self.settings.structure), |id| {
            self.scopes.get(id).structure
        });
        let joins = || parent.is_none_or(|parent| self.missing(parent).is_empty());
        if structure == Structure::LeafOnly && !(whole && joins()) {
            return None;
        }
        let content = self.intern(scope, 0, &record.tokens).ok()?;
        let id = match known {
            Some(id) => id,
            None => self.scopes.add(scope, self.settings.structure, &mut self.blocks),
        };
        let known = self.blocks.trie().child(self.scopes.get(id).root, parent, &content);
        let block = known.unwrap_or_else(|| {
            let mut path = Vec::with_capacity(1);
            self.new_nodes(Node { scope: id, ..stood }, parent, &content, &mut path);
            path[0]
        });
        self.scopes.digests.free(&content);
        Some((block, known.is_some()))
    }
}
