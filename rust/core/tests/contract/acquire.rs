//! Point 4: lookup, pin and room in one atomic step.

use kvtrie_core::{Acquire, Action, Error, Kind, LoadMode, Mark, Scope, Settings};

use crate::rig::{ALL, DISK, GPU, HOST, Rig, SIZE, all_of, holes, settings, tier, tokens};

fn two_tiers(gpu: u32, host: u32) -> Rig {
    Rig::new(settings(vec![tier(Kind::Gpu, gpu), tier(Kind::Host, host)]))
}

fn actions(rig: &Rig, id: u64) -> Vec<(u32, u32, Action, usize)> {
    let spans = &rig.manager.lease(id).unwrap().plan().spans;
    spans.iter().map(|span| (span.start, span.stop, span.action, span.tier)).collect()
}

#[test]
fn refusal_changes_nothing_and_names_the_numbers() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4)]));
    rig.serve(&tokens(1, 1));
    let held = rig.acquire(&tokens(2, 2));
    // One slot is free, one evictable, two are leased. `ask` compares the snapshots.
    let error = rig.ask(&all_of(&tokens(3, 3))).unwrap_err();
    let tier = "gpu".to_owned();
    assert_eq!(
        error,
        Error::NoSpace { tier, unit: "slots", wanted: 3, free: 2, coming: 0, leased: 2 }
    );
    let message = error.to_string();
    assert!(message.contains("wanted 3") && message.contains("2 leased"), "{message}");
    assert_eq!(rig.matched(&tokens(1, 1)), SIZE, "the draft's victim is where it was");
    rig.release(held);
    rig.acquire(&tokens(3, 3));
}

#[test]
fn arriving_slots_are_counted_as_coming() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 2)]));
    let mark = Mark {
        tokens: &tokens(1, 1),
        scope: Scope::default(),
        tier: GPU,
        present: true,
        ready: Some(9000),
        first: None,
    };
    rig.call(|manager, now| manager.mark(&mark, now)).unwrap();
    let tier = "gpu".to_owned();
    let error = rig.ask(&all_of(&tokens(2, 2))).unwrap_err();
    assert_eq!(
        error,
        Error::NoSpace { tier, unit: "slots", wanted: 2, free: 1, coming: 1, leased: 0 }
    );
}

#[test]
fn a_refused_request_leaves_no_scope_session_or_lease_behind() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 1)]));
    let scope = Scope { tenant: b"new".to_vec(), ..Scope::default() };
    let prompt = tokens(1, 2);
    let ask = Acquire { scope, session: Some("s"), ..all_of(&prompt) };
    assert!(matches!(rig.ask(&ask), Err(Error::NoSpace { .. })));
    assert_eq!((rig.manager.totals().1, rig.manager.sessions(&ask.scope).unwrap().len()), (0, 0));
    let id = rig.acquire(&tokens(1, 1));
    assert_eq!(id, 1, "the refused request used up no id");
}

#[test]
fn keep_leaves_tokens_at_the_end_to_compute() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8)]));
    let prompt = tokens(1, 3);
    rig.serve(&prompt);
    for (keep, matched) in [(0, 12), (1, 8), (4, 8), (5, 4), (12, 0), (99, 0)] {
        let found = rig.manager.lookup(&prompt, rig.now, &Scope::default(), keep).unwrap();
        assert_eq!(found.tokens, matched, "keep {keep}");
        let id = rig.ask(&Acquire { keep, ..all_of(&prompt) }).unwrap();
        assert_eq!(rig.manager.lease(id).unwrap().matched(), matched);
        assert_eq!(rig.manager.room_left(id).unwrap(), 12 - matched);
        rig.release(id);
    }
}

#[test]
fn lookup_changes_nothing_not_even_the_order_of_victims() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 2)]));
    let (old, new) = (tokens(1, 1), tokens(2, 1));
    rig.serve(&old);
    rig.serve(&new);
    let before = rig.manager.snapshot();
    let found = rig.manager.lookup(&old, rig.now + 77, &Scope::default(), 0).unwrap();
    assert_eq!((found.tokens, found.blocks[0].tokens.as_slice()), (SIZE, old.as_slice()));
    assert_eq!(before, rig.manager.snapshot());
    rig.serve(&tokens(3, 1));
    assert_eq!((rig.matched(&old), rig.matched(&new)), (0, SIZE));
}

#[test]
fn acquire_refreshes_what_it_matches() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 2)]));
    let (old, new) = (tokens(1, 1), tokens(2, 1));
    rig.serve(&old);
    rig.serve(&new);
    rig.serve(&old);
    rig.serve(&tokens(3, 1));
    assert_eq!((rig.matched(&old), rig.matched(&new)), (SIZE, 0));
}

#[test]
fn leased_blocks_stay_until_their_last_lease_is_released() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 3)]));
    let prompt = tokens(1, 2);
    rig.serve(&prompt);
    let (one, two) = (rig.acquire(&prompt), rig.acquire(&prompt));
    assert_eq!(rig.slots(one), rig.slots(two), "both use the same copy");
    for left in [two, one] {
        assert!(matches!(rig.ask(&all_of(&tokens(2, 2))), Err(Error::NoSpace { .. })));
        assert_eq!(rig.on(&prompt, GPU), [ALL, ALL]);
        rig.release(left);
    }
    let id = rig.acquire(&tokens(2, 2));
    assert_eq!(rig.matched(&prompt), SIZE);
    rig.release(id);
}

