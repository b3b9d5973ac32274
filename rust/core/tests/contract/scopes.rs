//! Who may share blocks with whom.

use kvtrie_core::block::Structure;
use kvtrie_core::manager::Acquire;
use kvtrie_core::scope::{FIRST_INTERNED, Scope};
use kvtrie_core::tier::Kind;

use crate::rig::{GPU, Rig, SIZE, all_of, settings, tier, tokens};

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
fn sequences_with_different_images_share_what_lies_before_them() {
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
fn a_digest_counts_where_it_stands_also_when_tokens_come_one_by_one() {
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
fn real_tokens_cannot_be_taken_for_digests() {
    let mut rig = rig();
    let high: Vec<u32> = vec![FIRST_INTERNED; SIZE];
    assert_eq!(serve(&mut rig, &Scope::default(), &high), 0, "as long as no digest is in use");
    let with = Acquire { scope: image(0, 1), ..all_of(&high) };
    let said = rig.ask(&with).unwrap_err().to_string();
    assert!(said.contains("token 4294901760 at 0"), "{said}");
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
fn a_lookup_in_a_scope_that_was_never_used_creates_none() {
    let rig = rig();
    let before = rig.manager.snapshot();
    let scope = Scope { tenant: b"x".to_vec(), ..image(0, 9) };
    assert_eq!(rig.manager.lookup(&tokens(1, 1), 1, &scope, 0).unwrap().tokens, 0);
    assert_eq!(before, rig.manager.snapshot());
}

#[test]
fn scopes_of_both_structures_live_on_one_tier() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 6)]));
    let holes =
        Scope { structure: Some(Structure::Holes), tenant: b"h".to_vec(), ..Scope::default() };
    serve(&mut rig, &holes, &tokens(1, 3));
    serve(&mut rig, &Scope::default(), &tokens(2, 3));
    rig.now += 1000;
    // All six are equally old. Ties: leading blocks of holes and last blocks of leaf-only paths.
    serve(&mut rig, &Scope { tenant: b"n".to_vec(), ..Scope::default() }, &tokens(3, 2));
    let left = |scope: &Scope, stem| rig.manager.matched(&tokens(stem, 3), scope, 0).unwrap();
    assert_eq!(left(&Scope::default(), 2), 3 * SIZE);
    assert_eq!(left(&holes, 1), 3 * SIZE);
    let found = rig.manager.lookup(&tokens(1, 3), rig.now, &holes, 0).unwrap();
    let gone: Vec<bool> = found.blocks.iter().map(|block| block.copies.is_empty()).collect();
    assert_eq!(gone, [true, true, false]);
    assert_eq!(rig.manager.occupancy(GPU).free, 0);
}
