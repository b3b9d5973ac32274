//! Hints: they change the order of eviction, never more than that.

use kvtrie_core::{
    Acquire, Answer, Handle, Hint, HintReply, Kind, NORMAL, Owner, POLICIES, Release, Retain,
    Scope, Settings, Structure, Target, TierSpec, Token,
};
use proptest::prelude::*;

use crate::rig::{ALL, DISK, GPU, HOST, Rig, all_of, retain, settings, tier, tokens};

pub(super) fn one(blocks: u32) -> Rig {
    Rig::new(settings(vec![tier(Kind::Gpu, blocks)]))
}

pub(super) fn path(tokens: &[Token]) -> Target {
    Target::Tokens { tokens: tokens.to_vec(), scope: Scope::default() }
}

/// Says that a session of the plain scope is over.
fn over(name: &str) -> Hint {
    Hint::Release(Release::Session { name: name.to_owned(), scope: Scope::default() })
}

/// Says that an owner of the plain scope is gone.
fn leave(name: &str) -> Hint {
    Hint::Release(Release::Owner { name: name.to_owned(), scope: Scope::default() })
}

pub(super) fn say(rig: &mut Rig, hint: Hint) -> HintReply {
    rig.call(|manager, now| manager.hint(&[hint], now)).expect("a good hint").remove(0)
}

pub(super) fn keep(rig: &mut Rig, tokens: &[Token], priority: u8) -> HintReply {
    say(rig, Hint::Retain(retain(path(tokens), priority)))
}

pub(super) fn answer(reply: &HintReply) -> (Answer, u64, u64) {
    (reply.answer, reply.blocks, reply.not_applied)
}

fn priorities(rig: &Rig, tokens: &[Token]) -> Vec<u8> {
    let known = rig.manager.cached_blocks(tokens, &Scope::default()).expect("good tokens");
    known.into_iter().map(|block| rig.manager.priority(block).expect("it lives")).collect()
}

/// The stems whose first block is cached, of `1..=stems`.
fn cached(rig: &Rig, stems: u32) -> Vec<u32> {
    (1..=stems).filter(|&stem| rig.matched(&tokens(stem, 1)) > 0).collect()
}

#[test]
fn lower_priorities_are_evicted_first_under_every_policy() {
    for name in POLICIES {
        let mut rig =
            Rig::new(Settings { policy: (*name).to_owned(), ..settings(vec![tier(Kind::Gpu, 6)]) });
        for stem in 1..=6 {
            rig.serve(&tokens(stem, 1));
        }
        let hints = [(1, 80), (2, 0), (3, 36), (4, 34)];
        for (stem, priority) in hints {
            let reply = keep(&mut rig, &tokens(stem, 1), priority);
            assert_eq!(answer(&reply), (Answer::Accepted, 1, 0), "{name}");
        }
        let mut order = Vec::new();
        for stem in 7..=12 {
            rig.ask(&all_of(&tokens(stem, 1))).expect("hints are soft");
            let left: Vec<u32> = (1..=6).filter(|stem| !order.contains(stem)).collect();
            let stays = cached(&rig, 6);
            order.extend(left.into_iter().filter(|stem| !stays.contains(stem)));
        }
        assert_eq!([order[0], order[1], order[4], order[5]], [2, 4, 3, 1], "{name}: {order:?}");
    }
}

#[test]
fn a_band_follows_its_block_to_every_tier_and_back() {
    let tiers = vec![tier(Kind::Gpu, 2), tier(Kind::Host, 2), tier(Kind::Disk, 4)];
    let mut rig = Rig::new(settings(tiers));
    rig.serve(&tokens(1, 1));
    rig.serve(&tokens(2, 1));
    keep(&mut rig, &tokens(1, 1), 90);
    keep(&mut rig, &tokens(2, 1), 10);
    for stem in 3..=6 {
        rig.serve(&tokens(stem, 1));
    }
    let block = rig.blocks(&tokens(2, 1))[0];
    assert_eq!(
        (rig.on(&tokens(2, 1), GPU), rig.on(&tokens(2, 1), DISK)[0]),
        (vec![ALL.meet(kvtrie_core::Layers::NONE)], ALL)
    );
    assert_eq!(rig.manager.explain(block, DISK, rig.now).unwrap().priority, 10);
    // The retained block has not moved.
    assert_eq!(rig.on(&tokens(1, 1), GPU), [ALL]);
    rig.serve(&tokens(2, 1));
    assert_eq!(rig.manager.explain(block, GPU, rig.now).unwrap().priority, 10);
}

