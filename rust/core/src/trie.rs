//! The radix trie: which token blocks exist, where each stands on its path, and what the blocks of
//! a run have in common.
//!
//! A run is a chain of blocks without a branch, numbered one after the other, and tokens lie where
//! the numbers say: contiguous in a run, so matching is a memory comparison. Blocks of one run share
//! a value of the caller's; where it differs, a run is split. Children of a run hang behind its last
//! block; an only child is known by that, and tables find one among siblings by a hash of that block
//! and of its own first one. Both compare exactly.
//! Invariant: no run but a scope's root is empty, and no two children of a run start with the same
//! block. Cost: lookup O(tokens + runs); inserting and removing at the end of a run O(1) a block; a
//! split O(blocks behind it). Beside the tokens six bytes per block and about 80 per run.

mod ids;
mod name;
mod prefetch;
mod query;
mod run;
mod siblings;
#[cfg(test)]
mod tests;
mod tokens;

use std::ops::Range;

use crate::block::{BlockId, Handle, Token};
use crate::paged_vec::{PAGE, PagedVec};
use crate::u32_map::U32Map;

pub use name::{GROUP, GroupSlice, Tags};
pub use query::Query;
pub use run::RunId;

use ids::Ids;
use run::{NONE, Run};
use tokens::TokenPages;

/// Ids kept behind a run that grew by few blocks, for those that follow.
const ROOM: u32 = 8;

