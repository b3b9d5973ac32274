//! Cost of many owners, tenants with quotas and pending hints, on one another.

use kvtrie_core::internals::visits_during;
use kvtrie_core::{
    Acquire, Answer, Hint, Kind, Manager, POLICIES, Release, Retain, Scope, Target, TierSpec,
};

use crate::rig::{GPU, all_of, retain, settings, tier, tokens};

/// Entries examined by one more tenant with a quota, where `tenants` have one already and exceed it
/// by a block each.
fn looks_of_a_tenant(tenants: u32, policy: &str) -> u64 {
    let blocks = 2 * tenants + 8;
    let tier = TierSpec { policy: Some(policy.to_owned()), ..tier(Kind::Gpu, blocks) };
    let mut manager = Manager::new(settings(vec![tier])).unwrap();
    let mut now = 0;
    let mut serve = |manager: &mut Manager, tenant: u32, prompt: &[u32]| {
        now += 1;
        let scope = Scope { tenant: tenant.to_le_bytes().to_vec(), ..Scope::default() };
        let id = manager.acquire(&Acquire { scope, ..all_of(prompt) }, now).unwrap();
        manager.commit(id, prompt, now).unwrap();
        manager.release(id, now).unwrap();
    };
    let quota = |manager: &mut Manager, tenant: u32| {
        let tenant = tenant.to_le_bytes().to_vec();
        let hint = Hint::Quota { tenant, tier: GPU, blocks: Some(1), share: None };
        assert_eq!(manager.hint(&[hint], 0).unwrap()[0].answer, Answer::Accepted);
    };
    for tenant in 0..tenants {
        serve(&mut manager, tenant, &tokens(1, 2));
        quota(&mut manager, tenant);
    }
    let ((), looks) = visits_during(|| {
        for turn in 0..8 {
            serve(&mut manager, tenants, &tokens(turn, 2));
        }
        quota(&mut manager, tenants);
        serve(&mut manager, tenants, &tokens(8, 2));
    });
    manager.audit().unwrap();
    looks
}

#[test]
fn the_cost_of_a_tenant_does_not_grow_with_their_number() {
    // `learned` counts lives and makes estimates in a cycle of 896 requests, so both begin at once.
    for policy in POLICIES {
        let (few, many) = (looks_of_a_tenant(896, policy), looks_of_a_tenant(1792, policy));
        assert!(few > 0 && many <= few, "{policy}: {few} entries, then {many}");
    }
}

#[test]
#[ignore = "a hundred thousand tenants"]
fn the_cost_of_a_tenant_does_not_grow_to_a_hundred_thousand() {
    let (few, many) = (looks_of_a_tenant(100, "lru"), looks_of_a_tenant(100_000, "lru"));
    assert!(few > 0 && many <= few, "{few} entries, then {many}");
}

#[test]
fn no_tenant_can_use_up_the_pending_hints_of_another() {
    let mut manager = Manager::new(settings(vec![tier(Kind::Gpu, 8)])).unwrap();
    let mut wait = |tenant: &str, stem: u32| {
        let scope = Scope { tenant: tenant.as_bytes().to_vec(), ..Scope::default() };
        let target = Target::Tokens { tokens: vec![stem; 4], scope };
        manager.hint(&[Hint::Retain(retain(target, 90))], 0).unwrap().remove(0)
    };
    for stem in 0..4096 {
        assert_eq!(wait("a", stem).answer, Answer::Deferred);
    }
    let refused = wait("a", 4096);
    assert_eq!(refused.answer, Answer::Rejected);
    assert!(refused.reason.contains("4096 hints of the scope wait already"), "{}", refused.reason);
    assert_eq!(wait("b", 0).answer, Answer::Deferred);
    manager.audit().unwrap();
}

/// Entries examined by one more owner of a block with `owners`, and by a use of the block.
fn looks_of_an_owner(owners: u32) -> u64 {
    let mut manager = Manager::new(settings(vec![tier(Kind::Gpu, 8)])).unwrap();
    let prompt = tokens(1, 1);
    let serve = |manager: &mut Manager| {
        let id = manager.acquire(&all_of(&prompt), 0).unwrap();
        let held = manager.lease_tokens(id).unwrap();
        manager.commit(id, &prompt[held..], 0).unwrap();
        manager.release(id, 0).unwrap();
    };
    serve(&mut manager);
    let claim = |manager: &mut Manager, owner: u32| {
        let priority = u8::try_from(36 + owner % 60).unwrap();
        let target = Target::Tokens { tokens: prompt.clone(), scope: Scope::default() };
        let hint = Retain { owner: Some(owner.to_string()), ..retain(target, priority) };
        manager.hint(&[Hint::Retain(hint)], 0).unwrap();
    };
    (0..owners).for_each(|owner| claim(&mut manager, owner));
    let ((), looks) = visits_during(|| {
        claim(&mut manager, owners);
        serve(&mut manager);
        let (name, scope) = (owners.to_string(), Scope::default());
        manager.hint(&[Hint::Release(Release::Owner { name, scope })], 0).unwrap();
    });
    manager.audit().unwrap();
    looks
}

#[test]
fn the_cost_of_an_owner_does_not_grow_with_the_owners_of_a_block() {
    let (few, many) = (looks_of_an_owner(100), looks_of_an_owner(10_000));
    assert!(few > 0 && many <= few, "{few} entries, then {many}");
}

#[test]
#[ignore = "a hundred thousand owners"]
fn the_cost_of_an_owner_does_not_grow_to_a_hundred_thousand_owners() {
    let (few, many) = (looks_of_an_owner(100), looks_of_an_owner(100_000));
    assert!(few > 0 && many <= few, "{few} entries, then {many}");
}
