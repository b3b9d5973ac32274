//! Facts and simple loops for the tests of all policies.
//!
//! Invariant: blocks hold 32 tokens and the model has 40 layers unless a test says otherwise. Cost:
//! full sorts and scans.

use super::{Entry, Facts, Policy};
use crate::block::{BlockId, Departure, Layers};
use crate::cost::CostModel;
use crate::time::Nanos;

/// A whole block, used once, about to be demoted.
pub(super) fn facts(context: u64, block: u32, session_blocks: u32) -> Facts {
    Facts {
        context,
        block,
        session_blocks,
        uses: 1,
        layers: Layers::new(0, 40),
        model_layers: 40,
        layer: None,
        departure: Departure::Demote,
    }
}

/// One layer of block `block` of a session of `session_blocks`.
pub(super) fn layer(layer: u16, model_layers: u16, block: u32, session_blocks: u32) -> Facts {
    Facts {
        layers: Layers::new(0, model_layers),
        model_layers,
        layer: Some(layer),
        ..facts(u64::from(block) * 32, block, session_blocks)
    }
}

/// The ids in the order in which they leave.
pub(super) fn order(policy: &dyn Policy, mut entries: Vec<Entry>, now: Nanos) -> Vec<BlockId> {
    entries.sort_by(|a, b| policy.compare(a, b, now));
    entries.iter().map(|entry| entry.id).collect()
}

/// Evicts layer by layer until nothing is left and returns (layer, id) of the victims. Each block
/// offers one layer at a time: the last one for demotion, the first one for drops. `accesses` holds
/// the last use of each block of each session.
pub(super) fn evict_all(
    policy: &dyn Policy,
    cost: &CostModel,
    model_layers: u16,
    accesses: &[Vec<Nanos>],
    departure: Departure,
    now: Nanos,
) -> Vec<(u16, BlockId)> {
    let mut blocks = Vec::new();
    for session in accesses {
        let number = u32::try_from(session.len()).unwrap_or(0);
        for (block, &access) in (0..).zip(session) {
            blocks.push((block, number, access, Layers::new(0, model_layers)));
        }
    }
    let mut victims = Vec::new();
    loop {
        let offers = (0..).zip(&blocks).filter(|(_, block)| !block.3.is_empty());
        let entries = offers.map(|(id, &(block, number, access, layers))| {
            let next = if departure == Departure::Demote { layers.hi - 1 } else { layers.lo };
            let facts = Facts { layers, departure, ..layer(next, model_layers, block, number) };
            (next, Entry { class: policy.class(&facts, cost), access, tie: 0, id })
        });
        let Some((next, entry)) = entries.min_by(|a, b| policy.compare(&a.1, &b.1, now)) else {
            return victims;
        };
        victims.push((next, entry.id));
        let layers = &mut blocks[entry.id as usize].3;
        *layers = layers.without(Layers::new(next, next + 1)).unwrap_or(Layers::NONE);
    }
}
