//! The blocks that a lease goes through, in logical order.
//!
//! Nearly every block is used where it stands: it is told by its id alone. What has a slot of the
//! lease's own or is still to be computed is told beside. Invariant: `apart` is in ascending order
//! and holds no step that is merely shared. Cost: four bytes per block; O(log n) for a step that
//! stands apart, O(1) at the end.

use crate::block::{BlockId, Layers};

use super::own::OwnId;

/// A block of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) block: BlockId,
    /// A slot of the lease's own, used instead of the block's.
    pub(super) own: Option<OwnId>,
    /// Layers of `own` that the engine still has to compute.
    pub(super) compute: Layers,
    /// `load` may still bring what is to be computed.
    pub(super) deferred: bool,
    /// What `own` will hold has not been offered to the trie yet.
    pub(super) fresh: bool,
}

impl Step {
    /// A step that uses the block's own residency.
    pub(super) fn shared(block: BlockId) -> Self {
        Self { block, own: None, compute: Layers::NONE, deferred: false, fresh: false }
    }
}

/// Blocks in logical order, and how each is used.
#[derive(Clone, Debug, Default)]
pub(super) struct Path {
    blocks: Vec<BlockId>,
    apart: Vec<(usize, Step)>,
}

impl Path {
    /// All these blocks, used where they stand.
    pub(super) fn of(blocks: Vec<BlockId>) -> Self {
        Self { blocks, apart: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// One step, if the path is that long.
    pub(super) fn get(&self, at: usize) -> Option<Step> {
        let &block = self.blocks.get(at)?;
        let apart = self.apart.binary_search_by_key(&at, |&(at, _)| at);
        Some(apart.map_or_else(|_| Step::shared(block), |found| self.apart[found].1))
    }

    /// Every step, first to last.
    pub(super) fn steps(&self) -> impl Iterator<Item = Step> + '_ {
        let mut apart = self.apart.iter().peekable();
        self.blocks.iter().enumerate().map(move |(at, &block)| {
            apart.next_if(|next| next.0 == at).map_or_else(|| Step::shared(block), |next| next.1)
        })
    }

    /// The steps that are not merely shared, with their places.
    pub(super) fn apart(&self) -> impl Iterator<Item = (usize, Step)> + '_ {
        self.apart.iter().copied()
    }

    /// The slots of the lease's own that it uses.
    pub(super) fn owns(&self) -> impl Iterator<Item = OwnId> + '_ {
        self.apart.iter().filter_map(|(_, step)| step.own)
    }

    /// Whether a step is not offered to the trie yet.
    pub(super) fn fresh(&self) -> bool {
        self.apart.iter().any(|(_, step)| step.fresh)
    }

    /// Changes a step of the path; its block stays.
    pub(super) fn change<R>(&mut self, at: usize, what: impl FnOnce(&mut Step) -> R) -> R {
        let block = self.blocks[at];
        let found = self.apart.binary_search_by_key(&at, |&(at, _)| at);
        let mut step = found.map_or_else(|_| Step::shared(block), |found| self.apart[found].1);
        let out = what(&mut step);
        debug_assert_eq!(step.block, block);
        match (found, step == Step::shared(block)) {
            (Ok(known), true) => drop(self.apart.remove(known)),
            (Ok(known), false) => self.apart[known].1 = step,
            (Err(_), true) => {}
            (Err(place), false) => self.apart.insert(place, (at, step)),
        }
        out
    }

    /// Further blocks at the end, used where they stand.
    pub(super) fn extend(&mut self, blocks: &[BlockId]) {
        self.blocks.extend_from_slice(blocks);
    }

    /// Cuts it before step `at` and returns the rest.
    pub(super) fn split_off(&mut self, at: usize) -> Self {
        let first = self.apart.partition_point(|&(place, _)| place < at);
        let moved = self.apart.split_off(first).into_iter().map(|(place, step)| (place - at, step));
        Self { blocks: self.blocks.split_off(at), apart: moved.collect() }
    }
}

impl From<Step> for Path {
    fn from(step: Step) -> Self {
        let mut path = Self::of(vec![step.block]);
        path.change(0, |known| *known = step);
        path
    }
}

#[cfg(test)]
mod tests {
    use super::{Path, Step};
    use crate::block::Layers;

    /// Beside a plain list of steps.
    #[test]
    fn it_is_a_list_of_steps() {
        let mut path = Path::of((10..20).collect());
        let mut list: Vec<Step> = (10..20).map(Step::shared).collect();
        let compute = |layers: u16| move |step: &mut Step| step.compute = Layers::new(0, layers);
        for (at, layers) in [(7, 2), (3, 1), (9, 4), (7, 0), (3, 5), (0, 0)] {
            path.change(at, compute(layers));
            compute(layers)(&mut list[at]);
            path.extend(&[30 + u32::from(layers)]);
            list.push(Step::shared(30 + u32::from(layers)));
            assert_eq!(path.steps().collect::<Vec<_>>(), list);
            let each: Vec<Step> = (0..path.len()).filter_map(|at| path.get(at)).collect();
            assert_eq!((each, path.get(path.len())), (list.clone(), None));
        }
        assert_eq!(path.apart().map(|(at, _)| at).collect::<Vec<_>>(), [3, 9]);
        let (rest, end) = (path.split_off(4), list.split_off(4));
        assert_eq!(path.steps().collect::<Vec<_>>(), list);
        assert_eq!(rest.steps().collect::<Vec<_>>(), end);
        assert_eq!((rest.apart().next().map(|(at, _)| at), path.fresh()), (Some(5), false));
        let one = Path::from(end[5]);
        assert_eq!((one.len(), one.get(0)), (1, Some(end[5])));
    }
}