#[test]
fn a_priority_ends_with_its_time() {
    let mut rig = one(4);
    rig.serve(&tokens(1, 2));
    let until = Retain { ttl: Some(500), ..retain(path(&tokens(1, 2)), 70) };
    say(&mut rig, Hint::Retain(until));
    say(&mut rig, Hint::Retain(Retain { end: Some(4), ..retain(path(&tokens(1, 2)), 50) }));
    // An owner has one priority per block: the later one, for the first block without an end.
    assert_eq!(priorities(&rig, &tokens(1, 2)), [50, 70]);
    rig.now += 499;
    say(&mut rig, leave("nobody"));
    assert_eq!(priorities(&rig, &tokens(1, 2)), [50, 70]);
    rig.now += 1;
    say(&mut rig, leave("nobody"));
    assert_eq!(
        (priorities(&rig, &tokens(1, 2)), rig.manager.retained(GPU)),
        (vec![50, 35], (1, 2))
    );
}

#[test]
fn the_strongest_living_owner_wins() {
    let mut rig = one(4);
    rig.serve(&tokens(1, 1));
    let by = |owner: &str, priority, ttl| {
        let owner = Some(owner.to_owned());
        Hint::Retain(Retain { owner, ttl, ..retain(path(&tokens(1, 1)), priority) })
    };
    say(&mut rig, by("a", 40, None));
    say(&mut rig, by("b", 90, Some(100)));
    say(&mut rig, by("c", 5, None));
    assert_eq!(priorities(&rig, &tokens(1, 1)), [90]);
    rig.now += 100;
    let reply = say(&mut rig, leave("c"));
    assert_eq!(
        (answer(&reply), priorities(&rig, &tokens(1, 1))),
        ((Answer::Rejected, 0, 1), vec![40])
    );
    let reply = say(&mut rig, leave("a"));
    assert_eq!(
        (answer(&reply), priorities(&rig, &tokens(1, 1))),
        ((Answer::Accepted, 1, 0), vec![0])
    );
    // A use revokes the end of the session.
    rig.serve(&tokens(1, 1));
    assert_eq!(priorities(&rig, &tokens(1, 1)), [NORMAL]);
}

#[test]
fn a_finished_session_releases_the_blocks_that_no_other_one_uses() {
    let mut rig = one(12);
    let system = tokens(1, 2);
    let chat = |stem| [system.clone(), tokens(stem, 2)].concat();
    rig.serve_as(Some("one"), &chat(5));
    rig.serve_as(Some("two"), &chat(6));
    let reply = say(&mut rig, over("one"));
    assert_eq!(answer(&reply), (Answer::Clipped, 2, 2));
    assert_eq!(priorities(&rig, &chat(5)), [35, 35, 0, 0]);
    let reply = say(&mut rig, over("two"));
    assert_eq!(
        (answer(&reply), priorities(&rig, &chat(6))),
        ((Answer::Accepted, 4, 0), vec![0; 4])
    );
    // The session continues after all.
    rig.serve_as(Some("one"), &chat(5));
    assert_eq!(priorities(&rig, &chat(5)), [35; 4]);
    let reply = say(&mut rig, over("three"));
    assert_eq!(answer(&reply), (Answer::Rejected, 0, 0));
}

#[test]
fn leased_blocks_are_not_released_by_another_session() {
    let mut rig = one(8);
    rig.serve_as(Some("one"), &tokens(1, 2));
    let held = rig.acquire(&tokens(1, 1));
    let reply = say(&mut rig, over("one"));
    assert_eq!(
        (answer(&reply), priorities(&rig, &tokens(1, 2))),
        ((Answer::Clipped, 1, 1), vec![35, 0])
    );
    rig.release(held);
    let mine = rig.ask(&Acquire { session: Some("one"), ..all_of(&tokens(1, 2)) }).unwrap();
    // Its own lease does not count as another's.
    let reply = say(&mut rig, over("one"));
    assert_eq!(answer(&reply), (Answer::Accepted, 2, 0));
    rig.release(mine);
}

