//! The radix trie: which token blocks exist, and where each stands on its path.
//!
//! A run is a chain of blocks without a branch; its tokens lie contiguous, so matching is a memory
//! comparison. Children of a run hang behind its last block; one table of all runs finds a child by
//! a hash of that block and of the child's first one, and compares exactly. Invariant: no run but a
//! scope's root is empty, and no two children of a run start with the same block. Cost: lookup
//! O(tokens + branches); inserting and removing at the end of a run O(1); a split O(blocks behind
//! it), since a run is split and joined without touching the table's entries of its children.

use std::hash::Hasher;

use hashbrown::HashTable;
use rustc_hash::FxHasher;

use crate::block::{BlockId, Handle, Token};

/// A run's place in the slab.
pub type RunId = u32;

const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Run {
    parent: RunId,
    depth: u32,
    tokens: Vec<Token>,
    blocks: Vec<BlockId>,
    /// The latest child, from which `next` leads to the earlier ones.
    child: RunId,
    next: RunId,
    previous: RunId,
}

impl Run {
    fn new(parent: RunId, depth: u32) -> Self {
        let (tokens, blocks) = (Vec::new(), Vec::new());
        Self { parent, depth, tokens, blocks, child: NONE, next: NONE, previous: NONE }
    }

    /// What the hash of a child is seeded with: the block before it, which stays the same however
    /// runs are split and joined; of a root the run itself.
    fn seed(&self, id: RunId) -> u64 {
        self.blocks.last().map_or(u64::MAX - u64::from(id), |&block| u64::from(block))
    }
}

#[derive(Clone, Copy, Debug)]
struct Place {
    run: RunId,
    index: u32,
    generation: u32,
}

/// The trie of all scopes. Block ids are reused; handles carry a generation.
#[derive(Clone, Debug)]
pub struct Trie {
    block_tokens: usize,
    runs: Vec<Run>,
    free_runs: Vec<RunId>,
    places: Vec<Place>,
    free_blocks: Vec<BlockId>,
    /// Every run that has a parent.
    table: HashTable<RunId>,
}

impl Trie {
    /// An empty trie of blocks of `block_tokens` tokens.
    #[must_use]
    pub fn new(block_tokens: usize) -> Self {
        Self {
            block_tokens,
            runs: Vec::new(),
            free_runs: Vec::new(),
            places: Vec::new(),
            free_blocks: Vec::new(),
            table: HashTable::new(),
        }
    }

    /// Adds the root of a scope.
    pub fn add_root(&mut self) -> RunId {
        self.new_run(Run::new(NONE, 0))
    }

