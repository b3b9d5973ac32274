//! Hints that move blocks between tiers: prefetches and demotions.

use kvtrie_core::{Answer, Hint, Kind, MoveKind, Target};

use crate::contract::hints::{answer, path, say};
use crate::rig::{ALL, DISK, GPU, HOST, Rig, settings, tier, tokens};

#[test]
fn prefetched_blocks_are_resident_when_requested() {
    let tiers = || vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8), tier(Kind::Disk, 8)];
    for tier in [GPU, HOST] {
        let mut rig = Rig::new(settings(tiers()));
        rig.mark(&tokens(1, 3), DISK);
        let fetch = Hint::Prefetch { target: path(&tokens(1, 3)), tier, deadline: None };
        // At most a quarter of the tier at a time.
        let reply = say(&mut rig, fetch.clone());
        assert_eq!(answer(&reply), (Answer::Clipped, 2, 1), "{}", reply.reason);
        let moves = rig.run();
        assert!(moves.iter().all(|m| m.kind == MoveKind::Load && m.lease == 0));
        let late = Hint::Prefetch { target: path(&tokens(1, 3)), tier, deadline: Some(rig.now) };
        assert_eq!(answer(&say(&mut rig, late)), (Answer::Clipped, 2, 1));
        assert_eq!(answer(&say(&mut rig, fetch)), (Answer::Accepted, 3, 0));
        rig.run();
        assert_eq!(rig.on(&tokens(1, 3), tier), [ALL; 3]);
    }
    let mut rig = Rig::new(settings(tiers()));
    let fetch = Hint::Prefetch { target: path(&tokens(1, 3)), tier: GPU, deadline: None };
    assert_eq!(answer(&say(&mut rig, fetch)), (Answer::Rejected, 0, 0));
}

#[test]
fn a_prefetch_names_the_first_lease_that_waits_for_it() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)]));
    rig.mark(&tokens(1, 1), HOST);
    let fetch = Hint::Prefetch { target: path(&tokens(1, 1)), tier: GPU, deadline: None };
    assert_eq!(answer(&say(&mut rig, fetch)), (Answer::Accepted, 1, 0));
    let (one, two) = (rig.acquire(&tokens(1, 1)), rig.acquire(&tokens(1, 1)));
    assert!(one < two && rig.awaits(one) == rig.awaits(two));
    let leases: Vec<_> = rig.hand_out().iter().map(|known| known.lease).collect();
    assert_eq!(leases, [one]);
}

#[test]
fn demoted_blocks_move_down_tier_by_tier_and_are_not_dropped() {
    let mut rig =
        Rig::new(settings(vec![tier(Kind::Gpu, 8), tier(Kind::Host, 4), tier(Kind::Disk, 8)]));
    rig.serve(&tokens(1, 3));
    let down = |to| Hint::Demote { target: path(&tokens(1, 3)), tier: to };
    assert_eq!(answer(&say(&mut rig, down(DISK))), (Answer::Accepted, 3, 0));
    rig.run();
    assert_eq!(rig.on(&tokens(1, 3), DISK), [ALL; 3]);
    assert_eq!((rig.on(&tokens(1, 3), GPU)[0].len(), rig.on(&tokens(1, 3), HOST)[0].len()), (0, 0));
    assert_eq!(rig.manager.occupancy(HOST).free, 4);
    // Leased blocks stay.
    let id = rig.acquire(&tokens(1, 1));
    rig.run();
    let down = Hint::Demote { target: Target::Lease(id), tier: HOST };
    assert_eq!(answer(&say(&mut rig, down)), (Answer::Rejected, 0, 1));
}
