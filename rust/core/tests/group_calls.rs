//! Models of several groups: calls whose answer depends on all groups of a path.
//!
//! Every call is followed by an audit. Cost: seconds.

mod bytes;
mod group_story;
mod rig;

use group_story::{FULL, branch, on};
use kvtrie_core::group::{Group, GroupKind};
use kvtrie_core::hint::{Answer, Hint, HintReply, Target};
use kvtrie_core::manager::{Acquire, Asked, Manager, MoveKind, Settings};
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::{Kind, Owner};
use rig::{GPU, HOST, Rig, SIZE, settings, tier, tokens};

/// Two blocks of four tokens.
const WINDOW: Group =
    Group { kind: GroupKind::Sliding { window: 9, sinks: 0 }, slot_bytes: 500, layers: 3 };
const STATE: Group = Group { kind: GroupKind::State, slot_bytes: 700, layers: 2 };

fn of(groups: &[Group], bytes: u64) -> Settings {
    on(groups, &[bytes])
}

fn target(tokens: &[u32]) -> Target {
    Target::Tokens { tokens: tokens.to_vec(), scope: Scope::default() }
}

fn resume_at(rig: &mut Rig, target: Target, borders: &[usize]) -> HintReply {
    let borders = borders.iter().map(|&border| border as u64).collect();
    let hint = Hint::ResumeAt { target, borders };
    rig.call(|m, now| m.hint(&[hint], now)).unwrap().remove(0)
}

#[test]
fn a_border_that_a_hint_names_is_a_point_that_newer_ones_leave() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(of(&[FULL, group], 100_000));
        let prompt = tokens(1, 6);
        let reply = resume_at(&mut rig, target(&prompt), &[2 * SIZE, 4 * SIZE]);
        assert_eq!((reply.answer, reply.blocks, reply.left), (Answer::Deferred, 0, 2));
        let id = rig.acquire(&prompt);
        assert_eq!(rig.manager.resume_borders(id).unwrap(), [2, 4, 6]);
        rig.commit(id, &prompt);
        rig.release(id);
        // Two points stay, and the newest.
        let held = rig.manager.group_slots(0)[1].held;
        assert_eq!(held, if group == WINDOW { 6 } else { 3 });
        rig.serve(&branch(&prompt, 6, 2, 3));
        assert_eq!(rig.manager.group_slots(0)[1].held, held);
        assert_eq!(rig.matched(&branch(&prompt, 4, 3, 2)), 4 * SIZE);
        let reply = resume_at(&mut rig, target(&prompt), &[2 * SIZE, 4 * SIZE]);
        assert_eq!((reply.answer, reply.blocks), (Answer::Accepted, 2));
    }
}

#[test]
fn a_hint_about_what_is_there_makes_the_point_at_once() {
    let mut rig = Rig::new(of(&[FULL, WINDOW], 100_000));
    let prompt = tokens(1, 6);
    let ask = Acquire { tokens: &prompt, session: Some("chat"), ..rig::all_of(&prompt) };
    let id = rig.ask(&ask).unwrap();
    rig.commit(id, &prompt);
    let reply = resume_at(&mut rig, Target::Lease(id), &[3 * SIZE]);
    assert_eq!((reply.answer, reply.blocks, reply.left), (Answer::Accepted, 1, 0));
    rig.release(id);
    let chat = Target::Session { name: "chat".to_owned(), scope: Scope::default() };
    assert_eq!(resume_at(&mut rig, chat, &[3 * SIZE, 5 * SIZE]).blocks, 2);
    assert_eq!(rig.manager.group_slots(0)[1].held, 5);
    let gone = Target::Session { name: "gone".to_owned(), scope: Scope::default() };
    assert_eq!(resume_at(&mut rig, gone, &[SIZE]).answer, Answer::Rejected);
}

