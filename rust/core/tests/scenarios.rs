//! Scenarios of the cost-model document: the order in which a manager evicts layers of blocks.
//!
//! One layer of one block is L39C0: layer 39 of block 0. Blocks and layers as in the document.

mod crowd;
mod shift;

use kvtrie_core::{
    Acquire, CostModel, DropOrder, Event, Handle, Kind, Layers, LoadMode, POLICIES, Reason,
    Settings, Structure, TierSpec,
};

use crate::rig::{self, GPU, HOST, Rig, layered, settings, tier};

/// A model of `layers` layers with blocks of 32 tokens and the document's constants.
fn document(layers: u16, policy: &str, tiers: Vec<TierSpec>) -> Settings {
    Settings {
        layers,
        block_tokens: 32,
        policy: policy.to_owned(),
        cost: CostModel::seed(1.0).unwrap(),
        structure: Structure::Holes,
        ..settings(tiers)
    }
}

/// A first tier of `blocks` blocks with layer slots, above a large host.
fn demoting(blocks: u32) -> Vec<TierSpec> {
    vec![layered(Kind::Gpu, blocks), tier(Kind::Host, 1000)]
}

fn conversation(stem: u32, blocks: usize) -> Vec<u32> {
    (0..).take(32 * blocks).map(|at| stem * 10_000 + at).collect()
}

/// The evictions from the first tier as (session, layer, block), in order.
fn departures(rig: &mut Rig, sessions: &[Vec<Handle>], reason: Reason) -> Vec<(usize, u16, usize)> {
    let place = |event: &Event| {
        sessions.iter().enumerate().find_map(|(session, blocks)| {
            let block = blocks.iter().position(|block| *block == event.block)?;
            assert_eq!((event.tier, event.reason), (GPU, reason));
            Some(event.layers.iter().map(|layer| (session, layer, block)).collect::<Vec<_>>())
        })
    };
    rig.events().iter().filter_map(place).flatten().collect()
}

/// Requests room for `blocks` blocks and nothing else.
fn press(rig: &mut Rig, stem: u32, blocks: usize) {
    let id = rig.acquire(&conversation(stem, blocks));
    rig.release(id);
    rig.run();
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * b.abs()
}

#[test]
fn worked_example_costs() {
    let mut rig = Rig::new(document(2, "weighted", demoting(2)));
    let prompt = conversation(1, 2);
    rig.serve_as(Some("user_1"), &prompt);
    let blocks = rig.blocks(&prompt);
    for (block, layer, cost) in [(0, 0, 0.0075), (0, 1, 0.003_75), (1, 0, 0.047), (1, 1, 0.0235)] {
        let price = rig.manager.explain_layer(blocks[block], GPU, layer, rig.now).unwrap();
        assert!(close(price.terms.cost, cost), "L{layer}C{block}: {price:?}");
        assert!(close(price.terms.base, [0.015, 0.047][block]));
        assert!(close(price.terms.layer_weight, [1.0, 0.5][usize::from(layer)]));
        assert!(close(price.terms.position_weight, [0.5, 1.0][block]));
        let same =
            rig.manager.cost(GPU, layer, u32::from(block == 1), 2, 32 * block as u64).unwrap();
        assert_eq!(same, price.terms, "one code for the price and for the ranking");
    }
    // `explain` gives a block the price of the layer that would be evicted next.
    let next = rig.manager.explain(blocks[0], GPU, rig.now).unwrap();
    assert_eq!((next.layers, next.rank), (Layers::new(1, 2), Some(0)));
    assert!(close(next.terms.cost, 0.003_75));
}

#[test]
fn worked_example_order_at_equal_idle_time() {
    let mut rig = Rig::new(document(2, "weighted", demoting(2)));
    let prompt = conversation(1, 2);
    rig.serve_as(Some("user_1"), &prompt);
    let session = [rig.blocks(&prompt)];
    press(&mut rig, 9, 2);
    let order = departures(&mut rig, &session, Reason::Demoted);
    assert_eq!(order, [(0, 1, 0), (0, 0, 0), (0, 1, 1), (0, 0, 1)], "L1C0, L0C0, L1C1, L0C1");
}

