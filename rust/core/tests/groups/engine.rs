//! Windows and states in the slots of an engine.

use kvtrie_core::{Group, LeaseId, NO_SLOT, Owner};

use super::{STATE, WINDOW};
use crate::group_story::{FULL, branch, on};
use crate::rig::{GPU, Rig, SIZE, tokens};

/// Two tiers, the first of an engine that numbers its slots.
fn engine(group: Group) -> Rig {
    let mut settings = on(&[FULL, group], &[100 * 700, 100 * 700]);
    settings.tiers[0].owner = Owner::Engine;
    Rig::new(settings)
}

/// Binds slots from `slot` on to the blocks of a lease from `first` to before `end`, in both groups.
fn bind(rig: &mut Rig, id: LeaseId, (first, end): (usize, usize), slot: u32) {
    let count = u32::try_from(end - first).unwrap();
    let slots: Vec<u32> = (slot..slot + count).collect();
    rig.call(|m, _| m.bind_group(id, first, &slots, 0)).unwrap();
    let slots: Vec<u32> = (slot + count..slot + 2 * count).collect();
    rig.call(|m, _| m.bind_group(id, first, &slots, 1)).unwrap();
}

#[test]
fn windows_in_an_engines_slots_are_stored_at_their_border_and_loaded_for_the_next_turn() {
    for (group, needed) in [(WINDOW, 2_u32), (STATE, 1)] {
        let mut rig = engine(group);
        let prompt = tokens(1, 6);
        let id = rig.acquire(&prompt);
        bind(&mut rig, id, (0, 6), 10);
        rig.commit(id, &prompt);
        let table = rig.manager.group_table(id, GPU, 1).unwrap().1;
        // What no token after the next border attends to is the engine's again.
        assert_eq!(table.iter().filter(|&&slot| slot != NO_SLOT).count(), needed as usize - 1);
        rig.release(id);
        let stores = rig.run();
        // A prompt that leaves this one earlier finds the rest while there is room.
        assert_eq!(stores.iter().filter(|known| known.group == 1).count(), 6);
        assert!(stores.iter().all(|known| known.group == 0 || known.src_slot >= 16));
        assert_eq!(rig.matched(&prompt), 6 * SIZE);
        let next = branch(&prompt, 6, 2, 1);
        let id = rig.acquire(&next);
        assert_eq!(rig.manager.lease(id).unwrap().matched(), 6 * SIZE);
        assert_eq!(rig.hand_out().len(), 0, "the engine has named no slot");
        bind(&mut rig, id, (0, 7), 40);
        let loads = rig.run();
        let slots = loads.iter().filter(|known| known.group == 1).map(|known| known.dst_slot);
        assert_eq!(slots.collect::<Vec<_>>(), (53 - needed..53).collect::<Vec<_>>());
        rig.commit(id, &next[6 * SIZE..]);
        rig.release(id);
    }
}

#[test]
fn slots_that_an_engine_has_taken_back_in_part_are_not_stored_by_a_later_commit() {
    for taken in [false, true] {
        let mut rig = engine(WINDOW);
        let prompt = tokens(1, 2);
        let id = rig.acquire(&prompt);
        rig.call(|m, _| m.bind(id, 0, &[1, 2])).unwrap();
        rig.commit(id, &prompt[..SIZE]);
        rig.call(|m, _| m.bind_group(id, 0, &[11, 12], 1)).unwrap();
        if taken {
            rig.call(|m, _| m.unbind(id, 1, 1)).unwrap();
            rig.refused("group 0, whose blocks a lease keeps", |m, _| m.unbind(id, 0, 0));
            rig.refused("there is no group 2", |m, _| m.unbind(id, 0, 2));
        }
        rig.commit(id, &prompt[SIZE..]);
        rig.release(id);
        let stores = rig.run();
        assert_eq!(stores.iter().any(|known| known.src_slot == 11), !taken);
        assert!(stores.iter().any(|known| known.src_slot == 12));
    }
}

#[test]
fn an_engine_gives_a_slot_that_it_has_taken_back_to_another_group() {
    let mut rig = engine(WINDOW);
    let id = rig.acquire(&tokens(1, 3));
    rig.call(|m, _| m.bind(id, 0, &[1, 2, 3])).unwrap();
    rig.call(|m, _| m.bind_group(id, 0, &[9, 2], 1)).unwrap();
    rig.call(|m, _| m.bind(id, 3, &[9])).unwrap();
    rig.refused("bound to slot 9 in group 1, not 8", |m, _| m.bind_group(id, 0, &[8], 1));
    rig.refused("there is no group 2, the manager keeps 2 apart", |m, _| {
        m.bind_group(id, 0, &[8], 2)
    });
    rig.refused("truncate of lease", |m, now| m.truncate(id, 0, now));
    rig.release(id);
    let id = rig.acquire(&tokens(2, 1));
    rig.call(|m, _| m.bind(id, 0, &[9])).unwrap();
    rig.release(id);
}
