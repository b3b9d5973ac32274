//! Scopes: which requests may share blocks.

use kvtrie_core::internals::FIRST_DIGEST;
use kvtrie_core::{
    Acquire, Hint, Kind, LoadMode, Manager, Release, Retain, Scope, Settings, Structure, Target,
};

use crate::rig::{GPU, Rig, SIZE, all_of, retain, settings, tier, tokens};

fn rig() -> Rig {
    Rig::new(settings(vec![tier(Kind::Gpu, 16)]))
}

fn serve(rig: &mut Rig, scope: &Scope, tokens: &[u32]) -> usize {
    let id = rig.ask(&Acquire { scope: scope.clone(), ..all_of(tokens) }).unwrap();
    let held = rig.manager.lease_tokens(id).unwrap();
    rig.commit(id, &tokens[held..]);
    rig.release(id);
    held
}

fn image(offset: u64, digest: u8) -> Scope {
    Scope { extra: vec![(offset, vec![digest; 32])], ..Scope::default() }
}

#[test]
fn tenants_and_adapters_never_share() {
    let mut rig = rig();
    let prompt = tokens(1, 2);
    let tenant = |name: &str| Scope { tenant: name.as_bytes().to_vec(), ..Scope::default() };
    let lora = |name: &str| Scope { lora: name.to_owned(), ..Scope::default() };
    let scopes = [Scope::default(), tenant("a"), tenant("b"), lora("a"), lora("b")];
    for scope in &scopes {
        assert_eq!(serve(&mut rig, scope, &prompt), 0);
    }
    for scope in &scopes {
        assert_eq!(serve(&mut rig, scope, &prompt), 2 * SIZE);
    }
    assert_eq!(rig.manager.totals().0, 10);
}

#[test]
fn sequences_with_different_images_share_the_prefix_before_them() {
    let mut rig = rig();
    let prompt = tokens(1, 4);
    assert_eq!(serve(&mut rig, &image(9, 1), &prompt), 0);
    assert_eq!(serve(&mut rig, &image(9, 2), &prompt), 2 * SIZE);
    assert_eq!(serve(&mut rig, &Scope::default(), &prompt), 2 * SIZE);
    assert_eq!(serve(&mut rig, &image(9, 1), &prompt), 4 * SIZE);
    assert_eq!(serve(&mut rig, &image(8, 1), &prompt), 2 * SIZE, "at another offset it is another");
    assert_eq!(rig.manager.totals().0, 2 + 4 * 2);
}

#[test]
fn a_digest_counts_at_its_position_even_if_tokens_arrive_one_by_one() {
    let mut rig = rig();
    let prompt = tokens(1, 3);
    let id = rig.ask(&Acquire { scope: image(6, 1), ..all_of(&prompt) }).unwrap();
    for token in &prompt {
        rig.commit(id, &[*token]);
    }
    rig.release(id);
    assert_eq!(serve(&mut rig, &image(6, 1), &prompt), 3 * SIZE);
    assert_eq!(serve(&mut rig, &image(6, 2), &prompt), SIZE);
}

#[test]
fn real_tokens_never_equal_digests() {
    let mut rig = rig();
    let high: Vec<u32> = vec![FIRST_DIGEST; SIZE];
    assert_eq!(serve(&mut rig, &Scope::default(), &high), 0, "as long as no digest is in use");
    let with = Acquire { scope: image(0, 1), ..all_of(&high) };
    let message = rig.ask(&with).unwrap_err().to_string();
    assert!(message.contains("token 2147483648 at 0"), "{message}");
    serve(&mut rig, &image(0, 1), &tokens(1, 1));
    assert!(rig.ask(&all_of(&high)).is_err(), "from then on nowhere");
}

#[test]
fn the_structure_is_fixed_at_the_first_use() {
    let mut rig = rig();
    let scope = |structure| Scope { structure, tenant: b"t".to_vec(), ..Scope::default() };
    let prompt = tokens(1, 1);
    serve(&mut rig, &scope(Some(Structure::Holes)), &prompt);
    assert_eq!(serve(&mut rig, &scope(None), &prompt), SIZE, "none asked for: whatever it is");
    let other = scope(Some(Structure::LeafOnly));
    let ask = Acquire { scope: other.clone(), ..all_of(&prompt) };
    rig.refused("structure 'holes' since its first use", |m, now| m.acquire(&ask, now));
    rig.refused("not 'leaf-only'", |m, now| m.lookup(&prompt, now, &other, 0));
    // The default scope took the manager's default at its first use.
    serve(&mut rig, &Scope::default(), &prompt);
    let holes = Scope { structure: Some(Structure::Holes), ..Scope::default() };
    let ask = Acquire { scope: holes, ..all_of(&prompt) };
    rig.refused("structure 'leaf-only'", |m, now| m.acquire(&ask, now));
}

