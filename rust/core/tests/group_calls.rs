//! Models of several groups: calls whose answer depends on all groups of a path.
//!
//! Every call is followed by an audit. Cost: seconds.

use kvtrie_core::{
    Acquire, Answer, Asked, Group, GroupKind, Hint, HintReply, Kind, LeaseId, Manager, MoveKind,
    NO_SLOT, Owner, Scope, Settings, Target, Write,
};
use proptest::prelude::*;

use crate::group_story::{FULL, branch, on};
use crate::rig::{self, GPU, HOST, Rig, SIZE, settings, tier, tokens};

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
        assert_eq!((reply.answer, reply.blocks, reply.not_applied), (Answer::Deferred, 0, 2));
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
    assert_eq!((reply.answer, reply.blocks, reply.not_applied), (Answer::Accepted, 1, 0));
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
    assert_eq!((reply.answer, reply.blocks, reply.not_applied), (Answer::Clipped, 0, 4100));
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

/// A prompt is asked for, computed with its passes ending where they should, and answered. Returns its
/// match.
fn answered(rig: &mut Rig, prompt: &[u32], answer: &[u32]) -> usize {
    let ask = Acquire { keep: 1, reserve: answer.len(), ..rig::all_of(prompt) };
    let id = rig.ask(&ask).unwrap();
    rig.run();
    let found = rig.manager.lease_tokens(id).unwrap();
    let ends = rig.manager.resume_borders(id).unwrap();
    let ends = ends.into_iter().map(|border| border as usize * SIZE).chain([prompt.len()]);
    for end in ends.collect::<Vec<_>>() {
        let done = rig.manager.lease_tokens(id).unwrap();
        rig.commit(id, &prompt[done..end]);
    }
    for token in answer {
        rig.run();
        rig.commit(id, std::slice::from_ref(token));
    }
    rig.release(id);
    rig.run();
    found
}

#[test]
fn a_repeated_prompt_is_found_up_to_the_last_border_before_its_last_token() {
    let owner = Owner::Kvtrie;
    for (group, long, (extra, output)) in [WINDOW, STATE]
        .into_iter()
        .flat_map(|group| [false, true].map(|long| (group, long)))
        .flat_map(|(group, long)| [3, 4, 5].map(|extra| (group, long, (extra, 0))))
        .flat_map(|(group, long, (extra, _))| {
            [0, 3, 9].map(|output| (group, long, (extra, output)))
        })
    {
        // On the first tier alone, or with too little room there for a prompt and what others leave.
        let bytes = if long { vec![9 * 700, 200 * 700] } else { vec![200 * 700] };
        let mut settings = on(&[FULL, group], &bytes);
        settings.tiers.iter_mut().for_each(|tier| tier.owner = owner);
        let mut rig = Rig::new(settings);
        let prompt = &tokens(1, 8)[..5 * SIZE + extra];
        let found: Vec<usize> = (0..6)
            .map(|turn| {
                // Answers differ from the fourth on.
                let answer = &tokens(if turn < 3 { 50 } else { 50 + turn }, 3)[..output];
                let found = answered(&mut rig, prompt, answer);
                for other in (0..6).filter(|_| long) {
                    answered(&mut rig, &tokens(100 + 10 * turn + other, 14), &tokens(9, 1));
                }
                found
            })
            .collect();
        let whole = (prompt.len() - 1) / SIZE * SIZE;
        assert_eq!(found[2..], [whole; 4], "{group:?} {long} {extra} {output}: {found:?}");
        // Where the answer filled no block the first repeat finds them.
        let fills = extra % SIZE + output >= SIZE;
        assert!(fills || found[1] == whole, "{group:?} {long} {extra} {output}: {found:?}");
    }
}

/// A request that runs: its lease, its prompt and answer, and where the prompt ends.
struct Running {
    id: LeaseId,
    stem: u32,
    tokens: Vec<u32>,
    prompt: usize,
}

