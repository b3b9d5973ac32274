//! The shapes of manager that worlds are made of.
//!
//! Invariant: every number gives settings that a manager accepts.

use kvtrie_core::{
    CostModel, DropOrder, Kind, LaneSpec, Owner, POLICIES, Settings, Structure, TierSpec, Write,
};

/// The next number of a seeded sequence (`SplitMix64`).
pub(crate) fn mixed(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A shape of manager, drawn from one number.
#[must_use]
pub(crate) fn settings(seed: u64) -> Settings {
    let bit = |at: u32, n: u64| (seed >> at) % n;
    let tiers = [1, 2, 2, 2, 3, 3, 4, 4][usize::try_from(bit(0, 8)).unwrap()];
    let layer_slots = bit(2, 3);
    let kinds = [Kind::Gpu, Kind::Host, Kind::Disk, Kind::Remote];
    let lane = |name: &str| LaneSpec {
        name: name.to_owned(),
        bytes_per_s: 1_000_000,
        latency_ns: 10,
        shares: None,
    };
    let engine = tiers > 1 && layer_slots == 0 && bit(13, 6) == 0;
    Settings {
        fingerprint: "world".to_owned(),
        layers: 3,
        layer_bytes: 16,
        block_tokens: 3,
        token_weight: 1,
        tiers: (0..tiers)
            .map(|at| TierSpec {
                kind: kinds[at],
                blocks: [5, 6, 7, 40][at],
                owner: if engine && at == 0 { Owner::Engine } else { Owner::Kvtrie },
                write: [Write::Back, Write::Through, Write::Back, Write::Never]
                    [usize::try_from(bit(4 + u32::try_from(at).unwrap(), 4)).unwrap()],
                admit_after: 1 + u32::try_from(bit(8, 2)).unwrap(),
                free_low: if bit(9, 3) == 0 { 0.4 } else { 0.0 },
                growth_reserve: if bit(11, 4) == 0 && at == 0 { 0.2 } else { 0.0 },
                retained_share: [0.0, 0.5, 0.5, 1.0][usize::try_from(bit(27, 4)).unwrap()],
                layer_slots: layer_slots > u64::try_from(at).unwrap()
                    && at < if tiers == 4 { 1 } else { 2 },
                kept: false,
                policy: None,
                read: lane(&format!("up{at}")),
                store: lane(&format!("down{at}")),
            })
            .collect(),
        policy: POLICIES[usize::try_from(bit(16, POLICIES.len() as u64)).unwrap()].to_owned(),
        reuse: bit(19, 2) == 0,
        epsilon: if bit(25, 2) == 0 { 0.0 } else { 0.25 },
        // Steep, so that rounding changes what blocks of one path cost.
        cost: CostModel::affine(0.25, 1.0, 0.0, 1000.0).unwrap(),
        priced: bit(29, 4) == 0,
        structure: if bit(20, 3) == 0 { Structure::LeafOnly } else { Structure::Holes },
        drop_order: if bit(21, 4) == 0 { DropOrder::Seed } else { DropOrder::Shallow },
        ranks: 1 + u32::try_from(bit(23, 3) / 2).unwrap(),
        events: 10_000,
        block_events: if bit(31, 2) == 0 { 1_000_000 } else { 0 },
        eviction_log: 100,
        groups: None,
        explain: false,
        producer_key: None,
    }
}

/// The same with a first tier that is the engine's and writes through, so that blocks are mostly
/// stored ahead.
#[must_use]
pub(crate) fn engines(seed: u64) -> Settings {
    let mut drawn = settings(seed | 2);
    for tier in &mut drawn.tiers {
        tier.layer_slots = false;
    }
    let first = &mut drawn.tiers[0];
    (first.owner, first.write, first.growth_reserve) = (Owner::Engine, Write::Through, 0.0);
    first.admit_after = 1 + u32::from(seed.is_multiple_of(16));
    drawn
}

/// The same with host memory directly above a remote tier.
#[must_use]
pub(crate) fn shared(seed: u64) -> Settings {
    let mut drawn = settings(seed | 4);
    drawn.tiers.truncate(3);
    (drawn.tiers[2].kind, drawn.tiers[2].blocks) = (Kind::Remote, 12);
    drawn
}