#[test]
fn a_hint_about_uncached_tokens_waits_for_their_commit() {
    let mut rig = one(8);
    let prompt = tokens(1, 3);
    rig.serve(&prompt[..4]);
    let reply = say(&mut rig, Hint::Retain(Retain { end: Some(8), ..retain(path(&prompt), 60) }));
    assert_eq!(answer(&reply), (Answer::Deferred, 1, 1));
    rig.serve(&prompt);
    assert_eq!(priorities(&rig, &prompt), [60, 60, 35]);
    // A scope that was never used yet.
    let scope = Scope { tenant: b"new".to_vec(), ..Scope::default() };
    let target = Target::Tokens { tokens: tokens(2, 1), scope: scope.clone() };
    let reply = say(&mut rig, Hint::Retain(Retain { ttl: Some(50), ..retain(target.clone(), 60) }));
    assert_eq!(answer(&reply), (Answer::Deferred, 0, 1));
    rig.now += 50;
    let id = rig.ask(&Acquire { scope: scope.clone(), ..all_of(&tokens(2, 1)) }).unwrap();
    rig.commit(id, &tokens(2, 1));
    let known = rig.manager.cached_blocks(&tokens(2, 1), &scope).unwrap();
    assert_eq!(rig.manager.priority(known[0]), Ok(NORMAL), "the hint was too old");
}

#[test]
fn pending_hints_are_bounded() {
    let mut rig = one(8);
    let hint = |stem| Hint::Retain(retain(path(&tokens(stem, 1)), 60));
    let hints: Vec<Hint> = (1..=4097).map(hint).collect();
    let replies = rig.call(|manager, now| manager.hint(&hints, now)).unwrap();
    assert!(replies[..4096].iter().all(|reply| reply.answer == Answer::Deferred));
    assert_eq!(answer(&replies[4096]), (Answer::Rejected, 0, 1));
    assert!(replies[4096].reason.contains("4096"), "{}", replies[4096].reason);
    // A repeated hint takes no further room.
    assert_eq!(say(&mut rig, hint(1)).answer, Answer::Rejected);
}

#[test]
fn a_request_sets_the_priority_of_its_own_tokens() {
    let mut rig = one(12);
    let prompt = tokens(1, 3);
    rig.serve(&prompt[..4]);
    let id = rig.ask(&Acquire { reserve: 12, ..all_of(&prompt) }).unwrap();
    let hint = Retain {
        start: 4,
        decode_priority: Some(5),
        decode_ttl: Some(10_000),
        ..retain(Target::Lease(id), 80)
    };
    let reply = say(&mut rig, Hint::Retain(hint));
    assert_eq!(answer(&reply), (Answer::Deferred, 0, 2));
    rig.commit(id, &prompt[4..]);
    rig.commit(id, &[7; 8]);
    let all = [prompt, vec![7; 8]].concat();
    assert_eq!(priorities(&rig, &all), [35, 80, 80, 5, 5]);
    rig.release(id);
    rig.now += 10_000;
    let reply = say(&mut rig, Hint::Retain(retain(Target::Lease(id), 80)));
    assert_eq!((reply.answer, reply.reason.contains("not held")), (Answer::Rejected, true));
    assert_eq!(priorities(&rig, &all), [35, 80, 80, 35, 35]);
}

#[test]
fn a_session_is_retained_as_it_grows() {
    let mut rig = one(12);
    let hint = Retain {
        decode_priority: Some(10),
        ..retain(Target::Session { name: "s".into(), scope: Scope::default() }, 70)
    };
    let reply = say(&mut rig, Hint::Retain(hint));
    assert_eq!(answer(&reply), (Answer::Deferred, 0, 0));
    rig.serve_as(Some("other"), &tokens(1, 1));
    rig.serve_as(Some("s"), &tokens(1, 2));
    assert_eq!(priorities(&rig, &tokens(1, 2)), [70, 70]);
    let reply = say(&mut rig, leave("s"));
    assert_eq!(reply.blocks + reply.not_applied, 2);
    assert_eq!(priorities(&rig, &tokens(1, 2)), vec![35, 35]);
}

#[test]
fn a_tier_retains_at_most_its_share() {
    let mut rig = Rig::new(settings(vec![TierSpec { retained_share: 0.25, ..tier(Kind::Gpu, 8) }]));
    rig.serve(&tokens(1, 4));
    let reply = keep(&mut rig, &tokens(1, 4), 90);
    assert_eq!(answer(&reply), (Answer::Clipped, 2, 2));
    assert_eq!(rig.manager.retained(GPU), (2, 2));
    let blocks = rig.blocks(&tokens(1, 4));
    let priority_at =
        |rig: &Rig, at: usize| rig.manager.explain(blocks[at], GPU, rig.now).unwrap().priority;
    assert_eq!([0, 1, 2, 3].map(|at| priority_at(&rig, at)), [90, 90, 35, 35]);
    // An evicted block makes room for retaining a used one.
    keep(&mut rig, &tokens(1, 1), 20);
    rig.serve(&tokens(1, 4));
    assert_eq!([0, 1, 2, 3].map(|at| priority_at(&rig, at)), [20, 90, 90, 35]);
}