    /// How many blocks exist.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len() - self.free_blocks.len()
    }

    /// Whether there is no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One behind the largest block id ever given out.
    #[must_use]
    pub fn bound(&self) -> usize {
        self.places.len()
    }

    /// Whether the id names a living block.
    #[must_use]
    pub fn alive(&self, block: BlockId) -> bool {
        self.places.get(block as usize).is_some_and(|place| place.run != NONE)
    }

    /// The handle of a living block.
    #[must_use]
    pub fn handle(&self, block: BlockId) -> Handle {
        Handle::new(block, self.places[block as usize].generation)
    }

    /// The block behind a handle, if it still lives.
    #[must_use]
    pub fn resolve(&self, handle: Handle) -> Option<BlockId> {
        let block = handle.id();
        (self.alive(block) && self.places[block as usize].generation == handle.generation())
            .then_some(block)
    }

    /// How many blocks stand before this one on its path.
    #[must_use]
    pub fn depth(&self, block: BlockId) -> u32 {
        let place = self.places[block as usize];
        self.runs[place.run as usize].depth + place.index
    }

    /// How many blocks stand before the chain without a branch that it belongs to.
    #[must_use]
    pub fn start(&self, block: BlockId) -> u32 {
        self.runs[self.places[block as usize].run as usize].depth
    }

    /// The tokens of one block.
    #[must_use]
    pub fn tokens(&self, block: BlockId) -> &[Token] {
        let place = self.places[block as usize];
        let at = place.index as usize * self.block_tokens;
        &self.runs[place.run as usize].tokens[at..at + self.block_tokens]
    }

    /// The block before this one, if it is not the first of its scope.
    #[must_use]
    pub fn parent(&self, block: BlockId) -> Option<BlockId> {
        let place = self.places[block as usize];
        let run = &self.runs[place.run as usize];
        if place.index > 0 {
            return Some(run.blocks[place.index as usize - 1]);
        }
        self.runs[run.parent as usize].blocks.last().copied()
    }

    /// The root of the scope that a block belongs to. Cost: O(branches above it).
    #[must_use]
    pub fn root(&self, block: BlockId) -> RunId {
        let mut run = self.places[block as usize].run;
        while self.runs[run as usize].parent != NONE {
            run = self.runs[run as usize].parent;
        }
        run
    }

    /// The blocks directly behind this one.
    pub fn children(&self, block: BlockId) -> impl Iterator<Item = BlockId> + '_ {
        let place = self.places[block as usize];
        let run = &self.runs[place.run as usize];
        let next = run.blocks.get(place.index as usize + 1).copied();
        let branches = if next.is_some() { NONE } else { run.child };
        next.into_iter().chain(self.siblings(branches).map(|child| self.first(child)))
    }

    /// The first blocks of a scope.
    pub fn firsts(&self, root: RunId) -> impl Iterator<Item = BlockId> + '_ {
        self.siblings(self.runs[root as usize].child).map(|child| self.first(child))
    }

    /// Appends the blocks of the longest known prefix of `tokens` to `path`; whole blocks only.
    pub fn walk(&self, root: RunId, tokens: &[Token], path: &mut Vec<BlockId>) {
        let size = self.block_tokens;
        let mut run = root;
        let mut rest = tokens;
        while rest.len() >= size {
            let Some(child) = self.find(run, &rest[..size]) else { return };
            let next = &self.runs[child as usize];
            let blocks = next.blocks.len().min(rest.len() / size);
            let same = if next.tokens[..blocks * size] == rest[..blocks * size] {
                blocks
            } else {
                let pairs = next.tokens.chunks_exact(size).zip(rest.chunks_exact(size));
                pairs.take_while(|(known, asked)| known == asked).count()
            };
            path.extend_from_slice(&next.blocks[..same]);
            if same < next.blocks.len() {
                return;
            }
            rest = &rest[same * size..];
            run = child;
        }
    }

    /// The child of `parent` (of the root, if none) with these tokens.
    #[must_use]
    pub fn child(&self, root: RunId, parent: Option<BlockId>, tokens: &[Token]) -> Option<BlockId> {
        let run = match parent {
            None => root,
            Some(block) => {
                let place = self.places[block as usize];
                let run = &self.runs[place.run as usize];
                if let Some(&next) = run.blocks.get(place.index as usize + 1) {
                    return (self.tokens(next) == tokens).then_some(next);
                }
                place.run
            }
        };
        self.find(run, tokens).map(|child| self.first(child))
    }

    /// Adds a block behind `parent` (behind the root, if none). The caller has seen that
    /// [`Trie::child`] finds nothing.
    pub fn insert(&mut self, root: RunId, parent: Option<BlockId>, tokens: &[Token]) -> BlockId {
        let run = match parent {
            None => root,
            Some(block) => {
                let place = self.places[block as usize];
                if place.index as usize + 1 < self.runs[place.run as usize].blocks.len() {
                    self.split(place.run, place.index as usize + 1);
                }
                place.run
            }
        };
        let parent = &self.runs[run as usize];
        let fresh = parent.parent == NONE || parent.child != NONE;
        let depth = parent.depth + count(parent.blocks.len());
        let home = if fresh { self.new_run(Run::new(run, depth)) } else { run };
        let index = count(self.runs[home as usize].blocks.len());
        let block = self.new_block(home, index);
        let at = &mut self.runs[home as usize];
        at.tokens.extend_from_slice(tokens);
        at.blocks.push(block);
        if fresh {
            self.adopt(run, home);
        }
        block
    }

    /// Removes a block that has no child; its id may be given out again.
    pub fn remove(&mut self, block: BlockId) {
        debug_assert!(self.children(block).next().is_none());
        let Place { run, .. } = self.places[block as usize];
        if self.runs[run as usize].blocks.len() == 1 {
            let parent = self.runs[run as usize].parent;
            self.disown(run);
            self.runs[run as usize] = Run::new(NONE, 0);
            self.free_runs.push(run);
            self.merge(parent);
        } else {
            let home = &mut self.runs[run as usize];
            home.blocks.pop();
            home.tokens.truncate(home.blocks.len() * self.block_tokens);
        }
        let place = &mut self.places[block as usize];
        place.run = NONE;
        place.generation = place.generation.wrapping_add(1);
        self.free_blocks.push(block);
    }

    /// Every broken invariant, in words.
    #[must_use]
    pub fn audit(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let (mut seen, mut kin) = (0, 0);
        for (id, run) in self.runs.iter().enumerate() {
            if run.tokens.len() != run.blocks.len() * self.block_tokens {
                broken.push(format!("run {id} has {} tokens", run.tokens.len()));
            }
            for (index, &block) in run.blocks.iter().enumerate() {
                seen += 1;
                let place = self.places[block as usize];
                if (place.run as usize, place.index as usize) != (id, index) {
                    broken.push(format!("block {block} is not where run {id} says"));
                }
            }
            let mut previous = NONE;
            for child in self.siblings(run.child).take(self.runs.len()) {
                kin += 1;
                let next = &self.runs[child as usize];
                if next.parent as usize != id || next.blocks.is_empty() {
                    broken.push(format!("run {child} is not a child of run {id}"));
                } else if next.tokens.len() < self.block_tokens
                    || self.find(next.parent, &next.tokens[..self.block_tokens]) != Some(child)
                {
                    broken.push(format!("run {child} is not found behind run {id}"));
                } else if next.depth != run.depth + count(run.blocks.len()) {
                    broken.push(format!("run {child} has depth {}", next.depth));
                }
                if next.previous != previous {
                    broken.push(format!("run {child} comes after run {}", next.previous));
                }
                previous = child;
            }
        }
        if kin != self.table.len() {
            broken.push(format!("{kin} runs have a parent, {} are in the table", self.table.len()));
        }
        if seen != self.len() {
            broken.push(format!("{seen} blocks in runs, {} in the slab", self.len()));
        }
        broken
    }

    fn first(&self, run: RunId) -> BlockId {
        self.runs[run as usize].blocks[0]
    }

    fn find(&self, run: RunId, tokens: &[Token]) -> Option<RunId> {
        let home = &self.runs[run as usize];
        if home.child == NONE {
            return None;
        }
        let same = |&child: &RunId| {
            let child = &self.runs[child as usize];
            child.parent == run && child.tokens[..self.block_tokens] == *tokens
        };
        self.table.find(hash(home.seed(run), tokens), same).copied()
    }

    /// The hash under which the table keeps a run that has a parent.
    fn key(runs: &[Run], size: usize, child: RunId) -> u64 {
        let run = &runs[child as usize];
        hash(runs[run.parent as usize].seed(run.parent), &run.tokens[..size])
    }

    /// Hangs a run that has blocks behind its parent.
    fn adopt(&mut self, run: RunId, child: RunId) {
        let next = std::mem::replace(&mut self.runs[run as usize].child, child);
        if next != NONE {
            self.runs[next as usize].previous = child;
        }
        let own = &mut self.runs[child as usize];
        (own.parent, own.previous, own.next) = (run, NONE, next);
        let (runs, size) = (&self.runs, self.block_tokens);
        let key = Self::key(runs, size, child);
        self.table.insert_unique(key, child, |&other| Self::key(runs, size, other));
    }

    /// Takes a run from its parent.
    fn disown(&mut self, run: RunId) {
        let key = Self::key(&self.runs, self.block_tokens, run);
        let entry = self.table.find_entry(key, |&other| other == run);
        entry.expect("a run is its parent's child").remove();
        let Run { parent, previous, next, .. } = self.runs[run as usize];
        if previous == NONE {
            self.runs[parent as usize].child = next;
        } else {
            self.runs[previous as usize].next = next;
        }
        if next != NONE {
            self.runs[next as usize].previous = previous;
        }
    }

    /// A run and those that `next` leads to.
    fn siblings(&self, first: RunId) -> impl Iterator<Item = RunId> + '_ {
        let link = |run: RunId| (run != NONE).then_some(run);
        std::iter::successors(link(first), move |&run| link(self.runs[run as usize].next))
    }

    /// Cuts a run before block `at`; the front keeps its id, so that its parent need not change.
    fn split(&mut self, run: RunId, at: usize) {
        let front = &mut self.runs[run as usize];
        let back = Run {
            parent: run,
            depth: front.depth + count(at),
            tokens: front.tokens.split_off(at * self.block_tokens),
            blocks: front.blocks.split_off(at),
            child: std::mem::replace(&mut front.child, NONE),
            next: NONE,
            previous: NONE,
        };
        let id = self.new_run(back);
        self.settle(id);
        self.adopt(run, id);
    }

    /// Joins a run with its only child, undoing a split whose reason is gone.
    fn merge(&mut self, run: RunId) {
        let front = &self.runs[run as usize];
        let child = front.child;
        let only = child != NONE && self.runs[child as usize].next == NONE;
        if front.parent == NONE || !only {
            return;
        }
        self.disown(child);
        let back = std::mem::replace(&mut self.runs[child as usize], Run::new(NONE, 0));
        let front = &mut self.runs[run as usize];
        front.tokens.extend_from_slice(&back.tokens);
        front.blocks.extend_from_slice(&back.blocks);
        front.child = back.child;
        self.settle(run);
        self.free_runs.push(child);
    }

    /// Tells blocks and children of a run where they are now.
    fn settle(&mut self, run: RunId) {
        let home = &self.runs[run as usize];
        for (index, &block) in home.blocks.iter().enumerate() {
            let place = &mut self.places[block as usize];
            place.run = run;
            place.index = count(index);
        }
        let mut child = home.child;
        while child != NONE {
            self.runs[child as usize].parent = run;
            child = self.runs[child as usize].next;
        }
    }

    fn new_run(&mut self, run: Run) -> RunId {
        if let Some(id) = self.free_runs.pop() {
            self.runs[id as usize] = run;
            id
        } else {
            self.runs.push(run);
            count(self.runs.len() - 1)
        }
    }

    fn new_block(&mut self, run: RunId, index: u32) -> BlockId {
        if let Some(id) = self.free_blocks.pop() {
            let place = &mut self.places[id as usize];
            place.run = run;
            place.index = index;
            id
        } else {
            self.places.push(Place { run, index, generation: 0 });
            count(self.places.len() - 1)
        }
    }
}

