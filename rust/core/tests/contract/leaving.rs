//! A victim stays usable until the store that reads it has ended.

use kvtrie_core::{
    Acquire, Action, Copy, Error, Kind, LeaseId, LoadMode, Mark, MoveKind, Scope, Settings, Slot,
};

use crate::rig::{ALL, GPU, HOST, Rig, SIZE, all_of, layered, settings, tier, tokens};

fn rig(gpu: u32) -> Rig {
    Rig::new(settings(vec![tier(Kind::Gpu, gpu), tier(Kind::Host, 8)]))
}

/// The copies of the first block of a sequence.
fn copies(rig: &Rig, prompt: &[u32]) -> Vec<Copy> {
    let found = rig.manager.lookup(prompt, rig.now, &Scope::default(), 0);
    found.unwrap().blocks[0].copies.clone()
}

fn suspend(rig: &mut Rig, id: LeaseId) {
    rig.call(|manager, now| manager.suspend(id, Kind::Host, now)).unwrap();
}

fn resume(rig: &mut Rig, id: LeaseId, reserve: usize) -> Result<(), Error> {
    rig.call(|manager, now| manager.resume(id, reserve, LoadMode::Plan, now))
}

/// A lease of two committed blocks, and their slots.
fn held(rig: &mut Rig, prompt: &[u32]) -> (LeaseId, Vec<Slot>) {
    let id = rig.acquire(prompt);
    rig.commit(id, prompt);
    (id, rig.slots(id))
}

#[test]
fn a_victim_is_found_until_its_store_has_ended() {
    let mut rig = rig(1);
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    let slot = copies(&rig, &prompt)[0].slot;
    rig.acquire(&tokens(2, 1));
    let found = copies(&rig, &prompt);
    assert_eq!(found.iter().map(|copy| copy.tier).collect::<Vec<_>>(), [GPU, HOST]);
    let (on_gpu, below) = (found[0], found[1]);
    assert_eq!((on_gpu.slot, on_gpu.layers, on_gpu.coming, on_gpu.leaving), (slot, ALL, ALL, true));
    assert_eq!((on_gpu.first, on_gpu.ready), (rig.now, rig.now));
    assert_eq!((below.coming, below.leaving), (ALL, false));
    rig.run();
    let found = copies(&rig, &prompt);
    assert_eq!(
        found.iter().map(|copy| (copy.tier, copy.layers)).collect::<Vec<_>>(),
        [(HOST, ALL)]
    );
}

#[test]
fn an_unclaimed_victim_stays_for_a_request_that_finds_it() {
    for slots in [false, true] {
        let gpu = if slots { layered(Kind::Gpu, 4) } else { tier(Kind::Gpu, 4) };
        let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 8)]));
        let prompt = tokens(1, 2);
        let (id, before) = held(&mut rig, &prompt);
        suspend(&mut rig, id);
        assert!(copies(&rig, &prompt)[0].leaving);
        resume(&mut rig, id, 0).unwrap();
        let plan = rig.manager.lease(id).unwrap().plan().clone();
        assert!(plan.spans.iter().all(|span| span.action == Action::Reuse), "{plan:?}");
        assert_eq!((plan.finish, rig.awaits(id)), (rig.now, vec![]));
        assert_eq!(rig.slots(id), before);
        assert_eq!(rig.on(&prompt, GPU), [ALL, ALL]);
        // The stores continue, and the copies below are resident once they have ended.
        assert!(rig.run().iter().all(|known| known.kind == MoveKind::Store));
        assert_eq!((rig.on(&prompt, GPU), rig.on(&prompt, HOST)), (vec![ALL; 2], vec![ALL; 2]));
        rig.release(id);
        rig.run();
    }
}

#[test]
fn a_kept_victim_stays_although_its_store_fails() {
    let mut rig = rig(4);
    let prompt = tokens(1, 1);
    let (id, before) = held(&mut rig, &prompt);
    suspend(&mut rig, id);
    let store = rig.hand_out()[0].id;
    resume(&mut rig, id, 0).unwrap();
    rig.fail(store);
    assert_eq!((rig.slots(id), rig.on(&prompt, GPU)), (before, vec![ALL]));
    rig.release(id);
}

#[test]
fn a_refused_request_does_not_keep_victims() {
    let mut rig = rig(2);
    let prompt = tokens(1, 2);
    let (id, _) = held(&mut rig, &prompt);
    suspend(&mut rig, id);
    // The call compares the state before and after it.
    assert!(matches!(resume(&mut rig, id, SIZE), Err(Error::NoSpace { .. })));
    assert!(copies(&rig, &prompt)[0].leaving);
    resume(&mut rig, id, 0).unwrap();
    assert_eq!(rig.on(&prompt, GPU), [ALL, ALL]);
}

#[test]
fn a_marked_victim_is_found_in_its_new_slots() {
    for slots in [false, true] {
        let gpu = if slots { layered(Kind::Gpu, 4) } else { tier(Kind::Gpu, 4) };
        let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 8)]));
        let prompt = tokens(1, 1);
        let (id, before) = held(&mut rig, &prompt);
        suspend(&mut rig, id);
        let mark = Mark {
            tokens: &prompt,
            scope: Scope::default(),
            tier: GPU,
            present: true,
            ready: None,
            first: None,
        };
        let block = rig.call(|manager, now| manager.mark(&mark, now)).unwrap()[0];
        let on_gpu = copies(&rig, &prompt)[0];
        assert_eq!((on_gpu.layers, on_gpu.leaving), (ALL, false));
        let marked = rig.manager.copy_slots(block, &on_gpu);
        assert!(marked.iter().all(|slot| !before.contains(slot)), "{marked:?} of {before:?}");
        resume(&mut rig, id, 0).unwrap();
        assert_eq!(rig.slots(id), marked);
        rig.run();
        assert_eq!(rig.manager.copy_slots(block, &copies(&rig, &prompt)[0]), marked);
        rig.release(id);
    }
}

#[test]
fn a_granted_slot_is_not_taken_back() {
    let mut rig = rig(3);
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    rig.serve(&tokens(2, 1));
    let other = rig.acquire(&tokens(3, 2));
    let found = copies(&rig, &prompt);
    assert!(found[0].leaving && rig.slots(other).contains(&found[0].slot));
    let id = rig.ask(&Acquire { load: LoadMode::All, ..all_of(&prompt) }).unwrap();
    let plan = rig.manager.lease(id).unwrap().plan().clone();
    assert_eq!((plan.spans[0].action, plan.spans[0].tier), (Action::Load, HOST));
    assert!(!rig.slots(id).contains(&found[0].slot));
    rig.run();
    assert_eq!(rig.on(&prompt, GPU), [ALL]);
}

#[test]
fn with_a_growth_reserve_a_kept_victim_counts_as_leased() {
    let mut gpu = tier(Kind::Gpu, 4);
    gpu.growth_reserve = 0.5;
    let spec: Settings = settings(vec![gpu, tier(Kind::Host, 8)]);
    let mut rig = Rig::new(spec);
    let prompt = tokens(1, 2);
    let (id, _) = held(&mut rig, &prompt);
    suspend(&mut rig, id);
    assert!(matches!(resume(&mut rig, id, SIZE), Err(Error::NoSpace { .. })));
    resume(&mut rig, id, 0).unwrap();
}
