//! Point 10: bad input changes nothing, a broken invariant ends the manager without a panic.

use kvtrie_core::{
    Acquire, DAY, Error, Hint, Kind, LoadMode, Manager, Mark, NORMAL, Outcome, Owner, Result,
    Retain, Row, Scope, Settings, Target, TierSpec,
};

use crate::rig::{GPU, HOST, Rig, all_of, layered, retain, settings, tier, tokens};

/// Every fallible call that needs only ids.
fn every_call(manager: &mut Manager) -> Vec<Result<()>> {
    let prompt = tokens(1, 1);
    let scope = Scope::default();
    let mark = Mark {
        tokens: &prompt,
        scope: scope.clone(),
        tier: GPU,
        present: true,
        ready: None,
        first: None,
    };
    vec![
        manager.acquire(&all_of(&prompt), 1).map(drop),
        manager.lookup(&prompt, 1, &scope, 0).map(drop),
        manager.matched(&prompt, &scope, 0).map(drop),
        manager.lease(1).map(drop),
        manager.commit(1, &[1], 1).map(drop),
        manager.commit_many(&[(1, &[1])], 1).map(drop),
        manager.reserve(1, 1, 1),
        manager.release(1, 1).map(drop),
        manager.fork(1, 1, 1).map(drop),
        manager.truncate(1, 0, 1),
        manager.suspend(1, Kind::Host, 1).map(drop),
        manager.resume(1, 0, LoadMode::Plan, 1),
        manager.load(1, None, None, 1).map(drop),
        manager.moves(1).map(drop),
        manager.complete(&[1], &Outcome::default(), 1).map(drop),
        manager.failed().map(drop),
        manager.mark(&mark, 1).map(drop),
        manager.load_index(GPU, &[], 1).map(drop),
        manager.index(GPU, 1).map(drop),
        manager.flush(1).map(drop),
        manager.transmit("gpu up", 1, 1, 1).map(drop),
        manager.take_events().map(drop),
        manager.reset(),
    ]
}

#[test]
fn a_poisoned_manager_refuses_everything_and_says_why() {
    let mut manager = Manager::new(settings(vec![tier(Kind::Gpu, 4)])).unwrap();
    assert!(manager.audit().is_ok());
    manager.poison("slot 3 is in two places");
    for result in every_call(&mut manager) {
        let Err(Error::Invariant(text)) = result else { panic!("{result:?}") };
        assert!(text.contains("slot 3 is in two places"), "{text}");
    }
    assert!(matches!(manager.audit(), Err(Error::Invariant(_))));
}

#[test]
fn a_closed_manager_refuses_everything() {
    let mut manager = Manager::new(settings(vec![tier(Kind::Gpu, 4)])).unwrap();
    manager.close();
    for result in every_call(&mut manager) {
        assert!(matches!(result, Err(Error::Closed(_))), "{result:?}");
    }
}

#[test]
fn a_manager_that_is_closed_with_moves_in_its_queue_is_still_sound() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 1), tier(Kind::Host, 4)]));
    rig.serve(&tokens(1, 1));
    rig.acquire(&tokens(2, 1));
    assert!(rig.manager.pending().0 > 0, "the first block is written down");
    rig.manager.close();
    assert_eq!(rig.manager.audit(), Ok(()));
}

#[test]
fn an_ended_lease_is_an_error_but_releasing_it_again_is_not() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4)]));
    let id = rig.acquire(&tokens(1, 1));
    rig.release(id);
    let before = rig.manager.snapshot();
    rig.release(id);
    rig.release(12345);
    assert_eq!(before, rig.manager.snapshot());
    let error = rig.call(|manager, now| manager.commit(id, &[1], now)).unwrap_err();
    assert_eq!(error, Error::Closed(format!("lease {id} is not held")));
}

#[test]
fn impossible_sizes_are_refused_not_wrapped() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4)]));
    let prompt = tokens(1, 1);
    let ask = Acquire { reserve: usize::MAX, ..all_of(&prompt) };
    assert!(rig.ask(&ask).is_err());
    let id = rig.acquire(&prompt);
    rig.commit(id, &[1]);
    assert!(rig.call(|manager, now| manager.reserve(id, usize::MAX, now)).is_err());
    assert!(rig.call(|manager, now| manager.reserve(id, usize::MAX - 1, now)).is_err());
    rig.call(|manager, now| manager.reserve(id, 0, now)).unwrap();
}

