//! A machine's view of the shared store: the last tier of its manager.
//!
//! Before each request the machine looks up the blocks missing on faster tiers. Blocks found in the
//! store are marked in the manager, and blocks evicted from the store are cleared. A block in use
//! by requests or child blocks cannot be cleared: it is left out of the lookup, recomputed, and
//! cleared before the next request. Few writes run at a time. Further writes wait in the manager,
//! and eviction may drop them. Invariant: a block enters the store once all its layers are written.
//! Cost: O(blocks of the prompt) per request.

use std::collections::BTreeMap;

use kvtrie_core::{
    BlockKey, Handle, Layers, MatchedBlock, MoveId, Nanos, Query, Result, Scope, Settings, TierId,
    Token, keys_of, scope_key,
};
use rustc_hash::FxHashMap;

use super::Machine;
use crate::call::Handed;
use crate::remote::SharedStore;
use crate::request::Prompt;

/// Concurrent writes per machine, equal to the storage threads, as in `kvtrie.Tier`.
const WRITES: usize = 4;

/// A machine's view of the shared store.
#[derive(Debug)]
pub(super) struct Remote {
    tier: TierId,
    scope: BlockKey,
    store: SharedStore,
    /// Blocks being written.
    writes: FxHashMap<MoveId, (Handle, BlockKey)>,
    /// Evicted blocks still known to the manager, with the prompts ending in them.
    stale: BTreeMap<BlockKey, Vec<Token>>,
}

impl Remote {
    /// Create the view for a manager with these settings.
    pub(super) fn new(settings: &Settings, store: SharedStore) -> Self {
        let scope = scope_key(&settings.fingerprint, settings.block_tokens, &[], "");
        let tier = settings.tiers.len() - 1;
        Self { tier, scope, store, writes: FxHashMap::default(), stale: BTreeMap::new() }
    }

    /// Number of further writes allowed.
    pub(super) fn free(&self) -> usize {
        WRITES.saturating_sub(self.writes.len())
    }

    /// Record the started writes among `handed`.
    pub(super) fn begin(&mut self, handed: &[Handed]) {
        let stores = handed.iter().filter(|order| order.dst == self.tier);
        // Only committed blocks have a key.
        let named = stores.filter_map(|order| Some((order.id, (order.block?, order.key))));
        self.writes.extend(named);
    }
}

/// Location of a prompt block on this machine.
#[derive(Clone, Copy, Debug, Default)]
struct BlockState {
    /// Whether faster tiers have or expect the whole block.
    local: bool,
    /// Whether the manager's last tier has the block.
    believed: bool,
}

impl Machine {
    /// Look up a prompt in the shared store, if any, and update the manager's last tier. `keep`
    /// tokens stay to be computed. Returns the updated `keep`: larger if the manager still has a
    /// block evicted from the store.
    ///
    /// # Errors
    /// Errors of the manager.
    pub fn find(&mut self, tokens: &[Token], keep: usize, now: Nanos) -> Result<usize> {
        let Some(Remote { tier, scope, store, stale, .. }) = &mut self.remote else {
            return Ok(keep);
        };
        let (tier, store, scope, stale) = (*tier, store.clone(), *scope, std::mem::take(stale));
        for (key, path) in stale {
            self.forget(key, &path, now)?;
        }
        let size = self.calls.settings().block_tokens as usize;
        let usable = &tokens[..tokens.len().saturating_sub(keep)];
        let keys: Vec<BlockKey> = keys_of(scope, usable, size).collect();
        let stored: Vec<bool> = {
            let store = store.get();
            keys.iter().map(|key| store.finds(key, self.number, now)).collect()
        };
        let (states, reach) = loop {
            let states = self.blocks(usable, tier, now)?;
            let of = |at: usize| states.get(at).copied().unwrap_or_default();
            let reach = (0..keys.len()).take_while(|&at| of(at).local || stored[at]).count();
            let new = |&at: &usize| !of(at).local && !of(at).believed;
            let Some(first) = (0..reach).find(new) else { break (states, reach) };
            let end = first + (first..reach).take_while(new).count();
            if !self.calls.mark(&tokens[..end * size], tier, first, (now, now), now)? {
                break (states, first);
            }
        };
        let asked = |at: &usize| states.get(*at).is_none_or(|state| !state.local);
        let found: Vec<BlockKey> = (0..reach).filter(asked).map(|at| keys[at]).collect();
        store.get().touch(&found);
        for at in (reach..states.len()).rev() {
            if states[at].believed {
                self.forget(keys[at], &tokens[..(at + 1) * size], now)?;
            }
        }
        let matched = self.calls.manager().matched(usable, &Scope::default(), 0)? / size;
        Ok(if matched > reach { tokens.len() - reach * size } else { keep })
    }

    /// Clear the last block of a path, unless it was written to the store again.
    fn forget(&mut self, key: BlockKey, path: &[Token], now: Nanos) -> Result<()> {
        let Some(Remote { tier, store, .. }) = &self.remote else { return Ok(()) };
        if store.get().finds(&key, self.number, now) {
            return Ok(());
        }
        let skip = path.len() / self.calls.settings().block_tokens as usize - 1;
        let cleared = self.calls.clear(path, *tier, skip, now)?;
        if let (false, Some(remote)) = (cleared, &mut self.remote) {
            remote.stale.insert(key, path.to_vec());
        }
        Ok(())
    }

    /// Locations of the prompt blocks known to the manager.
    fn blocks(&self, tokens: &[Token], remote: TierId, now: Nanos) -> Result<Vec<BlockState>> {
        let manager = self.calls.manager();
        let known = manager.probe(Query::Tokens(tokens), &Scope::default(), 0)?;
        let all = manager.settings().layers;
        let of = |block: MatchedBlock| {
            let staying = || block.copies.iter().filter(|copy| !copy.leaving);
            let mut above = staying().filter(|copy| copy.tier < remote);
            let lacking =
                above.try_fold(Layers::new(0, all), |left, copy| left.without(copy.coming));
            let local = lacking.is_some_and(Layers::is_empty);
            BlockState { local, believed: staying().any(|copy| copy.tier == remote) }
        };
        Ok(manager.describe(&known, now).into_iter().map(of).collect())
    }

    /// Number of leading prompt blocks with all layers on the machine's local tiers.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::resident`].
    pub fn resident(&self, prompt: Prompt<'_>) -> Result<usize> {
        let manager = self.calls.manager();
        let (query, scope) = (Query::Tokens(prompt.tokens), Scope::default());
        let Some(Remote { tier: remote, .. }) = &self.remote else {
            return manager.resident(query, &scope, prompt.keep);
        };
        let known = manager.probe(query, &scope, prompt.keep)?;
        let mut count = 0;
        loop {
            let left = &known[count..];
            let further = (0..*remote).map(|tier| manager.resident_blocks(left, tier)).max();
            match further {
                None | Some(0) => return Ok(count),
                Some(further) => count += further,
            }
        }
    }

    /// Add completed writes to the store: blocks with all layers.
    pub(super) fn written(&mut self, moves: &[MoveId], now: Nanos) {
        let Some(remote) = &mut self.remote else { return };
        let ended = moves.iter().filter_map(|id| remote.writes.remove(id));
        let (manager, mut store) = (self.calls.manager(), remote.store.get());
        for (block, key) in ended {
            if manager.resident_blocks(&[block], remote.tier) == 1 {
                store.put(key, self.number, now);
            }
        }
    }
}