#[test]
fn lookup_creates_no_scope() {
    let rig = rig();
    let before = rig.manager.snapshot();
    let scope = Scope { tenant: b"x".to_vec(), ..image(0, 9) };
    assert_eq!(rig.manager.lookup(&tokens(1, 1), 1, &scope, 0).unwrap().tokens, 0);
    assert_eq!(before, rig.manager.snapshot());
}

#[test]
fn scopes_of_both_structures_share_a_tier() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 6)]));
    let holes =
        Scope { structure: Some(Structure::Holes), tenant: b"h".to_vec(), ..Scope::default() };
    serve(&mut rig, &holes, &tokens(1, 3));
    serve(&mut rig, &Scope::default(), &tokens(2, 3));
    rig.now += 1000;
    // All six have the same age. Ties: leading blocks of holes and last blocks of leaf-only paths.
    serve(&mut rig, &Scope { tenant: b"n".to_vec(), ..Scope::default() }, &tokens(3, 2));
    let left = |scope: &Scope, stem| rig.manager.matched(&tokens(stem, 3), scope, 0).unwrap();
    assert_eq!(left(&Scope::default(), 2), 3 * SIZE);
    assert_eq!(left(&holes, 1), 3 * SIZE);
    let found = rig.manager.lookup(&tokens(1, 3), rig.now, &holes, 0).unwrap();
    let evicted: Vec<bool> = found.blocks.iter().map(|block| block.copies.is_empty()).collect();
    assert_eq!(evicted, [true, true, false]);
    assert_eq!(rig.manager.occupancy(GPU).free, 0);
}

/// Number of known scopes, by the snapshot.
fn known(rig: &Rig) -> usize {
    let state = String::from_utf8(rig.manager.snapshot()).unwrap();
    let known = state.lines().filter(|line| line.starts_with("scope ")).count();
    assert_eq!(known, rig.manager.scope_and_digest_counts().0);
    known
}

fn tenant(number: u32) -> Scope {
    Scope { tenant: number.to_le_bytes().to_vec(), ..Scope::default() }
}

#[test]
fn a_scope_is_forgotten_with_its_last_block_and_lease() {
    let mut rig = rig();
    let prompt = tokens(1, 4);
    for number in 0..40 {
        let lora = format!("adapter {number}");
        serve(&mut rig, &Scope { lora, ..tenant(number) }, &prompt);
        rig.now += 1000;
        assert!(known(&rig) <= 4, "{} scopes for four paths", known(&rig));
    }
    // A lease without a block, and one with a partial block.
    let empty = rig.ask(&Acquire { scope: tenant(99), ..all_of(&[]) }).unwrap();
    let id = rig.ask(&Acquire { scope: tenant(100), ..all_of(&prompt[..2]) }).unwrap();
    rig.commit(id, &prompt[..2]);
    serve(&mut rig, &Scope::default(), &tokens(9, 15));
    assert_eq!(known(&rig), 3);
    rig.release(empty);
    rig.release(id);
    assert_eq!(known(&rig), 1);
    assert_eq!(serve(&mut rig, &tenant(100), &prompt), 0);
}

#[test]
fn a_forgotten_scope_may_get_another_structure() {
    let mut rig = rig();
    let scope = |structure| Scope { structure: Some(structure), ..tenant(1) };
    serve(&mut rig, &scope(Structure::Holes), &tokens(1, 2));
    let other = scope(Structure::LeafOnly);
    let ask = Acquire { scope: other.clone(), ..all_of(&[]) };
    rig.refused("structure 'holes' since its first use", |m, now| m.acquire(&ask, now));
    serve(&mut rig, &Scope::default(), &tokens(9, 16));
    assert_eq!(serve(&mut rig, &other, &tokens(1, 2)), 0);
    rig.refused("structure 'leaf-only'", |m, now| {
        m.lookup(&tokens(1, 2), now, &scope(Structure::Holes), 0)
    });
}