#[test]
fn a_tier_that_does_not_exist_is_refused_everywhere() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4)]));
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    let block = rig.blocks(&prompt)[0];
    let id = rig.acquire(&prompt);
    let mark = Mark {
        tokens: &prompt,
        scope: Scope::default(),
        tier: HOST,
        present: true,
        ready: None,
        first: None,
    };
    rig.refused("there is no tier 1", |manager, now| manager.mark(&mark, now));
    rig.refused("there is no tier 1", |manager, _| manager.slots(id, HOST));
    rig.refused("there is no tier 1", |manager, now| manager.explain(block, HOST, now));
    rig.refused("there is no tier 9", |manager, now| manager.explain_layer(block, 9, 0, now));
    rig.refused("no lane 'nowhere'", |manager, now| manager.transmit("nowhere", 1, now, 1));
    rig.refused("the model has 4", |manager, now| manager.transmit("gpu up", 1, now, 5));
    let row: &[Row] = &[];
    rig.refused("there is no tier 2", |manager, now| manager.load_index(2, row, now));
}

#[test]
fn a_stale_handle_fails_even_if_its_id_is_reused() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 1)]));
    rig.serve(&tokens(1, 1));
    let dead = rig.blocks(&tokens(1, 1))[0];
    rig.serve(&tokens(2, 1));
    let alive = rig.blocks(&tokens(2, 1))[0];
    assert_eq!(dead.id(), alive.id());
    rig.refused("is not cached", |manager, now| manager.explain(dead, GPU, now));
    rig.manager.explain(alive, GPU, rig.now).unwrap();
}

#[test]
fn a_clock_that_runs_backwards_is_clamped_and_counted() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4)]));
    rig.serve(&tokens(1, 1));
    let last = rig.manager.now();
    rig.now = 5;
    let id = rig.acquire(&tokens(1, 1));
    rig.release(id);
    assert_eq!((rig.manager.now(), rig.manager.totals().2), (last, 2));
}

#[test]
fn reset_forgets_blocks_and_is_refused_while_one_is_leased() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4)]));
    let prompt = tokens(1, 2);
    rig.serve(&prompt);
    let id = rig.acquire(&prompt);
    rig.refused("reset with 1 leases", |manager, _| manager.reset());
    rig.release(id);
    rig.call(|manager, _| manager.reset()).unwrap();
    assert_eq!((rig.matched(&prompt), rig.manager.totals().0), (0, 0));
    assert_eq!((rig.manager.occupancy(GPU).free, rig.manager.requested().inserted), (4, 2));
    assert!(rig.acquire(&prompt) > id, "ids are never used twice");
}

#[test]
fn reset_forgets_the_time_and_the_queues_of_the_lanes() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4), tier(Kind::Host, 4)]));
    rig.now = 900 * DAY;
    rig.manager.transmit("host up", 1 << 20, rig.now, 1).unwrap();
    rig.call(|manager, _| manager.reset()).unwrap();
    rig.now = 5;
    rig.serve(&tokens(1, 1));
    assert!(rig.manager.now() < DAY);
    let sent = rig.manager.transmit("host up", 0, rig.now, 1).unwrap();
    assert!(sent.end < DAY, "{sent:?}");
    assert_eq!(rig.manager.totals().2, 0);
}

#[test]
fn a_hint_after_reset_ends_by_the_new_time() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4)]));
    let (prompt, second) = (tokens(1, 1), 1_000_000_000);
    let target = || Target::Tokens { tokens: tokens(1, 1), scope: Scope::default() };
    rig.now = 200 * second;
    rig.serve(&prompt);
    let hint = Hint::Retain(Retain { ttl: Some(second), ..retain(target(), 80) });
    rig.call(|manager, now| manager.hint(std::slice::from_ref(&hint), now)).unwrap();
    rig.call(|manager, _| manager.reset()).unwrap();
    rig.now = 0;
    rig.serve(&prompt);
    rig.call(|manager, now| manager.hint(&[hint], now)).unwrap();
    let block = rig.manager.cached_blocks(&prompt, &Scope::default()).unwrap()[0];
    let priority = |now| rig.manager.explain(block, GPU, now).unwrap().priority;
    assert_eq!((priority(rig.now), priority(100 * second)), (80, NORMAL));
}

