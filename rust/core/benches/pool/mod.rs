//! The manager that the benchmarks run.
//!
//! Invariant: the same settings in every benchmark, so that their figures belong together. Cost:
//! none.

use kvtrie_core::{CostModel, Kind, LaneSpec, Manager, Owner, Settings, TierSpec, Write};

/// One tier of `blocks` blocks of 16 tokens, leaf-only.
pub(crate) fn manager(policy: &str, blocks: u32) -> Manager {
    tiers(policy, blocks, 1)
}

/// `number` tiers of that size; each writes through to the next one.
pub(crate) fn tiers(policy: &str, blocks: u32, number: usize) -> Manager {
    Manager::new(settings(policy, blocks, number)).expect("good settings")
}

/// Settings of those managers.
pub(crate) fn settings(policy: &str, blocks: u32, number: usize) -> Settings {
    let lane = |name: &str| LaneSpec {
        name: name.to_owned(),
        bytes_per_s: 20_000_000_000,
        latency_ns: 10_000,
        shares: None,
    };
    let tier = |kind: Kind| TierSpec {
        kind,
        blocks,
        owner: Owner::Kvtrie,
        write: if number > 1 { Write::Through } else { Write::Back },
        admit_after: 1,
        free_low: 0.0,
        growth_reserve: 0.0,
        retained_share: 0.5,
        layer_slots: false,
        kept: false,
        policy: None,
        read: lane(&format!("from {}", kind.name())),
        store: lane(&format!("to {}", kind.name())),
    };
    let tiers = [Kind::Gpu, Kind::Host, Kind::Disk].into_iter().take(number).map(tier).collect();
    Settings {
        policy: policy.to_owned(),
        cost: CostModel::default_curve(100_000.0).expect("good numbers"),
        ..Settings::new("bench", 32, 65_536, tiers)
    }
}
