//! Point 1: owners of slots, and the contents of a slot.

use std::collections::BTreeSet;

use kvtrie_core::{
    Acquire, Error, Kind, MoveKind, NO_SLOT, Owner, Settings, Slot, TierSpec, Write,
};

use crate::rig::{
    ALL, GPU, HOST, LAYERS, Rig, SIZE, all_of, holes, layered, settings, tier, tokens,
};

fn engine(write: Write) -> Rig {
    let gpu = TierSpec { owner: Owner::Engine, write, ..tier(Kind::Gpu, 8) };
    Rig::new(settings(vec![gpu, tier(Kind::Host, 8)]))
}

#[test]
fn our_pool_gives_every_slot_to_one_holder() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 6)]));
    let one = rig.ask(&Acquire { reserve: SIZE, ..all_of(&tokens(1, 2)) }).unwrap();
    let two = rig.acquire(&tokens(2, 3));
    let mut slots = rig.slots(one);
    assert_eq!(slots.len(), 3);
    slots.extend(rig.slots(two));
    slots.sort_unstable();
    assert_eq!(slots, [0, 1, 2, 3, 4, 5]);
    assert_eq!(rig.manager.occupancy(GPU).free, 0);
    rig.release(one);
    assert_eq!(rig.manager.occupancy(GPU).free, 3);
}

#[test]
fn an_engine_binds_its_slots_and_learns_which_moves_still_read_them() {
    let mut rig = engine(Write::Back);
    let prompt = tokens(1, 2);
    let id = rig.acquire(&prompt);
    rig.call(|manager, _| manager.bind(id, 0, &[70, 33])).unwrap();
    assert_eq!(rig.slots(id), [70, 33]);
    rig.commit(id, &prompt);
    let reading = rig.release(id);
    let moves = rig.hand_out();
    assert_eq!(moves.iter().map(|known| known.id).collect::<Vec<_>>(), reading);
    let ends: Vec<_> = moves.iter().map(|m| (m.kind, m.src, m.src_slot, m.dst)).collect();
    assert_eq!(ends, [(MoveKind::Store, GPU, 70, HOST), (MoveKind::Store, GPU, 33, HOST)]);
    // The engine's tier never gets a residency.
    for known in &moves {
        assert_eq!(rig.on(&prompt, GPU), [kvtrie_core::Layers::NONE; 2]);
        rig.done(known.id);
    }
    assert_eq!(rig.on(&prompt, HOST), [ALL, ALL]);
    assert_eq!(rig.release(id), [0; 0], "releasing twice does nothing");
}

#[test]
fn blocks_of_an_engine_that_writes_nothing_are_forgotten_at_release() {
    let mut rig = engine(Write::Never);
    let prompt = tokens(1, 2);
    let id = rig.acquire(&prompt);
    rig.call(|manager, _| manager.bind(id, 0, &[1, 2])).unwrap();
    rig.commit(id, &prompt);
    assert_eq!(rig.release(id), [0; 0]);
    assert_eq!((rig.manager.totals().0, rig.hand_out().len()), (0, 0));
}

#[test]
fn a_load_into_an_engines_slot_waits_for_bind() {
    let mut rig = engine(Write::Back);
    let prompt = tokens(1, 2);
    rig.mark(&prompt, HOST);
    let id = rig.acquire(&prompt);
    assert_eq!(rig.slots(id), [NO_SLOT, NO_SLOT]);
    assert_eq!(rig.awaits(id).len(), 2);
    assert!(rig.hand_out().is_empty());
    rig.call(|manager, _| manager.bind(id, 1, &[9])).unwrap();
    let moves = rig.hand_out();
    assert_eq!(
        moves.iter().map(|m| (m.kind, m.dst_slot)).collect::<Vec<_>>(),
        [(MoveKind::Load, 9)]
    );
    rig.call(|manager, _| manager.bind(id, 0, &[4])).unwrap();
    let first = rig.hand_out();
    assert_eq!(first.iter().map(|m| m.dst_slot).collect::<Vec<_>>(), [4]);
    rig.done(moves[0].id);
    rig.done(first[0].id);
    assert!(rig.awaits(id).is_empty());
}

