//! Model test of the trie: any list of operations against a naive map from paths to blocks.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{BlockId, Handle, Token};
use crate::trie::{Query, RunId, Trie};
use proptest::prelude::*;

/// A scope's root, and the tokens from the root to the end of a block.
type RootPath = (RunId, Vec<Token>);

#[derive(Clone, Debug)]
enum Op {
    /// Inserts after the block with this number, or after a root.
    Insert(usize, Vec<Token>),
    /// Inserts many at once, for long runs.
    Extend(usize, u8, Token),
    /// Removes the leaf with this number.
    Remove(usize),
    /// Changes the value of the path to the block with this number, except for a number of blocks
    /// at both ends.
    Change(usize, usize, usize, u8),
    /// Looks up a query with the beginning of a known path.
    Walk(usize, usize, Vec<Token>),
}

fn op(size: usize) -> impl Strategy<Value = Op> {
    let token = || 0..3_u32;
    let tokens = move || prop::collection::vec(token(), size);
    prop_oneof![
        4 => (any::<usize>(), tokens()).prop_map(|(at, tokens)| Op::Insert(at, tokens)),
        2 => (any::<usize>(), 1..9_u8, token()).prop_map(|(at, n, t)| Op::Extend(at, n, t)),
        4 => any::<usize>().prop_map(Op::Remove),
        3 => (any::<usize>(), 0..4_usize, 0..4_usize, 0..3_u8)
            .prop_map(|(at, front, back, value)| Op::Change(at, front, back, value)),
        2 => (any::<usize>(), 0..20_usize, prop::collection::vec(token(), 0..3 * size))
            .prop_map(|(at, keep, tail)| Op::Walk(at, keep, tail)),
    ]
}

/// The trie and the map it must equal.
struct Checked {
    trie: Trie<u8>,
    size: usize,
    roots: Vec<RunId>,
    paths: BTreeMap<RootPath, BlockId>,
    dead: Vec<Handle>,
    owns: BTreeMap<BlockId, u8>,
}

impl Checked {
    fn new(size: usize) -> Self {
        let mut trie = Trie::new(size);
        let roots = vec![trie.add_root(), trie.add_root()];
        Self { trie, size, roots, paths: BTreeMap::new(), dead: Vec::new(), owns: BTreeMap::new() }
    }

    /// Selects a root or a known path.
    fn pick(&self, at: usize) -> RootPath {
        let at = at % (self.paths.len() + self.roots.len());
        match self.roots.get(at) {
            Some(&root) => (root, Vec::new()),
            None => self.paths.keys().nth(at - self.roots.len()).expect("known").clone(),
        }
    }

    fn insert(&mut self, parent: &RootPath, tokens: &[Token]) -> RootPath {
        let path = (parent.0, [&parent.1[..], tokens].concat());
        let above = self.paths.get(parent).copied();
        let known = self.paths.get(&path).copied();
        assert_eq!(self.trie.child(path.0, above, tokens), known);
        if known.is_none() {
            let value = above.map_or(0, |above| self.owns[&above]).min(1);
            let block = self.trie.insert(path.0, above, tokens, value);
            self.owns.insert(block, value);
            assert!(self.paths.values().all(|other| *other != block), "an id is used twice");
            self.paths.insert(path.clone(), block);
        }
        path
    }

    fn remove(&mut self, at: usize) {
        let leaf = |path: &RootPath| {
            let extends = |other: &RootPath| other.0 == path.0 && other.1.starts_with(&path.1);
            self.paths.keys().filter(|other| extends(other)).count() == 1
        };
        let leaves: Vec<RootPath> = self.paths.keys().filter(|path| leaf(path)).cloned().collect();
        if leaves.is_empty() {
            return;
        }
        let path = &leaves[at % leaves.len()];
        let block = self.paths.remove(path).expect("a known path");
        self.dead.push(self.trie.handle(block));
        self.trie.remove(block);
    }

    fn change(&mut self, at: usize, (front, back): (usize, usize), value: u8) {
        let (root, tokens) = self.pick(at);
        let mut path = Vec::new();
        self.trie.walk(root, Query::Tokens(&tokens), &mut path);
        let Some(slice) = path.get(front..path.len().saturating_sub(back)) else { return };
        let mut seen = Vec::new();
        self.trie.change(slice, |run, known| {
            seen.extend(run);
            *known = value;
        });
        assert_eq!(seen, slice);
        self.owns.extend(slice.iter().map(|&block| (block, value)));
    }