#[test]
fn ghost_entries_of_a_scope_serve_no_other_scope() {
    let policy = "retention".to_owned();
    let mut rig = Rig::new(Settings { policy, ..settings(vec![tier(Kind::Gpu, 16)]) });
    let prompt = tokens(1, 4);
    let mut uses = |scope: &Scope, times: usize| {
        for _ in 0..times {
            serve(&mut rig, scope, &prompt);
            rig.now += 1000;
        }
        let block = rig.manager.lookup(&prompt, rig.now, scope, 0).unwrap().blocks[0].block;
        let counted = rig.manager.explain(block, GPU, rig.now).unwrap().terms.uses;
        serve(&mut rig, &Scope::default(), &tokens(9, 16));
        assert_eq!(rig.manager.matched(&prompt, scope, 0), Ok(0));
        counted
    };
    assert_eq!(uses(&tenant(1), 5), 5);
    assert_eq!(uses(&tenant(2), 1), 1, "it got the id of another");
    assert_eq!(uses(&tenant(1), 1), 6, "it got another id");
}

/// Serves `count` images one after the other through a pool of 16 blocks.
fn images(count: u32) {
    let mut manager = Manager::new(settings(vec![tier(Kind::Gpu, 16)])).unwrap();
    let prompt = tokens(1, 1);
    for (number, now) in (0..count).zip(1..) {
        let extra = vec![(0, number.to_le_bytes().to_vec())];
        let ask = Acquire { scope: Scope { extra, ..Scope::default() }, ..all_of(&prompt) };
        let id = manager.acquire(&ask, now).unwrap();
        manager.commit(id, &prompt, now).unwrap();
        manager.release(id, now).unwrap();
        assert_eq!(manager.matched(&prompt, &ask.scope, 0), Ok(SIZE));
        let (_, digests) = manager.scope_and_digest_counts();
        assert!(digests <= 16, "{digests} digests");
    }
    manager.audit().unwrap();
}

#[test]
fn digests_are_free_with_their_blocks() {
    images(66_000);
}

#[test]
#[ignore = "a million requests"]
fn a_million_digests_are_free_with_their_blocks() {
    images(1_000_000);
}

#[test]
fn a_digest_lives_as_long_as_a_block_uses_it() {
    let mut rig = rig();
    let (prompt, scope) = (tokens(1, 3), image(5, 1));
    let digests = |rig: &Rig| rig.manager.scope_and_digest_counts().1;
    let id = rig.ask(&Acquire { scope: scope.clone(), reserve: 8, ..all_of(&prompt) }).unwrap();
    assert_eq!(digests(&rig), 0, "a lookup gives no number");
    rig.commit(id, &prompt[..6]);
    assert_eq!(digests(&rig), 1, "in a partial block");
    let forks = rig.call(|m, now| m.fork(id, 2, now)).unwrap();
    rig.call(|m, now| m.truncate(id, 5, now)).unwrap();
    rig.release(forks[0]);
    assert_eq!(digests(&rig), 1, "in the partial block of a fork");
    rig.call(|m, now| m.suspend(forks[1], Kind::Host, now)).unwrap();
    assert_eq!(digests(&rig), 0);
    // Another token at the same position is another pair.
    rig.call(|m, now| m.reserve(id, 7, now)).unwrap();
    rig.run();
    rig.commit(id, &[77]);
    rig.call(|m, now| m.truncate(id, 5, now)).unwrap();
    rig.call(|m, now| m.reserve(id, 7, now)).unwrap();
    rig.commit(id, &prompt[5..]);
    assert_eq!(digests(&rig), 1, "in a block");
    rig.call(|m, now| m.truncate(id, 6, now)).unwrap();
    rig.release(id);
    assert_eq!(digests(&rig), 1, "in a block without a lease");
    rig.call(|m, now| m.resume(forks[1], 0, LoadMode::All, now)).unwrap();
    assert_eq!(rig.manager.lease_tokens(forks[1]), Ok(SIZE), "6 tokens, one full block");
    rig.release(forks[1]);
    let id = rig.ask(&Acquire { scope, ..all_of(&prompt) }).unwrap();
    assert_eq!(rig.manager.lease_tokens(id), Ok(3 * SIZE));
    rig.call(|m, now| m.suspend(id, Kind::Host, now)).unwrap();
    rig.call(|m, now| m.resume(id, 0, LoadMode::All, now)).unwrap();
    assert_eq!(rig.manager.lease_tokens(id), Ok(0), "without a lower tier they are dropped");
    assert_eq!(digests(&rig), 0);
}

