//! Point 11, second half: holes, and the lifetime of a node without a copy.

use kvtrie_core::{Action, Kind, Layers, Manager, MoveKind, Scope, Structure};

use crate::rig::{ALL, GPU, HOST, Rig, SIZE, all_of, holes, settings, tier, tokens};

/// One path of three blocks on the host.
fn path() -> (Rig, Vec<u32>) {
    let mut rig = Rig::new(holes(vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)]));
    let prompt = tokens(1, 3);
    rig.mark(&prompt, HOST);
    (rig, prompt)
}

#[test]
fn a_node_without_a_copy_lives_until_its_last_resident_descendant_dies() {
    let (mut rig, prompt) = path();
    rig.unmark(&prompt[..2 * SIZE], HOST);
    assert_eq!((rig.manager.totals().0, rig.matched(&prompt)), (3, 3 * SIZE));
    assert_eq!(rig.on(&prompt, HOST), [Layers::NONE, Layers::NONE, ALL]);
    rig.unmark(&prompt, HOST);
    assert_eq!((rig.manager.totals().0, rig.matched(&prompt)), (0, 0));
}

#[test]
fn a_branch_keeps_the_hole_before_it() {
    let (mut rig, prompt) = path();
    let branch = [&prompt[..SIZE], &[5; SIZE]].concat();
    rig.mark(&branch, HOST);
    rig.unmark(&prompt[..SIZE], HOST);
    assert_eq!(rig.manager.totals().0, 4);
    rig.unmark(&branch, HOST);
    assert_eq!((rig.manager.totals().0, rig.matched(&branch)), (3, 0));
    assert_eq!(rig.matched(&prompt), 3 * SIZE);
}

#[test]
fn holes_at_the_end_of_a_match_are_not_part_of_it() {
    let (mut rig, prompt) = path();
    let longer = [prompt.as_slice(), &[5; SIZE]].concat();
    rig.mark(&longer, HOST);
    rig.unmark(&prompt, HOST);
    assert_eq!(rig.matched(&prompt), 0, "three holes and nothing after them within the prompt");
    assert_eq!(rig.matched(&longer), 4 * SIZE);
}

#[test]
fn all_holes_of_a_path_are_computed_in_one_pass() {
    let (mut rig, prompt) = path();
    rig.unmark(&prompt[..SIZE], HOST);
    let id = rig.acquire(&prompt);
    let lease = rig.manager.lease(id).unwrap();
    let plan: Vec<_> = lease.plan().spans.iter().map(|s| (s.start, s.stop, s.action)).collect();
    assert_eq!(plan, [(0, 1, Action::Recompute), (1, 3, Action::Load)]);
    rig.run();
    rig.commit(id, &[]);
    assert_eq!(rig.on(&prompt, GPU), [ALL; 3]);
}

#[test]
fn a_hole_is_not_computed_into_a_slot_that_a_store_still_reads() {
    let mut rig = Rig::new(holes(vec![tier(Kind::Gpu, 2), tier(Kind::Host, 8)]));
    rig.serve(&tokens(9, 1));
    let prompt = tokens(1, 2);
    rig.mark(&prompt, HOST);
    rig.unmark(&prompt[..SIZE], HOST);
    let id = rig.acquire(&prompt);
    let (loads, stores): (Vec<_>, Vec<_>) =
        rig.hand_out().into_iter().partition(|known| known.kind == MoveKind::Load);
    assert_eq!((loads.len(), stores.len()), (1, 1));
    assert_eq!(rig.slots(id), [stores[0].src_slot, loads[0].dst_slot]);
    rig.done(loads[0].id);
    assert_eq!(rig.awaits(id), [stores[0].id]);
    rig.refused("awaits 1 moves", |manager, now| manager.commit(id, &[], now));
    rig.done(stores[0].id);
    rig.commit(id, &[]);
    assert_eq!(rig.on(&prompt, GPU), [ALL; 2]);
}

#[test]
fn holes_evicts_leading_blocks_first_and_leaf_only_last_blocks() {
    let survivors = |structure| {
        let base = settings(vec![tier(Kind::Gpu, 4)]);
        let mut rig = Rig::new(kvtrie_core::Settings { structure, ..base });
        let prompt = tokens(1, 4);
        rig.serve(&prompt);
        let all = rig.blocks(&prompt);
        rig.serve(&tokens(2, 2));
        let cached = |manager: &Manager, block| {
            manager.layer_tiers(block).is_ok_and(|tiers| tiers == [Some(GPU); 4])
        };
        all.into_iter().map(|block| cached(&rig.manager, block)).collect::<Vec<_>>()
    };
    assert_eq!(survivors(Structure::Holes), [false, false, true, true]);
    assert_eq!(survivors(Structure::LeafOnly), [true, true, false, false]);
}

#[test]
fn leaf_only_never_makes_a_hole_on_any_tier() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 5), tier(Kind::Host, 4)]));
    for turn in 0..60_u32 {
        let stem = tokens(turn % 3, 1 + (turn as usize * 7) % 4);
        let prompt = [stem.as_slice(), &[turn % 5; SIZE]].concat();
        // The rig audits every step: no block is resident after a partial one.
        rig.serve(&prompt);
        let found = rig.manager.lookup(&prompt, rig.now, &Scope::default(), 0).unwrap();
        for block in &found.blocks {
            assert!(block.copies.iter().any(|copy| copy.layers == ALL));
        }
    }
    let id = rig.ask(&all_of(&tokens(0, 4))).unwrap();
    assert_eq!(rig.manager.lease(id).unwrap().recompute().count(), 0);
}