#[test]
fn a_bound_block_keeps_its_slot_and_bad_bindings_are_refused() {
    let mut rig = engine(Write::Back);
    let id = rig.acquire(&tokens(1, 2));
    rig.call(|manager, _| manager.bind(id, 0, &[7])).unwrap();
    rig.call(|manager, _| manager.bind(id, 0, &[7, 8])).unwrap();
    rig.refused("bound to slot 7, not 6", |manager, _| manager.bind(id, 0, &[6, 9]));
    rig.refused("names none", |manager, _| manager.bind(id, 2, &[NO_SLOT]));
    rig.refused("has 2 blocks", |manager, _| manager.bind(id, 3, &[1]));
    let mut ours = Rig::new(settings(vec![tier(Kind::Gpu, 8)]));
    let id = ours.acquire(&tokens(1, 1));
    ours.refused("owner is not 'engine'", |manager, _| manager.bind(id, 0, &[0]));
}

#[test]
fn without_bytes_slots_are_counted_and_moves_made_all_the_same() {
    let nobody = |kind, blocks| TierSpec { owner: Owner::Nobody, ..tier(kind, blocks) };
    let mut rig = Rig::new(settings(vec![nobody(Kind::Gpu, 2), nobody(Kind::Host, 2)]));
    let (old, new) = (tokens(1, 2), tokens(2, 2));
    rig.serve(&old);
    let id = rig.acquire(&new);
    let moves = rig.run();
    assert_eq!(moves.len(), 2);
    assert!(moves.iter().all(|m| (m.kind, m.src, m.dst) == (MoveKind::Store, GPU, HOST)));
    assert_eq!(rig.on(&old, HOST), [ALL, ALL]);
    let full = rig.ask(&all_of(&tokens(3, 1))).unwrap_err();
    let Error::NoSpace { tier, unit: "slots", wanted: 1, free: 0, coming: 0, leased: 2 } = full
    else {
        panic!("{full}")
    };
    assert_eq!(tier, "gpu");
    rig.release(id);
}

#[test]
fn layer_slots_are_one_space_of_blocks_times_layers() {
    let mut rig = Rig::new(holes(vec![layered(Kind::Gpu, 2)]));
    assert_eq!(rig.manager.occupancy(GPU).slots, 8);
    let id = rig.acquire(&tokens(1, 2));
    let (rows, table) = rig.manager.slots(id, GPU).unwrap();
    assert_eq!((rows, table.len()), (usize::from(LAYERS), 8));
    let distinct: BTreeSet<Slot> = table.iter().copied().collect();
    assert_eq!(distinct, (0..8).collect());
    assert_eq!(rig.manager.occupancy(GPU).free, 0);
}

#[test]
fn with_layer_slots_a_single_layer_is_a_victim_and_its_memory_is_free_at_once() {
    let gpu = TierSpec { write: Write::Through, ..layered(Kind::Gpu, 2) };
    let mut rig = Rig::new(Settings {
        policy: "checkerboard".to_owned(),
        ..holes(vec![gpu, tier(Kind::Host, 8)])
    });
    let (one, two) = (tokens(1, 1), tokens(2, 1));
    rig.serve(&one);
    rig.serve(&two);
    // Both blocks fill the tier. A third takes four layers: two from each, last ones first.
    rig.now += 1 << 30;
    let id = rig.acquire(&tokens(3, 1));
    assert!(rig.awaits(id).is_empty(), "clean layers leave at once");
    rig.release(id);
    assert_eq!(rig.manager.occupancy(GPU).free, 4);
    let half = kvtrie_core::Layers::new(0, 2);
    assert_eq!((rig.on(&one, GPU), rig.on(&two, GPU)), (vec![half], vec![half]));
    assert_eq!(rig.manager.stats(GPU).bytes_freed, 4 * 100);
}

#[test]
fn without_layer_slots_a_victim_loses_all_layers() {
    let mut rig = Rig::new(Settings {
        policy: "checkerboard".to_owned(),
        ..holes(vec![tier(Kind::Gpu, 2), tier(Kind::Host, 8)])
    });
    let (one, two) = (tokens(1, 1), tokens(2, 1));
    rig.serve(&one);
    rig.serve(&two);
    rig.now += 1 << 30;
    rig.serve(&tokens(3, 1));
    let none = kvtrie_core::Layers::NONE;
    assert_eq!((rig.on(&one, GPU), rig.on(&two, GPU)), (vec![none], vec![ALL]));
    assert_eq!(rig.on(&one, HOST), [ALL]);
}