#[test]
fn one_wrong_time_ends_no_hint_and_readies_no_mark() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8)]));
    let (wanted, coming) = (tokens(1, 2), tokens(2, 2));
    rig.serve(&wanted);
    let ready = rig.now + DAY / 2;
    let mark = Mark {
        tokens: &coming,
        scope: Scope::default(),
        tier: GPU,
        present: true,
        ready: Some(ready),
        first: None,
    };
    rig.call(|manager, now| manager.mark(&mark, now)).unwrap();
    let target = Target::Tokens { tokens: wanted.clone(), scope: Scope::default() };
    let hint = Hint::Retain(Retain { ttl: Some(DAY / 2), ..retain(target, 80) });
    rig.manager.hint(&[hint], rig.now).unwrap();
    rig.manager.flush(rig.now + 40 * DAY).unwrap();
    rig.now += 1;
    rig.serve(&tokens(3, 1));
    assert_eq!(rig.manager.doubted(), 1);
    let block = rig.blocks(&wanted)[0];
    assert_eq!(rig.manager.explain(block, GPU, rig.now).unwrap().priority, 80);
    let found = rig.manager.lookup(&coming, rig.now, &Scope::default(), 0).unwrap();
    assert_eq!(found.blocks[0].copies[0].ready, ready);
}

fn refused(settings: Settings, part: &str) {
    let Err(Error::Config(text)) = Manager::new(settings) else { panic!("'{part}' was accepted") };
    assert!(text.contains(part), "'{text}' lacks '{part}'");
}

#[test]
fn settings_that_contradict_each_other_are_refused_with_the_numbers() {
    let gpu = || tier(Kind::Gpu, 4);
    let host = || tier(Kind::Host, 4);
    let disk = || tier(Kind::Disk, 4);
    let good = || settings(vec![gpu(), host()]);
    refused(settings(vec![]), "0 tiers");
    refused(settings(vec![gpu(), gpu()]), "at most once");
    refused(settings(vec![host(), gpu()]), "tiers go gpu, host, disk, remote");
    refused(Settings { layers: 0, ..good() }, "layers 0");
    refused(Settings { block_tokens: 0, ..good() }, "block_tokens 0");
    refused(Settings { token_weight: 0, ..good() }, "token_weight 0");
    refused(Settings { ranks: 0, ..good() }, "ranks is 0");
    refused(Settings { ranks: 65, ..good() }, "ranks is 65");
    refused(Settings { policy: "best".to_owned(), ..good() }, "best");
    let policy = Some("worst".to_owned());
    refused(settings(vec![TierSpec { policy, ..gpu() }]), "worst");
    refused(settings(vec![tier(Kind::Gpu, 0)]), "has 0 blocks");
    refused(settings(vec![layered(Kind::Gpu, u32::MAX / 3)]), "1 to 2^32 - 2");
    refused(settings(vec![TierSpec { free_low: 1.0, ..gpu() }]), "free_low of tier 'gpu' is 1");
    let growth = TierSpec { growth_reserve: f64::NAN, ..gpu() };
    refused(settings(vec![growth]), "growth_reserve of tier 'gpu' is NaN");
    refused(settings(vec![gpu(), layered(Kind::Host, 4)]), "'gpu' above it must have them too");
    refused(settings(vec![layered(Kind::Disk, 4)]), "whole objects");
    let engine = |kind| TierSpec { owner: Owner::Engine, ..tier(kind, 4) };
    refused(settings(vec![gpu(), engine(Kind::Host)]), "owner 'engine'");
    refused(settings(vec![engine(Kind::Gpu)]), "owner 'engine'");
    refused(settings(vec![gpu(), tier(Kind::Remote, 4)]), "which is missing");
    let small = vec![tier(Kind::Host, 1), disk(), tier(Kind::Remote, 4)];
    refused(settings(small), "at least 2 blocks");
    assert!(Manager::new(settings(vec![gpu(), host(), disk(), tier(Kind::Remote, 9)])).is_ok());
}
