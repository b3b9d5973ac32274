//! Marks in a single group: residencies of consecutive blocks, as reported by a shared store.
//!
//! A store shared by several machines keeps a value per block and group, and may lose any of them.
//! The border at the end of the marked blocks becomes a resume point on the tier once all its needs
//! are there. Parts not needed by a point are released. Invariant: a call sets no residency of a
//! different group. Cost: the cost of a mark.

use crate::block::{BlockId, GroupId, Handle, NO_SLOT, Place};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::points::Stay;
use crate::manager::request::matching::path::path_border;
use crate::manager::request::restart::mark::Mark;
use crate::time::Nanos;

impl Manager {
    /// Like [`Manager::mark_after`], in a single group.
    ///
    /// Blocks to set in a group after the first must be cached, and become resident at once.
    /// Clearing ends the points that need a cleared part.
    ///
    /// # Errors
    /// The errors of [`Manager::mark_after`]. [`Error::Config`] for a nonexistent group, uncached
    /// blocks, or a ready time for a group after the first.
    pub fn mark_group(
        &mut self,
        mark: &Mark<'_>,
        group: GroupId,
        skip: usize,
        now: Nanos,
    ) -> Result<Vec<Handle>> {
        let groups = self.points.groups.len();
        if group >= groups {
            return Err(Error::config(format!("there is no group {group}, only {groups}")));
        }
        if group > 0 && mark.ready.is_some() {
            return Err(Error::config(format!("a mark of group {group} has no time: it is now")));
        }
        self.mark_in(mark, Some(group), skip, now)
    }

    /// Sets the residency of blocks of a path after the first `skip` in a group after the first.
    pub(super) fn mark_part(
        &mut self,
        mark: &Mark<'_>,
        path: &[BlockId],
        (group, skip): (GroupId, usize),
        now: Nanos,
    ) -> Result<Vec<Handle>> {
        let (place, full) = (Place::new(mark.tier, group), mark.tokens.len() / self.block_tokens());
        if path.len() < full {
            let cached = path.len();
            return Err(Error::config(format!("{full} blocks are to be cached, {cached} are")));
        }
        let marked = path.get(skip..).unwrap_or_default();
        let mut lacking = Vec::new();
        for &block in marked {
            if self.residency(place, block).slot == NO_SLOT {
                lacking.push(block);
            } else if !self.blocks.expects(place, block) {
                return Err(self.still_moving(place, block));
            }
        }
        let present: Vec<BlockId> =
            marked.iter().copied().filter(|block| !lacking.contains(block)).collect();
        let mut slots = vec![0; self.points.groups.len()];
        slots[group] = lacking.len() as u64;
        // Neither known blocks nor resident parts may leave for the new parts.
        self.pin(path);
        self.blocks.hold(place, present.iter().copied());
        let stay: Vec<_> = self.runs(path).into_iter().map(|run| (mark.tier, run)).collect();
        let room = self.make_room(&[Wanted { tier: mark.tier, slots: &slots }], &stay, now);
        if room.is_ok() {
            for &block in &lacking {
                let slot = self.blocks.take_slot(place).slot;
                self.blocks.put(place, block, slot);
            }
            self.blocks.hold(place, lacking.iter().copied());
            self.add_point(mark.tier, path, path_border(path), Stay::Newest);
            self.blocks.unhold(place, lacking.iter().copied());
        }
        self.blocks.unhold(place, present);
        self.refresh_stay(stay);
        let handles = self.trie().handles(marked);
        self.unpin(path, None);
        room.map(|()| handles)
    }
}
