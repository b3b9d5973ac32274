//! Resume points: borders of blocks at which a request can go on, of a model with several groups.
//!
//! A point holds what a resume at its border needs of the groups after the first. In the eviction index
//! the entry of a block with a point is the point's: it leaves before the block, which keeps the blocks
//! before it. A block without a point that no block follows serves no resume, and leaves first.
//!
//! ```text
//!   blocks   0 -- 1 -- 2 -- 3 -- 4 -- 5     point at 4: cost of 2..4, bytes of its windows and state
//!            point at 2 ^    \        ^ no point: leaves first
//!                             6 -- 7 < point at 8, whose point before is that at 2
//! ```
//!
//! Invariant: a point's needs are resident and held by it; `before` is the nearest point on the path
//! to it, `after` the points that name it. Cost: O(path) per point, O(log n) per block looked up.

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::block::{BlockId, TierId};
use crate::error::{Error, Result};
use crate::group::{Group, longest};
use crate::hint::{Band, Priority};
use crate::manager::Manager;
use crate::manager::settings::{Groups, Settings};

/// Priority of blocks that serve no resume point.
const USELESS: Priority = 0;

/// Resume point after a block.
#[derive(Clone, Debug)]
pub(super) struct Point {
    /// Blocks before the border.
    pub(super) border: u32,
    /// Whether newer points of the path do not replace it.
    pub(super) kept: bool,
    /// Block of the nearest point before it on its path.
    pub(super) before: Option<BlockId>,
    /// Blocks of the points whose `before` it is.
    pub(super) after: SmallVec<[BlockId; 2]>,
}

/// Resume points, and the groups that they are of.
#[derive(Debug)]
pub(super) struct Points {
    /// Groups after the first.
    pub(super) groups: Vec<Group>,
    /// Bytes of a block of the first group.
    block_bytes: u64,
    /// Tokens of a block, each with its KV.
    pub(super) block_tokens: u64,
    newest: u32,
    /// Blocks from point to point; 0 for points at ends and branches.
    pub(super) every: u32,
    pub(super) at: BTreeMap<BlockId, Point>,
}

impl Points {
    /// No points.
    pub(super) fn new(groups: &Groups, settings: &Settings) -> Self {
        Self {
            block_bytes: groups.groups[0].slot_bytes,
            groups: groups.groups[1..].to_vec(),
            block_tokens: u64::from(settings.block_tokens) * u64::from(settings.token_weight),
            newest: groups.newest,
            every: groups.every,
            at: BTreeMap::new(),
        }
    }

    /// Bytes that a resume at a border needs of the groups after the first.
    fn bytes(&self, border: u32) -> u64 {
        let slots = |group: &Group| group.needed(border, self.block_tokens).iter().count() as u64;
        self.groups.iter().map(|group| slots(group) * group.slot_bytes).sum()
    }
}

impl Manager {
    /// Refuses a call that several groups do not support.
    pub(super) fn one_group(&self, what: &str) -> Result<()> {
        match &self.points {
            None => Ok(()),
            Some(points) => Err(Error::config(format!(
                "{what} is not supported for a model with {} groups",
                points.groups.len() + 1
            ))),
        }
    }

    /// Whether a resume point is after a block.
    pub(super) fn has_point(&self, block: BlockId) -> bool {
        self.points.as_ref().is_some_and(|points| points.at.contains_key(&block))
    }

    /// Whether a resume point is after one of these blocks.
    pub(super) fn points_among(&self, blocks: Range<BlockId>) -> bool {
        self.points.as_ref().is_some_and(|points| points.at.range(blocks).next().is_some())
    }

    /// The blocks of a run that have a resume point.
    pub(super) fn points_in(&self, run: Range<BlockId>) -> SmallVec<[BlockId; 4]> {
        let points = self.points.iter();
        points.flat_map(|points| points.at.range(run.clone()).map(|(&block, _)| block)).collect()
    }

    /// Brings the entries of the blocks of a run that have a resume point in line.
    pub(super) fn refresh_points(&mut self, tier: TierId, run: Range<BlockId>) {
        // Without groups no run has a point.
        if self.points.is_some() {
            for block in self.points_in(run) {
                self.refresh_on(tier, block);
            }
        }
    }

    /// The band of a block, by whether it serves a resume.
    pub(super) fn point_band(&self, block: BlockId) -> Band {
        let priority = if self.has_point(block) { Band::NORMAL.priority } else { USELESS };
        Band { priority, ..Band::NORMAL }
    }

