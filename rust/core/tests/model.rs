//! Model test of the manager: random operations compared with a naive world, an audit after each.

use kvtrie_core::Settings;
use proptest::prelude::*;

use crate::rig::share;
use crate::world::{Raw, World, engines, settings, shared};

fn run(settings: Settings, ops: &[Raw]) -> World {
    let mut world = World::new(settings);
    for &raw in ops {
        world.step(raw);
    }
    world.drain();
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: share(400), ..ProptestConfig::default() })]

    #[test]
    fn every_operation_keeps_every_invariant(
        seed: u64,
        ops in prop::collection::vec(any::<Raw>(), 1..120),
    ) {
        run(settings(seed), &ops);
    }

    #[test]
    fn the_same_operations_give_the_same_moves(
        seed: u64,
        ops in prop::collection::vec(any::<Raw>(), 1..80),
    ) {
        let (one, two) = (run(settings(seed), &ops), run(settings(seed), &ops));
        prop_assert_eq!(format!("{:?}", one.log), format!("{:?}", two.log));
        prop_assert_eq!(one.manager.snapshot(), two.manager.snapshot());
    }

    #[test]
    fn blocks_stored_ahead_keep_every_invariant(
        seed: u64,
        ops in prop::collection::vec(any::<Raw>(), 1..120),
    ) {
        let (one, two) = (run(engines(seed), &ops), run(engines(seed), &ops));
        prop_assert_eq!(format!("{:?}", one.log), format!("{:?}", two.log));
        prop_assert_eq!(one.manager.snapshot(), two.manager.snapshot());
    }

    #[test]
    fn blocks_above_a_shared_store_keep_every_invariant(
        seed: u64,
        ops in prop::collection::vec(any::<Raw>(), 1..120),
    ) {
        let (one, two) = (run(shared(seed), &ops), run(shared(seed), &ops));
        prop_assert_eq!(format!("{:?}", one.log), format!("{:?}", two.log));
        prop_assert_eq!(one.manager.snapshot(), two.manager.snapshot());
    }
}