#[test]
fn retention_value_is_cost_over_idle_time_and_infinite_at_none() {
    let mut rig = Rig::new(document(2, "weighted", demoting(2)));
    let prompt = conversation(1, 1);
    let id = rig.acquire(&prompt);
    rig.commit(id, &prompt);
    rig.release(id);
    let block = rig.blocks(&prompt)[0];
    let price = |rig: &Rig, idle| rig.manager.explain(block, GPU, rig.now + idle).unwrap();
    assert_eq!((price(&rig, 0).idle, price(&rig, 0).value), (0, f64::INFINITY));
    let later = price(&rig, 2_000_000_000);
    assert_eq!(later.idle, 2_000_000_000);
    assert!(close(later.value, later.terms.cost / 2.0), "per second");
    assert!(price(&rig, 1).value.is_finite());
}

/// The golden drawing: one session of four blocks, forty layers, `checkerboard`.
fn golden(settings: Settings, reason: Reason) -> Vec<(u16, usize)> {
    let mut rig = Rig::new(settings);
    let prompt = conversation(1, 4);
    rig.serve_as(Some("s"), &prompt);
    let session = [rig.blocks(&prompt)];
    press(&mut rig, 9, 4);
    let order = departures(&mut rig, &session, reason);
    order.into_iter().map(|(_, layer, block)| (layer, block)).collect()
}

fn layer_by_layer(layers: impl Iterator<Item = u16>) -> Vec<(u16, usize)> {
    layers.flat_map(|layer| (0..4).map(move |block| (layer, block))).collect()
}

#[test]
fn golden_checkerboard_demotes_l39c0_to_l39c3_then_l38c0_and_l0c3_last() {
    let order = golden(document(40, "checkerboard", demoting(4)), Reason::Demoted);
    assert_eq!(order[..4], [(39, 0), (39, 1), (39, 2), (39, 3)]);
    assert_eq!((order[4], order.len(), order[159]), ((38, 0), 160, (0, 3)));
    assert_eq!(order, layer_by_layer((0..40).rev()));
}

#[test]
fn golden_last_copies_are_dropped_from_layer_0() {
    let order = golden(document(40, "checkerboard", vec![layered(Kind::Gpu, 4)]), Reason::Dropped);
    assert_eq!(order, layer_by_layer(0..40));
}

#[test]
fn golden_the_source_documents_order_of_drops() {
    let shallow = document(40, "checkerboard", vec![layered(Kind::Gpu, 4)]);
    let order = golden(Settings { drop_order: DropOrder::Seed, ..shallow }, Reason::Dropped);
    assert_eq!(order, layer_by_layer((0..40).rev()));
}

#[test]
fn scenario_1_three_sessions_and_room_for_two_blocks() {
    // The third session's block evicts from the oldest session, last layer first.
    for policy in ["checkerboard", "weighted"] {
        let mut rig = Rig::new(document(40, policy, demoting(2)));
        let (oldest, second) = (conversation(1, 2), conversation(2, 1));
        rig.serve_as(Some("oldest"), &oldest);
        let session = [rig.blocks(&oldest)];
        rig.now += 1 << 40;
        rig.serve_as(Some("second"), &second);
        rig.serve_as(Some("third"), &conversation(3, 1));
        let order = departures(&mut rig, &session, Reason::Demoted);
        assert_eq!((order.len(), order[0]), (80, (0, 39, 0)), "{policy}");
        if policy == "checkerboard" {
            let back_to_front: Vec<_> =
                (0..40).rev().flat_map(|layer| [(0, layer, 0), (0, layer, 1)]).collect();
            assert_eq!(order, back_to_front, "L39C0, L39C1, L38C0 …");
        }
        for block in 0..2 {
            let layers: Vec<_> = order.iter().filter(|o| o.2 == block).map(|o| o.1).collect();
            assert!(layers.iter().rev().copied().eq(0..40), "{policy}: back before front");
        }
        assert_eq!(rig.on(&second, GPU), [Layers::new(0, 40)], "the younger session stays");
    }
}