    fn walk(&self, root: RunId, tokens: &[Token]) {
        let mut found = vec![BlockId::MAX];
        self.trie.walk(root, Query::Tokens(tokens), &mut found);
        let ends = (self.size..=tokens.len()).step_by(self.size);
        let known = ends.map_while(|end| self.paths.get(&(root, tokens[..end].to_vec())));
        let wanted: Vec<BlockId> = std::iter::once(BlockId::MAX).chain(known.copied()).collect();
        assert_eq!(found, wanted, "earlier entries of the list stay in front");
    }

    /// From each block of a path on, `along` gives the path's blocks run by run.
    fn along(&self, root: RunId, tokens: &[Token]) {
        let mut path = Vec::new();
        self.trie.walk(root, Query::Tokens(tokens), &mut path);
        let handles = path.iter().map(|&block| self.trie.handle(block));
        assert_eq!(self.trie.handles(&path), handles.collect::<Vec<_>>());
        for from in 0..path.len() {
            let mut seen = Vec::new();
            for (run, value) in self.trie.along(&path[from..]) {
                let all = self.trie.run(run.start);
                assert!(run.end == all.end || path.last() == Some(&(run.end - 1)));
                assert!(all.contains(&(run.end - 1)) && *value == self.owns[&run.start]);
                seen.extend(run);
            }
            assert_eq!(seen, path[from..]);
        }
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Insert(at, tokens) => {
                self.insert(&self.pick(*at), tokens);
            }
            Op::Extend(at, number, token) => {
                let mut path = self.pick(*at);
                for _ in 0..*number {
                    path = self.insert(&path, &vec![*token; self.size]);
                }
            }
            Op::Remove(at) => self.remove(*at),
            Op::Change(at, front, back, value) => self.change(*at, (*front, *back), *value),
            Op::Walk(at, keep, tail) => {
                let (root, mut tokens) = self.pick(*at);
                tokens.truncate(*keep);
                tokens.extend(tail);
                self.walk(root, &tokens);
            }
        }
    }

    fn check(&self) {
        assert_eq!(self.trie.audit(), [""; 0]);
        assert_eq!(
            (self.trie.len(), self.trie.is_empty()),
            (self.paths.len(), self.paths.is_empty())
        );
        assert!(self.dead.iter().all(|handle| self.trie.resolve(*handle).is_none()));
        let mut below: BTreeMap<RootPath, BTreeSet<BlockId>> = BTreeMap::new();
        for (path, &block) in &self.paths {
            let (root, tokens) = path;
            let parent = (*root, tokens[..tokens.len() - self.size].to_vec());
            assert!(self.trie.alive(block) && block < self.trie.bound());
            assert_eq!(self.trie.resolve(self.trie.handle(block)), Some(block));
            assert_eq!(self.trie.depth(block) as usize, tokens.len() / self.size - 1);
            assert_eq!(self.trie.tokens(block), &tokens[parent.1.len()..]);
            assert_eq!(self.trie.parent(block), self.paths.get(&parent).copied());
            assert_eq!(self.trie.root(block), *root);
            assert_eq!(*self.trie.value(block), self.owns[&block]);
            self.walk(*root, tokens);
            self.along(*root, tokens);
            below.entry(parent).or_default().insert(block);
        }
        for (path, &block) in &self.paths {
            let children: Vec<BlockId> = self.trie.children(block).collect();
            assert_eq!(set(&children), below.remove(path).unwrap_or_default());
        }
        for &root in &self.roots {
            let firsts: Vec<BlockId> = self.trie.first_blocks(root).collect();
            assert_eq!(set(&firsts), below.remove(&(root, Vec::new())).unwrap_or_default());
        }
    }
}

fn set(blocks: &[BlockId]) -> BTreeSet<BlockId> {
    let set: BTreeSet<BlockId> = blocks.iter().copied().collect();
    assert_eq!(set.len(), blocks.len(), "a block occurs twice");
    set
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_trie_is_the_set_of_its_paths(
        (size, ops) in (1..4_usize)
            .prop_flat_map(|size| (Just(size), prop::collection::vec(op(size), 1..80))),
    ) {
        let mut checked = Checked::new(size);
        for op in &ops {
            checked.step(op);
            checked.check();
        }
        while !checked.paths.is_empty() {
            checked.remove(7);
            checked.check();
        }
        prop_assert!(checked.trie.is_empty());
    }
}