#[test]
fn the_rest_of_the_prompt_and_the_reserve_get_room_at_once() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8)]));
    rig.serve(&tokens(1, 1));
    let prompt: Vec<u32> = tokens(1, 1).into_iter().chain([7, 8, 9]).collect();
    let id = rig.ask(&Acquire { reserve: 6, ..all_of(&prompt) }).unwrap();
    assert_eq!(rig.manager.room_left(id).unwrap(), 12, "3 + 6 tokens are three blocks");
    assert_eq!(rig.slots(id).len(), 4);
    rig.refused("has room for 12", |manager, now| manager.commit(id, &[1; 13], now));
}

#[test]
fn each_block_takes_its_fastest_copy() {
    let tiers = vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8), tier(Kind::Disk, 8)];
    let mut rig = Rig::new(settings(tiers));
    let prompt = tokens(1, 3);
    rig.mark(&prompt, DISK);
    rig.mark(&prompt[..2 * SIZE], HOST);
    rig.mark(&prompt[..SIZE], GPU);
    let id = rig.acquire(&prompt);
    let wanted =
        [(0, 1, Action::Reuse, GPU), (1, 2, Action::Load, HOST), (2, 3, Action::Load, DISK)];
    assert_eq!(actions(&rig, id), wanted);
    let stats = [GPU, HOST, DISK].map(|tier| rig.manager.stats(tier).hits);
    assert_eq!((stats, rig.manager.requested().tokens), ([1, 1, 1], 12));
}

#[test]
fn the_match_ends_before_an_absent_block_unless_holes_are_tolerated() {
    let clear = |manager: &mut kvtrie_core::Manager, now| {
        let prompt = tokens(1, 1);
        let scope = Scope::default();
        let mark =
            Mark { tokens: &prompt, scope, tier: HOST, present: false, ready: None, first: None };
        manager.mark(&mark, now)
    };
    let tiers = || vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)];
    let mut rig = Rig::new(holes(tiers()));
    let prompt = tokens(1, 3);
    rig.mark(&prompt, HOST);
    rig.call(clear).unwrap();
    let id = rig.acquire(&[prompt.as_slice(), &[1; SIZE]].concat());
    assert_eq!(rig.manager.lease(id).unwrap().matched(), 3 * SIZE);
    assert_eq!(actions(&rig, id), [(0, 1, Action::Recompute, GPU), (1, 3, Action::Load, HOST)]);
    assert_eq!(rig.manager.lease(id).unwrap().recompute().collect::<Vec<_>>(), [(0, ALL)]);
    // In a leaf-only scope such a hole cannot be made.
    let mut strict = Rig::new(settings(tiers()));
    strict.mark(&prompt, HOST);
    strict.refused("children need it in a leaf-only scope", clear);
}

#[test]
fn a_plan_is_never_later_than_loading_or_computing_everything() {
    for ns_per_token in [0.001, 0.1, 1.0, 10.0, 1000.0] {
        let cost = kvtrie_core::CostModel::default_curve(ns_per_token).unwrap();
        let tiers = vec![tier(Kind::Gpu, 40), tier(Kind::Host, 40)];
        let mut rig = Rig::new(Settings { cost, ..settings(tiers) });
        let prompt = tokens(1, 30);
        rig.mark(&prompt, HOST);
        let mut finish = |load| {
            let id = rig.ask(&Acquire { load, ..all_of(&prompt) }).unwrap();
            let took = rig.manager.lease(id).unwrap().plan().finish - rig.now;
            rig.run();
            rig.release(id);
            rig.now += 1_000_000;
            let scope = Scope::default();
            let mark = Mark {
                tokens: &prompt,
                scope,
                tier: GPU,
                present: false,
                ready: None,
                first: None,
            };
            rig.call(|manager, now| manager.mark(&mark, now)).unwrap();
            took
        };
        let (plan, all, none) =
            (finish(LoadMode::Plan), finish(LoadMode::All), finish(LoadMode::None));
        assert!(plan <= all.min(none), "{plan} {all} {none} at {ns_per_token}");
    }
}

#[test]
fn loads_that_would_miss_the_deadline_are_not_planned() {
    let mut rig = two_tiers(8, 8);
    let prompt = tokens(1, 4);
    rig.mark(&prompt, HOST);
    // A load of 400 bytes takes 410 ns, and the fourth would end after 1640 ns.
    let plan = |rig: &mut Rig, deadline| {
        let id = rig.ask(&Acquire { load: LoadMode::Plan, deadline, ..all_of(&prompt) }).unwrap();
        let computed = rig.manager.lease(id).unwrap().recompute().count();
        rig.run();
        rig.commit(id, &[]);
        rig.release(id);
        computed
    };
    let now = rig.now;
    assert_eq!(plan(&mut rig, Some(now + 1)), 4);
    let mut rig = two_tiers(8, 8);
    rig.mark(&prompt, HOST);
    assert_eq!(plan(&mut rig, Some(now + 1_000_000)), 0);
}

#[test]
fn nothing_is_loaded_before_the_call_of_load() {
    let mut rig = two_tiers(8, 8);
    let prompt = tokens(1, 2);
    rig.mark(&prompt, HOST);
    let id = rig.ask(&Acquire { load: LoadMode::None, ..all_of(&prompt) }).unwrap();
    assert!(rig.hand_out().is_empty());
    assert_eq!(actions(&rig, id), [(0, 2, Action::Recompute, GPU)]);
    let moves = rig.call(|manager, now| manager.load(id, None, None, now)).unwrap();
    assert_eq!((moves.len(), rig.awaits(id)), (2, moves));
    assert_eq!(actions(&rig, id), [(0, 1, Action::Load, HOST), (1, 2, Action::Load, HOST)]);
    rig.run();
    assert_eq!(rig.call(|manager, now| manager.load(id, None, None, now)).unwrap(), [0; 0]);
    rig.commit(id, &[]);
    assert_eq!(rig.on(&prompt, GPU), [ALL, ALL]);
}