#[test]
fn a_tenant_beyond_its_quota_loses_its_own_blocks_first() {
    let mut rig = one(6);
    let scope = |tenant: &[u8]| Scope { tenant: tenant.to_vec(), ..Scope::default() };
    let serve = |rig: &mut Rig, tenant: &[u8], stem| {
        let id = rig.ask(&Acquire { scope: scope(tenant), ..all_of(&tokens(stem, 1)) }).unwrap();
        rig.commit(id, &tokens(stem, 1));
        rig.release(id);
        rig.now += 1000;
    };
    let quota = |blocks, share| Hint::Quota { tenant: b"big".to_vec(), tier: GPU, blocks, share };
    serve(&mut rig, b"small", 1);
    for stem in 2..=6 {
        serve(&mut rig, b"big", stem);
    }
    assert_eq!(answer(&say(&mut rig, quota(Some(5), Some(0.5)))), (Answer::Accepted, 5, 0));
    let cached = |rig: &Rig, tenant: &[u8], stem| {
        rig.manager.matched(&tokens(stem, 1), &scope(tenant), 0).unwrap() > 0
    };
    // Two blocks too many: they are evicted although younger; then the oldest of all.
    let id = rig.ask(&Acquire { reserve: 12, ..all_of(&[]) }).unwrap();
    let left: Vec<u32> = (2..=6).filter(|&stem| cached(&rig, b"big", stem)).collect();
    assert_eq!((cached(&rig, b"small", 1), left), (false, vec![4, 5, 6]));
    rig.release(id);
    assert_eq!(answer(&say(&mut rig, quota(None, None))), (Answer::Accepted, 3, 0));
    assert_eq!(answer(&say(&mut rig, quota(None, None))), (Answer::Rejected, 0, 0));
}

#[test]
fn priorities_and_their_remaining_time_survive_a_restart() {
    let three = || settings(vec![tier(Kind::Gpu, 4), tier(Kind::Host, 4), tier(Kind::Disk, 8)]);
    let mut rig = Rig::new(three());
    rig.mark(&tokens(1, 3), DISK);
    say(&mut rig, Hint::Retain(Retain { ttl: Some(900), ..retain(path(&tokens(1, 1)), 90) }));
    let owner = Some("agent".to_owned());
    let second = Retain { start: 4, end: Some(8), owner, ..retain(path(&tokens(1, 3)), 20) };
    say(&mut rig, Hint::Retain(second));
    say(
        &mut rig,
        Hint::Retain(Retain { end: Some(8), start: 4, ..retain(path(&tokens(1, 3)), 60) }),
    );
    rig.now += 400;
    let rows = rig.call(|manager, now| manager.index(DISK, now)).unwrap();
    let mut other = Rig::new(three());
    other.now = 7;
    other.call(|manager, now| manager.load_index(DISK, &rows, now)).unwrap();
    assert_eq!(priorities(&other, &tokens(1, 3)), [90, 60, 35]);
    other.now = 506;
    say(&mut other, leave("none"));
    assert_eq!(priorities(&other, &tokens(1, 3)), [90, 60, 35]);
    other.now = 507;
    say(&mut other, leave("none"));
    assert_eq!(priorities(&other, &tokens(1, 3)), [35, 60, 35]);
}

