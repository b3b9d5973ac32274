//! Names for outside: the keys and records under which blocks stand on storage.
//!
//! Invariant: a key is hashed once in a block's life. Cost: one hash per block of the path that has
//! no key yet.

use crate::block::BlockId;
use crate::record::{Key, Label, Owner, Record, Standing, scope_key};
use crate::time::{Nanos, stamp};

use super::Manager;

impl Manager {
    /// Content hash of a block: over the model, the scope and all tokens up to its end.
    pub(super) fn key(&mut self, block: BlockId) -> Key {
        let mut path = vec![block];
        while let Some(parent) = self.trie.parent(*path.last().expect("not empty")) {
            if self.keys.contains_key(&parent) {
                path.push(parent);
                break;
            }
            path.push(parent);
        }
        let mut key = None;
        for &block in path.iter().rev() {
            key = Some(match (self.keys.get(&block), key) {
                (Some(known), _) => *known,
                (None, above) => self.hash(block, above),
            });
            self.keys.insert(block, key.expect("just set"));
        }
        key.expect("the path has a block")
    }

    fn hash(&self, block: BlockId, above: Option<Key>) -> Key {
        self.record_behind(block, above).key()
    }

    /// What a store has to keep beside the bytes of a block.
    pub(super) fn label(&mut self, block: BlockId, now: Nanos) -> Label {
        let above = self.trie.parent(block).map(|parent| self.key(parent));
        let node = *self.node(block);
        let standing = Standing {
            age: stamp(now).saturating_sub(node.access),
            uses: node.uses,
            session_blocks: self.session_blocks(block).unwrap_or(0),
            wanted: self.wanted_of(block, now),
            cost: self.price(block),
        };
        Label { record: self.record_behind(block, above), standing }
    }

    fn record_behind(&self, block: BlockId, above: Option<Key>) -> Record {
        let scope = self.scopes.get(self.node(block).scope);
        let mut digests = Vec::new();
        let content = self.trie.tokens(block).iter().zip(0..);
        let tokens = content
            .map(|(&token, offset)| match self.scopes.pair(token) {
                Some((token, digest)) => {
                    digests.push((offset, digest.clone()));
                    *token
                }
                None => token,
            })
            .collect();
        match above {
            Some(parent) => Record { parent, scope: None, tokens, digests },
            None => Record {
                parent: self.scope_key(&scope.tenant, &scope.lora),
                scope: Some(Owner {
                    tenant: scope.tenant.clone(),
                    lora: scope.lora.clone(),
                    structure: scope.chosen.then_some(scope.structure),
                }),
                tokens,
                digests,
            },
        }
    }

    /// The key that the first blocks of a scope are chained to.
    pub(super) fn scope_key(&self, tenant: &[u8], lora: &str) -> Key {
        let settings = &self.settings;
        scope_key(&settings.fingerprint, settings.block_tokens, tenant, lora)
    }
}
