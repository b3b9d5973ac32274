//! Borders named by hints before any tier has all their needs.
//!
//! A named border waits by the content key of its last block. The next request with these tokens
//! gets it as a border of its pass. Invariant: no scope has more than [`MOST_NAMED`]. Cost: while
//! borders of its scope wait, a hash per block of a request.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{BlockId, Token};
use crate::manager::Manager;
use crate::record::BlockKey;
use crate::scope::Scope;

/// Maximum number of waiting borders of a scope.
pub(crate) const MOST_NAMED: usize = 4096;

/// Waiting borders, by the key of their scope.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamedBorders(BTreeMap<BlockKey, BTreeSet<BlockKey>>);

impl NamedBorders {
    /// Adds a border. Returns whether it waits now.
    pub(crate) fn add(&mut self, scope: BlockKey, border: BlockKey) -> bool {
        let waiting = self.0.entry(scope).or_default();
        waiting.contains(&border) || (waiting.len() < MOST_NAMED && waiting.insert(border))
    }

    /// Ends the wait of a border. Returns whether it waited.
    fn take(&mut self, scope: BlockKey, border: BlockKey) -> bool {
        let Some(waiting) = self.0.get_mut(&scope) else { return false };
        let waited = waiting.remove(&border);
        // Empty rows would keep the scope in the table.
        if waiting.is_empty() {
            self.0.remove(&scope);
        }
        waited
    }
}

impl Manager {
    /// The waiting borders of a prompt, in blocks, ascending.
    pub(crate) fn named_borders(&self, scope: &Scope, tokens: &[Token]) -> Vec<u32> {
        if self.points.named.0.is_empty() {
            return Vec::new();
        }
        let first = self.scope_key(scope.owner(), &scope.lora);
        let Some(waiting) = self.points.named.0.get(&first) else { return Vec::new() };
        let keys = self.keys(scope, tokens).unwrap_or_default();
        (1..).zip(keys).filter(|(_, key)| waiting.contains(key)).map(|(border, _)| border).collect()
    }

    /// Ends the wait of the border after a block that becomes a point. Returns whether a hint named
    /// it.
    pub(crate) fn take_named(&mut self, block: BlockId) -> bool {
        if self.points.named.0.is_empty() {
            return false;
        }
        let (scope, key) = (self.scope_key_of(block), self.key(block));
        self.points.named.take(scope, key)
    }
}