/// Plays requests whose room is reserved; what a reservation promised never runs out. Unless requests that
/// run may have the same tokens, each state after a prompt has a slot before it is written.
fn play_promised(rig: &mut Rig, groups: &[Group], steps: &[(u8, u32, usize, usize)], shared: bool) {
    let mut running: Vec<Running> = Vec::new();
    for &(what, stem, long, count) in steps {
        if what < 3 || running.is_empty() {
            if !shared && running.iter().any(|one| one.stem == stem) {
                continue;
            }
            let tokens = tokens(stem, 16)[..long + 4 * count].to_vec();
            let (prompt, reserve) = (long, tokens.len() - long);
            let ask = Acquire { keep: 1, reserve, ..rig::all_of(&tokens[..prompt]) };
            let Ok(id) = rig.ask(&ask) else { continue };
            rig.run();
            for border in rig.manager.resume_borders(id).unwrap() {
                let done = rig.manager.lease_tokens(id).unwrap();
                rig.commit(id, &tokens[done..border as usize * SIZE]);
                rig.run();
            }
            let done = rig.manager.lease_tokens(id).unwrap();
            rig.commit(id, &tokens[done..prompt]);
            running.push(Running { id, stem, tokens, prompt });
            continue;
        }
        let at = stem as usize % running.len();
        let Running { id, ref tokens, prompt, .. } = running[at];
        let done = rig.manager.lease_tokens(id).unwrap();
        let more = tokens.len().min(done + if what % 2 == 0 { 1 } else { count }) - done;
        if more == 0 || what == 9 {
            rig.release(running.remove(at).id);
            continue;
        }
        rig.run();
        rig.call(|m, now| m.reserve(id, more, now)).unwrap();
        let full = (done + more) / SIZE;
        if !shared && full > done / SIZE && full > prompt / SIZE {
            for (group, _) in (0..).zip(groups).filter(|(_, g)| g.kind == GroupKind::State) {
                let table = rig.manager.group_table(id, GPU, group).unwrap().1;
                assert_ne!(table[full - 1], NO_SLOT, "group {group} of block {full} of {id}");
            }
        }
        rig.run();
        rig.commit(id, &tokens[done..done + more]);
    }
    for one in running {
        rig.release(one.id);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn what_a_reservation_promised_never_runs_out(
        state in 20_u64..900,
        window in prop::option::of((1_u64..30, 20_u64..900)),
        (pages, below) in (4_u64..24, prop::collection::vec(4_u64..40, 0..2)),
        through in any::<bool>(),
        newest in 1_u32..3,
        shared in any::<bool>(),
        steps in prop::collection::vec((0_u8..10, 0_u32..4, 1_usize..24, 1_usize..10), 1..80),
    ) {
        let mut groups = vec![FULL, Group { slot_bytes: state, ..STATE }];
        groups.extend(window.map(|(window, slot_bytes)| {
            Group { kind: GroupKind::Sliding { window, sinks: 0 }, slot_bytes, layers: 3 }
        }));
        let largest = groups.iter().map(|group| group.slot_bytes).max().unwrap();
        let bytes: Vec<u64> = [pages].into_iter().chain(below).map(|n| n * largest).collect();
        let mut settings = on(&groups, &bytes);
        settings.tiers.iter_mut().for_each(|tier| tier.owner = Owner::Kvtrie);
        settings.tiers[0].write = if through { Write::Through } else { Write::Back };
        settings.groups.as_mut().unwrap().newest = newest;
        if Manager::new(settings.clone()).is_ok() {
            play_promised(&mut Rig::new(settings), &groups, &steps, shared);
        }
    }
}

#[test]
fn a_refusal_names_pages_of_all_groups() {
    let mut settings = on(&[FULL, STATE], &[4 * 700]);
    settings.tiers[0].owner = Owner::Kvtrie;
    let mut rig = Rig::new(settings);
    let prompt = tokens(1, 4);
    let id = rig.ask(&Acquire { keep: 1, ..rig::all_of(&prompt) }).unwrap();
    rig.commit(id, &prompt);
    // Two states, and blocks of the first group, have three of four pages.
    let refused = rig.call(|m, now| m.reserve(id, 7 * SIZE, now)).unwrap_err().to_string();
    let numbers = "wanted 3 pages, 1 free or evictable, 0 coming, 3 leased";
    assert_eq!(refused, format!("tier 'gpu' has no room: {numbers}"));
    rig.release(id);
}
