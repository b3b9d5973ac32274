//! Basic types: ids of blocks, slots, tiers, leases and moves, and ranges of layers.
//!
//! Invariant: imports nothing of the manager. Cost: plain integers.

use std::fmt;

/// A token id.
pub type Token = u32;

/// Index of a block. Handles that leave the crate have a generation too, see [`Handle`].
pub type BlockId = u32;

/// Index of a slot on a tier: space for a block, or for a single layer on tiers with layer slots.
pub type Slot = u32;

/// Index of a tier, fastest first.
pub type TierId = usize;

/// Number of a group of layers, in the model's order.
pub type GroupId = usize;

/// Id of a lease, never reused.
pub type LeaseId = u64;

/// Id of a move, never reused. 0 is no move.
pub type MoveId = u64;

/// Unknown slot of an endpoint, for example an engine's slot before `bind`.
pub const NO_SLOT: Slot = Slot::MAX;

/// Id of no move.
pub const NO_MOVE: MoveId = 0;

/// Place of a block's residency: a group of layers on a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Tier.
    pub tier: TierId,
    /// Group of layers.
    pub group: GroupId,
}

impl Place {
    /// A group on a tier.
    #[must_use]
    pub const fn new(tier: TierId, group: GroupId) -> Self {
        Self { tier, group }
    }
}

/// A tier converts to its first group. Most models have a single group.
impl From<TierId> for Place {
    fn from(tier: TierId) -> Self {
        Self::new(tier, 0)
    }
}

/// Layers of a group in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Part {
    /// Group of layers.
    pub group: GroupId,
    /// Block.
    pub block: BlockId,
}

/// A contiguous range of model layers, `lo..hi`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layers {
    /// The first layer.
    pub lo: u16,
    /// The last layer plus 1.
    pub hi: u16,
}

impl Layers {
    /// The empty range.
    pub const NONE: Self = Self { lo: 0, hi: 0 };

    /// The range `lo..hi`.
    #[must_use]
    pub const fn new(lo: u16, hi: u16) -> Self {
        Self { lo, hi }
    }

    /// Number of layers.
    #[must_use]
    pub const fn len(self) -> u16 {
        self.hi.saturating_sub(self.lo)
    }

    /// Whether the range is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.hi <= self.lo
    }

    /// Whether the range contains `layer`.
    #[must_use]
    pub const fn contains(self, layer: u16) -> bool {
        self.lo <= layer && layer < self.hi
    }

    /// Whether the range contains all of `other`. An empty range is always covered.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        other.is_empty() || (self.lo <= other.lo && other.hi <= self.hi)
    }

    /// The intersection, or [`Layers::NONE`] if the ranges are disjoint.
    #[must_use]
    pub fn meet(self, other: Self) -> Self {
        let both = Self::new(self.lo.max(other.lo), self.hi.min(other.hi));
        if both.is_empty() { Self::NONE } else { both }
    }

    /// The union, or `None` if there is a gap between the ranges.
    #[must_use]
    pub fn join(self, other: Self) -> Option<Self> {
        if self.is_empty() {
            return Some(other);
        }
        if other.is_empty() {
            return Some(self);
        }
        (self.lo <= other.hi && other.lo <= self.hi)
            .then(|| Self::new(self.lo.min(other.lo), self.hi.max(other.hi)))
    }

    /// The difference, or `None` if it is not contiguous.
    #[must_use]
    pub fn without(self, other: Self) -> Option<Self> {
        let cut = self.meet(other);
        if cut.is_empty() {
            Some(self)
        } else if cut == self {
            Some(Self::NONE)
        } else if cut.lo == self.lo {
            Some(Self::new(cut.hi, self.hi))
        } else if cut.hi == self.hi {
            Some(Self::new(self.lo, cut.lo))
        } else {
            None
        }
    }

    /// The layers in ascending order.
    #[must_use]
    pub fn iter(self) -> std::ops::Range<u16> {
        self.lo..self.hi
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.lo, self.hi)
    }
}

/// Handle of a block: index and generation. A removed block's handle no longer resolves.
///
/// ```text
/// bits 63..32 generation    bits 31..0 index
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

impl Handle {
    /// Joins index and generation.
    #[must_use]
    pub fn new(id: BlockId, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(id))
    }

    /// The slab index.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the index")]
    pub fn id(self) -> BlockId {
        self.0 as u32
    }

    /// The generation.
    #[must_use]
    pub fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Structure of a scope: whether blocks inside a path may be evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Structure {
    /// Only the last block of a path may leave, so every cached prefix stays usable.
    #[default]
    LeafOnly,
    /// Any block may leave. A missing block is recomputed at its own positions.
    Holes,
}

impl Structure {
    /// The name users write.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LeafOnly => "leaf-only",
            Self::Holes => "holes",
        }
    }
}

/// Kind of departure from a tier. It decides the order of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Departure {
    /// Demotion: a copy exists or will exist on a lower tier. The deepest layers leave first.
    Demote,
    /// Drop of the last copy. The shallowest layers leave first.
    Drop,
}

#[cfg(test)]
mod tests {
    use super::{Handle, Layers};

    #[test]
    fn ranges_join_only_without_a_gap() {
        assert_eq!(Layers::new(0, 2).join(Layers::new(2, 5)), Some(Layers::new(0, 5)));
        assert_eq!(Layers::new(0, 2).join(Layers::new(3, 5)), None);
        assert_eq!(Layers::NONE.join(Layers::new(3, 5)), Some(Layers::new(3, 5)));
    }

    #[test]
    fn cutting_the_middle_out_is_refused() {
        let all = Layers::new(0, 5);
        assert_eq!(all.without(Layers::new(0, 2)), Some(Layers::new(2, 5)));
        assert_eq!(all.without(Layers::new(3, 9)), Some(Layers::new(0, 3)));
        assert_eq!(all.without(Layers::new(2, 3)), None);
        assert_eq!(all.without(all), Some(Layers::NONE));
    }

    #[test]
    fn a_handle_keeps_index_and_generation() {
        let handle = Handle::new(7, 3);
        assert_eq!((handle.id(), handle.generation()), (7, 3));
    }
}
