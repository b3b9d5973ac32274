//! Versions: blocks of older weights leave first or at once, some per call.

use std::collections::BTreeMap;

use kvtrie_core::internals::visits_during;
use kvtrie_core::{
    Acquire, Hint, Kind, Manager, POLICIES, Retain, Scope, Settings, SortedVersions, Target,
    VersionFate,
};
use proptest::prelude::*;

use crate::rig::{Rig, all_of, retain, settings, tier, tokens};

const VERSIONS: [&str; 3] = ["", "v1", "v2"];

/// The scope of a version, for one of two adapters and two tenants.
fn of(version: &str, more: u8) -> Scope {
    let adapter = if more.is_multiple_of(2) { "" } else { " adapter" };
    Scope {
        tenant: vec![b't'; usize::from(more) / 2],
        lora: format!("{version}{adapter}"),
        ..Scope::default()
    }
}

fn serve(rig: &mut Rig, scope: &Scope, prompt: &[u32]) {
    let id = rig.ask(&Acquire { scope: scope.clone(), ..all_of(prompt) }).expect("there is room");
    rig.run();
    let held = rig.manager.lease_tokens(id).expect("held");
    rig.commit(id, &prompt[held..]);
    rig.release(id);
    rig.run();
    rig.now += 1000;
}

fn matched(manager: &Manager, scope: &Scope, prompt: &[u32]) -> usize {
    manager.matched(prompt, scope, 0).expect("a good lookup")
}

fn fates(of: &[(&str, VersionFate)]) -> BTreeMap<String, VersionFate> {
    of.iter().map(|&(version, fate)| (version.to_owned(), fate)).collect()
}

/// A pass over all blocks in calls of `most`; the sum of what they changed and kept.
fn pass(
    rig: &mut Rig,
    fates: &BTreeMap<String, VersionFate>,
    others: VersionFate,
    most: u32,
) -> SortedVersions {
    let mut all = SortedVersions::default();
    loop {
        let from = (all.next, most);
        let one = rig.call(|m, now| m.sort_versions(fates, others, from, now)).expect("it is open");
        (all.changed, all.kept) = (all.changed + one.changed, all.kept + one.kept);
        all.next = one.next;
        if all.next.is_none() {
            return all;
        }
    }
}

#[test]
fn retired_blocks_leave_first_under_every_policy_whatever_hints_say() {
    for name in POLICIES {
        let policy = (*name).to_owned();
        let mut rig = Rig::new(Settings { policy, ..settings(vec![tier(Kind::Gpu, 8)]) });
        for stem in 1..=4 {
            serve(&mut rig, &of("", 0), &tokens(stem, 1));
            serve(&mut rig, &of("v1", 1), &tokens(stem, 1));
        }
        let target = Target::Tokens { tokens: tokens(1, 1), scope: of("v1", 1) };
        let hint = Hint::Retain(Retain { ..retain(target, 90) });
        rig.call(|manager, now| manager.hint(&[hint], now)).expect("a good hint");
        let sorted = pass(&mut rig, &fates(&[("v1", VersionFate::Retire)]), VersionFate::Keep, 3);
        assert_eq!((sorted.changed, sorted.kept), (4, 0), "{name}");
        for stem in 5..=8 {
            serve(&mut rig, &of("", 0), &tokens(stem, 1));
        }
        for stem in 1..=4 {
            assert_eq!(matched(&rig.manager, &of("v1", 1), &tokens(stem, 1)), 0, "{name}");
            assert_eq!(matched(&rig.manager, &of("", 0), &tokens(stem, 1)), 4, "{name}");
        }
    }
}

#[test]
fn a_version_that_is_kept_again_has_its_hints_again() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8)]));
    serve(&mut rig, &of("v1", 0), &tokens(1, 2));
    let target = Target::Tokens { tokens: tokens(1, 1), scope: of("v1", 0) };
    let hint = Hint::Retain(retain(target, 90));
    rig.call(|manager, now| manager.hint(&[hint], now)).expect("a good hint");
    let priorities = |rig: &Rig| {
        let known = rig.manager.cached_blocks(&tokens(1, 2), &of("v1", 0)).expect("good tokens");
        known.into_iter().map(|block| rig.manager.priority(block).unwrap()).collect::<Vec<_>>()
    };
    let before = priorities(&rig);
    pass(&mut rig, &fates(&[("v1", VersionFate::Retire)]), VersionFate::Keep, 8);
    assert_eq!(priorities(&rig), [0, 0]);
    pass(&mut rig, &fates(&[]), VersionFate::Keep, 8);
    assert_eq!(priorities(&rig), before);
    assert_eq!(before[0], 90);
}