    /// Worth of a resume point, if one is after the block: the cost of computing from the point before
    /// it, for as many bytes as a token of the first group has. The bytes are those that leave with
    /// the point: its windows and states and, if no other point follows, the blocks after the point
    /// before it.
    pub(super) fn point_price(&self, block: BlockId) -> Option<f64> {
        let points = self.points.as_ref()?;
        let point = points.at.get(&block)?;
        let from = point.before.map_or(0, |before| points.at[&before].border);
        let tokens = |blocks: u32| u64::from(blocks) * points.block_tokens;
        let (start, end) = (tokens(from), tokens(point.border));
        let cost = self.settings.cost.worth(start.midpoint(end));
        let alone = if point.after.is_empty() { u64::from(point.border - from) } else { 0 };
        let bytes = points.bytes(point.border) + alone * points.block_bytes;
        #[expect(clippy::cast_precision_loss, reason = "a ratio of bytes and tokens")]
        let per_byte = (end - start) as f64 / bytes.max(1) as f64;
        #[expect(clippy::cast_precision_loss, reason = "as above")]
        let token = points.block_bytes as f64 / points.block_tokens as f64;
        Some(cost * per_byte * token)
    }

    /// Cuts a path of blocks of the first group to the longest border at which all groups have what a
    /// resume needs.
    pub(super) fn cut_to_groups(&self, path: &mut Vec<BlockId>) {
        let Some(points) = &self.points else { return };
        let most = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
        let has = |at, block: u32| self.blocks.group_slot(at, path[block as usize]).is_some();
        let border = longest(&points.groups, points.block_tokens, most, has);
        path.truncate(border as usize);
    }

    /// Whether all that a resume at a border of a path needs of the groups after the first is there.
    fn can_resume(&self, path: &[BlockId], border: u32) -> bool {
        let Some(points) = &self.points else { return false };
        points.groups.iter().enumerate().all(|(at, group)| {
            let mut needed = group.needed(border, points.block_tokens).iter();
            needed.all(|block| self.blocks.group_slot(at, path[block as usize]).is_some())
        })
    }

    /// Blocks of a path that a resume at a border needs of each group after the first.
    pub(super) fn needs(&self, path: &[BlockId], border: u32) -> Vec<(usize, BlockId)> {
        let points = self.points.as_ref().expect("a model of several groups");
        let of = |(at, group): (usize, &Group)| {
            let needed = group.needed(border, points.block_tokens).iter();
            needed.map(move |block| (at, path[block as usize])).collect::<Vec<_>>()
        };
        points.groups.iter().enumerate().flat_map(of).collect()
    }

    /// Makes a border of a path a resume point, if all that it needs is there. A point that newer ones
    /// of its path do not replace is `kept`; of the others the oldest is released where there are too
    /// many.
    pub(super) fn add_point(&mut self, path: &[BlockId], border: u32, kept: bool) {
        if border == 0 || !self.can_resume(path, border) {
            return;
        }
        let block = path[border as usize - 1];
        let points = self.points.as_mut().expect("a model of several groups");
        if let Some(known) = points.at.get_mut(&block) {
            known.kept |= kept;
            return;
        }
        let before = path[..border as usize - 1].iter().rev();
        let before = before.copied().find(|block| points.at.contains_key(block));
        for (at, block) in self.needs(path, border) {
            self.blocks.hold_group(at, block);
        }
        let after = self.points_below(block);
        let points = self.points.as_mut().expect("seen above");
        for below in &after {
            points.at.get_mut(below).expect("a point").before = Some(block);
        }
        if let Some(before) = before.and_then(|before| points.at.get_mut(&before)) {
            before.after.retain(|below| !after.contains(below));
            before.after.push(block);
        }
        points.at.insert(block, Point { border, kept, before, after: after.clone() });
        self.refresh_on(0, block);
        // The worth of the points around it hangs on it.
        for other in after.into_iter().chain(before) {
            self.refresh_on(0, other);
        }
        self.replace_points(block);
    }

    /// The nearest points below a block.
    fn points_below(&self, block: BlockId) -> SmallVec<[BlockId; 2]> {
        let mut open: Vec<BlockId> = self.trie().children(block).collect();
        let mut found = SmallVec::new();
        while let Some(next) = open.pop() {
            if self.has_point(next) {
                found.push(next);
            } else {
                open.extend(self.trie().children(next));
            }
        }
        found
    }

