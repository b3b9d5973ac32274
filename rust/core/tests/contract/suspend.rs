//! Point 9, second half: preemption never fails, and resume plans again.

use kvtrie_core::{Error, Kind, Layers, LoadMode, MoveId, Owner, Settings, TierSpec};

use crate::rig::{ALL, GPU, HOST, Rig, SIZE, all_of, holes, settings, tier, tokens};

fn two(gpu: u32, host: u32) -> Settings {
    settings(vec![tier(Kind::Gpu, gpu), tier(Kind::Host, host)])
}

/// A lease with `blocks` full blocks and one more token.
fn running(settings: Settings, blocks: usize) -> (Rig, u64, Vec<u32>) {
    let mut rig = Rig::new(settings);
    let prompt: Vec<u32> = tokens(1, blocks).into_iter().chain([77]).collect();
    let id = rig.acquire(&prompt);
    rig.commit(id, &prompt);
    (rig, id, prompt)
}

fn suspend(rig: &mut Rig, id: u64) -> Vec<MoveId> {
    rig.call(|manager, now| manager.suspend(id, Kind::Host, now)).unwrap()
}

#[test]
fn suspend_frees_the_first_tier_and_demotes_as_room_allows() {
    let (mut rig, id, prompt) = running(two(4, 8), 3);
    assert_eq!(suspend(&mut rig, id), [0; 0], "slots of ours need no waiting");
    rig.run();
    assert_eq!(rig.manager.occupancy(GPU).free, 4);
    assert_eq!(
        (rig.on(&prompt, GPU), rig.on(&prompt, HOST)),
        (vec![Layers::NONE; 3], vec![ALL; 3])
    );
    assert_eq!(rig.manager.lease_tokens(id).unwrap(), prompt.len());
    assert!(rig.manager.lease(id).unwrap().suspended());
}

#[test]
fn suspend_drops_blocks_without_room_below() {
    let mut rig = Rig::new(two(4, 1));
    let held = tokens(9, 1);
    rig.mark(&held, HOST);
    let other = rig.acquire(&held);
    let prompt = tokens(1, 3);
    let id = rig.acquire(&prompt);
    // The host's one slot is being read, so no store can use it.
    rig.commit(id, &prompt);
    suspend(&mut rig, id);
    assert_eq!((rig.matched(&prompt), rig.manager.stats(GPU).dropped), (0, 3));
    rig.run();
    rig.release(other);
    rig.release(id);
}

#[test]
fn suspend_leaves_blocks_that_others_hold() {
    let (mut rig, id, prompt) = running(two(4, 8), 2);
    let other = rig.acquire(&prompt[..SIZE]);
    suspend(&mut rig, id);
    rig.run();
    assert_eq!(rig.on(&prompt, GPU), [ALL, Layers::NONE]);
    assert_eq!(rig.slots(other).len(), 1);
}

#[test]
fn a_suspended_lease_can_only_be_resumed_or_released() {
    let (mut rig, id, _) = running(two(4, 8), 2);
    rig.refused("the tier below 'gpu' is 'host'", |m, now| m.suspend(id, Kind::Disk, now));
    rig.refused("is not suspended", |manager, now| manager.resume(id, 0, LoadMode::Plan, now));
    suspend(&mut rig, id);
    let errors = [
        rig.call(|manager, now| manager.commit(id, &[1], now).map(drop)),
        rig.call(|manager, now| manager.reserve(id, 1, now)),
        rig.call(|manager, now| manager.truncate(id, 0, now)),
        rig.call(|manager, now| manager.fork(id, 1, now).map(drop)),
        rig.call(|manager, now| manager.load(id, None, None, now).map(drop)),
        rig.call(|manager, now| manager.suspend(id, Kind::Host, now).map(drop)),
    ];
    for error in errors {
        assert!(matches!(&error, Err(Error::Closed(text)) if text.contains("resume it first")));
    }
    rig.release(id);
    rig.run();
    assert_eq!(rig.manager.totals().1, 0);
}