#[test]
fn blocks_in_use_are_dropped_by_a_later_pass() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)]));
    let prompt = tokens(1, 3);
    serve(&mut rig, &of("v1", 0), &prompt);
    let id = rig.ask(&Acquire { scope: of("v1", 0), ..all_of(&prompt[..8]) }).unwrap();
    let sorted = pass(&mut rig, &fates(&[]), VersionFate::Drop, 2);
    assert_eq!((sorted.changed, sorted.kept), (1, 2));
    rig.release(id);
    let sorted = pass(&mut rig, &fates(&[]), VersionFate::Drop, 2);
    assert_eq!((sorted.changed, sorted.kept), (2, 0));
    assert_eq!(rig.manager.cached_blocks(&prompt, &of("v1", 0)).unwrap(), []);
}

/// Entries that one call of 16 blocks visits, where a version has this many blocks and tenants.
fn looks(blocks: u32, fate: VersionFate) -> u64 {
    let mut manager = Manager::new(settings(vec![tier(Kind::Gpu, blocks)])).unwrap();
    for at in 0..blocks {
        let scope =
            Scope { tenant: at.to_le_bytes().to_vec(), lora: "v1".to_owned(), ..Scope::default() };
        let prompt = tokens(at % 9, 1);
        let id = manager.acquire(&Acquire { scope, ..all_of(&prompt) }, 0).unwrap();
        manager.commit(id, &prompt, 0).unwrap();
        manager.release(id, 0).unwrap();
    }
    let mut sorted = SortedVersions::default();
    let mut most = 0;
    loop {
        let (one, looks) = visits_during(|| {
            manager.sort_versions(&fates(&[]), fate, (sorted.next, 16), 0).unwrap()
        });
        most = most.max(looks);
        sorted = SortedVersions { changed: sorted.changed + one.changed, ..one };
        if sorted.next.is_none() {
            break;
        }
    }
    assert_eq!(sorted.changed, u64::from(blocks));
    manager.audit().unwrap();
    most
}

#[test]
fn the_cost_of_a_call_does_not_grow_with_blocks_requests_and_tenants() {
    for fate in [VersionFate::Retire, VersionFate::Drop] {
        let (few, many) = (looks(64, fate), looks(4096, fate));
        assert!(few >= 16 && many <= few, "{fate:?}: {few} entries, then {many}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    /// Any passes among requests of all versions: audits hold after every call, nothing of a version
    /// that was dropped is found, and all versions that were kept are found as before.
    #[test]
    fn passes_among_requests_touch_their_versions_alone(
        tiers in 1..=3usize,
        ops in prop::collection::vec((0..6u8, 0..3usize, 0..4u8, 1..5u32, 1..5usize), 1..40),
    ) {
        let kinds = [Kind::Gpu, Kind::Host, Kind::Disk];
        let tiers = kinds[..tiers].iter().map(|&kind| tier(kind, 200)).collect();
        let mut rig = Rig::new(settings(tiers));
        let mut held = Vec::new();
        for (kind, version, more, stem, blocks) in ops {
            let (name, scope) = (VERSIONS[version], of(VERSIONS[version], more));
            match kind {
                0..=2 => serve(&mut rig, &scope, &tokens(stem, blocks)),
                3 => held.push(rig.ask(&Acquire { scope, ..all_of(&tokens(stem, blocks)) }).unwrap()),
                4 => held.drain(..).for_each(|id| { rig.release(id); }),
                _ => {
                    let fate = [VersionFate::Keep, VersionFate::Retire, VersionFate::Drop, VersionFate::Drop][usize::from(more)];
                    let found = |rig: &Rig| -> Vec<(usize, usize)> {
                        let all = VERSIONS.iter().enumerate().flat_map(|(at, version)| {
                            (0..4).flat_map(move |more| (1..5).map(move |stem| (at, of(version, more), stem)))
                        });
                        all.map(|(at, scope, stem)| (at, matched(&rig.manager, &scope, &tokens(stem, 5)))).collect()
                    };
                    if fate == VersionFate::Drop {
                        held.drain(..).for_each(|id| { rig.release(id); });
                        rig.run();
                    }
                    let mut before = found(&rig);
                    // Children may have smaller ids than their parents.
                    for _ in 0..6 {
                        if pass(&mut rig, &fates(&[(name, fate)]), VersionFate::Keep, stem * 3).kept == 0 {
                            break;
                        }
                    }
                    if fate == VersionFate::Drop {
                        before.iter_mut().filter(|row| row.0 == version).for_each(|row| row.1 = 0);
                    }
                    prop_assert_eq!(found(&rig), before);
                }
            }
        }
    }
}
