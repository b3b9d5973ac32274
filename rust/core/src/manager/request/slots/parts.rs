//! Parts of blocks: evicts parts in groups after the first individually.
//!
//! An engine with memory divided by group wants room in a single group: windows and states leave,
//! and the blocks stay for the first group. Invariant: parts held by a lease or a pin stay, and a
//! point with leaving parts has ended. Cost: O(released parts) per call, and O(n log n) in the
//! evictable blocks once a point has to end.

use crate::block::{BlockId, Handle, Part, Place, TierId};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::residency::ReleasedAt;
use crate::time::Nanos;

impl Manager {
    /// Evicts up to `count` parts of blocks from a place.
    ///
    /// Released parts leave first, then the parts of resume points in the eviction order of the
    /// tier. Returns their blocks. Returns fewer if the rest is held.
    ///
    /// # Errors
    /// [`Error::Config`] for the first group, a nonexistent tier or group, or an engine's tier.
    pub fn evict_parts(&mut self, place: Place, count: u64, now: Nanos) -> Result<Vec<Handle>> {
        self.open()?;
        self.check_part(place)?;
        let now = self.tick(now);
        let mut left = Vec::new();
        self.discard_released(place, count, &mut left);
        if (left.len() as u64) < count {
            self.end_points(place, count, &mut left, now);
        }
        Ok(left)
    }

    /// Ends points of a tier until `count` parts have left a place: first points that alone hold a
    /// part, then further points, because two points may hold the same parts.
    fn end_points(&mut self, place: Place, count: u64, left: &mut Vec<Handle>, now: Nanos) {
        let mut points = self.points_in_order(place.tier, now);
        for alone in [true, false] {
            let mut ended = true;
            while ended {
                ended = false;
                let mut kept = Vec::new();
                for block in points {
                    if left.len() as u64 >= count || alone && !self.alone(place, block) {
                        kept.push(block);
                        continue;
                    }
                    self.drop_point_on(place.tier, block);
                    self.discard_released(place, count, left);
                    ended = true;
                }
                points = kept;
            }
        }
    }

    /// Evicts the parts of these blocks from a place, and ends the points that need them.
    ///
    /// # Errors
    /// The errors of [`Manager::evict_parts`]. [`Error::Config`] if a lease or a pin holds any
    /// part.
    pub fn clear_parts(
        &mut self,
        place: Place,
        blocks: &[Handle],
        now: Nanos,
    ) -> Result<Vec<Handle>> {
        self.open()?;
        self.check_part(place)?;
        self.tick(now);
        let Place { tier, group } = place;
        let mut left = Vec::with_capacity(blocks.len());
        for &handle in blocks {
            let block = self.resolve(handle)?;
            if !self.blocks.expects(place, block) {
                continue;
            }
            // Most parts are needed by no point.
            if self.blocks.holds(place, block) > 0 {
                self.drop_points_of(tier, Part { group, block });
            }
            if !self.blocks.is_released(place, block) {
                return Err(Error::config(format!(
                    "block {:#x} is held {} times in group {group} on tier {tier}",
                    handle.0,
                    self.blocks.holds(place, block)
                )));
            }
            self.blocks.discard(place, block);
            left.push(handle);
        }
        Ok(left)
    }

    /// Fails for a nonexistent place or an engine's tier.
    pub(crate) fn check_place(&self, Place { tier, group }: Place) -> Result<()> {
        self.check_tier(tier)?;
        let groups = self.points.groups.len();
        if group >= groups {
            return Err(Error::config(format!("group {group} of a model with {groups}")));
        }
        Ok(())
    }

    fn check_part(&self, place: Place) -> Result<()> {
        self.check_place(place)?;
        if place.group == 0 {
            return Err(Error::config("parts are of groups after the first, this is group 0"));
        }
        Ok(())
    }

    /// Discards released parts of a place, the oldest first, until `count` have left.
    fn discard_released(&mut self, place: Place, count: u64, left: &mut Vec<Handle>) {
        let mut at = ReleasedAt::default();
        while (left.len() as u64) < count
            && let Some(Part { group, block }) = self.blocks.released_from(place.tier, &mut at)
        {
            if group == place.group {
                left.push(self.trie().handle(block));
                self.blocks.discard(place, block);
            }
        }
    }

    /// The points of a tier in eviction order. Points kept by leases or pins of their blocks come
    /// last.
    fn points_in_order(&self, tier: TierId, now: Nanos) -> Vec<BlockId> {
        let linked = self.tiers[tier].eviction.order(now).into_iter().map(|entry| entry.id);
        let mut points: Vec<BlockId> =
            linked.filter(|&block| self.points.has_on(tier, block)).collect();
        let kept = |block: &BlockId| self.tiers[tier].eviction.get(*block).is_none();
        let all = self.points.all().map(|(block, _)| block);
        points.extend(all.filter(|&block| self.points.has_on(tier, block)).filter(kept));
        points
    }

    /// Whether a point is the only holder of a part in a place.
    fn alone(&self, place: Place, block: BlockId) -> bool {
        let path = self.path_to(Some(block));
        let border = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
        let of = |part: &Part| part.group == place.group;
        let needs = self.points.needs(&path, border);
        needs.iter().filter(|part| of(part)).any(|part| self.blocks.holds(place, part.block) == 1)
    }
}