/// The trie of all scopes. Block ids are reused; handles carry a generation.
#[derive(Clone, Debug)]
pub struct Trie<T = ()> {
    block_tokens: usize,
    runs: PagedVec<Run<T>>,
    bound: RunId,
    free_runs: Vec<RunId>,
    /// Which ids are blocks, and of which run.
    ids: Ids,
    token_pages: TokenPages,
    generations: PagedVec<u16>,
    living: usize,
    roots: u32,
    /// Every run that has a sibling, by its key.
    siblings: U32Map,
}

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// An empty trie of blocks of `block_tokens` tokens.
    #[must_use]
    pub fn new(block_tokens: usize) -> Self {
        Self {
            block_tokens,
            runs: PagedVec::new(Run::new(NONE, 0, T::default())),
            bound: 0,
            free_runs: Vec::new(),
            ids: Ids::new(),
            token_pages: TokenPages::new(block_tokens),
            generations: PagedVec::new(0),
            living: 0,
            roots: 0,
            siblings: U32Map::default(),
        }
    }

    /// Adds the root of a scope.
    pub fn add_root(&mut self) -> RunId {
        self.roots += 1;
        self.new_run(Run::new(NONE, 0, T::default()))
    }

    /// Whether no block stands behind the root of a scope.
    #[must_use]
    pub fn bare(&self, root: RunId) -> bool {
        self.runs[root].child == NONE
    }

    /// Removes the root of a scope without a block; its id may be given out again.
    pub fn remove_root(&mut self, root: RunId) {
        debug_assert!(self.bare(root), "blocks stand behind root {root}");
        self.roots -= 1;
        self.free_runs.push(root);
    }

    /// How many blocks exist.
    #[must_use]
    pub fn len(&self) -> usize {
        self.living
    }

    /// Whether there is no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.living == 0
    }

    /// One behind the largest block id ever given out.
    #[must_use]
    pub fn bound(&self) -> BlockId {
        self.ids.bound()
    }

    /// Bytes of text that so many more blocks take besides what is there.
    #[must_use]
    pub fn growth(&self, blocks: usize) -> usize {
        self.token_pages.growth(self.len().saturating_add(blocks).max(self.ids.bound() as usize))
    }

    /// How many runs hold the blocks.
    #[must_use]
    pub fn runs(&self) -> usize {
        (self.bound - self.roots) as usize - self.free_runs.len()
    }

    /// Whether the id names a living block.
    #[must_use]
    pub fn alive(&self, block: BlockId) -> bool {
        self.ids.home(block) != NONE
    }

    /// The handle of a living block.
    #[must_use]
    pub fn handle(&self, block: BlockId) -> Handle {
        Handle::new(block, u32::from(self.generations[block]))
    }

    /// The handles of consecutive blocks of one path.
    #[must_use]
    pub fn handles(&self, path: &[BlockId]) -> Vec<Handle> {
        let mut handles = Vec::with_capacity(path.len());
        for (run, _) in self.along(path) {
            let generations = self.generations.stretch(run.start, run.end);
            let numbered = run.zip(generations);
            handles.extend(numbered.map(|(block, &age)| Handle::new(block, u32::from(age))));
        }
        handles
    }

    /// The block behind a handle, if it still lives.
    #[must_use]
    pub fn resolve(&self, handle: Handle) -> Option<BlockId> {
        let block = handle.id();
        (self.alive(block) && u32::from(self.generations[block]) == handle.generation())
            .then_some(block)
    }

    /// How many blocks stand before this one on its path.
    #[must_use]
    pub fn depth(&self, block: BlockId) -> u32 {
        let run = self.home(block);
        run.depth + (block - run.first)
    }

    /// How many blocks stand before the chain without a branch that it belongs to. Cost: O(runs of
    /// the chain).
    #[must_use]
    pub fn start(&self, block: BlockId) -> u32 {
        let mut run = self.home(block);
        loop {
            let above = &self.runs[run.parent];
            if above.parent == NONE || run.next != NONE || run.previous != NONE {
                return run.depth;
            }
            run = above;
        }
    }

    /// The tokens of one block.
    #[must_use]
    pub fn tokens(&self, block: BlockId) -> &[Token] {
        self.token_pages.of(block, 1)
    }

    /// The tokens of consecutive blocks of one run.
    #[must_use]
    pub fn tokens_of(&self, blocks: Range<BlockId>) -> &[Token] {
        self.token_pages.of(blocks.start, blocks.end - blocks.start)
    }

    /// What a block has in common with the others of its run.
    #[must_use]
    pub fn value(&self, block: BlockId) -> &T {
        &self.home(block).value
    }

    /// The blocks of the run that a block belongs to.
    #[must_use]
    pub fn run(&self, block: BlockId) -> Range<BlockId> {
        let run = self.home(block);
        run.first..run.first + run.blocks
    }

    /// Consecutive blocks of one path, run by run, and what those of each run have in common.
    pub fn along<'a>(
        &'a self,
        path: &'a [BlockId],
    ) -> impl Iterator<Item = (Range<BlockId>, &'a T)> + 'a {
        let (mut rest, mut before) = (path, NONE);
        std::iter::from_fn(move || {
            let &first = rest.first()?;
            before = self.behind(before, first);
            let run = &self.runs[before];
            let blocks = rest.len().min((run.first + run.blocks - first) as usize);
            rest = &rest[blocks..];
            Some((first..first + count(blocks), &run.value))
        })
    }

    /// Changes what consecutive blocks of one path have in common with those of their runs, run by
    /// run. Runs that reach beyond them are split; ends that became alike are joined.
    pub fn change(&mut self, path: &[BlockId], mut what: impl FnMut(Range<BlockId>, &mut T)) {
        let (mut rest, mut before) = (path, NONE);
        while let Some(&first) = rest.first() {
            before = self.isolate(before, first, rest.len());
            let run = &mut self.runs[before];
            what(first..first + run.blocks, &mut run.value);
            rest = &rest[run.blocks as usize..];
        }
        let Some(&first) = path.first() else { return };
        self.merge(before);
        self.merge(self.runs[self.ids.home(first)].parent);
    }

    /// The block before this one, if it is not the first of its scope.
    #[must_use]
    pub fn parent(&self, block: BlockId) -> Option<BlockId> {
        let run = self.home(block);
        if block > run.first { Some(block - 1) } else { self.runs[run.parent].last() }
    }

    /// The root of the scope that a block belongs to. Cost: O(runs above it).
    #[must_use]
    pub fn root(&self, block: BlockId) -> RunId {
        let mut run = self.ids.home(block);
        while self.runs[run].parent != NONE {
            run = self.runs[run].parent;
        }
        run
    }

    /// The blocks directly behind this one.
    pub fn children(&self, block: BlockId) -> impl Iterator<Item = BlockId> + '_ {
        let run = self.home(block);
        let next = (run.last() != Some(block)).then_some(block + 1);
        let branches = if next.is_some() { NONE } else { run.child };
        next.into_iter().chain(self.siblings(branches).map(|child| self.runs[child].first))
    }

    /// Whether a block is the only one behind its parent.
    #[must_use]
    pub fn only_child(&self, block: BlockId) -> bool {
        let run = self.home(block);
        block > run.first || (run.previous, run.next) == (NONE, NONE)
    }

    /// The first blocks of a scope.
    pub fn firsts(&self, root: RunId) -> impl Iterator<Item = BlockId> + '_ {
        self.siblings(self.runs[root].child).map(|child| self.runs[child].first)
    }

    /// Appends the blocks of the longest known prefix of `asked` to `path`; whole blocks only.
    pub fn walk(&self, root: RunId, asked: Query<'_>, path: &mut Vec<BlockId>) {
        let size = self.block_tokens;
        let mut run = root;
        let mut rest = asked;
        while rest.len() >= size {
            let Some(child) = self.find(run, &rest.first(size).tokens()) else { return };
            let next = &self.runs[child];
            let blocks = (next.blocks as usize).min(rest.len() / size);
            // The walk is bound by memory: its next step loads while this one is compared.
            if next.child != NONE {
                let ahead = &self.runs[next.child];
                self.token_pages.prefetch_lines(ahead.first);
                if ahead.child != NONE {
                    self.runs.prefetch_line(ahead.child);
                }
            }
            let same = rest.alike(self.token_pages.of(next.first, count(blocks)), size);
            path.extend(next.first..next.first + count(same));
            if same < next.blocks as usize {
                return;
            }
            rest = rest.from(same * size);
            run = child;
        }
    }

    /// The child of `parent` (of the root, if none) with these tokens.
    #[must_use]
    pub fn child(&self, root: RunId, parent: Option<BlockId>, tokens: &[Token]) -> Option<BlockId> {
        let run = match parent {
            None => root,
            Some(block) if self.home(block).last() == Some(block) => self.ids.home(block),
            Some(block) => return (self.tokens(block + 1) == tokens).then_some(block + 1),
        };
        self.find(run, tokens).map(|child| self.runs[child].first)
    }

    /// Adds a block behind `parent` (behind the root, if none). The caller has seen that
    /// [`Trie::child`] finds nothing.
    pub fn insert(
        &mut self,
        root: RunId,
        parent: Option<BlockId>,
        tokens: &[Token],
        value: T,
    ) -> BlockId {
        let mut path = Vec::with_capacity(1);
        self.extend(root, parent, tokens, value, &mut path);
        path[0]
    }

    /// Adds blocks one behind the other, the first behind `parent` (behind the root, if none), and
    /// appends them to `path`. The caller has seen that [`Trie::child`] does not find the first.
    pub fn extend(
        &mut self,
        root: RunId,
        parent: Option<BlockId>,
        tokens: &[Token],
        value: T,
        path: &mut Vec<BlockId>,
    ) {
        let size = self.block_tokens;
        let mut run = root;
        if let Some(block) = parent {
            run = self.ids.home(block);
            let at = block + 1 - self.runs[run].first;
            if at < self.runs[run].blocks {
                self.split(run, at);
            }
        }
        let mut rest = tokens;
        while !rest.is_empty() {
            let wanted = count(rest.len() / size);
            let at = &self.runs[run];
            let joins = at.parent != NONE && at.child == NONE && at.value == value;
            let mut taken = if joins { self.lengthen(run, wanted) } else { 0 };
            let fresh = taken == 0;
            let mut home = run;
            if fresh {
                let at = &self.runs[run];
                let depth = at.depth + at.blocks;
                let (first, length) = self.ids.take(wanted.max(ROOM));
                taken = wanted.min(length);
                let kept = length - taken;
                home = self.new_run(Run { first, room: kept, ..Run::new(run, depth, value) });
            }
            let (now, later) = rest.split_at(taken as usize * size);
            self.append(home, taken, now, path);
            if fresh {
                self.adopt(run, home);
            }
            run = home;
            rest = later;
        }
    }

    /// Takes up to `wanted` ids behind a run's last one.
    fn lengthen(&mut self, run: RunId, wanted: u32) -> u32 {
        let at = &mut self.runs[run];
        if at.room > 0 {
            let taken = wanted.min(at.room);
            at.room -= taken;
            return taken;
        }
        self.ids.extend(at.first + at.blocks, wanted)
    }

    /// Puts blocks, whose ids are taken, at the end of a run.
    fn append(&mut self, run: RunId, taken: u32, tokens: &[Token], path: &mut Vec<BlockId>) {
        let at = &mut self.runs[run];
        let first = at.first + at.blocks;
        at.blocks += taken;
        self.token_pages.put(first, tokens);
        self.generations.reach(self.ids.bound());
        self.ids.settle(first..first + taken, run);
        path.extend(first..first + taken);
        self.living += taken as usize;
    }

    /// Gives back the ids that are kept behind the run of a block for more of them.
    pub fn trim(&mut self, block: BlockId) {
        let run = &mut self.runs[self.ids.home(block)];
        let (first, room) = (run.first + run.blocks, std::mem::take(&mut run.room));
        self.ids.give(first, room);
    }

    /// Removes a block that has no child; its id may be given out again.
    pub fn remove(&mut self, block: BlockId) {
        self.remove_tail(block, 1);
    }

    /// Removes the last blocks of a run that has no child, of which `block` is the last one; their
    /// ids may be given out again.
    pub fn remove_tail(&mut self, block: BlockId, blocks: u32) {
        debug_assert!(self.children(block).next().is_none());
        let id = self.ids.home(block);
        let parent = self.runs[id].parent;
        if blocks == self.runs[id].blocks {
            self.detach(id);
        }
        let run = &mut self.runs[id];
        run.blocks -= blocks;
        let first = run.first + run.blocks;
        let end = first + blocks + std::mem::take(&mut run.room);
        self.living -= blocks as usize;
        let mut free = first;
        let generations = self.generations.stretch_mut(first, first + blocks);
        for (block, generation) in (first..).zip(generations) {
            *generation = generation.saturating_add(1);
            // An id whose generations are used up never comes again.
            if *generation == u16::MAX {
                self.ids.give(free, block - free);
                self.ids.retire(block);
                free = block + 1;
            }
        }
        self.ids.give(free, end - free);
        if self.runs[id].blocks == 0 {
            self.runs[id] = Run::new(NONE, 0, T::default());
            self.free_runs.push(id);
            self.merge(parent);
        }
    }

    /// Every broken invariant, in words.
    #[must_use]
    pub fn audit(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let (mut seen, mut siblings, mut alone) = (0, 0, 0);
        for id in 0..self.bound {
            let run = &self.runs[id];
            alone += usize::from(run.child != NONE && self.runs[run.child].next == NONE);
            for block in (0..run.blocks).map(|at| run.first + at) {
                seen += 1;
                if self.ids.home(block) != id {
                    broken.push(format!("block {block} is not where run {id} says"));
                }
                if self.ids.is_free(block) {
                    broken.push(format!("block {block} of run {id} is free"));
                }
            }
            let mut previous = NONE;
            for child in self.siblings(run.child).take(self.bound as usize) {
                siblings += 1;
                let next = &self.runs[child];
                if next.parent != id || next.blocks == 0 {
                    broken.push(format!("run {child} is not a child of run {id}"));
                } else if self.find(next.parent, self.token_pages.of(next.first, 1)) != Some(child)
                {
                    broken.push(format!("run {child} is not found behind run {id}"));
                } else if next.depth != run.depth + run.blocks {
                    broken.push(format!("run {child} has depth {}", next.depth));
                }
                if next.previous != previous {
                    broken.push(format!("run {child} comes after run {}", next.previous));
                }
                previous = child;
            }
        }
        if siblings != self.runs() {
            broken.push(format!("{siblings} runs have a parent, {} are counted", self.runs()));
        }
        let known = self.siblings.len();
        if siblings - alone != known {
            broken.push(format!(
                "{} runs have a sibling, {known} are in the tables",
                siblings - alone
            ));
        }
        if seen != self.len() {
            broken.push(format!("{seen} blocks in runs, {} are counted", self.len()));
        }
        broken
    }

    #[inline]
    fn home(&self, block: BlockId) -> &Run<T> {
        &self.runs[self.ids.home(block)]
    }

    /// The run of a block, which stands behind the run `before` if one is named. An only child is
    /// found without a look at where each block is.
    fn behind(&self, before: RunId, block: BlockId) -> RunId {
        if before != NONE {
            let child = self.runs[before].child;
            if child != NONE && self.runs[child].first == block {
                return child;
            }
        }
        self.ids.home(block)
    }

    /// Splits the run of `block`, which stands behind the run `before` if one is named, so that it
    /// begins with `block` and has at most `blocks` blocks.
    fn isolate(&mut self, before: RunId, block: BlockId, blocks: usize) -> RunId {
        let mut run = self.behind(before, block);
        let at = block - self.runs[run].first;
        if at > 0 {
            self.split(run, at);
            run = self.ids.home(block);
        }
        if (self.runs[run].blocks as usize) > blocks {
            self.split(run, count(blocks));
        }
        run
    }

    /// Cuts a run before block `at`; the front keeps its id, so that its parent need not change.
    fn split(&mut self, run: RunId, at: u32) {
        let front = &mut self.runs[run];
        let back = Run {
            parent: run,
            depth: front.depth + at,
            first: front.first + at,
            blocks: front.blocks - at,
            room: std::mem::take(&mut front.room),
            child: std::mem::replace(&mut front.child, NONE),
            next: NONE,
            previous: NONE,
            key: 0,
            value: front.value,
        };
        front.blocks = at;
        let id = self.new_run(back);
        self.settle(id);
        self.adopt(run, id);
    }

    /// Joins a run with its only child, undoing a split whose reason is gone.
    fn merge(&mut self, run: RunId) {
        let front = &self.runs[run];
        let child = front.child;
        if front.parent == NONE || child == NONE {
            return;
        }
        let back = &self.runs[child];
        let follows =
            front.first + front.blocks == back.first && !(back.first as usize).is_multiple_of(PAGE);
        if back.next != NONE || !follows || front.value != back.value {
            return;
        }
        self.detach(child);
        let vacant = Run::new(NONE, 0, T::default());
        let back = std::mem::replace(&mut self.runs[child], vacant);
        let front = &mut self.runs[run];
        front.blocks += back.blocks;
        front.room = back.room;
        front.child = back.child;
        self.settle(run);
        self.free_runs.push(child);
    }

    /// Tells blocks and children of a run where they are now.
    fn settle(&mut self, run: RunId) {
        let Run { first, blocks, mut child, .. } = self.runs[run];
        self.ids.settle(first..first + blocks, run);
        while child != NONE {
            self.runs[child].parent = run;
            child = self.runs[child].next;
        }
    }

    fn new_run(&mut self, run: Run<T>) -> RunId {
        let id = self.free_runs.pop().unwrap_or_else(|| {
            self.bound += 1;
            self.runs.reach(self.bound);
            self.bound - 1
        });
        self.runs[id] = run;
        id
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("fewer than 2^32 blocks")
}
