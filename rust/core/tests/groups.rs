//! Models of several groups: what a request finds, what stays resumable, and room in one budget.
//!
//! Every call is followed by an audit, which counts slots, pages, holds and links again from the
//! resume points and the leases. Cost: seconds.

mod engine;
mod parts;
mod points;
mod room;
mod shared;
mod stories;
mod tiers;

use kvtrie_core::{Answer, Group, GroupKind, Hint, Scope, Settings, Target, Token};

use crate::group_story::on;
use crate::rig::{GPU, Rig};

/// Two blocks of four tokens.
const WINDOW: Group =
    Group { kind: GroupKind::Sliding { window: 9, sinks: 0 }, slot_bytes: 500, layers: 3 };
const STATE: Group = Group { kind: GroupKind::State, slot_bytes: 700, layers: 2 };

fn of(groups: &[Group], bytes: u64) -> Settings {
    on(groups, &[bytes])
}

fn held(rig: &Rig) -> Vec<(u64, u64)> {
    held_on(rig, GPU)
}

fn held_on(rig: &Rig, tier: usize) -> Vec<(u64, u64)> {
    rig.manager.group_slots(tier).iter().map(|slots| (slots.held, slots.released)).collect()
}

fn hinted(rig: &mut Rig, hint: Hint) -> Answer {
    rig.call(|m, now| m.hint(&[hint], now)).unwrap()[0].answer
}

fn target(tokens: &[Token]) -> Target {
    Target::Tokens { tokens: tokens.to_vec(), scope: Scope::default() }
}
