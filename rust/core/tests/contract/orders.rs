//! Point 3: demotion evicts the last layer first; dropping a last copy, the first layer.

use kvtrie_core::{CostModel, DropOrder, Kind, Layers, Reason, Settings};

use crate::rig::{GPU, HOST, Rig, holes, layered, settings, tier, tokens};

/// The layers of one block in the order in which `tier` evicts them, with the reasons.
fn departures(settings: Settings, tier: usize) -> Vec<(u16, Reason)> {
    let mut rig = Rig::new(settings);
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    let block = rig.blocks(&prompt)[0];
    for stem in 2..12 {
        rig.serve(&tokens(stem, 1));
    }
    let ours = |event: &&kvtrie_core::Event| event.block == block && event.tier == tier;
    let events = rig.events();
    let layers = events.iter().filter(ours).map(|event| {
        assert_eq!(event.layers.len(), 1);
        (event.layers.lo, event.reason)
    });
    layers.collect()
}

#[test]
fn demotion_starts_with_the_last_layer() {
    let tiers = vec![layered(Kind::Gpu, 2), tier(Kind::Host, 20)];
    let demoted: Vec<_> = [3, 2, 1, 0].map(|layer| (layer, Reason::Demoted)).to_vec();
    assert_eq!(departures(holes(tiers), GPU), demoted);
}

#[test]
fn clean_layers_are_demoted_from_the_last_too() {
    let gpu = kvtrie_core::TierSpec { write: kvtrie_core::Write::Through, ..layered(Kind::Gpu, 2) };
    let clean: Vec<_> = [3, 2, 1, 0].map(|layer| (layer, Reason::Clean)).to_vec();
    assert_eq!(departures(holes(vec![gpu, tier(Kind::Host, 20)]), GPU), clean);
}

#[test]
fn a_last_copy_is_dropped_from_layer_0() {
    let dropped: Vec<_> = [0, 1, 2, 3].map(|layer| (layer, Reason::Dropped)).to_vec();
    assert_eq!(departures(holes(vec![layered(Kind::Gpu, 2)]), GPU), dropped);
    let two = holes(vec![layered(Kind::Gpu, 2), layered(Kind::Host, 2)]);
    assert_eq!(departures(two, HOST), dropped);
}

#[test]
fn the_source_documents_order_of_dropping_is_a_setting() {
    let settings = holes(vec![layered(Kind::Gpu, 2)]);
    let dropped: Vec<_> = [3, 2, 1, 0].map(|layer| (layer, Reason::Dropped)).to_vec();
    assert_eq!(departures(Settings { drop_order: DropOrder::Seed, ..settings }, GPU), dropped);
}

#[test]
fn leaf_only_drops_all_layers_of_a_block() {
    let mut rig = Rig::new(settings(vec![layered(Kind::Gpu, 2)]));
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    rig.serve(&tokens(2, 1));
    rig.serve(&tokens(3, 1));
    let first = rig.events()[0];
    assert_eq!((first.layers, first.reason), (Layers::new(0, 4), Reason::Dropped));
    assert_eq!(rig.matched(&prompt), 0);
}

/// Weight of the layer that would be evicted next, by `explain`.
fn next_out(settings: Settings) -> (Layers, f64) {
    let mut rig = Rig::new(Settings {
        policy: "weighted".to_owned(),
        cost: CostModel::seed(1.0).unwrap(),
        ..settings
    });
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    let price = rig.manager.explain(rig.blocks(&prompt)[0], GPU, rig.now).unwrap();
    (price.layers, price.terms.layer_weight)
}

#[test]
fn the_kind_of_departure_sets_weight_and_layer() {
    let demoted = next_out(holes(vec![layered(Kind::Gpu, 2), tier(Kind::Host, 2)]));
    assert_eq!(demoted, (Layers::new(3, 4), 0.25));
    let dropped = next_out(holes(vec![layered(Kind::Gpu, 2)]));
    assert_eq!(dropped, (Layers::new(0, 1), 0.25));
    let seed = Settings { drop_order: DropOrder::Seed, ..holes(vec![layered(Kind::Gpu, 2)]) };
    assert_eq!(next_out(seed), (Layers::new(3, 4), 0.25), "the source document's order");
}

#[test]
fn a_block_weighs_the_sum_of_its_layers() {
    let (layers, weight) = next_out(holes(vec![tier(Kind::Gpu, 2), tier(Kind::Host, 2)]));
    assert_eq!((layers, weight), (Layers::new(0, 4), 2.5));
}
