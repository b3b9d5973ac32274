//! Radix trie of token blocks: finds the longest known prefix of a prompt, and the depth of a
//! block.
//!
//! A run is a chain of blocks without a branch. Its block ids are consecutive and its tokens are
//! contiguous in memory, so a match is a memory comparison. The blocks of a run share a value of
//! the caller. Changing part of a run splits it. Neighbours with equal values are merged again.
//!
//! ```text
//!   root ──> run 1: blocks 0..4 ──┬──> run 2: blocks 4..9     (siblings: in the hash table,
//!                                 └──> run 3: blocks 16..18    by last block of run 1, own tokens)
//!                                           └──> run 4: blocks 24..99   (only child: no table)
//! ```
//!
//! A match compares tokens, never hashes alone. Invariants: only roots of scopes are empty runs. No
//! two children of a run start with the same block. Cost: lookup O(tokens + runs). O(1) per block
//! inserted or removed at the end of a run. A split is O(blocks after it). In addition to the
//! tokens, 6 bytes per block and about 80 per run.

mod audit;
mod ids;
#[cfg(test)]
mod model;
mod prefetch;
mod query;
mod run;
mod siblings;
mod tags;
#[cfg(test)]
mod tests;
mod tokens;

use std::ops::Range;

use crate::block::{BlockId, Handle, Token};
use crate::paged_vec::{PAGE, PagedVec};
use crate::u32_map::U32Map;

pub use query::Query;
pub(crate) use run::RunId;
pub(crate) use tags::content;
pub(crate) use tags::{GROUP, GroupSlice, sample_hash};

use ids::Ids;
use run::{NONE, Run};
use tokens::TokenPages;

/// Ids reserved for the next blocks after a run that grew by few blocks.
const RESERVE: u32 = 8;

