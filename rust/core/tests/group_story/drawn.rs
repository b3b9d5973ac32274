//! Settings of stories, drawn from one number.
//!
//! Invariant: one number gives the same settings for ever. Cost: O(1).

use kvtrie_core::{Group, GroupKind, Owner, POLICIES, Settings, Structure, Write};

use super::{FULL, on};

/// Settings drawn from one number: two to four groups on one to three tiers. A manager may refuse
/// those with too little room.
pub(crate) fn drawn(seed: u64) -> Settings {
    let mut state = seed;
    let mut next = |n: u64| mixed(&mut state) % n;
    let place = |drawn: u64| usize::try_from(drawn).unwrap();
    let small = |drawn: u64| u32::try_from(drawn).unwrap();
    let mut groups = vec![FULL];
    for _ in 0..=next(3) {
        let kind = match next(7) {
            0..3 => GroupKind::Sliding { window: 1 + next(29), sinks: next(6) },
            3 | 4 => GroupKind::Chunked { chunk: 1 + next(29) },
            _ => GroupKind::State,
        };
        groups.push(Group { kind, slot_bytes: 20 + next(880), layers: 2 });
    }
    let largest = groups.iter().map(|group| group.slot_bytes).max().unwrap_or(1);
    let mut bytes = vec![(6 + next(54)) * largest];
    bytes.extend((0..next(3)).map(|_| (4 + next(36)) * largest));
    let mut settings = on(&groups, &bytes);
    POLICIES[place(next(POLICIES.len() as u64))].clone_into(&mut settings.policy);
    settings.block_events = 100_000;
    settings.tiers[0].owner = [Owner::Kvtrie, Owner::Nobody, Owner::Engine][place(next(3))];
    settings.tiers[0].growth_reserve = if next(4) == 0 { 0.3 } else { 0.0 };
    for tier in &mut settings.tiers {
        tier.write = [Write::Back, Write::Through, Write::Never][place(next(3))];
        tier.admit_after = 1 + u32::from(next(5) == 0);
        tier.free_low = if next(4) == 0 { 0.4 } else { 0.0 };
    }
    if let Some(groups) = &mut settings.groups {
        groups.newest = 1 + small(next(3));
        groups.every = if next(5) == 0 { 1 + small(next(3)) } else { 0 };
    }
    settings.structure = if next(3) == 0 { Structure::Holes } else { Structure::LeafOnly };
    settings
}

/// The next number of a seeded sequence (`SplitMix64`).
fn mixed(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