#[test]
fn a_border_off_the_path_or_inside_a_block_is_a_config_error() {
    let mut rig = Rig::new(of(&[FULL, STATE], 100_000));
    let prompt = tokens(1, 6);
    rig.serve(&prompt);
    let id = rig.acquire(&prompt);
    let mut refused = |target: Target, borders: Vec<u64>, part: &str| {
        let hint = Hint::ResumeAt { target, borders };
        rig.refused(part, |m, now| m.hint(&[hint], now));
    };
    refused(target(&prompt), vec![8, 10], "10 tokens is not at the end of a block of 4");
    refused(target(&prompt), vec![0], "0 tokens is not at the end of a block of 4");
    refused(target(&prompt), vec![28], "28 tokens is off the path, which has 24");
    refused(Target::Lease(id), vec![4, 28], "28 tokens is off the path, which has 24");
    refused(target(&prompt), vec![], "0 borders are named");
    rig.release(id);
    let mut one = Rig::new(settings(vec![tier(Kind::Gpu, 9)]));
    let hint = Hint::ResumeAt { target: target(&prompt), borders: vec![4] };
    one.refused("models of several groups", |m, now| m.hint(&[hint], now));
}

#[test]
fn a_scope_has_a_bounded_number_of_borders_that_wait() {
    let mut rig = Rig::new(of(&[FULL, STATE], 100_000));
    let prompt = tokens(1, 4100);
    let all: Vec<usize> = (1..=4100).map(|block| block * SIZE).collect();
    let reply = resume_at(&mut rig, target(&prompt), &all);
    assert_eq!((reply.answer, reply.blocks, reply.left), (Answer::Clipped, 0, 4100));
    assert!(reply.reason.contains("4 borders are beyond the 4096"), "{}", reply.reason);
    assert_eq!(resume_at(&mut rig, target(&tokens(2, 1)), &[SIZE]).answer, Answer::Rejected);
    let other = Scope { tenant: b"other".to_vec(), ..Scope::default() };
    let other = Target::Tokens { tokens: tokens(2, 1), scope: other };
    assert_eq!(resume_at(&mut rig, other, &[SIZE]).answer, Answer::Deferred);
}

#[test]
fn an_engines_pass_ends_at_a_named_border() {
    let mut settings = on(&[FULL, STATE], &[100 * 700, 100 * 700]);
    settings.tiers[0].owner = Owner::Engine;
    let mut rig = Rig::new(settings);
    let prompt = tokens(1, 6);
    resume_at(&mut rig, target(&prompt), &[3 * SIZE]);
    let id = rig.acquire(&prompt);
    assert_eq!(rig.manager.resume_borders(id).unwrap(), [3, 6]);
    for group in 0..2 {
        let slots: Vec<u32> = (10 * group..10 * group + 6).collect();
        rig.call(|m, _| m.bind_group(id, 0, &slots, group as usize)).unwrap();
    }
    rig.commit(id, &prompt[..3 * SIZE]);
    rig.commit(id, &prompt[3 * SIZE..]);
    rig.release(id);
    rig.run();
    assert_eq!(rig.matched(&branch(&prompt, 3, 2, 2)), 3 * SIZE);
}

#[test]
fn points_are_below_before_their_room_is_wanted() {
    for group in [WINDOW, STATE] {
        let served = |free_low| {
            // Three sessions of six blocks and their points take half of the pages, or a few more.
            let mut settings = on(&[FULL, group], &[12 * 700, 100 * 700]);
            settings.tiers[0].free_low = free_low;
            let mut rig = Rig::new(settings);
            for stem in 1..4 {
                rig.serve(&tokens(stem, 6));
            }
            rig.run();
            rig
        };
        let held = |rig: &Rig, tier: usize| rig.manager.group_slots(tier)[1].held;
        assert_eq!(held(&served(0.0), HOST), 0);
        let rig = served(0.8);
        let needed = if group == WINDOW { 2 } else { 1 };
        assert!(held(&rig, HOST) >= needed, "{group:?}");
        // Nothing has left the first tier for it.
        assert_eq!(held(&rig, GPU), 3 * needed);
        let rows = { rig }.call(|m, now| m.index(HOST, now)).unwrap();
        let mut again = Rig::new(on(&[FULL, group], &[6 * 700, 100 * 700]));
        again.call(|m, now| m.load_index(HOST, &rows, now)).unwrap();
        assert_eq!(again.matched(&tokens(1, 6)), 6 * SIZE, "a point is written with its blocks");
    }
}