/// Trie of all scopes. Block ids are reused. Handles carry a generation, so stale handles fail.
#[derive(Clone, Debug)]
pub(crate) struct Trie<T = ()> {
    block_tokens: usize,
    runs: PagedVec<Run<T>>,
    bound: RunId,
    free_runs: Vec<RunId>,
    /// Allocator of block ids, with the run of each block.
    ids: Ids,
    token_pages: TokenPages,
    generations: PagedVec<u16>,
    blocks: usize,
    roots: u32,
    /// Hash table of runs with a sibling.
    siblings: U32Map,
}

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// An empty trie of blocks of `block_tokens` tokens.
    #[must_use]
    pub(crate) fn new(block_tokens: usize) -> Self {
        Self {
            block_tokens,
            runs: PagedVec::new(Run::new(NONE, 0, T::default())),
            bound: 0,
            free_runs: Vec::new(),
            ids: Ids::new(),
            token_pages: TokenPages::new(block_tokens),
            generations: PagedVec::new(0),
            blocks: 0,
            roots: 0,
            siblings: U32Map::default(),
        }
    }

    /// Adds the root of a scope.
    pub(crate) fn add_root(&mut self) -> RunId {
        self.roots += 1;
        self.new_run(Run::new(NONE, 0, T::default()))
    }

    /// Whether a scope's root has no blocks.
    #[must_use]
    pub(crate) fn has_no_blocks(&self, root: RunId) -> bool {
        self.runs[root].child == NONE
    }

    /// Removes the root of a scope without blocks. Its id may be reused.
    pub(crate) fn remove_root(&mut self, root: RunId) {
        debug_assert!(self.has_no_blocks(root), "root {root} has blocks");
        self.roots -= 1;
        self.free_runs.push(root);
    }

    /// Number of blocks.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.blocks
    }

    /// Whether there is no block.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// The largest block id ever allocated, plus 1.
    #[must_use]
    pub(crate) fn bound(&self) -> BlockId {
        self.ids.bound()
    }

    /// Bytes of token memory needed for `blocks` more blocks.
    #[must_use]
    pub(crate) fn growth(&self, blocks: usize) -> usize {
        self.token_pages.growth(self.len().saturating_add(blocks).max(self.ids.bound() as usize))
    }

    /// Number of runs, without roots.
    #[must_use]
    pub(crate) fn runs(&self) -> usize {
        (self.bound - self.roots) as usize - self.free_runs.len()
    }

    /// Whether this id is in use.
    #[must_use]
    pub(crate) fn alive(&self, block: BlockId) -> bool {
        self.ids.run_of(block) != NONE
    }

    /// The handle of a block.
    #[must_use]
    pub(crate) fn handle(&self, block: BlockId) -> Handle {
        Handle::new(block, u32::from(self.generations[block]))
    }

    /// The handles of consecutive blocks of a path.
    #[must_use]
    pub(crate) fn handles(&self, path: &[BlockId]) -> Vec<Handle> {
        let mut handles = Vec::with_capacity(path.len());
        for (run, _) in self.along(path) {
            let generations = self.generations.stretch(run.start, run.end);
            let numbered = run.zip(generations);
            handles.extend(numbered.map(|(block, &age)| Handle::new(block, u32::from(age))));
        }
        handles
    }

    /// The block of a handle, unless it was removed since.
    #[must_use]
    pub(crate) fn resolve(&self, handle: Handle) -> Option<BlockId> {
        let block = handle.id();
        (self.alive(block) && u32::from(self.generations[block]) == handle.generation())
            .then_some(block)
    }

    /// Number of blocks before this one on its path.
    #[must_use]
    pub(crate) fn depth(&self, block: BlockId) -> u32 {
        let run = self.run_of(block);
        run.depth + (block - run.first)
    }

    /// Depth of the branchless chain containing this block. Cost: O(runs of the chain).
    #[must_use]
    pub(crate) fn start(&self, block: BlockId) -> u32 {
        self.start_of(self.ids.run_of(block))
    }

    /// Depth of the branchless chain containing this run.
    fn start_of(&self, run: RunId) -> u32 {
        let mut run = &self.runs[run];
        loop {
            let above = &self.runs[run.parent];
            // Consecutive runs with different values form a chain. Only a sibling ends it.
            if above.parent == NONE || run.next != NONE || run.previous != NONE {
                return run.depth;
            }
            run = above;
        }
    }

    /// The tokens of a block.
    #[must_use]
    pub(crate) fn tokens(&self, block: BlockId) -> &[Token] {
        self.token_pages.of(block, 1)
    }

    /// The tokens of consecutive blocks of a run.
    #[must_use]
    pub(crate) fn tokens_of(&self, blocks: Range<BlockId>) -> &[Token] {
        self.token_pages.of(blocks.start, blocks.end - blocks.start)
    }

    /// The caller's value of a block, shared by its run.
    #[must_use]
    pub(crate) fn value(&self, block: BlockId) -> &T {
        &self.run_of(block).value
    }

    /// The blocks of this block's run.
    #[must_use]
    pub(crate) fn run(&self, block: BlockId) -> Range<BlockId> {
        let run = self.run_of(block);
        run.first..run.first + run.blocks
    }

    /// Consecutive blocks of a path, run by run, each with the run's value.
    pub(crate) fn along<'a>(
        &'a self,
        path: &'a [BlockId],
    ) -> impl Iterator<Item = (Range<BlockId>, &'a T)> + 'a {
        self.runs_along(path).map(|(blocks, run)| (blocks, &self.runs[run].value))
    }

    /// Consecutive blocks of a path, run by run, each with the run's value and the depth of its
    /// branchless chain.
    pub(crate) fn starts_along<'a>(
        &'a self,
        path: &'a [BlockId],
    ) -> impl Iterator<Item = (Range<BlockId>, &'a T, u32)> + 'a {
        let mut start = None;
        self.runs_along(path).map(move |(blocks, id)| {
            let run = &self.runs[id];
            // Along a chain without a branch the start stays equal.
            let alone = (run.previous, run.next) == (NONE, NONE);
            let depth = start.filter(|_| alone).unwrap_or_else(|| self.start_of(id));
            start = Some(depth);
            (blocks, &run.value, depth)
        })
    }

    /// Consecutive blocks of a path, run by run.
    fn runs_along<'a>(
        &'a self,
        path: &'a [BlockId],
    ) -> impl Iterator<Item = (Range<BlockId>, RunId)> + 'a {
        let (mut rest, mut before) = (path, NONE);
        std::iter::from_fn(move || {
            let &first = rest.first()?;
            before = self.next_run(before, first);
            let run = &self.runs[before];
            let blocks = rest.len().min((run.first + run.blocks - first) as usize);
            rest = &rest[blocks..];
            Some((first..first + count(blocks), before))
        })
    }

    /// Changes the values of consecutive blocks of a path, run by run.
    ///
    /// Splits runs reaching beyond the path, and merges neighbours with equal values.
    pub(crate) fn change(
        &mut self,
        path: &[BlockId],
        mut change: impl FnMut(Range<BlockId>, &mut T),
    ) {
        let (mut rest, mut before) = (path, NONE);
        while let Some(&first) = rest.first() {
            before = self.isolate(before, first, rest.len());
            let run = &mut self.runs[before];
            change(first..first + run.blocks, &mut run.value);
            rest = &rest[run.blocks as usize..];
        }
        let Some(&first) = path.first() else { return };
        // Only the two ends can have become equal to an unchanged neighbour.
        self.merge(before);
        self.merge(self.runs[self.ids.run_of(first)].parent);
    }

    /// The previous block, or `None` for the first of its scope.
    #[must_use]
    pub(crate) fn parent(&self, block: BlockId) -> Option<BlockId> {
        let run = self.run_of(block);
        if block > run.first { Some(block - 1) } else { self.runs[run.parent].last() }
    }

    /// The root of a block's scope. Cost: O(runs above it).
    #[cfg(test)]
    pub(crate) fn root(&self, block: BlockId) -> RunId {
        let mut run = self.ids.run_of(block);
        while self.runs[run].parent != NONE {
            run = self.runs[run].parent;
        }
        run
    }

    /// The blocks directly after this block.
    pub(crate) fn children(&self, block: BlockId) -> impl Iterator<Item = BlockId> + '_ {
        let run = self.run_of(block);
        let next = (run.last() != Some(block)).then_some(block + 1);
        let branches = if next.is_some() { NONE } else { run.child };
        next.into_iter().chain(self.siblings(branches).map(|child| self.runs[child].first))
    }

    /// Whether a block has no sibling.
    #[must_use]
    pub(crate) fn only_child(&self, block: BlockId) -> bool {
        let run = self.run_of(block);
        block > run.first || (run.previous, run.next) == (NONE, NONE)
    }

    /// The first blocks of a scope's paths.
    pub(crate) fn first_blocks(&self, root: RunId) -> impl Iterator<Item = BlockId> + '_ {
        self.siblings(self.runs[root].child).map(|child| self.runs[child].first)
    }

    /// Appends the blocks of the longest known prefix of `query` to `path`. Full blocks only.
    pub(crate) fn walk(&self, root: RunId, query: Query<'_>, path: &mut Vec<BlockId>) {
        let size = self.block_tokens;
        let mut run = root;
        let mut rest = query;
        while rest.len() >= size {
            let Some(child) = self.find(run, &rest.first(size).tokens()) else { return };
            let next = &self.runs[child];
            let blocks = (next.blocks as usize).min(rest.len() / size);
            // The walk is bound by memory latency: load the next step while comparing this one.
            if next.child != NONE {
                let after = &self.runs[next.child];
                self.token_pages.prefetch_lines(after.first);
                if after.child != NONE {
                    self.runs.prefetch_line(after.child);
                }
            }
            let equal = rest.equal_blocks(self.token_pages.of(next.first, count(blocks)), size);
            path.extend(next.first..next.first + count(equal));
            // The query ends or diverges inside this run, so no child can match.
            if equal < next.blocks as usize {
                return;
            }
            rest = rest.from(equal * size);
            run = child;
        }
    }

    /// The child of `parent` (of the root, if none) with these tokens.
    #[must_use]
    pub(crate) fn child(
        &self,
        root: RunId,
        parent: Option<BlockId>,
        tokens: &[Token],
    ) -> Option<BlockId> {
        let run = match parent {
            None => root,
            Some(block) if self.run_of(block).last() == Some(block) => self.ids.run_of(block),
            // Inside a run the next block is the only child.
            Some(block) => return (self.tokens(block + 1) == tokens).then_some(block + 1),
        };
        self.find(run, tokens).map(|child| self.runs[child].first)
    }

    /// Inserts a block after `parent` (after the root, if none). [`Trie::child`] must not find it.
    #[cfg(test)]
    pub(crate) fn insert(
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

    /// Inserts consecutive blocks, the first after `parent` (after the root, if none), and appends
    /// them to `path`. [`Trie::child`] must not find the first.
    pub(crate) fn extend(
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
            run = self.ids.run_of(block);
            let at = block + 1 - self.runs[run].first;
            // Children hang off the last block of a run only.
            if at < self.runs[run].blocks {
                self.split(run, at);
            }
        }
        let mut rest = tokens;
        while !rest.is_empty() {
            let wanted = count(rest.len() / size);
            let at = &self.runs[run];
            // A leaf of the same value grows in place, if the ids after it are free.
            let grows = at.parent != NONE && at.child == NONE && at.value == value;
            let mut taken = if grows { self.lengthen(run, wanted) } else { 0 };
            let fresh = taken == 0;
            let mut home = run;
            if fresh {
                let at = &self.runs[run];
                let depth = at.depth + at.blocks;
                // Keeps the ids of a run growing by single blocks consecutive.
                let (first, length) = self.ids.take(wanted.max(RESERVE));
                taken = wanted.min(length);
                let kept = length - taken;
                home = self.new_run(Run { first, reserved: kept, ..Run::new(run, depth, value) });
            }
            // The ids may end at a page or at a used id. The rest goes into further runs.
            let (now, later) = rest.split_at(taken as usize * size);
            self.append(home, taken, now, path);
            if fresh {
                // Not earlier: the table of siblings reads its first block's tokens.
                self.adopt(run, home);
            }
            run = home;
            rest = later;
        }
    }

    /// Allocates up to `wanted` ids directly after a run's last block.
    fn lengthen(&mut self, run: RunId, wanted: u32) -> u32 {
        let at = &mut self.runs[run];
        // Reserved ids are allocated already; only their owner may use them.
        if at.reserved > 0 {
            let taken = wanted.min(at.reserved);
            at.reserved -= taken;
            return taken;
        }
        self.ids.extend(at.first + at.blocks, wanted)
    }

    /// Appends blocks with allocated ids to a run.
    fn append(&mut self, run: RunId, taken: u32, tokens: &[Token], path: &mut Vec<BlockId>) {
        let at = &mut self.runs[run];
        let first = at.first + at.blocks;
        at.blocks += taken;
        self.token_pages.put(first, tokens);
        self.generations.reach(self.ids.bound());
        self.ids.assign(first..first + taken, run);
        path.extend(first..first + taken);
        self.blocks += taken as usize;
    }

    /// Frees the ids reserved after a block's run.
    pub(crate) fn trim(&mut self, block: BlockId) {
        let run = &mut self.runs[self.ids.run_of(block)];
        let (first, reserved) = (run.first + run.blocks, std::mem::take(&mut run.reserved));
        self.ids.give(first, reserved);
    }

    /// Removes a block without children. Its id may be reused.
    #[cfg(test)]
    pub(crate) fn remove(&mut self, block: BlockId) {
        self.remove_tail(block, 1);
    }

    /// Removes the last `blocks` blocks of a childless run ending with `block`. Their ids may be
    /// reused.
    pub(crate) fn remove_tail(&mut self, block: BlockId, blocks: u32) {
        debug_assert!(self.children(block).next().is_none());
        let id = self.ids.run_of(block);
        let parent = self.runs[id].parent;
        if blocks == self.runs[id].blocks {
            self.detach(id);
        }
        let run = &mut self.runs[id];
        run.blocks -= blocks;
        let first = run.first + run.blocks;
        // The end of the run moved, so the ids reserved after it are no longer adjacent.
        let end = first + blocks + std::mem::take(&mut run.reserved);
        self.blocks -= blocks as usize;
        let mut free = first;
        let generations = self.generations.stretch_mut(first, first + blocks);
        for (block, generation) in (first..).zip(generations) {
            *generation = generation.saturating_add(1);
            // Retire an id whose generations are used up: an old handle must not resolve again.
            if *generation == u16::MAX {
                self.ids.give(free, block - free);
                self.ids.retire(block);
                free = block + 1;
            }
        }
        self.ids.give(free, end - free);
        // Without this branch, its sibling may be mergeable with the parent.
        if self.runs[id].blocks == 0 {
            self.runs[id] = Run::new(NONE, 0, T::default());
            self.free_runs.push(id);
            self.merge(parent);
        }
    }

    #[inline]
    fn run_of(&self, block: BlockId) -> &Run<T> {
        &self.runs[self.ids.run_of(block)]
    }

    /// The run of a block. `before` is the run before it on the path, if known: an only child is
    /// then found without a lookup by id.
    fn next_run(&self, before: RunId, block: BlockId) -> RunId {
        if before != NONE {
            let child = self.runs[before].child;
            if child != NONE && self.runs[child].first == block {
                return child;
            }
        }
        self.ids.run_of(block)
    }

    /// Splits a block's run to get a run of at most `blocks` blocks starting at `block`. `before`
    /// as in `next_run`.
    fn isolate(&mut self, before: RunId, block: BlockId, blocks: usize) -> RunId {
        let mut run = self.next_run(before, block);
        let at = block - self.runs[run].first;
        if at > 0 {
            self.split(run, at);
            run = self.ids.run_of(block);
        }
        if (self.runs[run].blocks as usize) > blocks {
            self.split(run, count(blocks));
        }
        run
    }

    /// Splits a run before its block number `at`. The front keeps the id, so its parent stays
    /// valid.
    fn split(&mut self, run: RunId, at: u32) {
        let front = &mut self.runs[run];
        let back = Run {
            parent: run,
            depth: front.depth + at,
            first: front.first + at,
            blocks: front.blocks - at,
            reserved: std::mem::take(&mut front.reserved),
            child: std::mem::replace(&mut front.child, NONE),
            next: NONE,
            previous: NONE,
            key: 0,
            value: front.value,
        };
        front.blocks = at;
        let id = self.new_run(back);
        self.repoint(id);
        self.adopt(run, id);
    }

    /// Merges a run with its only child if their ids are adjacent and their values equal.
    fn merge(&mut self, run: RunId) {
        let front = &self.runs[run];
        let child = front.child;
        if front.parent == NONE || child == NONE {
            return;
        }
        // A run must not cross a page: its tokens would not be contiguous.
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
        front.reserved = back.reserved;
        front.child = back.child;
        self.repoint(run);
        self.free_runs.push(child);
    }

    /// Points a run's blocks and children at its id.
    fn repoint(&mut self, run: RunId) {
        let Run { first, blocks, mut child, .. } = self.runs[run];
        self.ids.assign(first..first + blocks, run);
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
