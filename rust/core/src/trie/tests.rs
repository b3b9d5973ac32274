//! Unit tests of the trie: cases not reached by the model test.

use super::run::key;
use super::{Query, Trie};
use crate::block::{BlockId, Token};

/// Two blocks with the same hash: their first pair is multiplied as 0.
const TWINS: [[Token; 4]; 2] = [[0xE17D_05AC; 4], [0xE17D_05AC, 0xE17D_05AC, 1, 2]];

fn walk(trie: &Trie, root: u32, tokens: &[Token]) -> Vec<BlockId> {
    let mut path = Vec::new();
    trie.walk(root, Query::Tokens(tokens), &mut path);
    path
}

#[test]
fn blocks_of_equal_hash_are_distinguished_by_their_tokens() {
    assert_eq!(key(7, &TWINS[0]), key(7, &TWINS[1]));
    for (first, second) in [(0, 1), (1, 0)] {
        let mut trie = Trie::<()>::new(4);
        let root = trie.add_root();
        let one = trie.insert(root, None, &TWINS[first], ());
        assert_eq!(walk(&trie, root, &TWINS[second]), [0; 0]);
        assert_eq!(trie.child(root, None, &TWINS[second]), None);
        let two = trie.insert(root, None, &TWINS[second], ());
        assert_eq!(walk(&trie, root, &TWINS[first]), [one]);
        assert_eq!(walk(&trie, root, &TWINS[second]), [two]);
        trie.remove(one);
        assert_eq!(trie.child(root, None, &TWINS[second]), Some(two));
        assert_eq!((trie.audit(), trie.len()), (vec![], 1));
    }
}

#[test]
fn a_run_is_merged_again_when_its_branch_is_removed() {
    let mut trie = Trie::<()>::new(1);
    let root = trie.add_root();
    let mut path: Vec<BlockId> = Vec::new();
    for token in 0..9 {
        path.push(trie.insert(root, path.last().copied(), &[token], ()));
    }
    let branch = trie.insert(root, Some(path[3]), &[77], ());
    assert_eq!((trie.run(path[8]), trie.runs()), (path[4]..path[8] + 1, 3));
    let alone: Vec<bool> = path.iter().map(|&block| trie.only_child(block)).collect();
    assert_eq!(alone, (0..9).map(|at| at != 4).collect::<Vec<_>>());
    trie.remove(branch);
    assert_eq!((trie.run(path[8]), trie.runs()), (path[0]..path[8] + 1, 1));
    assert_eq!(walk(&trie, root, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]), path);
    assert_eq!(trie.audit(), [""; 0]);
}

#[test]
fn blocks_of_a_run_have_one_value() {
    let mut trie = Trie::<u8>::new(1);
    let root = trie.add_root();
    let mut path = Vec::new();
    trie.extend(root, None, &[0, 1, 2, 3, 4], 1, &mut path);
    trie.change(&path[1..3], |_, value| *value = 2);
    assert_eq!(trie.runs(), 3);
    assert_eq!(path.iter().map(|&b| *trie.value(b)).collect::<Vec<_>>(), [1, 2, 2, 1, 1]);
    trie.change(&path, |_, value| *value += 1);
    let (five, seven) = (path[4], path[4] + 2);
    trie.extend(root, Some(five), &[5, 6], 2, &mut path);
    trie.extend(root, Some(seven), &[7], 9, &mut path);
    assert_eq!(trie.runs(), 4);
    let runs: Vec<_> = path.iter().map(|&b| trie.run(b)).collect();
    assert_eq!((runs[3].clone(), runs[6].clone()), (3..7, 3..7));
    trie.change(&path[1..3], |_, value| *value = 2);
    assert_eq!((trie.run(path[0]), trie.runs()), (0..7, 2));
    assert_eq!(trie.audit(), [""; 0]);
}

