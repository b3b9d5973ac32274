//! A machine's part of the shared store: what its manager takes it to have.
//!
//! The manager's last tier is what it takes the store to have. Before a request the machine asks for
//! the blocks that no faster tier has, marks those that it finds there, and clears those that have left
//! the store. A block that cannot be cleared, because requests or other blocks need it, is left out of
//! the lookup, computed, and cleared before the next request. Writes are a few at a time; the others wait in the manager, where eviction may drop them.
//! Invariant: the store gets a block when all of its layers are written. Cost: O(blocks of the
//! prompt) per request.

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

/// Writes that a machine has under way: one for each thread of a storage, as `kvtrie.Tier` has them.
const WRITES: usize = 4;

/// The shared store of a machine.
#[derive(Debug)]
pub(super) struct Remote {
    tier: TierId,
    scope: BlockKey,
    store: SharedStore,
    /// Blocks that are being written.
    writes: FxHashMap<MoveId, (Handle, BlockKey)>,
    /// Blocks that have left the store and could not be cleared, with their prompts up to their ends.
    stale: BTreeMap<BlockKey, Vec<Token>>,
}

impl Remote {
    /// The store as the last tier of a manager with these settings.
    pub(super) fn new(settings: &Settings, store: SharedStore) -> Self {
        let scope = scope_key(&settings.fingerprint, settings.block_tokens, &[], "");
        let tier = settings.tiers.len() - 1;
        Self { tier, scope, store, writes: FxHashMap::default(), stale: BTreeMap::new() }
    }

    /// Number of stores that may begin.
    pub(super) fn free(&self) -> usize {
        WRITES.saturating_sub(self.writes.len())
    }

    /// Stores among some moves have begun.
    pub(super) fn begin(&mut self, handed: &[Handed]) {
        let stores = handed.iter().filter(|order| order.dst == self.tier);
        // A block that is not committed yet has no name.
        let named = stores.filter_map(|order| Some((order.id, (order.block?, order.key))));
        self.writes.extend(named);
    }
}

/// A block of a prompt, as a machine has it.
#[derive(Clone, Copy, Debug, Default)]
struct Here {
    /// Whether faster tiers than the store have it or expect it.
    local: bool,
    /// Whether the manager takes the store to have it.
    believed: bool,
}

impl Machine {
    /// Asks the shared store, if there is one, for the blocks of a prompt, of which `keep` tokens stay
    /// to be computed, and brings the manager in line with its answer. Returns how many tokens stay to
    /// be computed now: more, if the manager still believes in a block that has left the store.
    ///
    /// # Errors
    /// Those of the manager.
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
        let (here, reach) = loop {
            let here = self.blocks(usable, tier, now)?;
            let of = |at: usize| here.get(at).copied().unwrap_or_default();
            let reach = (0..keys.len()).take_while(|&at| of(at).local || stored[at]).count();
            let new = |&at: &usize| !of(at).local && !of(at).believed;
            let Some(first) = (0..reach).find(new) else { break (here, reach) };
            let end = first + (first..reach).take_while(new).count();
            if !self.calls.mark(&tokens[..end * size], tier, first, (now, now), now)? {
                break (here, first);
            }
        };
        let asked = |at: &usize| here.get(*at).is_none_or(|here| !here.local);
        let found: Vec<BlockKey> = (0..reach).filter(asked).map(|at| keys[at]).collect();
        store.get().touch(&found);
        for at in (reach..here.len()).rev() {
            if here[at].believed {
                self.forget(keys[at], &tokens[..(at + 1) * size], now)?;
            }
        }
        let matched = self.calls.manager().matched(usable, &Scope::default(), 0)? / size;
        Ok(if matched > reach { tokens.len() - reach * size } else { keep })
    }

    /// Clears the last block of a path, which has left the store unless it was written again.
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

    /// Blocks of a prompt that the manager knows.
    fn blocks(&self, tokens: &[Token], remote: TierId, now: Nanos) -> Result<Vec<Here>> {
        let manager = self.calls.manager();
        let known = manager.probe(Query::Tokens(tokens), &Scope::default(), 0)?;
        let all = manager.settings().layers;
        let of = |block: MatchedBlock| {
            let staying = || block.copies.iter().filter(|copy| !copy.leaving);
            let mut above = staying().filter(|copy| copy.tier < remote);
            let lacking =
                above.try_fold(Layers::new(0, all), |left, copy| left.without(copy.coming));
            let local = lacking.is_some_and(Layers::is_empty);
            Here { local, believed: staying().any(|copy| copy.tier == remote) }
        };
        Ok(manager.describe(&known, now).into_iter().map(of).collect())
    }

    /// Number of leading blocks of a prompt that it has with all their layers, on tiers of its own.
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

    /// Stores among some moves have ended: the store has the blocks that are whole.
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
