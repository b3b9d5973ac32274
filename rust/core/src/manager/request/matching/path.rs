//! Lease paths: a list of blocks in logical order, with exceptions.
//!
//! Nearly every block is used in its residency and needs only its id. A block with a private slot,
//! or a block to compute, has a row in a side list. Invariant: `exceptions` ascends and has no
//! shared steps. Cost: four bytes per block. O(log n) per exception, O(1) at the end.

use crate::block::{BlockId, Layers};
use crate::private_slots::PrivateSlotId;

/// Step of a path: a block, with the slot used by the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PathBlock {
    pub(crate) block: BlockId,
    /// A private slot, used instead of the block's residency.
    pub(crate) private: Option<PrivateSlotId>,
    /// Layers of `private` still to be computed by the engine.
    pub(crate) compute: Layers,
    /// Whether `load` may still bring the layers to compute.
    pub(crate) deferred: bool,
    /// Whether the block in `private` must still be offered to the trie.
    pub(crate) fresh: bool,
}

impl PathBlock {
    /// A step with the block's residency.
    pub(crate) fn shared(block: BlockId) -> Self {
        Self { block, private: None, compute: Layers::NONE, deferred: false, fresh: false }
    }
}

/// Path: blocks in logical order, with the exceptional steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct LeasePath {
    blocks: Vec<BlockId>,
    exceptions: Vec<(usize, PathBlock)>,
}

impl LeasePath {
    /// A path of shared blocks.
    pub(crate) fn of(blocks: Vec<BlockId>) -> Self {
        Self { blocks, exceptions: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The step at a place, or `None` after the end of the path.
    pub(crate) fn get(&self, at: usize) -> Option<PathBlock> {
        let &block = self.blocks.get(at)?;
        let exceptions = self.exceptions.binary_search_by_key(&at, |&(at, _)| at);
        Some(exceptions.map_or_else(|_| PathBlock::shared(block), |found| self.exceptions[found].1))
    }

    /// All steps, first to last.
    pub(crate) fn steps(&self) -> impl Iterator<Item = PathBlock> + '_ {
        let mut exceptions = self.exceptions.iter().peekable();
        self.blocks.iter().enumerate().map(move |(at, &block)| {
            exceptions
                .next_if(|next| next.0 == at)
                .map_or_else(|| PathBlock::shared(block), |next| next.1)
        })
    }

    /// The exceptional steps, with their places.
    pub(crate) fn exceptions(&self) -> impl Iterator<Item = (usize, PathBlock)> + '_ {
        self.exceptions.iter().copied()
    }

    /// The private slots of the path.
    pub(crate) fn private_slots(&self) -> impl Iterator<Item = PrivateSlotId> + '_ {
        self.exceptions.iter().filter_map(|(_, step)| step.private)
    }

    /// Whether any step must still be offered to the trie.
    pub(crate) fn fresh(&self) -> bool {
        self.exceptions.iter().any(|(_, step)| step.fresh)
    }

    /// Number of blocks before the first fresh step.
    pub(crate) fn written(&self) -> usize {
        let fresh = self.exceptions.iter().find(|(_, step)| step.fresh);
        fresh.map_or(self.blocks.len(), |&(place, _)| place)
    }

    /// Changes a step in place. Its block stays.
    pub(crate) fn change<R>(&mut self, at: usize, what: impl FnOnce(&mut PathBlock) -> R) -> R {
        let block = self.blocks[at];
        let found = self.exceptions.binary_search_by_key(&at, |&(at, _)| at);
        let mut step =
            found.map_or_else(|_| PathBlock::shared(block), |found| self.exceptions[found].1);
        let out = what(&mut step);
        debug_assert_eq!(step.block, block);
        // A step that has become shared leaves the list.
        match (found, step == PathBlock::shared(block)) {
            (Ok(known), true) => drop(self.exceptions.remove(known)),
            (Ok(known), false) => self.exceptions[known].1 = step,
            (Err(_), true) => {}
            (Err(place), false) => self.exceptions.insert(place, (at, step)),
        }
        out
    }

    /// Appends shared blocks.
    pub(crate) fn extend(&mut self, blocks: &[BlockId]) {
        self.blocks.extend_from_slice(blocks);
    }

    /// Splits the path before step `at`, and returns the rest.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let first = self.exceptions.partition_point(|&(place, _)| place < at);
        let moved =
            self.exceptions.split_off(first).into_iter().map(|(place, step)| (place - at, step));
        Self { blocks: self.blocks.split_off(at), exceptions: moved.collect() }
    }
}

/// The blocks of a path at these places.
pub(crate) fn blocks_at(path: &[BlockId], places: &[u32]) -> impl Iterator<Item = BlockId> {
    places.iter().map(|&place| path[place as usize])
}

/// The border after a path.
pub(in crate::manager) fn path_border(path: &[BlockId]) -> u32 {
    u32::try_from(path.len()).expect("fewer than 2^32 blocks")
}

impl From<PathBlock> for LeasePath {
    fn from(step: PathBlock) -> Self {
        let mut path = Self::of(vec![step.block]);
        path.change(0, |known| *known = step);
        path
    }
}

#[cfg(test)]
mod tests {
    use super::{LeasePath, PathBlock};
    use crate::block::Layers;

    /// Compares with a plain list of steps.
    #[test]
    fn it_is_a_list_of_steps() {
        let mut path = LeasePath::of((10..20).collect());
        let mut list: Vec<PathBlock> = (10..20).map(PathBlock::shared).collect();
        let compute =
            |layers: u16| move |step: &mut PathBlock| step.compute = Layers::new(0, layers);
        for (at, layers) in [(7, 2), (3, 1), (9, 4), (7, 0), (3, 5), (0, 0)] {
            path.change(at, compute(layers));
            compute(layers)(&mut list[at]);
            path.extend(&[30 + u32::from(layers)]);
            list.push(PathBlock::shared(30 + u32::from(layers)));
            assert_eq!(path.steps().collect::<Vec<_>>(), list);
            let each: Vec<PathBlock> = (0..path.len()).filter_map(|at| path.get(at)).collect();
            assert_eq!((each, path.get(path.len())), (list.clone(), None));
        }
        assert_eq!(path.exceptions().map(|(at, _)| at).collect::<Vec<_>>(), [3, 9]);
        let (rest, end) = (path.split_off(4), list.split_off(4));
        assert_eq!(path.steps().collect::<Vec<_>>(), list);
        assert_eq!(rest.steps().collect::<Vec<_>>(), end);
        assert_eq!((rest.exceptions().next().map(|(at, _)| at), path.fresh()), (Some(5), false));
        let one = LeasePath::from(end[5]);
        assert_eq!((one.len(), one.get(0)), (1, Some(end[5])));
    }
}
