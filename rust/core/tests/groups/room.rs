//! Room of all groups in one budget: what fits, and the point that leaves first.

use kvtrie_core::{
    Answer, Error, Group, GroupKind, Hint, Kind, Manager, Mark, Objective, Scope, Settings, Write,
};

use super::{STATE, WINDOW, held, held_on, hinted, of, target};
use crate::group_story::{FULL, on};
use crate::rig::{GPU, HOST, Rig, SIZE, all_of, retain, tokens};

#[test]
fn a_long_pass_needs_a_window_and_its_points_alone() {
    // Pages of 500 bytes: 40 for 200 blocks of the first group, and 4.
    let mut rig = Rig::new(of(&[FULL, WINDOW], 44 * 500));
    rig.serve(&tokens(1, 200));
    assert_eq!(held(&rig)[1], (2, 2));
    assert_eq!(rig.matched(&tokens(1, 201)), 200 * SIZE);
    // A second one takes their room.
    rig.serve(&tokens(2, 200));
    assert_eq!(rig.matched(&tokens(2, 201)), 200 * SIZE);
}

#[test]
fn a_request_without_room_is_refused_and_changes_nothing() {
    let mut rig = Rig::new(of(&[FULL, WINDOW], 10 * 500));
    let id = rig.acquire(&tokens(1, 20));
    rig.commit(id, &tokens(1, 20));
    let other = tokens(2, 25);
    let Err(Error::NoSpace { wanted, .. }) = rig.ask(&all_of(&other)) else {
        panic!("there is no room");
    };
    // Five pages for 25 blocks of the first group, and two for the window of their end.
    assert_eq!(wanted, 7);
    assert_eq!(rig.matched(&tokens(1, 20)), 20 * SIZE);
    rig.release(id);
    rig.serve(&other);
}

#[test]
fn a_mark_makes_room_or_changes_nothing() {
    for tier in [GPU, HOST] {
        // Ten pages: a state each for two sessions, and five slots of the first group in others.
        let mut rig = Rig::new(on(&[FULL, STATE], &[6 * 700, 6 * 700]));
        for stem in 1..4 {
            rig.mark(&tokens(stem, 20), tier);
            assert_eq!(rig.matched(&tokens(stem, 20)), 20 * SIZE);
            rig.run();
        }
        let (tokens, scope) = (tokens(9, 50), Scope::default());
        let mark = Mark { tokens: &tokens, scope, tier, present: true, ready: None, first: None };
        assert!(rig.call(|m, now| m.mark(&mark, now)).is_err());
    }
}

#[test]
fn a_growth_reserve_is_for_leases_that_run() {
    // Pages of 700 bytes: three for twenty blocks, one for a state, and one in six is kept.
    let mut settings = of(&[FULL, STATE], 6 * 700);
    settings.tiers[0].growth_reserve = 0.2;
    let mut rig = Rig::new(settings);
    let id = rig.acquire(&tokens(1, 20));
    rig.commit(id, &tokens(1, 20));
    assert!(rig.ask(&all_of(&tokens(2, 7))).is_err());
    rig.call(|m, now| m.reserve(id, 7 * SIZE, now)).unwrap();
    rig.release(id);
    rig.serve(&tokens(2, 20));
}

#[test]
fn the_point_of_the_least_worth_per_byte_leaves_first() {
    // Pages for three of seven blocks and a state, and for one and a state.
    let mut settings = of(&[FULL, STATE], 6 * 700);
    settings.policy = "learned".to_owned();
    settings.cost = settings.cost.with_objective(Objective::Hits);
    let mut rig = Rig::new(settings);
    for (stem, blocks) in [(1, 20), (2, 6), (3, 6)] {
        rig.serve(&tokens(stem, blocks));
    }
    let found = [1, 2].map(|stem| rig.matched(&tokens(stem, 20)));
    assert_eq!(found, [20 * SIZE, 0]);
}

#[test]
fn a_retained_point_stays_while_others_leave() {
    let mut rig = Rig::new(of(&[FULL, STATE], 10 * 700));
    rig.serve(&tokens(1, 14));
    assert_eq!(
        hinted(&mut rig, Hint::Retain(retain(target(&tokens(1, 14)), 90))),
        Answer::Accepted
    );
    for stem in 2..6 {
        rig.serve(&tokens(stem, 14));
    }
    assert_eq!((rig.matched(&tokens(1, 14)), rig.matched(&tokens(3, 14))), (14 * SIZE, 0));
}

#[test]
fn without_room_below_a_point_is_dropped() {
    let mut settings = on(&[FULL, STATE], &[6 * 700, 2 * 700]);
    settings.tiers[0].write = Write::Never;
    let mut rig = Rig::new(settings);
    rig.serve(&tokens(1, 20));
    rig.serve(&tokens(2, 20));
    assert_eq!((rig.matched(&tokens(1, 20)), held_on(&rig, HOST)[1]), (0, (0, 0)));
    // One page for the state, and one for seven of twenty blocks: the others leave.
    let mut rig = Rig::new(on(&[FULL, STATE], &[6 * 700, 2 * 700]));
    rig.serve(&tokens(1, 20));
    rig.serve(&tokens(2, 20));
    assert_eq!(rig.matched(&tokens(2, 20)), 20 * SIZE);
}

#[test]
fn bad_groups_are_config_errors() {
    let no =
        |groups: &[Group], bytes| Manager::new(of(groups, bytes)).expect_err("refused").to_string();
    assert!(no(&[], 9000).contains("0 groups, the first of kind None: 1 to 64 wanted"));
    assert!(no(&[STATE, FULL], 9000).contains("the first of kind Some(State)"));
    assert!(no(&[FULL, STATE], 1399).contains("1399 bytes are 1 pages of 700: 2 are wanted"));
    let empty = Group { kind: GroupKind::Sliding { window: 0, sinks: 0 }, ..WINDOW };
    assert!(no(&[FULL, empty], 9000).contains("window above 0"));
    let several = |change: fn(&mut Settings)| {
        let mut several = on(&[FULL, STATE], &[9000, 9000]);
        change(&mut several);
        Manager::new(several).expect_err("refused").to_string()
    };
    let text = several(|settings| settings.tiers[1].layer_slots = true);
    assert!(text.contains("layer_slots"), "{text}");
    let text = several(|settings| settings.tiers[1].kind = Kind::Remote);
    assert!(text.contains("remote"), "{text}");
}

#[test]
fn victims_on_request_leave_with_their_points() {
    let mut rig = Rig::new(of(&[FULL, STATE], 100_000));
    rig.serve(&tokens(1, 4));
    rig.serve(&tokens(2, 4));
    let stay = rig.blocks(&tokens(2, 4));
    let evict = |count| {
        let stay = stay.clone();
        move |m: &mut Manager, now| m.evict_blocks(GPU, count, &stay[3..], now)
    };
    assert!(rig.call(evict(5)).is_err());
    assert_eq!(rig.call(evict(4)).unwrap().len(), 4);
    assert_eq!((rig.matched(&tokens(1, 4)), rig.matched(&tokens(2, 4))), (0, 4 * SIZE));
}
