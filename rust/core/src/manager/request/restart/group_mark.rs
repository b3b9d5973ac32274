//! Marks of a model with several groups: what the end of a marked sequence needs is marked with it.
//!
//! The end becomes a resume point on the tier. Clearing ends the points that need what leaves.
//! Invariant: all errors are found before the first change. Cost: O(path), and room for the slots;
//! O(points) per block that is cleared.

use crate::block::{BlockId, GroupId, Part, Place, TierId};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::points::Stay;
use crate::tier::ResidencyState;
use crate::time::Nanos;

/// Windows and states at the end of a marked sequence.
#[derive(Debug, Default)]
pub(in crate::manager::request) struct MarkedEnd {
    /// Blocks of the sequence.
    border: u32,
    /// Those that the tier has.
    there: Vec<Part>,
    /// By group, places on the path of the others.
    lacking: Vec<Vec<u32>>,
}

impl Manager {
    /// What a resume at the end of a sequence of `blocks` blocks needs on a tier; `path` are those
    /// that are known.
    ///
    /// # Errors
    /// [`Error::Config`] if a failed move may still write some of it, or its bytes cannot be read.
    pub(in crate::manager::request) fn marked_end(
        &self,
        tier: TierId,
        path: &[BlockId],
        blocks: usize,
    ) -> Result<MarkedEnd> {
        let points = &self.points;
        let border = u32::try_from(blocks).expect("fewer than 2^32 blocks");
        let mut end = MarkedEnd { border, there: Vec::new(), lacking: vec![Vec::new()] };
        for (number, group) in points.others() {
            let here = Place::new(tier, number);
            let mut lacking = Vec::new();
            for place in group.needed(border, points.block_tokens).iter() {
                let Some(&block) = path.get(place as usize) else {
                    lacking.push(place);
                    continue;
                };
                let absent = self.residency(here, block).state == ResidencyState::Absent;
                if !absent && !self.blocks.expects(here, block) {
                    return Err(Error::config(format!(
                        "block {:#x} cannot be marked on tier '{}': moves have still to end there \
                         in group {number}",
                        self.trie().handle(block).0,
                        self.tiers[tier].spec.kind.name(),
                    )));
                }
                if absent {
                    lacking.push(place);
                } else {
                    end.there.push(Part { group: number, block });
                }
            }
            end.lacking.push(lacking);
        }
        Ok(end)
    }

    /// Makes room on a tier for `units` slots of the first group and for the end of a mark, which
    /// must be settled then.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; nothing has changed then.
    pub(in crate::manager::request) fn room_for_mark(
        &mut self,
        tier: TierId,
        units: u64,
        path: &[BlockId],
        end: &MarkedEnd,
        now: Nanos,
    ) -> Result<()> {
        let mut wanted = vec![units];
        wanted.extend(end.lacking.iter().skip(1).map(|lacking| lacking.len() as u64));
        for &Part { group, block } in &end.there {
            self.blocks.hold(Place::new(tier, group), [block]);
        }
        let stay: Vec<_> = self.runs(path).into_iter().map(|run| (tier, run)).collect();
        let room = self.make_room(&[Wanted { tier, slots: &wanted }], &stay, now);
        if room.is_err() {
            self.let_marked_go(tier, end);
        }
        room
    }

    /// Makes the end of a mark, for which there is room, a resume point on a tier.
    pub(in crate::manager::request) fn add_marked_point(
        &mut self,
        tier: TierId,
        path: &[BlockId],
        end: &MarkedEnd,
    ) {
        for (group, places) in end.lacking.iter().enumerate() {
            let here = Place::new(tier, group);
            for &place in places {
                let slot = self.blocks.take_slot(here).slot;
                self.blocks.put(here, path[place as usize], slot);
            }
        }
        self.add_point(tier, path, end.border, Stay::Newest);
        self.let_marked_go(tier, end);
    }

    fn let_marked_go(&mut self, tier: TierId, end: &MarkedEnd) {
        for &Part { group, block } in &end.there {
            self.blocks.unhold(Place::new(tier, group), [block]);
        }
    }

    /// Fails if moves read or write a block in a group after the first on a tier.
    pub(in crate::manager::request) fn check_clear_groups(
        &self,
        tier: TierId,
        block: BlockId,
    ) -> Result<()> {
        let moving = |&group: &GroupId| {
            let here = Place::new(tier, group);
            self.residency(here, block).busy > 0 || self.arrival(here, block).is_some()
        };
        match self.points.other_numbers().find(moving) {
            None => Ok(()),
            Some(group) => Err(Error::config(format!(
                "block {:#x} cannot be cleared: moves of group {group} have still to end",
                self.trie().handle(block).0,
            ))),
        }
    }

    /// Clears a block in all groups after the first on a tier, and ends the points that need it there.
    pub(in crate::manager::request) fn clear_groups(&mut self, tier: TierId, block: BlockId) {
        self.drop_point_on(tier, block);
        for group in self.points.other_numbers() {
            let here = Place::new(tier, group);
            if self.residency(here, block).state != ResidencyState::Absent {
                self.drop_points_of(tier, Part { group, block });
                self.blocks.discard(here, block);
            }
        }
    }
}
