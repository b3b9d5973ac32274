//! The predicted time at which a plan's prompt is computed.

use kvtrie_core::{Acquire, CostModel, Kind, LoadMode, Nanos, Settings};

use crate::rig::{HOST, LAYERS, Rig, SIZE, all_of, settings, tier, tokens};

/// Time to load one block.
const LOAD: Nanos = 410;

fn cost(ns_per_token: f64) -> CostModel {
    CostModel::default_curve(ns_per_token).unwrap()
}

/// The predicted time of a prompt whose blocks are on the host.
fn took(ask: &Acquire<'_>, below: usize, ns_per_token: f64) -> Nanos {
    let tiers = vec![tier(Kind::Gpu, 40), tier(Kind::Host, 40)];
    let mut rig = Rig::new(Settings { cost: cost(ns_per_token), ..settings(tiers) });
    if below > 0 {
        rig.mark(&ask.tokens[..below * SIZE], HOST);
    }
    let id = rig.ask(ask).unwrap();
    rig.manager.lease(id).unwrap().plan().finish - rig.now
}

#[test]
fn the_finish_counts_the_tokens_behind_the_match() {
    let prompt = tokens(1, 5);
    for layerwise in [false, true] {
        let ask = Acquire { layerwise, ..all_of(&prompt) };
        assert_eq!(took(&ask, 0, 100.0), cost(100.0).compute_ns(0, 20));
        assert_eq!(took(&all_of(&prompt[..18]), 0, 100.0), cost(100.0).compute_ns(0, 18));
        // The growth reserve is no part of the prompt; tokens kept for computing are.
        assert_eq!(took(&Acquire { reserve: 9, ..ask.clone() }, 0, 100.0), took(&ask, 0, 100.0));
        let kept = Acquire { keep: 1, tokens: &prompt[..SIZE], ..ask };
        assert_eq!(took(&kept, 0, 100.0), cost(100.0).compute_ns(0, 4));
    }
    // Whole layers first, then the rest.
    let rest = cost(100.0).compute_ns(12, 8);
    assert_eq!(took(&all_of(&prompt), 3, 100.0), 3 * LOAD + rest);
    assert_eq!(took(&Acquire { keep: 1, ..all_of(&prompt[..12]) }, 3, 100.0), {
        2 * LOAD + cost(100.0).compute_ns(8, 4)
    });
}

#[test]
fn layer_by_layer_loads_hide_behind_the_rest_of_the_prompt() {
    let (prompt, layers) = (tokens(1, 8), u64::from(LAYERS));
    for (blocks, ns_per_token) in [(4, 1.0), (4, 20.0), (4, 200.0), (7, 100.0), (1, 3.0)] {
        let ask = Acquire { layerwise: true, ..all_of(&prompt) };
        let (load, rest) = {
            let rest = cost(ns_per_token).compute_ns(blocks * 4, (8 - blocks) * 4);
            (LOAD * blocks, rest)
        };
        // The formula of a pipeline of equal layers: max over j of the loads up to j and the
        // computations from j on. Times of layers are rounded, by a nanosecond each.
        let at = |j: u64| load * (j + 1) / layers + rest * (layers - j) / layers;
        let best = (0..layers).map(at).max().unwrap();
        let found = took(&ask, usize::try_from(blocks).unwrap(), ns_per_token);
        assert!(found.abs_diff(best) <= layers, "{found} {best} with {blocks} at {ns_per_token}");
        let whole = took(
            &Acquire { layerwise: false, ..ask },
            usize::try_from(blocks).unwrap(),
            ns_per_token,
        );
        assert_eq!(whole, load + rest);
        assert!(found < whole);
    }
}

#[test]
fn a_layerwise_plan_is_never_later_than_loading_or_computing_everything() {
    let prompt = tokens(1, 30);
    for ns_per_token in [0.001, 1.0, 10.0, 100.0, 1000.0] {
        for below in [1, 10, 30] {
            let ask = |load| Acquire { load, layerwise: true, ..all_of(&prompt) };
            let time = |load| took(&ask(load), below, ns_per_token);
            let (plan, all, none) =
                (time(LoadMode::Plan), time(LoadMode::All), time(LoadMode::None));
            assert!(plan <= all.min(none), "{plan} {all} {none} at {ns_per_token} of {below}");
        }
    }
}
