//! Many sessions: victims come in the order of a plain sort by retention value.

use kvtrie_core::{Event, Handle, Kind, Settings};

use super::{close, conversation, demoting, document, press};
use crate::rig::{GPU, Rig, tier};

/// Twelve conversations of one to six blocks, used at different times, some twice.
fn crowd(settings: Settings) -> (Rig, Vec<Vec<Handle>>) {
    let mut rig = Rig::new(settings);
    let lengths: Vec<usize> = (0..12).map(|stem| 1 + stem * 5 % 6).collect();
    for (stem, &length) in (0_u32..).zip(&lengths) {
        rig.serve_as(Some(&format!("s{stem}")), &conversation(stem, length));
        rig.now += 1_000_003 * u64::from(stem * stem % 7 + 1);
    }
    for stem in [3_u32, 8, 5] {
        let prompt = conversation(stem, lengths[stem as usize]);
        rig.serve_as(Some(&format!("s{stem}")), &prompt);
        rig.now += 77_777_777;
    }
    let blocks = (0_u32..).zip(&lengths).map(|(stem, &length)| {
        let found = rig.blocks(&conversation(stem, length));
        assert_eq!(found.len(), length);
        found
    });
    let blocks = blocks.collect();
    (rig, blocks)
}

#[test]
fn blocks_are_evicted_in_the_order_of_a_plain_sort_by_retention_value() {
    for policy in ["lru", "flat", "retention", "weighted"] {
        let tiers = vec![tier(Kind::Gpu, 42), tier(Kind::Host, 100)];
        let (mut rig, sessions) = crowd(document(40, policy, tiers));
        let blocks: Vec<Handle> = sessions.iter().flatten().copied().collect();
        assert_eq!((blocks.len(), rig.manager.occupancy(GPU).free), (42, 0));
        let value = |block| rig.manager.explain(block, GPU, rig.now).unwrap();
        let mut sorted: Vec<_> = blocks.iter().map(|&block| (value(block).value, block)).collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut ranked: Vec<_> = blocks.iter().map(|&b| (value(b).rank.unwrap(), b)).collect();
        ranked.sort_unstable();
        rig.events();
        press(&mut rig, 99, 42);
        let left: Vec<Handle> = rig.events().iter().map(|event| event.block).collect();
        let by_rank: Vec<Handle> = ranked.iter().map(|&(_, block)| block).collect();
        assert_eq!(left, by_rank, "{policy}: the rank gives the next victim");
        let values: Vec<f64> = sorted.iter().map(|&(value, _)| value).collect();
        let of = |block: &Handle| sorted.iter().find(|(_, b)| b == block).unwrap().0;
        let seen: Vec<f64> = left.iter().map(of).collect();
        assert!(seen.iter().zip(&values).all(|(a, b)| close(*a, *b)), "{policy}: {seen:?}");
    }
}

#[test]
fn layers_are_evicted_in_the_order_of_a_plain_sort_by_retention_value() {
    let (mut rig, sessions) = crowd(document(8, "weighted", demoting(42)));
    let mut all = Vec::new();
    for &block in sessions.iter().flatten() {
        for layer in 0..8 {
            let value = rig.manager.explain_layer(block, GPU, layer, rig.now).unwrap().value;
            all.push((value, block, layer));
        }
    }
    rig.events();
    press(&mut rig, 99, 42);
    let of = |event: &Event| {
        let found = all.iter().find(|(_, b, l)| (*b, *l) == (event.block, event.layers.lo));
        found.unwrap().0
    };
    let seen: Vec<f64> = rig.events().iter().map(of).collect();
    assert_eq!(seen.len(), all.len());
    // Costs are ranked in units of 2^-40, so neighbours may differ by that much.
    assert!(seen.windows(2).all(|pair| pair[0] <= pair[1] * (1.0 + 1e-8)));
    let mut values: Vec<f64> = all.iter().map(|&(value, ..)| value).collect();
    values.sort_by(f64::total_cmp);
    let mut left = seen;
    left.sort_by(f64::total_cmp);
    assert_eq!(left, values, "each layer left once");
}
