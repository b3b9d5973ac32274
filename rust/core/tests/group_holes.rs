//! Holes of models of several groups: which a request computes, and in which slots.
//!
//! Every call is followed by an audit. Cost: seconds. Random stories over holes are in `groups`.

use kvtrie_core::{
    Action, Group, GroupKind, LeaseId, Mark, MoveKind, NO_SLOT, Outcome, Scope, Settings,
    Structure, Token,
};

use crate::group_story::{FULL, branch, on};
use crate::rig::{GPU, HOST, Rig, SIZE, tokens};

/// Two blocks of four tokens.
const WINDOW: Group =
    Group { kind: GroupKind::Sliding { window: 9, sinks: 0 }, slot_bytes: 500, layers: 3 };
const STATE: Group = Group { kind: GroupKind::State, slot_bytes: 700, layers: 2 };

/// Loses a block of a path on every tier.
fn lose(rig: &mut Rig, path: &[Token], block: usize) {
    let mut left = 0;
    for tier in 0..rig.manager.settings().tiers.len() {
        let (tokens, scope) = (&path[..(block + 1) * SIZE], Scope::default());
        let mark = Mark { tokens, scope, tier, present: false, ready: None, first: None };
        left += rig.call(|m, now| m.mark_after(&mark, block, now)).unwrap().len();
    }
    assert!(left > 0);
}

/// Settings with holes.
fn holed(groups: &[Group], bytes: &[u64]) -> Settings {
    Settings { structure: Structure::Holes, ..on(groups, bytes) }
}

/// Twenty blocks on the first tier with all windows, one of them on the second tier alone.
fn on_host_alone(block: usize) -> Rig {
    let mut rig = Rig::new(holed(&[FULL, WINDOW], &[100_000; 2]));
    let prompt = tokens(1, 20);
    rig.serve(&prompt);
    rig.mark(&prompt, HOST);
    let (tokens, scope) = (&prompt[..(block + 1) * SIZE], Scope::default());
    let mark = Mark { tokens, scope, tier: GPU, present: false, ready: None, first: None };
    rig.call(|m, now| m.mark_after(&mark, block, now)).unwrap();
    rig
}

/// Blocks that a lease has to compute within its match.
fn computed(rig: &Rig, id: LeaseId) -> Vec<u32> {
    let spans = &rig.manager.lease(id).unwrap().plan().spans;
    let holes = spans.iter().filter(|span| span.action == Action::Recompute);
    holes.flat_map(|span| span.start..span.stop).collect()
}

#[test]
fn a_hole_is_computed_where_the_window_before_it_is_there() {
    for (lost, found) in [(5, 8), (0, 8), (7, 7)] {
        let mut rig = Rig::new(holed(&[FULL, WINDOW], &[100_000]));
        let prompt = tokens(1, 8);
        rig.serve(&prompt);
        lose(&mut rig, &prompt, lost);
        let next = branch(&prompt, 8, 2, 1);
        assert_eq!(rig.matched(&next), found * SIZE);
        let id = rig.acquire(&next);
        let hole = u32::try_from(lost).unwrap();
        assert_eq!(computed(&rig, id), if found == 8 { vec![hole] } else { vec![] });
        // A token of the hole attends to two blocks before it.
        let table = rig.manager.group_table(id, GPU, 1).unwrap().1;
        let before = lost.saturating_sub(2)..lost;
        assert!(before.chain([6]).all(|place| table[place] != NO_SLOT), "{table:?}");
        rig.commit(id, &next[found * SIZE..]);
        rig.release(id);
        assert_eq!(rig.matched(&branch(&next, 9, 3, 1)), 9 * SIZE);
        let again = rig.acquire(&branch(&prompt, 8, 4, 1));
        assert_eq!(computed(&rig, again), []);
        rig.release(again);
    }
}

