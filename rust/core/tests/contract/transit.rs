//! Bytes move between neighbours; disk and the first tier, and remote and every tier, via the host.

use kvtrie_core::{
    Acquire, Action, Kind, LoadMode, MoveKind, Outcome, Settings, Structure, TierSpec, Write,
};

use crate::rig::{ALL, DISK, GPU, HOST, REMOTE, Rig, SIZE, all_of, settings, tier, tokens};

fn four(blocks: [u32; 4]) -> Settings {
    let kinds = [Kind::Gpu, Kind::Host, Kind::Disk, Kind::Remote];
    settings(kinds.into_iter().zip(blocks).map(|(kind, blocks)| tier(kind, blocks)).collect())
}

#[test]
fn a_load_from_disk_uses_a_host_slot_only_in_transit() {
    let mut rig = Rig::new(four([4, 2, 4, 4]));
    let prompt = tokens(1, 1);
    rig.mark(&prompt, DISK);
    let id = rig.acquire(&prompt);
    assert_eq!(rig.manager.occupancy(HOST).free, 1, "reserved together with the load");
    let moves = rig.hand_out();
    let shape: Vec<_> = moves.iter().map(|m| (m.kind, m.src, m.dst, m.after)).collect();
    let hop = moves[0].id;
    assert_eq!(shape, [(MoveKind::Load, DISK, HOST, 0), (MoveKind::Load, HOST, GPU, hop)]);
    assert_eq!(moves[0].dst_slot, moves[1].src_slot);
    assert_eq!(rig.awaits(id), [moves[0].id, moves[1].id]);
    rig.done(moves[0].id);
    assert_eq!(rig.manager.occupancy(HOST).free, 1);
    rig.done(moves[1].id);
    assert_eq!(rig.manager.occupancy(HOST).free, 2);
    assert_eq!((rig.on(&prompt, GPU), rig.on(&prompt, HOST).len()), (vec![ALL], 1));
    assert!(rig.awaits(id).is_empty());
}

#[test]
fn remote_exchanges_bytes_with_the_host_only() {
    let mut rig = Rig::new(four([4, 4, 1, 4]));
    let prompt = tokens(1, 1);
    rig.mark(&prompt, REMOTE);
    rig.acquire(&prompt);
    let up: Vec<_> = rig.run().iter().map(|m| (m.src, m.dst)).collect();
    assert_eq!(up, [(REMOTE, HOST), (HOST, GPU)]);
    // A disk's block goes to remote through the host as well.
    rig.mark(&tokens(2, 1), DISK);
    rig.flush();
    let down: Vec<_> = rig.run().iter().map(|m| (m.kind, m.src, m.dst)).collect();
    let through = [(MoveKind::Load, DISK, HOST), (MoveKind::Store, HOST, REMOTE)];
    assert!(down.ends_with(&through), "{down:?}");
    assert_eq!(rig.on(&tokens(2, 1), REMOTE), [ALL]);
}

#[test]
fn remote_below_the_host_needs_no_transit() {
    let tiers = vec![tier(Kind::Gpu, 2), tier(Kind::Host, 1), tier(Kind::Remote, 4)];
    let mut rig = Rig::new(settings(tiers));
    rig.mark(&tokens(1, 1), HOST);
    rig.flush();
    let down: Vec<_> = rig.run().iter().map(|m| (m.kind, m.src, m.dst)).collect();
    assert_eq!(down, [(MoveKind::Store, HOST, DISK)], "the third tier is remote here");
    assert_eq!(rig.on(&tokens(1, 1), DISK), [ALL]);
}

#[test]
fn without_a_transit_slot_blocks_are_computed_not_loaded() {
    let tiers = vec![tier(Kind::Gpu, 4), tier(Kind::Host, 1), tier(Kind::Disk, 4)];
    let mut rig = Rig::new(Settings { structure: Structure::Holes, ..settings(tiers) });
    rig.mark(&tokens(1, 1), HOST);
    rig.mark(&tokens(2, 1), DISK);
    let reading = rig.acquire(&tokens(1, 1));
    let computing = rig.acquire(&tokens(2, 1));
    let actions = |rig: &Rig, id| -> Vec<_> {
        rig.manager.lease(id).unwrap().plan().spans.iter().map(|span| span.action).collect()
    };
    assert_eq!(actions(&rig, computing), [Action::Recompute]);
    rig.run();
    rig.release(reading);
    rig.release(computing);
    let loading = rig.acquire(&tokens(2, 1));
    assert_eq!(actions(&rig, loading), [Action::Load]);
}