#[test]
fn a_returning_request_finds_the_blocks_of_its_digests() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 16), tier(Kind::Host, 16)]));
    let (prompt, scope) = (tokens(1, 3), image(5, 1));
    let id = rig.ask(&Acquire { scope, ..all_of(&prompt) }).unwrap();
    rig.commit(id, &prompt);
    rig.call(|m, now| m.suspend(id, Kind::Host, now)).unwrap();
    rig.run();
    rig.call(|m, now| m.resume(id, 0, LoadMode::All, now)).unwrap();
    assert_eq!(rig.manager.lease_tokens(id), Ok(3 * SIZE));
}

#[test]
fn ghost_entries_of_a_digest_serve_no_other_digest() {
    let policy = "retention".to_owned();
    let mut rig = Rig::new(Settings { policy, ..settings(vec![tier(Kind::Gpu, 16)]) });
    let prompt = tokens(1, 4);
    let mut uses = |digest: u8, times: usize| {
        for _ in 0..times {
            serve(&mut rig, &image(0, digest), &prompt);
            rig.now += 1000;
        }
        let found = rig.manager.lookup(&prompt, rig.now, &image(0, digest), 0).unwrap();
        let counted = rig.manager.explain(found.blocks[0].block, GPU, rig.now).unwrap().terms.uses;
        serve(&mut rig, &Scope::default(), &tokens(9, 16));
        assert_eq!(rig.manager.scope_and_digest_counts().1, 0);
        counted
    };
    assert_eq!(uses(1, 5), 5);
    assert_eq!(uses(2, 1), 1, "it got the id of another");
    assert_eq!(uses(1, 1), 6);
    for other in 3..20 {
        assert_eq!(uses(other, 1), 1);
    }
}

#[test]
fn a_pending_hint_keeps_scope_and_digest() {
    let mut rig = rig();
    let scope = Scope { tenant: b"t".to_vec(), ..image(0, 1) };
    let (prompt, target) =
        (tokens(1, 1), Target::Tokens { tokens: tokens(1, 1), scope: scope.clone() });
    let say = |rig: &mut Rig, hint: Hint| rig.call(|m, now| m.hint(&[hint], now)).unwrap();
    let forever = retain(target.clone(), 90);
    say(&mut rig, Hint::Retain(Retain { ttl: Some(500), ..forever.clone() }));
    assert_eq!(rig.manager.scope_and_digest_counts(), (1, 1));
    rig.now += 1000;
    say(
        &mut rig,
        Hint::Release(Release::Owner { name: "nobody".to_owned(), scope: Scope::default() }),
    );
    assert_eq!(rig.manager.scope_and_digest_counts(), (0, 0), "its time is over");
    say(&mut rig, Hint::Retain(forever));
    serve(&mut rig, &scope, &prompt);
    assert_eq!(rig.manager.scope_and_digest_counts(), (1, 1));
    let block = rig.manager.lookup(&prompt, rig.now, &scope, 0).unwrap().blocks[0].block;
    assert_eq!(rig.manager.priority(block), Ok(90), "it applied");
    serve(&mut rig, &Scope::default(), &tokens(9, 16));
    assert_eq!(rig.manager.scope_and_digest_counts(), (1, 0));
}

#[test]
fn a_used_token_is_never_a_digests_number() {
    let draw = |high: Option<u32>| {
        let mut rig = rig();
        if let Some(high) = high {
            serve(&mut rig, &Scope::default(), &[high; SIZE]);
        }
        serve(&mut rig, &image(0, 1), &tokens(1, 1));
        let found = rig.manager.lookup(&tokens(1, 1), rig.now, &image(0, 1), 0).unwrap();
        found.blocks[0].tokens[0]
    };
    let number = draw(None);
    assert!(number >= FIRST_DIGEST);
    assert_eq!(draw(Some(number)), number + 1);
}

#[test]
fn a_repeated_session_hint_holds_its_scope_once() {
    let mut rig = rig();
    let scope = tenant(1);
    let session = || ("chat".to_owned(), scope.clone());
    for priority in [80, 90] {
        let (name, scope) = session();
        let hint = retain(Target::Session { name, scope }, priority);
        rig.call(|m, now| m.hint(&[Hint::Retain(hint)], now)).unwrap();
        assert_eq!(known(&rig), 1);
    }
    let (name, scope) = session();
    let over = Hint::Release(Release::Session { name, scope });
    rig.call(|m, now| m.hint(&[over], now)).unwrap();
    assert_eq!(known(&rig), 0);
}