#[test]
fn a_match_ends_before_a_hole_whose_window_is_gone_and_before_any_with_states() {
    let next = branch(&tokens(1, 8), 8, 2, 1);
    // Two pages for the blocks, eight for windows: those of later prompts take what is released.
    let mut rig = Rig::new(holed(&[FULL, WINDOW], &[10 * 500]));
    rig.serve(&tokens(1, 8));
    let windows = |rig: &Rig| rig.manager.group_map(&next, &Scope::default()).unwrap()[1].clone();
    for stem in 3..9 {
        if windows(&rig)[4] {
            rig.serve(&tokens(stem, 1));
        }
    }
    assert_eq!((windows(&rig)[4], rig.matched(&next)), (false, 8 * SIZE));
    lose(&mut rig, &next, 5);
    assert!(rig.matched(&next) < 5 * SIZE);
    // One hole after another: the window of the second is computed with the first.
    let mut rig = Rig::new(holed(&[FULL, WINDOW], &[100_000]));
    rig.serve(&tokens(1, 8));
    for block in [2, 4] {
        lose(&mut rig, &next, block);
    }
    let id = rig.acquire(&next);
    assert_eq!(
        (rig.manager.lease(id).unwrap().matched(), computed(&rig, id)),
        (8 * SIZE, vec![2, 4])
    );
    let mut rig = Rig::new(holed(&[FULL, STATE], &[100_000]));
    rig.serve(&tokens(1, 8));
    lose(&mut rig, &next, 5);
    assert_eq!(rig.matched(&next), 0);
}

#[test]
fn a_lease_that_cannot_load_goes_on_before_the_holes_that_it_has_still_to_compute() {
    let mut rig = on_host_alone(12);
    let prompt = tokens(1, 20);
    lose(&mut rig, &prompt, 5);
    let next = branch(&prompt, 20, 3, 1);
    let id = rig.acquire(&next);
    let matched = |rig: &Rig| rig.manager.lease(id).unwrap().matched() / SIZE;
    assert_eq!((matched(&rig), computed(&rig, id)), (20, vec![5]));
    rig.refused("1 blocks to compute", |m, now| m.fork(id, 1, now));
    for known in rig.hand_out() {
        rig.fail(known.id);
    }
    assert_eq!((matched(&rig), computed(&rig, id)), (5, vec![]));
    rig.commit(id, &next[5 * SIZE..]);
    rig.release(id);
    assert_eq!(rig.matched(&branch(&next, 21, 4, 1)), 21 * SIZE);
}

#[test]
fn a_hole_is_computed_in_slots_of_its_own_whoever_has_its_window() {
    let mut rig = on_host_alone(18);
    let prompt = tokens(1, 20);
    let next = branch(&prompt, 20, 3, 1);
    let id = rig.acquire(&next);
    let lost = rig.blocks(&prompt)[18];
    while rig.manager.pending().1 > 0 {
        for known in rig.hand_out() {
            if (known.block, known.kind, known.group) == (Some(lost), MoveKind::Load, 0) {
                rig.fail(known.id);
            } else {
                rig.report(&[known.id], &Outcome::default()).ok();
            }
        }
    }
    rig.release(id);
    // The window of the block can be read as before.
    assert!(rig.manager.group_map(&prompt, &Scope::default()).unwrap()[1][18]);
    let id = rig.acquire(&next);
    assert_eq!(
        (rig.manager.lease(id).unwrap().matched(), computed(&rig, id)),
        (20 * SIZE, vec![18])
    );
    let own = rig.manager.group_table(id, GPU, 1).unwrap().1[18];
    let found = rig.manager.lookup(&prompt, rig.now, &Scope::default(), 0).unwrap();
    let known = found.blocks[18].copies.iter().find(|copy| (copy.tier, copy.group) == (GPU, 1));
    assert!(own != NO_SLOT && known.is_none_or(|copy| copy.slot != own), "{known:?}");
    rig.run();
    rig.commit(id, &next[20 * SIZE..]);
    rig.release(id);
    assert_eq!(rig.matched(&branch(&next, 21, 4, 1)), 21 * SIZE);
}