#[test]
fn invalid_hints_are_refused_and_change_nothing() {
    let mut rig = Rig::new(settings(vec![
        TierSpec { owner: Owner::Engine, ..tier(Kind::Gpu, 4) },
        tier(Kind::Host, 4),
    ]));
    let good = Hint::Retain(retain(path(&tokens(1, 1)), 80));
    let mut refused = |part: &str, bad: Hint| {
        rig.refused(part, |manager, now| manager.hint(&[good.clone(), bad], now));
    };
    let hint = || retain(path(&tokens(1, 1)), 80);
    refused("hint 1: priority is 101", Hint::Retain(Retain { priority: 101, ..hint() }));
    refused(
        "ends at 3, before its start at 4",
        Hint::Retain(Retain { start: 4, end: Some(3), ..hint() }),
    );
    refused("ttl is 0 ns", Hint::Retain(Retain { ttl: Some(0), ..hint() }));
    refused(
        "about a lease or a session",
        Hint::Retain(Retain { decode_priority: Some(9), ..hint() }),
    );
    refused("without decode_priority", Hint::Retain(Retain { decode_ttl: Some(9), ..hint() }));
    let fetch = |tier| Hint::Prefetch { target: path(&tokens(1, 1)), tier, deadline: None };
    refused("the engine owns the slots of tier 'gpu'", fetch(GPU));
    refused("no tier below it", fetch(HOST));
    refused("there is no tier 2, only 2", fetch(2));
    refused("no tier above it", Hint::Demote { target: path(&tokens(1, 1)), tier: GPU });
    let quota = |tier, share| Hint::Quota { tenant: Vec::new(), tier, blocks: None, share };
    refused("the engine owns", quota(GPU, None));
    refused("a share is NaN", quota(HOST, Some(f64::NAN)));
    let scope = Scope { structure: Some(Structure::Holes), ..Scope::default() };
    rig.mark(&tokens(1, 1), HOST);
    let other = Target::Tokens { tokens: tokens(1, 1), scope };
    rig.refused("leaf-only", |m, now| m.hint(&[Hint::Demote { target: other, tier: HOST }], now));
}

#[test]
fn the_users_costs_replace_the_models() {
    let mut rig = Rig::new(Settings {
        policy: "retention".to_owned(),
        priced: true,
        ..settings(vec![tier(Kind::Gpu, 3)])
    });
    for stem in 1..=3 {
        rig.serve(&tokens(stem, 1));
    }
    let rows = rig.manager.unpriced(9).unwrap();
    assert_eq!(rows.len(), 3);
    assert_eq!(rig.manager.unpriced(2).unwrap(), rows[..2]);
    let ids: Vec<Handle> = rows.iter().map(|row| row.block).collect();
    for (part, costs) in [
        ("3 blocks and 2 costs", vec![1.0, 2.0]),
        ("cost 1, of block", vec![1.0, f64::INFINITY, 1.0]),
        ("is 0: finite and above 0", vec![1.0, 1.0, 0.0]),
    ] {
        rig.refused(part, |manager, now| manager.set_costs(&ids, &costs, now));
    }
    rig.call(|manager, now| manager.set_costs(&ids, &[900.0, 1.0, 50.0], now)).unwrap();
    assert!(rig.manager.unpriced(9).unwrap().is_empty());
    let price = rig.manager.explain(ids[0], GPU, rig.now).unwrap();
    assert!((price.terms.base - 900.0).abs() < 1e-12);
    // The oldest costs the most by far: the second one is evicted.
    rig.serve(&tokens(4, 1));
    assert_eq!(cached(&rig, 4), [1, 3, 4]);
    let set = rig.call(|manager, now| manager.set_costs(&ids, &[1.0; 3], now)).unwrap();
    assert_eq!(set, 2, "one was evicted");
    let mut plain = one(2);
    plain.refused("cost='python'", |manager, _| manager.unpriced(1));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Whether or not a call has ended the hints that are over by then.
    #[test]
    fn an_explanation_is_as_of_its_time(
        hints in prop::collection::vec((1..=4_u32, 0..=100_u8, 1..50_u64, 0..2_usize), 1..8),
        later in 0..60_u64,
        after_reset: bool,
    ) {
        let spec = TierSpec { retained_share: 1.0, ..tier(Kind::Gpu, 8) };
        let mut rig = Rig::new(settings(vec![spec]));
        if after_reset {
            rig.now = 1 << 60;
            rig.serve(&tokens(1, 2));
            keep(&mut rig, &tokens(1, 2), 90);
            rig.call(|manager, _| manager.reset()).unwrap();
            rig.now = 0;
        }
        for stem in 1..=4 {
            rig.serve(&tokens(stem, 2));
        }
        for (stem, priority, ttl, owner) in hints {
            let owner = Some(["a", "b"][owner].to_owned());
            let hint = retain(path(&tokens(stem, 1)), priority);
            say(&mut rig, Hint::Retain(Retain { ttl: Some(ttl), owner, ..hint }));
        }
        rig.now += later;
        let all = |rig: &Rig| -> Vec<_> {
            let known = |stem| rig.manager.cached_blocks(&tokens(stem, 2), &Scope::default()).unwrap();
            let blocks = (1..=4).flat_map(known);
            blocks.map(|block| rig.manager.explain(block, GPU, rig.now).unwrap()).collect()
        };
        let before = all(&rig);
        rig.call(|manager, now| manager.hint(&[], now)).unwrap();
        prop_assert_eq!(before, all(&rig));
    }
}