#[test]
fn scenario_2_five_turns_and_room_for_three_keep_the_most_recent() {
    for policy in ["lru", "flat", "retention", "weighted", "checkerboard"] {
        for tiers in [vec![tier(Kind::Gpu, 5)], vec![tier(Kind::Gpu, 5), tier(Kind::Host, 9)]] {
            let base = document(40, policy, tiers);
            let mut rig = Rig::new(Settings { reuse: false, ..base });
            let whole = conversation(1, 5);
            for turn in 1..=5 {
                rig.serve_as(Some("s"), &whole[..32 * turn]);
            }
            // Another session takes two of the five blocks.
            let other = rig.acquire(&conversation(2, 2));
            rig.run();
            let on: Vec<u16> = rig.on(&whole, GPU).iter().map(|layers| layers.len()).collect();
            assert_eq!(on, [0, 0, 40, 40, 40], "{policy}");
            // The leading blocks are the holes that the next turn computes again.
            rig.release(other);
            let id = rig.ask(&Acquire { load: LoadMode::None, ..rig::all_of(&whole) }).unwrap();
            let lease = rig.manager.lease(id).unwrap();
            let holes: Vec<u32> = lease.recompute().map(|(at, _)| at).collect();
            assert_eq!(holes, [0, 1], "{policy}");
        }
    }
}

#[test]
fn scenario_3_layer_39_leaves_before_layer_0() {
    for policy in ["retention", "weighted", "checkerboard"] {
        let mut rig = Rig::new(document(40, policy, demoting(2)));
        let prompt = conversation(1, 2);
        rig.serve_as(Some("s"), &prompt);
        let blocks = rig.blocks(&prompt);
        press(&mut rig, 9, 1);
        let tiers: Vec<_> =
            blocks.iter().map(|block| rig.manager.layer_tiers(*block).unwrap()).collect();
        let (back, front) = (&tiers[0][39], &tiers[1][0]);
        assert_eq!(
            (*back, *front),
            (Some(HOST), Some(GPU)),
            "{policy}: the leading block's back layer"
        );
        if policy == "checkerboard" {
            for map in tiers {
                assert_eq!((map[0], map[39]), (Some(GPU), Some(HOST)), "kept in part");
                assert_eq!(map.iter().filter(|tier| **tier == Some(GPU)).count(), 20);
            }
        }
        let order = departures(&mut rig, &[blocks], Reason::Demoted);
        for block in 0..2 {
            let layers: Vec<_> = order.iter().filter(|o| o.2 == block).map(|o| o.1).collect();
            assert!(layers.is_sorted_by(|a, b| a > b), "{policy}: from the back");
        }
    }
}

#[test]
fn the_weights_of_forty_layers() {
    let rig = Rig::new(document(40, "weighted", demoting(1)));
    for (layer, weight) in [(0, 1.0), (19, 0.525), (39, 0.025)] {
        let terms = rig.manager.cost(GPU, layer, 0, 1, 0).unwrap();
        assert!(close(terms.layer_weight, weight));
    }
}

#[test]
fn leaf_only_evicts_the_last_block_of_a_path_first() {
    for &policy in POLICIES {
        let base = document(40, policy, vec![tier(Kind::Gpu, 5), tier(Kind::Host, 9)]);
        let mut rig = Rig::new(Settings { structure: Structure::LeafOnly, ..base });
        let prompt = conversation(1, 5);
        rig.serve_as(Some("s"), &prompt);
        let session = [rig.blocks(&prompt)];
        press(&mut rig, 2, 3);
        let order = departures(&mut rig, &session, Reason::Demoted);
        let blocks: Vec<_> = order.iter().step_by(40).map(|place| place.2).collect();
        assert_eq!(blocks, [4, 3, 2], "{policy}");
    }
}

#[test]
fn recent_blocks_stay_and_old_ones_are_evicted() {
    // Without history `learned` keeps costly blocks whatever their age in time.
    for &policy in POLICIES.iter().filter(|&&name| name != "learned") {
        let mut rig = Rig::new(document(40, policy, vec![tier(Kind::Gpu, 4), tier(Kind::Host, 9)]));
        let (old, young) = (conversation(1, 2), conversation(2, 2));
        rig.serve_as(Some("old"), &old);
        rig.now += 1 << 40;
        rig.serve_as(Some("young"), &young);
        press(&mut rig, 3, 2);
        assert_eq!(rig.on(&old, GPU), [Layers::NONE; 2], "{policy}");
        assert_eq!(rig.on(&young, GPU), [Layers::new(0, 40); 2], "{policy}");
    }
}
