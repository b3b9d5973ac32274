//! Sessions: their begin, weight and end.

use kvtrie_core::{Acquire, Hint, Kind, Release, Scope, Settings};

use crate::rig::{GPU, Rig, all_of, settings, tier, tokens};

fn weighted() -> Rig {
    let policy = "weighted".to_owned();
    Rig::new(Settings { policy, ..settings(vec![tier(Kind::Gpu, 16)]) })
}

fn weights(rig: &Rig, blocks: usize) -> Vec<f64> {
    let blocks = rig.blocks(&tokens(1, blocks));
    let weight = |&block| rig.manager.explain(block, GPU, rig.now).unwrap().terms.position_weight;
    blocks.iter().map(weight).collect()
}

fn over(rig: &mut Rig, name: &str) {
    let release = Release::Session { name: name.to_owned(), scope: Scope::default() };
    rig.call(|manager, now| manager.hint(&[Hint::Release(release)], now)).unwrap();
}

fn names(rig: &Rig) -> Vec<String> {
    let sessions = rig.manager.sessions(&Scope::default()).unwrap();
    sessions.into_iter().map(|(name, ..)| name).collect()
}

#[test]
fn a_block_of_two_sessions_weighs_as_in_the_shorter_one() {
    let mut rig = weighted();
    rig.serve_as(Some("eight"), &tokens(1, 8));
    assert_eq!(weights(&rig, 3), [1.0 / 8.0, 2.0 / 8.0, 3.0 / 8.0]);
    rig.serve_as(Some("two"), &tokens(1, 2));
    assert_eq!(weights(&rig, 3), [1.0 / 2.0, 2.0 / 2.0, 3.0 / 8.0]);
    over(&mut rig, "two");
    assert_eq!(
        weights(&rig, 3),
        [1.0 / 8.0, 2.0 / 8.0, 3.0 / 8.0],
        "an ended session does not count"
    );
}

#[test]
fn a_session_weighs_as_long_as_it_will_be_and_never_shorter_than_it_is() {
    let mut rig = weighted();
    let say = |rig: &mut Rig, blocks: usize, foretold: Option<u32>| {
        let prompt = tokens(1, blocks);
        let ask = Acquire { session: Some("s"), session_blocks: foretold, ..all_of(&prompt) };
        let id = rig.ask(&ask).unwrap();
        let held = rig.manager.lease_tokens(id).unwrap();
        rig.commit(id, &prompt[held..]);
        rig.release(id);
    };
    say(&mut rig, 2, Some(8));
    assert_eq!(weights(&rig, 2), [1.0 / 8.0, 2.0 / 8.0]);
    say(&mut rig, 3, None);
    assert_eq!(weights(&rig, 3), [1.0 / 8.0, 2.0 / 8.0, 3.0 / 8.0], "the announced length stays");
    say(&mut rig, 3, Some(6));
    assert_eq!(weights(&rig, 3), [1.0 / 6.0, 2.0 / 6.0, 3.0 / 6.0]);
    say(&mut rig, 4, Some(1));
    assert_eq!(weights(&rig, 4), [1.0 / 4.0, 2.0 / 4.0, 3.0 / 4.0, 1.0]);
}

#[test]
fn a_released_session_ends_at_once_or_with_its_last_lease() {
    let mut rig = weighted();
    rig.serve_as(Some("idle"), &tokens(1, 2));
    over(&mut rig, "idle");
    assert_eq!(names(&rig), Vec::<String>::new());
    let prompt = tokens(2, 2);
    let ask = Acquire { session: Some("held"), ..all_of(&prompt) };
    let id = rig.ask(&ask).unwrap();
    rig.commit(id, &prompt);
    let fork = rig.call(|manager, now| manager.fork(id, 1, now)).unwrap()[0];
    over(&mut rig, "held");
    rig.release(id);
    assert_eq!(names(&rig), ["held"]);
    assert_eq!(rig.manager.session_name(fork), Ok(Some("held")));
    rig.release(fork);
    assert_eq!(names(&rig), Vec::<String>::new());
    // A request that arrives before the last lease ends revokes the release.
    let id = rig.ask(&ask).unwrap();
    over(&mut rig, "held");
    rig.serve_as(Some("held"), &prompt);
    rig.release(id);
    assert_eq!(names(&rig), ["held"]);
}

#[test]
fn a_session_ends_if_its_request_is_given_up_without_a_block() {
    let mut rig = weighted();
    let prompt = tokens(1, 2);
    let id = rig.ask(&Acquire { session: Some("s"), ..all_of(&prompt) }).unwrap();
    assert_eq!(names(&rig), ["s"]);
    rig.release(id);
    assert_eq!(names(&rig), Vec::<String>::new());
}

#[test]
fn a_block_keeps_the_eight_sessions_used_last() {
    let mut rig = weighted();
    let prompt = tokens(1, 2);
    let ask = Acquire { session: Some("held"), ..all_of(&prompt) };
    let held = rig.ask(&ask).unwrap();
    rig.commit(held, &prompt);
    for turn in 0..20 {
        rig.serve_as(Some(&format!("s{turn:02}")), &prompt);
    }
    rig.serve_as(Some("s12"), &prompt);
    rig.serve_as(Some("s20"), &prompt);
    rig.serve_as(None, &prompt);
    // A session without a name counts too if lengths matter; the last one ends at the next request.
    assert_eq!(names(&rig), ["held", "s12", "s14", "s15", "s16", "s17", "s18", "s19", "s20"]);
    rig.acquire(&tokens(2, 1));
    assert_eq!(names(&rig), ["held", "s12", "s15", "s16", "s17", "s18", "s19", "s20"]);
}