fn hash(seed: u64, tokens: &[Token]) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write_u64(seed);
    for pair in tokens.chunks(2) {
        hasher.write_u64(u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32);
    }
    hasher.finish()
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("fewer than 2^32 blocks")
}

#[cfg(test)]
mod tests {
    use super::{Trie, hash};
    use crate::block::{BlockId, Token};

    /// Two blocks with one hash: their second words differ by minus the hash's multiplier.
    const TWINS: [[Token; 4]; 2] = [[0; 4], [1, 0, 0xD19D_563B, 0x0ECA_8515]];

    fn walk(trie: &Trie, root: u32, tokens: &[Token]) -> Vec<BlockId> {
        let mut path = Vec::new();
        trie.walk(root, tokens, &mut path);
        path
    }

    #[test]
    fn blocks_with_one_hash_are_told_apart_by_their_tokens() {
        #[cfg(target_pointer_width = "64")]
        assert_eq!(hash(7, &TWINS[0]), hash(7, &TWINS[1]));
        for (first, second) in [(0, 1), (1, 0)] {
            let mut trie = Trie::new(4);
            let root = trie.add_root();
            let one = trie.insert(root, None, &TWINS[first]);
            assert_eq!(walk(&trie, root, &TWINS[second]), [0; 0]);
            assert_eq!(trie.child(root, None, &TWINS[second]), None);
            let two = trie.insert(root, None, &TWINS[second]);
            assert_eq!(walk(&trie, root, &TWINS[first]), [one]);
            assert_eq!(walk(&trie, root, &TWINS[second]), [two]);
            trie.remove(one);
            assert_eq!(trie.child(root, None, &TWINS[second]), Some(two));
            assert_eq!((trie.audit(), trie.len()), (vec![], 1));
        }
    }