    /// Releases the points of a path, up to the one after a block, that newer ones replace.
    fn replace_points(&mut self, block: BlockId) {
        let points = self.points.as_ref().expect("a model of several groups");
        let (mut next, mut left) = (Some(block), points.newest);
        let mut replaced: SmallVec<[BlockId; 2]> = SmallVec::new();
        while let Some(point) = next {
            let Point { kept, before, ref after, .. } = points.at[&point];
            // Two paths go on from a branch.
            if !kept && after.len() < 2 {
                if left == 0 {
                    replaced.push(point);
                }
                left = left.saturating_sub(1);
            }
            next = before;
        }
        for point in replaced {
            self.drop_point(point);
        }
    }

    /// Ends the point after a block, if there is one. What it alone held is released.
    pub(super) fn drop_point(&mut self, block: BlockId) {
        let Some(points) = &mut self.points else { return };
        let Some(Point { border, before, after, .. }) = points.at.remove(&block) else { return };
        for below in &after {
            points.at.get_mut(below).expect("a point").before = before;
        }
        if let Some(before) = before.and_then(|before| points.at.get_mut(&before)) {
            before.after.retain(|below| *below != block);
            before.after.extend(after.iter().copied());
        }
        let path = self.path_to(Some(block));
        for (at, block) in self.needs(&path, border) {
            self.blocks.unhold_group(at, block);
        }
        self.refresh_on(0, block);
        // Without it the points below cost more to compute, and the one before may be the last.
        for other in after.into_iter().chain(before) {
            self.refresh_on(0, other);
        }
    }

    /// Points, links and holds agree with each other and with the leases.
    pub(super) fn audit_points(&self, broken: &mut Vec<String>) {
        let (Some(points), Some(arena)) = (&self.points, self.blocks.arena()) else { return };
        let mut holds = self.audit_links(points, broken);
        let mut live = vec![0_u64; points.groups.len()];
        for lease in self.leases.values() {
            let Some(windows) = &lease.windows else { continue };
            for (at, (held, open)) in windows.held.iter().zip(&windows.open).enumerate() {
                live[at] += open.len() as u64;
                for &block in held {
                    *holds.entry((at, lease.path.blocks()[block as usize])).or_default() += 1;
                }
                if open.iter().any(|&slot| !arena.is_live(at + 1, slot)) {
                    broken.push(format!("lease {} has a slot of group {at} twice", lease.id));
                }
            }
        }
        for block in self.living() {
            for (at, live) in live.iter_mut().enumerate() {
                let seen = holds.get(&(at, block)).copied().unwrap_or(0);
                let slot = self.blocks.group_slot(at, block);
                *live += u64::from(slot.is_some());
                let here = !self.blocks.table(0).none_present(block..block + 1);
                let lost = slot.is_some_and(|slot| !here || !arena.is_live(at + 1, slot));
                if seen != self.blocks.group_holds(at, block)
                    || lost
                    || (seen > 0 && slot.is_none())
                {
                    broken.push(format!(
                        "block {block} has slot {slot:?} in group {at} and {} holds, {seen} seen",
                        self.blocks.group_holds(at, block)
                    ));
                }
            }
        }
        let first = u64::from(self.blocks.space(0).capacity());
        let counted = std::iter::once(first).chain(live);
        for (group, counted) in counted.enumerate() {
            if counted != arena.live(group) {
                broken.push(format!(
                    "group {group} has {counted} slots, {} in its pages",
                    arena.live(group)
                ));
            }
        }
    }

    /// Links of the points, and how often they hold a block in a group.
    fn audit_links(
        &self,
        points: &Points,
        broken: &mut Vec<String>,
    ) -> FxHashMap<(usize, BlockId), u16> {
        let mut holds: FxHashMap<(usize, BlockId), u16> = FxHashMap::default();
        for (&block, point) in &points.at {
            let path = self.path_to(Some(block));
            if path.len() != point.border as usize || !self.can_resume(&path, point.border) {
                broken.push(format!("nothing resumes at the point after block {block}"));
                continue;
            }
            for held in self.needs(&path, point.border) {
                *holds.entry(held).or_default() += 1;
            }
            let before = path[..path.len() - 1].iter().rev();
            let before = before.copied().find(|block| points.at.contains_key(block));
            let named = before.is_none_or(|before| points.at[&before].after.contains(&block));
            if before != point.before || !named {
                broken.push(format!("the point after block {block} is linked to {before:?}"));
            }
        }
        let linked: usize = points.at.values().map(|point| point.after.len()).sum();
        if linked != points.at.values().filter(|point| point.before.is_some()).count() {
            broken.push(format!("{linked} points are linked as after another"));
        }
        holds
    }
}