#[test]
fn a_run_that_grows_block_by_block_keeps_its_ids_together() {
    let mut trie = Trie::<()>::new(1);
    let root = trie.add_root();
    let mut tips = [7, 8].map(|token| trie.insert(root, None, &[token], ()));
    for token in 0..6 {
        tips = tips.map(|tip| trie.insert(root, Some(tip), &[token], ()));
    }
    assert_eq!((trie.runs(), trie.bound()), (2, 16));
    trie.trim(tips[0]);
    let other = trie.insert(root, None, &[9], ());
    assert_eq!((other, trie.bound(), trie.audit()), (16, 24, vec![]));
}

#[test]
fn a_tail_is_removed_at_once() {
    let mut trie = Trie::<()>::new(2);
    let root = trie.add_root();
    let mut path = Vec::new();
    trie.extend(root, None, &[1; 40], (), &mut path);
    let handles: Vec<_> = path.iter().map(|&block| trie.handle(block)).collect();
    trie.remove_tail(path[19], 15);
    assert_eq!(walk(&trie, root, &[1; 40]), path[..5]);
    assert!(handles[5..].iter().all(|&handle| trie.resolve(handle).is_none()));
    trie.remove_tail(path[4], 5);
    assert_eq!((trie.len(), trie.runs(), trie.audit()), (0, 0, vec![]));
}

#[test]
fn a_path_continues_in_the_next_page() {
    let mut trie = Trie::<()>::new(2);
    let root = trie.add_root();
    let tokens: Vec<Token> = (0..10_000).collect();
    let mut path = Vec::new();
    trie.extend(root, None, &tokens[..9_000], (), &mut path);
    trie.extend(root, path.last().copied(), &tokens[9_000..], (), &mut path);
    assert_eq!((path.len(), trie.runs(), trie.audit()), (5_000, 2, vec![]));
    assert_eq!(walk(&trie, root, &tokens), path);
    let mut seen = path.clone();
    trie.change(&path[4_000..4_200], |_, ()| ());
    seen.retain(|&block| {
        trie.depth(block) as usize == path.iter().position(|&b| b == block).unwrap()
    });
    assert_eq!((seen.len(), trie.audit()), (5_000, vec![]));
    trie.remove_tail(path[4_999], 5_000 - 4_096);
    trie.remove_tail(path[4_095], 4_096);
    assert!(trie.is_empty() && trie.runs() == 0);
}

#[test]
fn an_id_without_generations_left_is_retired() {
    let mut trie = Trie::<()>::new(1);
    let root = trie.add_root();
    let block = trie.insert(root, None, &[5], ());
    trie.generations[block] = u16::MAX - 1;
    trie.remove(block);
    assert_ne!(trie.insert(root, None, &[5], ()), block);
    assert_eq!(trie.audit(), [""; 0]);
}

#[test]
fn a_reused_id_gets_another_generation() {
    let mut trie = Trie::<()>::new(1);
    let root = trie.add_root();
    let block = trie.insert(root, None, &[5], ());
    let old = trie.handle(block);
    trie.remove(block);
    assert!(!trie.alive(block) && trie.is_empty());
    assert_eq!(trie.insert(root, None, &[6], ()), block);
    assert_eq!((trie.resolve(old), trie.resolve(trie.handle(block))), (None, Some(block)));
    assert_eq!(trie.bound(), 8);
}

#[test]
fn the_audit_finds_each_inconsistency() {
    let mut trie = Trie::<()>::new(1);
    let root = trie.add_root();
    let first = trie.insert(root, None, &[5], ());
    trie.insert(root, Some(first), &[6], ());
    trie.insert(root, Some(first), &[7], ());
    assert_eq!(trie.audit(), [""; 0]);
    let break_it = |change: fn(&mut Trie)| {
        let mut broken = trie.clone();
        change(&mut broken);
        assert!(!broken.audit().is_empty());
    };
    break_it(|trie| trie.ids.assign(1..2, 3));
    break_it(|trie| trie.runs[2].depth = 7);
    break_it(|trie| trie.token_pages.put(trie.runs[2].first, &[8]));
    break_it(|trie| trie.runs[2].parent = 0);
    break_it(|trie| trie.runs[1].child = 2);
    break_it(|trie| trie.ids.give(1, 1));
}