#[test]
fn victims_on_request_leave_a_tier_below_the_first() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(on(&[FULL, group], &[40 * 700; 3]));
        for stem in [1, 2] {
            rig.mark(&tokens(stem, 4), HOST);
        }
        let stay = rig.blocks(&tokens(2, 4));
        let evict = |count| {
            let stay = stay.clone();
            move |m: &mut Manager, now| m.evict_blocks(HOST, count, &stay[3..], now)
        };
        assert!(rig.call(evict(5)).is_err());
        assert_eq!(rig.call(evict(4)).unwrap().len(), 4);
        rig.run();
        assert_eq!(rig.manager.group_slots(HOST)[0].held, 4);
        // The others are on the disk, with their point.
        assert_eq!((rig.matched(&tokens(1, 4)), rig.matched(&tokens(2, 4))), (16, 16));
        assert!(rig.on(&tokens(1, 4), HOST).iter().all(|layers| layers.is_empty()));
    }
}

fn causes(rig: &mut Rig, tokens: &[u32]) -> Vec<(usize, usize, &'static str)> {
    let scope = Scope::default();
    let asked = Asked { tokens, scope: &scope, session: None, limit: 4 };
    let open = rig.call(|m, now| m.miss(&asked, now)).unwrap();
    let miss = open.close();
    let found: usize = miss.found.iter().sum();
    let spans: usize = miss.causes.iter().map(|&(from, to, _)| to - from).sum();
    assert_eq!(found + miss.in_flight + spans, tokens.len(), "{miss:?}");
    assert!(miss.causes.is_sorted());
    miss.causes.into_iter().map(|(from, to, why)| (from, to, why.name())).collect()
}

#[test]
fn a_miss_names_blocks_that_no_group_can_resume_at() {
    let mut rig = Rig::new(on(&[FULL, STATE], &[40 * 700, 40 * 700]));
    let prompt = tokens(1, 6);
    rig.serve(&prompt);
    assert_eq!(causes(&mut rig, &prompt), []);
    let other = branch(&prompt, 4, 2, 3);
    assert_eq!(causes(&mut rig, &other), [(0, 16, "no resume point"), (16, 28, "new")]);
    assert_eq!(causes(&mut rig, &branch(&prompt, 6, 2, 1)), [(24, 28, "new")]);
}

#[test]
fn a_miss_names_blocks_whose_load_takes_longer_than_computing() {
    let mut settings = on(&[FULL, STATE], &[6 * 700, 100 * 700]);
    settings.tiers[1].read.latency_ns = 1_000_000_000;
    let mut rig = Rig::new(settings);
    rig.serve(&tokens(1, 20));
    rig.serve(&tokens(2, 20));
    rig.run();
    let causes = causes(&mut rig, &tokens(1, 20));
    assert_eq!(causes, [(0, 80, "recomputed")]);
}

#[test]
fn a_border_whose_load_failed_is_a_point_again_once_it_is_computed() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(on(&[FULL, group], &[10 * 700, 100 * 700]));
        let first = tokens(1, 20);
        rig.serve(&first);
        rig.serve(&tokens(2, 45));
        rig.call(|m, now| m.evict_blocks(GPU, 45, &[], now)).unwrap();
        rig.run();
        let next = branch(&first, 20, 3, 1);
        let id = rig.acquire(&next);
        assert_eq!(rig.manager.resume_borders(id).unwrap(), [21]);
        for known in rig.hand_out() {
            match (known.kind, known.group) {
                (MoveKind::Load, 1) => rig.fail(known.id),
                _ => rig.done(known.id),
            }
        }
        rig.call(|m, _| m.failed()).unwrap();
        rig.run();
        let matched = rig.manager.lease(id).unwrap().matched();
        assert!(matched < 20 * SIZE, "{matched}");
        assert_eq!(rig.manager.resume_borders(id).unwrap(), [20, 21]);
        rig.call(|m, now| m.reserve(id, next.len() - matched, now)).unwrap();
        rig.commit(id, &next[matched..20 * SIZE]);
        // Another request goes on from it while the first one runs.
        assert_eq!(rig.matched(&branch(&first, 20, 4, 1)), 20 * SIZE);
        rig.commit(id, &next[20 * SIZE..]);
        rig.release(id);
        assert_eq!(rig.matched(&branch(&next, 21, 4, 1)), 21 * SIZE);
    }
}
