//! Resume points: which borders a request finds, and where a pass writes them.

use kvtrie_core::{Acquire, NO_SLOT, Owner, Settings, TierSpec};

use super::{STATE, WINDOW, held, of};
use crate::group_story::{FULL, branch};
use crate::rig::{GPU, Rig, SIZE, tokens};

#[test]
fn the_next_turn_resumes_at_the_end_of_the_prompt() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(of(&[FULL, group], 100_000));
        let prompt = tokens(1, 6);
        rig.serve(&prompt);
        let next = branch(&prompt, 6, 2, 3);
        assert_eq!(rig.matched(&next), 6 * SIZE);
        rig.serve(&next);
        // The newer point of the path replaces the older one.
        let needed = if group == WINDOW { 2 } else { 1 };
        assert_eq!(held(&rig)[1].0, needed);
        assert_eq!(rig.matched(&branch(&next, 9, 3, 1)), 9 * SIZE);
    }
}

#[test]
fn a_prompt_that_diverges_finds_its_windows_while_room_is_free() {
    let mut rig = Rig::new(of(&[FULL, WINDOW], 100_000));
    let prompt = tokens(1, 6);
    rig.serve(&prompt);
    assert_eq!(held(&rig), [(6, 0), (2, 4)]);
    assert_eq!(rig.matched(&branch(&prompt, 3, 2, 3)), 3 * SIZE);
    // States are there only where a pass ended.
    let mut rig = Rig::new(of(&[FULL, STATE], 100_000));
    rig.serve(&prompt);
    assert_eq!(rig.matched(&branch(&prompt, 3, 2, 3)), 0);
}

#[test]
fn a_branch_is_resumable_from_its_second_occurrence_on() {
    let mut rig = Rig::new(of(&[FULL, STATE], 100_000));
    let prompt = tokens(1, 6);
    rig.serve(&prompt);
    let second = branch(&prompt, 3, 2, 3);
    let id = rig.acquire(&second);
    let borders: Vec<u32> = rig.manager.resume_borders(id).unwrap();
    assert_eq!((rig.manager.lease(id).unwrap().matched(), borders), (0, vec![3, 6]));
    rig.commit(id, &second);
    rig.release(id);
    assert_eq!(rig.matched(&branch(&prompt, 3, 3, 3)), 3 * SIZE);
    // The branch stays while its paths go on, and so do both ends.
    assert_eq!(held(&rig)[1], (3, 0));
    rig.serve(&branch(&second, 6, 4, 2));
    assert_eq!(held(&rig)[1], (3, 1));
}

#[test]
fn an_answer_ends_in_a_resume_point() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(of(&[FULL, group], 100_000));
        let prompt = tokens(1, 5);
        let ask = Acquire { tokens: &prompt, reserve: 5 * SIZE + 2, ..Acquire::default() };
        let id = rig.ask(&ask).unwrap();
        rig.commit(id, &prompt);
        let answer = tokens(2, 6);
        for token in &answer[..=5 * SIZE] {
            rig.commit(id, std::slice::from_ref(token));
        }
        rig.release(id);
        let path = [&prompt[..], &answer].concat();
        assert_eq!(rig.matched(&path), 10 * SIZE, "{group:?}");
        assert_eq!(held(&rig)[1].0, if group == WINDOW { 2 } else { 1 });
    }
}

#[test]
fn a_pass_over_several_blocks_writes_a_state_only_where_it_has_to_end() {
    let owner = Owner::Kvtrie;
    let settings = of(&[FULL, STATE], 100_000);
    let tiers = settings.tiers.iter().map(|tier| TierSpec { owner, ..tier.clone() }).collect();
    let mut rig = Rig::new(Settings { tiers, ..settings });
    let prompt = tokens(1, 6);
    let ask = Acquire { tokens: &prompt, reserve: SIZE, ..Acquire::default() };
    let id = rig.ask(&ask).unwrap();
    let written = |rig: &mut Rig| {
        let table = rig.manager.group_table(id, GPU, 1).unwrap().1;
        let places = table.iter().enumerate().filter(|(_, slot)| **slot != NO_SLOT);
        places.map(|(place, _)| place).collect::<Vec<_>>()
    };
    // The end of the prompt, and the block after it.
    rig.call(|m, now| m.reserve(id, 6 * SIZE, now)).unwrap();
    assert_eq!(written(&mut rig), [5, 6]);
    rig.commit(id, &prompt[..2 * SIZE]);
    assert_eq!(written(&mut rig), [5, 6]);
    rig.commit(id, &prompt[2 * SIZE..]);
    assert_eq!(written(&mut rig), [5, 6]);
    // Room for four blocks and a part: the slot is for the last one that becomes full.
    rig.call(|m, now| m.reserve(id, 4 * SIZE + 1, now)).unwrap();
    assert_eq!(written(&mut rig), [5, 9]);
    // A pass that ends earlier does so at the next block.
    rig.commit(id, &tokens(2, 1));
    assert_eq!(written(&mut rig), [7]);
    rig.call(|m, now| m.reserve(id, 3 * SIZE + 1, now)).unwrap();
    rig.commit(id, &tokens(3, 3));
    assert_eq!(written(&mut rig), [9, 10]);
    rig.release(id);
    let path = [prompt, tokens(2, 1), tokens(3, 3)].concat();
    assert_eq!(rig.matched(&[path, tokens(4, 1)].concat()), 10 * SIZE);
}

#[test]
fn a_truncated_lease_goes_back_to_a_border_at_which_all_groups_resume() {
    for (groups, kept) in [(&[FULL, WINDOW][..], 6 * SIZE), (&[FULL, STATE], 4 * SIZE)] {
        let mut rig = Rig::new(of(groups, 100_000));
        let prompt = tokens(1, 8);
        rig.serve(&prompt[..4 * SIZE]);
        let id = rig.acquire(&prompt);
        rig.commit(id, &prompt[4 * SIZE..]);
        rig.call(|m, now| m.truncate(id, 6 * SIZE + 3, now)).unwrap();
        assert_eq!(rig.manager.lease_tokens(id).unwrap(), kept);
        rig.call(|m, now| m.reserve(id, SIZE, now)).unwrap();
        rig.commit(id, &tokens(2, 1));
        rig.release(id);
        let other = [&prompt[..kept], &tokens(2, 1)].concat();
        assert_eq!(rig.matched(&other), other.len());
    }
}