#[test]
fn a_failed_first_hop_fails_the_second_and_frees_the_host() {
    let mut rig = Rig::new(four([4, 4, 4, 4]));
    let prompt = tokens(1, 2);
    rig.mark(&prompt, DISK);
    let id = rig.acquire(&prompt);
    let moves = rig.hand_out();
    assert_eq!(moves.len(), 4);
    rig.fail(moves[0].id);
    let failed = rig.call(|manager, _| manager.failed()).unwrap();
    assert_eq!(failed.iter().map(|f| (f.lease, f.start, f.stop)).collect::<Vec<_>>(), [(id, 0, 8)]);
    for known in &moves[2..] {
        rig.done(known.id);
    }
    assert_eq!((rig.manager.occupancy(HOST).free, rig.matched(&prompt)), (4, 0));
    assert!(rig.awaits(id).is_empty());
    rig.commit(id, &prompt);
    assert_eq!(rig.on(&prompt, GPU), [ALL, ALL]);
}

#[test]
fn write_through_to_remote_passes_the_host() {
    let through = |kind, blocks| TierSpec { write: Write::Through, ..tier(kind, blocks) };
    let tiers = vec![
        through(Kind::Gpu, 4),
        through(Kind::Host, 4),
        through(Kind::Disk, 4),
        tier(Kind::Remote, 4),
    ];
    let mut rig = Rig::new(settings(tiers));
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    let places = [GPU, HOST, DISK, REMOTE].map(|tier| rig.on(&prompt, tier));
    assert_eq!(places, [const { [ALL] }; 4].map(Vec::from));
    assert_eq!(rig.manager.occupancy(HOST).free, 3);
}

#[test]
fn several_loads_from_disk_each_get_a_transit_slot() {
    let mut rig = Rig::new(four([8, 8, 8, 8]));
    let prompt = tokens(1, 5);
    rig.mark(&prompt, DISK);
    rig.mark(&prompt[..2 * SIZE], HOST);
    let id = rig.acquire(&prompt);
    let moves = rig.run();
    let count = |src, dst| moves.iter().filter(|m| (m.src, m.dst) == (src, dst)).count();
    assert_eq!((count(DISK, HOST), count(HOST, GPU)), (3, 5));
    assert!(rig.awaits(id).is_empty());
    assert_eq!(rig.on(&prompt, GPU), [ALL; 5]);
}

#[test]
fn a_path_on_disk_longer_than_the_host_is_served() {
    for load in [LoadMode::Plan, LoadMode::All] {
        let mut rig = Rig::new(four([8, 3, 8, 8]));
        let prompt = tokens(1, 6);
        rig.mark(&prompt, DISK);
        let id = rig.ask(&Acquire { load, ..all_of(&prompt) }).unwrap();
        rig.run();
        let held = rig.manager.lease_tokens(id).unwrap();
        rig.commit(id, &prompt[held..]);
        assert_eq!(rig.on(&prompt, GPU), [ALL; 6]);
        rig.release(id);
    }
}

#[test]
fn an_engine_that_loads_all_of_a_prefix_gets_none_with_a_gap() {
    // The only host slot is another request's source, so no load from disk can pass.
    for (structure, matched) in [(Structure::LeafOnly, 1), (Structure::Holes, 3)] {
        let tiers = vec![tier(Kind::Gpu, 8), tier(Kind::Host, 1), tier(Kind::Disk, 4)];
        let mut rig = Rig::new(Settings { structure, ..settings(tiers) });
        let prompt = tokens(1, 3);
        rig.serve(&prompt[..SIZE]);
        rig.mark(&prompt, DISK);
        rig.mark(&tokens(2, 1), HOST);
        let reading = rig.acquire(&tokens(2, 1));
        let id = rig.acquire(&prompt);
        let lease = rig.manager.lease(id).unwrap();
        assert_eq!(lease.matched(), matched * SIZE, "{structure:?}");
        let computed = lease.plan().spans.iter().any(|span| span.action == Action::Recompute);
        assert_eq!(computed, structure == Structure::Holes);
        rig.run();
        let held = rig.manager.lease_tokens(id).unwrap();
        rig.commit(id, &prompt[held..]);
        assert_eq!(rig.on(&prompt, GPU), [ALL; 3]);
        rig.release(reading);
        rig.release(id);
    }
}

#[test]
fn a_hung_first_hop_keeps_the_slot_that_it_reads() {
    let mut rig = Rig::new(four([1, 3, 1, 4]));
    rig.mark(&tokens(1, 1), DISK);
    rig.flush();
    let hop = rig.hand_out().iter().find(|hop| hop.src == DISK).unwrap().id;
    let hung = Outcome { ok: false, hung: true, ..Outcome::default() };
    rig.report(&[hop], &hung).unwrap();
    assert_eq!(rig.manager.occupancy(DISK).free, 0, "the hung move still reads its slot");
    rig.report(&[hop], &Outcome { hung: false, ..hung }).unwrap();
    assert_eq!(rig.manager.occupancy(DISK).free, 1);
}