#[test]
fn resume_matches_cached_blocks_and_allocates_the_rest() {
    let (mut rig, id, prompt) = running(two(4, 8), 3);
    suspend(&mut rig, id);
    rig.run();
    rig.call(|manager, now| manager.resume(id, 2, LoadMode::Plan, now)).unwrap();
    let lease = rig.manager.lease(id).unwrap();
    assert_eq!((lease.matched(), lease.suspended()), (3 * SIZE, false));
    assert_eq!(rig.manager.room_left(id).unwrap(), SIZE);
    let loads = rig.run();
    assert_eq!(loads.len() + rig.manager.lease(id).unwrap().recompute().count(), 3);
    rig.commit(id, &prompt[3 * SIZE..]);
    assert_eq!(rig.on(&prompt, GPU), [ALL; 3]);
}

#[test]
fn a_refused_resume_leaves_the_lease_suspended() {
    let (mut rig, id, prompt) = running(two(4, 8), 3);
    suspend(&mut rig, id);
    rig.run();
    let other = rig.acquire(&tokens(5, 2));
    let error = rig.call(|manager, now| manager.resume(id, 0, LoadMode::Plan, now)).unwrap_err();
    assert!(matches!(error, Error::NoSpace { wanted: 4, free: 2, leased: 2, .. }), "{error}");
    assert!(rig.manager.lease(id).unwrap().suspended());
    rig.release(other);
    rig.call(|manager, now| manager.resume(id, 0, LoadMode::Plan, now)).unwrap();
    assert_eq!(rig.manager.lease(id).unwrap().matched(), prompt.len() - 1);
}

#[test]
fn a_single_tier_drops_suspended_blocks() {
    let (mut rig, id, prompt) = running(settings(vec![tier(Kind::Gpu, 4)]), 3);
    suspend(&mut rig, id);
    assert_eq!((rig.matched(&prompt), rig.manager.occupancy(GPU).free), (0, 4));
    rig.call(|manager, now| manager.resume(id, 0, LoadMode::Plan, now)).unwrap();
    assert_eq!(rig.manager.room_left(id).unwrap(), 4 * SIZE);
    rig.commit(id, &prompt);
}

#[test]
fn a_suspended_tail_in_a_shared_slot_leaves_the_other_forks_alone() {
    let (mut rig, id, prompt) = running(holes(vec![tier(Kind::Gpu, 6), tier(Kind::Host, 8)]), 2);
    let fork = rig.call(|manager, now| manager.fork(id, 1, now)).unwrap()[0];
    suspend(&mut rig, id);
    assert_eq!(rig.on(&prompt, GPU), [ALL, ALL]);
    rig.call(|manager, now| manager.reserve(fork, 1, now)).unwrap();
    assert!(rig.hand_out().is_empty(), "the fork is the tail's only holder now");
    rig.commit(fork, &[78]);
}

#[test]
fn an_engines_blocks_are_written_down_before_it_takes_its_slots_back() {
    let gpu = TierSpec { owner: Owner::Engine, ..tier(Kind::Gpu, 8) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 8)]));
    let prompt = tokens(1, 2);
    let id = rig.ask(&all_of(&prompt)).unwrap();
    rig.call(|manager, _| manager.bind(id, 0, &[5, 6])).unwrap();
    rig.commit(id, &prompt);
    let reading = suspend(&mut rig, id);
    let moves = rig.run();
    assert_eq!(moves.iter().map(|m| m.id).collect::<Vec<_>>(), reading);
    assert_eq!(moves.iter().map(|m| m.src_slot).collect::<Vec<_>>(), [5, 6]);
    assert_eq!(rig.on(&prompt, HOST), [ALL, ALL]);
    rig.call(|manager, now| manager.resume(id, 0, LoadMode::Plan, now)).unwrap();
    assert_eq!(rig.manager.lease(id).unwrap().matched(), 2 * SIZE);
    assert_eq!(rig.slots(id), [kvtrie_core::NO_SLOT; 2]);
}

#[test]
fn resume_obeys_its_load_mode() {
    for (load, loaded) in [(LoadMode::All, 3), (LoadMode::None, 0)] {
        let (mut rig, id, _) = running(holes(vec![tier(Kind::Gpu, 4), tier(Kind::Host, 8)]), 3);
        suspend(&mut rig, id);
        rig.run();
        rig.call(|manager, now| manager.resume(id, 0, load, now)).unwrap();
        assert_eq!(rig.run().len(), loaded);
        let lease = rig.manager.lease(id).unwrap();
        assert_eq!((lease.matched(), lease.recompute().count()), (3 * SIZE, 3 - loaded));
        let late = rig.call(|manager, now| manager.load(id, None, None, now)).unwrap();
        assert_eq!(late.len(), 3 - loaded);
    }
}