    #[test]
    fn a_run_that_branched_and_lost_the_branch_is_one_run_again() {
        let mut trie = Trie::new(1);
        let root = trie.add_root();
        let mut path: Vec<BlockId> = Vec::new();
        for token in 0..9 {
            path.push(trie.insert(root, path.last().copied(), &[token]));
        }
        let branch = trie.insert(root, Some(path[3]), &[77]);
        assert_eq!(trie.places[path[8] as usize].index, 4);
        trie.remove(branch);
        let place = trie.places[path[8] as usize];
        assert_eq!((place.index, trie.runs[place.run as usize].blocks.len()), (8, 9));
        assert_eq!(walk(&trie, root, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]), path);
        assert_eq!(trie.audit(), [""; 0]);
    }

    #[test]
    fn an_id_comes_again_under_another_generation() {
        let mut trie = Trie::new(1);
        let root = trie.add_root();
        let block = trie.insert(root, None, &[5]);
        let old = trie.handle(block);
        trie.remove(block);
        assert!(!trie.alive(block) && trie.is_empty());
        assert_eq!(trie.insert(root, None, &[6]), block);
        assert_eq!((trie.resolve(old), trie.resolve(trie.handle(block))), (None, Some(block)));
        assert_eq!(trie.bound(), 1);
    }

    #[test]
    fn the_audit_sees_what_is_out_of_place() {
        let mut trie = Trie::new(1);
        let root = trie.add_root();
        let first = trie.insert(root, None, &[5]);
        trie.insert(root, Some(first), &[6]);
        trie.insert(root, Some(first), &[7]);
        assert_eq!(trie.audit(), [""; 0]);
        let break_it = |change: fn(&mut Trie)| {
            let mut broken = trie.clone();
            change(&mut broken);
            assert!(!broken.audit().is_empty());
        };
        break_it(|trie| trie.places[1].index = 3);
        break_it(|trie| trie.runs[2].depth = 7);
        break_it(|trie| trie.runs[2].tokens[0] = 8);
        break_it(|trie| trie.runs[2].tokens.clear());
        break_it(|trie| trie.runs[2].parent = 0);
        break_it(|trie| trie.runs[1].child = 2);
        break_it(|trie| trie.free_blocks.push(1));
    }
}
