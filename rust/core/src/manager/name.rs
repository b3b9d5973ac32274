//! Storage names: the keys and records of blocks on persistent tiers.
//!
//! Invariant: a path has the same keys after recomputation. Cost: a hash per block below the next
//! ancestor with a cached key, at most sixteen once a deeper key was computed.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::block::{BlockId, Token};
use crate::error::Result;
use crate::record::{
    BlockKey, Label, Producer, Record, ScopeOwner, Usage, chained, keys_with, scope_key,
};
use crate::scope::Scope;
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::keys::BlockName;

impl Manager {
    /// Content keys of the full blocks of a sequence, cached or not. Cost: a hash per block.
    ///
    /// # Errors
    /// [`crate::error::Error::Config`] for tokens in the range of digests.
    pub fn keys(&self, scope: &Scope, tokens: &[Token]) -> Result<Vec<BlockKey>> {
        self.open()?;
        self.scopes.digests.check(scope, tokens)?;
        let first = self.scope_key(scope.owner(), &scope.lora);
        let size = self.block_tokens();
        Ok(keys_with(first, tokens, size, scope.extra.clone()).collect())
    }

    /// Content hash of a block: over the model, the scope and all tokens up to its end.
    pub(crate) fn key(&mut self, block: BlockId) -> BlockKey {
        self.name(block).key
    }

    /// Name of a block.
    // Keys are chained: hash downwards from the nearest ancestor with a cached name.
    pub(crate) fn name(&mut self, block: BlockId) -> BlockName {
        let mut path: SmallVec<[BlockId; 16]> = SmallVec::new();
        let (mut next, mut above) = (Some(block), None);
        while let Some(block) = next {
            above = self.keys.get(block);
            if above.is_some() {
                break;
            }
            path.push(block);
            next = self.trie().parent(block);
        }
        for &block in path.iter().rev() {
            let name = self.name_under(block, above);
            self.keys.put(block, self.trie().depth(block), name);
            above = Some(name);
        }
        above.expect("the path has a block")
    }

    /// Name of a block under the name of its parent.
    pub(crate) fn name_under(&self, block: BlockId, above: Option<BlockName>) -> BlockName {
        let (parent, before) = if let Some(above) = above {
            (above.key, above.private)
        } else {
            let whose = &self.scopes.get(self.node(block).scope).whose;
            (self.scope_key(whose.tenant(), whose.lora()), !whose.tenant().is_empty())
        };
        if self.scopes.digests.is_empty() {
            let key = chained(parent, self.trie().tokens(block), &[]);
            return BlockName { key, private: before };
        }
        let record = self.record_under(block, above.map(|above| above.key));
        BlockName { key: record.key(), private: before || !record.digests.is_empty() }
    }

    /// Index of all blocks by key. Cost: a hash per block of the trie.
    pub(crate) fn by_key(&self) -> FxHashMap<BlockKey, BlockId> {
        let mut known = FxHashMap::default();
        let firsts = self.scopes.all().flat_map(|(_, scope)| self.trie().first_blocks(scope.root));
        let mut open: Vec<(BlockId, Option<BlockKey>)> =
            firsts.map(|block| (block, None)).collect();
        while let Some((block, above)) = open.pop() {
            let key = self.record_under(block, above).key();
            known.insert(key, block);
            open.extend(self.trie().children(block).map(|child| (child, Some(key))));
        }
        known
    }

    /// The label stored with the bytes of a block.
    pub(crate) fn label(&mut self, block: BlockId, now: Nanos) -> Label {
        let above = self.trie().parent(block).map(|parent| self.key(parent));
        let node = *self.node(block);
        let usage = Usage {
            age: stamp(now).saturating_sub(node.access),
            uses: node.uses,
            session_blocks: self.session_blocks(block).unwrap_or(0),
            wanted: self.stored_hint(block, now),
            cost: self.prices.of(block),
        };
        Label { record: self.record_under(block, above), usage }
    }

    /// The record of a block under the key of its parent, with digests in place of their numbers.
    pub(crate) fn record_under(&self, block: BlockId, above: Option<BlockKey>) -> Record {
        let scope = self.scopes.get(self.node(block).scope);
        let mut digests = Vec::new();
        let content = self.trie().tokens(block).iter().zip(0..);
        let tokens = content
            .map(|(&token, offset)| match self.scopes.digests.pair(token) {
                Some((token, digest)) => {
                    digests.push((offset, digest.clone()));
                    *token
                }
                None => token,
            })
            .collect();
        let producers = self.producers.of(block).map(<[Producer]>::to_vec);
        match above {
            Some(parent) => Record { parent, scope: None, tokens, digests, producers },
            None => Record {
                parent: self.scope_key_of(block),
                scope: Some(Box::new(ScopeOwner {
                    tenant: scope.whose.tenant().to_vec(),
                    lora: scope.whose.lora().to_owned(),
                    structure: scope.chosen.then_some(scope.structure),
                })),
                tokens,
                digests,
                producers,
            },
        }
    }

    /// The key chained before the first blocks of a scope.
    pub(crate) fn scope_key(&self, tenant: &[u8], lora: &str) -> BlockKey {
        let settings = &self.settings;
        scope_key(&settings.fingerprint, settings.block_tokens, tenant, lora)
    }

    /// The scope key of a block's scope.
    pub(crate) fn scope_key_of(&self, block: BlockId) -> BlockKey {
        let whose = &self.scopes.get(self.node(block).scope).whose;
        self.scope_key(whose.tenant(), whose.lora())
    }
}
