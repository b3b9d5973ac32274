//! Resume points: block borders at which a request of a model with several groups can resume.
//!
//! Each tier of a point has everything that a resume at its border needs of the groups after the
//! first. In a tier's eviction index, a block with a point has the point's entry: the point leaves
//! before the block and its prefix. A leaf without a point serves no resume, and leaves first.
//!
//! ```text
//!   blocks   0 -- 1 -- 2 -- 3 -- 4 -- 5     point at 4: cost of 2..4, bytes of windows and state
//!            point at 2 ^    \        ^ no point: leaves first
//!                             6 -- 7 < point at 8; the point before it is at 2
//! ```
//!
//! Invariant: a point's needs are on each of its tiers, and held by the point. `before` is the
//! nearest point on the path to it, and `after` lists the next points. Cost: O(path) per point. A
//! lookup of a block costs O(1) without a point, O(log n) with a point.

mod audit;
pub(in crate::manager) mod named;
mod stores;

use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, GroupId, Layers, Part, Place, Structure, TierId};
use crate::group::{Group, GroupKind, Places, longest, longest_over_holes};
use crate::hint::{Band, Priority};
use crate::manager::Manager;
use crate::manager::settings::Settings;
use crate::paged_vec::PagedVec;
use crate::tier::ResidencyState;

use named::NamedBorders;

/// Priority of blocks that serve no resume point.
const NO_RESUME: Priority = 0;

/// Lifetime of a resume point while newer points are made on its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stay {
    /// As long as it is among the newest points.
    Newest,
    /// As long as the next point: a repeated prompt that ends there resumes here.
    Next,
    /// Regardless of later points.
    Always,
}

/// Resume point after a block.
#[derive(Clone, Debug)]
pub(super) struct Point {
    /// Number of blocks before the border.
    pub(super) border: u32,
    /// Lifetime of the point.
    pub(super) stay: Stay,
    /// Bit set of the tiers that have all its needs.
    pub(super) tiers: u8,
    /// Block of the previous point on its path.
    pub(super) before: Option<BlockId>,
    /// Blocks of the next points.
    pub(super) after: SmallVec<[BlockId; 2]>,
}

/// Removed point.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    point: Point,
    /// Blocks of the next points of its previous point.
    siblings: SmallVec<[BlockId; 2]>,
}

/// State of a point before it moved between tiers.
#[derive(Clone, Debug)]
pub(super) struct Shifted {
    tiers: u8,
    /// The point, if it lost its last tier.
    ended: Option<Ended>,
}

impl Ended {
    /// Blocks of the previous and the next points.
    fn around(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.point.after.iter().copied().chain(self.point.before)
    }
}

impl Shifted {
    /// Blocks of the neighbours of a removed point.
    pub(super) fn around(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.ended.iter().flat_map(Ended::around)
    }
}

/// Resume points, and the model's groups.
#[derive(Debug)]
pub(super) struct Points {
    /// All groups. A point holds nothing of the first group.
    pub(super) groups: Vec<Group>,
    /// Number of tokens of a block.
    pub(super) block_tokens: u64,
    newest: u32,
    /// Distance in blocks between points. 0 for points at ends and branches.
    pub(super) every: u32,
    /// Borders named by hints before they become points.
    pub(super) named: NamedBorders,
    at: BTreeMap<BlockId, Point>,
    /// A bit per block with a point: most blocks have none.
    bits: PagedVec<u64>,
}

impl Points {
    /// An empty table.
    pub(super) fn new(settings: &Settings) -> Self {
        let full = Group {
            kind: GroupKind::Full,
            slot_bytes: settings.layer_bytes * u64::from(settings.layers),
            layers: settings.layers,
        };
        let (groups, newest, every) = match &settings.groups {
            Some(groups) => (groups.groups.clone(), groups.newest, groups.every),
            None => (vec![full], 0, 0),
        };
        Self {
            groups,
            block_tokens: u64::from(settings.block_tokens) * u64::from(settings.token_weight),
            newest,
            every,
            at: BTreeMap::new(),
            named: NamedBorders::default(),
            bits: PagedVec::new(0),
        }
    }

    /// Whether there are groups after the first. Without them a request resumes after any block,
    /// and no point is kept.
    #[inline]
    pub(super) fn several(&self) -> bool {
        self.groups.len() > 1
    }

    /// The groups after the first, with their numbers.
    pub(super) fn others(&self) -> impl Iterator<Item = (GroupId, &Group)> {
        self.groups.iter().enumerate().skip(1)
    }

    /// Whether there are no points.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.at.is_empty()
    }

    /// Whether a block has a resume point.
    pub(super) fn has(&self, block: BlockId) -> bool {
        self.bits.get(block / 64).is_some_and(|bits| bits >> (block % 64) & 1 == 1)
    }

    /// The resume point of a block.
    pub(super) fn get(&self, block: BlockId) -> Option<&Point> {
        if self.has(block) { self.at.get(&block) } else { None }
    }

    /// The resume point of a block, mutable.
    pub(super) fn get_mut(&mut self, block: BlockId) -> Option<&mut Point> {
        if self.has(block) { self.at.get_mut(&block) } else { None }
    }

    /// All points, by block.
    pub(super) fn all(&self) -> impl Iterator<Item = (BlockId, &Point)> {
        self.at.iter().map(|(&block, point)| (block, point))
    }

    /// The points of the blocks of a run, ascending.
    pub(super) fn within(
        &self,
        run: Range<BlockId>,
    ) -> impl DoubleEndedIterator<Item = (BlockId, &Point)> {
        let last = run.end.saturating_sub(1);
        let of = move |word: u32| {
            let bits = self.bits.get(word).copied().unwrap_or(0);
            let from = if word == run.start / 64 { u64::MAX << (run.start % 64) } else { u64::MAX };
            let upto = if word == last / 64 { u64::MAX >> (63 - last % 64) } else { u64::MAX };
            (word, bits & from & upto)
        };
        let words = (run.start / 64..run.end.div_ceil(64)).map(of).filter(|&(_, bits)| bits != 0);
        let blocks = words.flat_map(|(word, bits)| {
            (0..64).filter(move |place| bits >> place & 1 == 1).map(move |place| 64 * word + place)
        });
        blocks.map(|block| (block, &self.at[&block]))
    }

    /// Adds a point.
    pub(super) fn insert(&mut self, block: BlockId, point: Point) {
        self.bits.reach(block / 64 + 1);
        self.bits[block / 64] |= 1 << (block % 64);
        self.at.insert(block, point);
    }

    /// Removes a point, and links its neighbours.
    fn remove(&mut self, block: BlockId) -> Option<Ended> {
        if !self.has(block) {
            return None;
        }
        self.bits[block / 64] &= !(1 << (block % 64));
        let point = self.at.remove(&block)?;
        for below in &point.after {
            self.get_mut(*below).expect("a point").before = point.before;
        }
        let mut siblings = SmallVec::new();
        if let Some(before) = point.before.and_then(|before| self.get_mut(before)) {
            siblings.clone_from(&before.after);
            before.after.retain(|below| *below != block);
            before.after.extend(point.after.iter().copied());
        }
        Some(Ended { point, siblings })
    }

    /// Moves a point between tiers, and removes it with its last tier. Returns the state for
    /// [`Points::restore`].
    pub(super) fn shift(
        &mut self,
        block: BlockId,
        from: Option<TierId>,
        to: Option<TierId>,
    ) -> Shifted {
        let bit = |tier: Option<TierId>| tier.map_or(0, |tier| 1_u8 << tier);
        let point = self.get_mut(block).expect("a point");
        let tiers = point.tiers;
        point.tiers = (tiers & !bit(from)) | bit(to);
        let ended = if point.tiers == 0 { self.remove(block) } else { None };
        Shifted { tiers, ended }
    }

    /// Undoes the latest shift of a point.
    pub(super) fn restore(&mut self, block: BlockId, before: &Shifted) {
        if let Some(Ended { point, siblings }) = &before.ended {
            for below in &point.after {
                self.get_mut(*below).expect("a point").before = Some(block);
            }
            if let Some(before) = point.before.and_then(|before| self.get_mut(before)) {
                before.after.clone_from(siblings);
            }
            self.insert(block, point.clone());
        }
        self.get_mut(block).expect("a point").tiers = before.tiers;
    }

    /// Whether a block has a resume point on a tier.
    pub(super) fn has_on(&self, tier: TierId, block: BlockId) -> bool {
        self.get(block).is_some_and(|point| point.tiers >> tier & 1 == 1)
    }

    /// Whether any of these blocks has a resume point on a tier.
    pub(super) fn among(&self, tier: TierId, blocks: Range<BlockId>) -> bool {
        !self.is_empty() && self.within(blocks).any(|(_, point)| point.tiers >> tier & 1 == 1)
    }

    /// The blocks of a run with a resume point.
    pub(super) fn of_run(&self, run: Range<BlockId>) -> SmallVec<[BlockId; 4]> {
        self.within(run).map(|(block, _)| block).collect()
    }

    /// The parts of groups after the first that a resume at a border of a path needs.
    pub(super) fn needs(&self, path: &[BlockId], border: u32) -> Vec<Part> {
        let points = self;
        let of = |(number, group): (GroupId, &Group)| {
            let needed = group.needed(border, points.block_tokens).iter();
            let part = |place: u32| Part { group: number, block: path[place as usize] };
            needed.map(part).collect::<Vec<_>>()
        };
        points.others().flat_map(of).collect()
    }

    /// Places on a request's path needed per group, from a tier or from the request itself.
    ///
    /// The request provides the places in `holes`. The needs are the context of the first token of
    /// each hole, and the needs of a resume at the end of the path. Empty for the first group.
    pub(super) fn needed_over(&self, holes: &[u32], path: &[BlockId]) -> Vec<Places> {
        let points = self;
        let border = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
        let begins = |&&at: &&u32| {
            at.checked_sub(1).is_none_or(|before| holes.binary_search(&before).is_err())
        };
        let needed = |(_, group): (GroupId, &Group)| {
            let starts = holes.iter().filter(begins).copied();
            group.needed_at(starts.chain([border]), points.block_tokens, 0..border)
        };
        std::iter::once(Places::default()).chain(points.others().map(needed)).collect()
    }

    /// The layers of a group.
    pub(super) fn layers(&self, group: GroupId) -> Layers {
        Layers::new(0, self.groups[group].layers)
    }

    /// Numbers of the groups after the first. Empty for most models.
    pub(super) fn other_numbers(&self) -> Range<GroupId> {
        1..self.groups.len()
    }

    /// Bytes of the groups after the first needed by a resume at a border.
    fn bytes(&self, border: u32) -> u64 {
        let slots = |group: &Group| group.needed(border, self.block_tokens).iter().count() as u64;
        self.others().map(|(_, group)| slots(group) * group.slot_bytes).sum()
    }
}

impl Manager {
    /// Whether the last block of a path on a tier serves a resume: it has a point, or is on the way
    /// to a point on a tier below.
    #[inline]
    pub(super) fn serves_points(&self, tier: TierId, block: BlockId) -> bool {
        !self.points.several() || self.points.has(block) || self.child_below(tier, block)
    }

    /// Whether a tier below has a child of this block.
    fn child_below(&self, tier: TierId, block: BlockId) -> bool {
        let absent = |at, child| self.residency(at, child).state == ResidencyState::Absent;
        let below = |child| !(tier + 1..self.tiers.len()).all(|at| absent(at, child));
        self.trie().children(block).any(below)
    }

    /// Refreshes the entries of blocks of a run with a resume point.
    pub(super) fn refresh_points(&mut self, tier: TierId, run: Range<BlockId>) {
        // Most models have no points.
        if !self.points.is_empty() {
            for block in self.points.of_run(run) {
                self.refresh_on(tier, block);
            }
        }
    }

    /// The band of a block on a tier, lowered if the block serves no resume.
    pub(super) fn point_band(&self, tier: TierId, block: BlockId, band: Band) -> Band {
        let serves = self.serves_points(tier, block);
        Band { priority: if serves { band.priority } else { NO_RESUME }, ..band }
    }

    /// Worth of a block's resume point on a tier.
    ///
    /// This is the cost of computing from the previous point, for as many bytes as a token of the
    /// first group has. The counted bytes leave together with the point: its windows and states
    /// and, without a next point, the blocks after the previous point.
    pub(super) fn point_price(&self, tier: TierId, block: BlockId) -> Option<f64> {
        let points = &self.points;
        let point = points.get(block).filter(|point| point.tiers >> tier & 1 == 1)?;
        let from = point.before.map_or(0, |before| points.at[&before].border);
        let tokens = |blocks: u32| u64::from(blocks) * points.block_tokens;
        let (start, end) = (tokens(from), tokens(point.border));
        let cost = self.settings.cost.worth(start.midpoint(end));
        let alone = if point.after.is_empty() { u64::from(point.border - from) } else { 0 };
        let block_bytes = points.groups[0].slot_bytes;
        let bytes = points.bytes(point.border) + alone * block_bytes;
        #[expect(clippy::cast_precision_loss, reason = "a ratio of bytes and tokens")]
        let per_byte = (end - start) as f64 / bytes.max(1) as f64;
        #[expect(clippy::cast_precision_loss, reason = "as above")]
        let token = block_bytes as f64 / points.block_tokens as f64;
        Some(cost * per_byte * token)
    }

    /// Cuts a path of blocks of the first group to its longest resumable border on any tier.
    pub(super) fn cut_to_groups(&self, path: &mut Vec<BlockId>) {
        if self.points.several() {
            let border = self.usable_border(path, self.tiers.len());
            path.truncate(border as usize);
        }
    }

    /// Places of a path with a block missing on all tiers: the holes of a scope that allows them.
    pub(super) fn holes(&self, path: &[BlockId]) -> Vec<u32> {
        let Some(&first) = path.first() else { return Vec::new() };
        if self.structure(first) == Structure::LeafOnly || self.holds_all(0) {
            return Vec::new();
        }
        let hole = |&(_, &block): &(u32, &BlockId)| {
            !self.missing(block).is_empty() || self.stuck(0, block)
        };
        (0..).zip(path).filter(hole).map(|(place, _)| place).collect()
    }

    /// The longest border of a request's path that is resumable from the first `tiers` tiers. Holes
    /// before it can be computed with the blocks on these tiers.
    pub(super) fn usable_border(&self, path: &[BlockId], tiers: usize) -> u32 {
        let holes = self.holes(path);
        match holes.first() {
            None => self.longest_border(path, tiers),
            // The engine names the slots of a path front to back.
            Some(&hole) if self.tiers.engine_owned() => {
                self.longest_border(&path[..hole as usize], tiers)
            }
            Some(_) => {
                let points = &self.points;
                let most = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
                let has = self.parts_on(path, tiers);
                longest_over_holes(&points.groups[1..], points.block_tokens, most, &holes, has)
            }
        }
    }

    /// The longest border of a path without holes that is resumable from the first `tiers` tiers.
    pub(super) fn longest_border(&self, path: &[BlockId], tiers: usize) -> u32 {
        let points = &self.points;
        let most = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
        longest(&points.groups[1..], points.block_tokens, most, self.parts_on(path, tiers))
    }

    /// Whether any of the first `tiers` tiers has a place of a path in a group, counted after the
    /// first.
    fn parts_on(&self, path: &[BlockId], tiers: usize) -> impl Fn(usize, u32) -> bool {
        move |after, place| {
            self.part_on(Part { group: after + 1, block: path[place as usize] }, tiers)
        }
    }

    /// Whether any of the first `tiers` tiers has or expects a part of a block.
    pub(super) fn part_on(&self, Part { group, block }: Part, tiers: usize) -> bool {
        let first = Place::new(0, group);
        if self.blocks.table(first).fully_resident(block) {
            return true;
        }
        // A failed move may still write the slot on the first tier: nothing can be loaded there.
        let stuck = self.arrival(first, block).is_some_and(|arrival| arrival.failed);
        !stuck && (0..tiers).any(|tier| self.blocks.expects(Place::new(tier, group), block))
    }

    /// The first tier that has or expects a part of a matched block.
    pub(super) fn nearest(&self, Part { group, block }: Part) -> TierId {
        let mut tiers = 0..self.tiers.len();
        let has = |&tier: &TierId| self.blocks.expects(Place::new(tier, group), block);
        tiers.find(has).expect("a matched block")
    }

    /// Whether a tier has everything that a resume at a border of a path needs of the groups after
    /// the first.
    pub(super) fn can_resume(&self, tier: TierId, path: &[BlockId], border: u32) -> bool {
        let points = &self.points;
        points.others().all(|(number, group)| {
            let group_place = Place::new(tier, number);
            let mut needed = group.needed(border, points.block_tokens).iter();
            needed.all(|place| self.blocks.expects(group_place, path[place as usize]))
        })
    }

    /// Holds the needs of the point at a border of a path on a tier that has or expects them.
    pub(super) fn hold_point(&mut self, tier: TierId, path: &[BlockId], border: u32) {
        let points = &self.points;
        for (number, group) in points.others() {
            let needed = group.needed(border, points.block_tokens).iter();
            let needed = needed.map(|place| path[place as usize]);
            self.blocks.hold(Place::new(tier, number), needed);
        }
        let block = path[border as usize - 1];
        let points = &mut self.points;
        points.get_mut(block).expect("a point").tiers |= 1 << tier;
        self.refresh(block);
    }

    /// The nearest points below a block.
    pub(super) fn points_below(&self, block: BlockId) -> SmallVec<[BlockId; 2]> {
        let mut open: Vec<BlockId> = self.trie().children(block).collect();
        let mut found = SmallVec::new();
        while let Some(next) = open.pop() {
            if self.points.has(next) {
                found.push(next);
            } else {
                open.extend(self.trie().children(next));
            }
        }
        found
    }

    /// Releases the points of a path, up to the point of a block, that are replaced by newer
    /// points.
    pub(super) fn replace_points(&mut self, block: BlockId) {
        let points = &self.points;
        let (mut next, mut left, mut stays) = (Some(block), points.newest, true);
        let mut replaced: SmallVec<[BlockId; 2]> = SmallVec::new();
        while let Some(point) = next {
            let Point { stay, before, ref after, .. } = points.at[&point];
            // Two paths continue from a branch.
            if stay != Stay::Always && after.len() < 2 {
                if stay == Stay::Newest {
                    stays = left > 0;
                    left = left.saturating_sub(1);
                }
                if !stays {
                    replaced.push(point);
                }
            }
            next = before;
        }
        for point in replaced {
            self.drop_point(point);
        }
    }

    /// Removes a block's point from a tier. With its last tier, the point ends.
    pub(super) fn drop_point_on(&mut self, tier: TierId, block: BlockId) {
        let Some(point) = self.points.get_mut(block) else { return };
        if point.tiers == 1 << tier {
            self.drop_point(block);
        } else if point.tiers >> tier & 1 == 1 {
            point.tiers &= !(1 << tier);
            let border = point.border;
            self.end_point_store(tier, block);
            self.end_point_holds(tier, block, border);
            self.refresh(block);
        }
    }

    /// Ends the holds of a point on a tier.
    fn end_point_holds(&mut self, tier: TierId, block: BlockId, border: u32) {
        let path = self.path_to(Some(block));
        let points = &self.points;
        for (number, group) in points.others() {
            let needed = group.needed(border, points.block_tokens).iter();
            let needed = needed.map(|place| path[place as usize]);
            self.blocks.unhold(Place::new(tier, number), needed);
        }
    }

    /// Removes a block's point, if any, and releases its holds.
    pub(super) fn drop_point(&mut self, block: BlockId) {
        let Some(ended) = self.points.remove(block) else { return };
        let Point { border, tiers, .. } = ended.point;
        for tier in (0..self.tiers.len()).filter(|tier| tiers >> tier & 1 == 1) {
            self.end_point_store(tier, block);
            self.end_point_holds(tier, block, border);
        }
        self.refresh(block);
        // The next points now cost more to compute, and the previous point may be the last.
        for other in ended.around() {
            self.refresh(other);
        }
    }

    /// Removes the points on a tier that need a lost part of a block.
    pub(super) fn drop_points_of(&mut self, tier: TierId, part: Part) {
        self.end_store_of(tier, part);
        let points = &self.points;
        let on = points.all().filter(|(_, point)| point.tiers >> tier & 1 == 1);
        let concerned = on.filter(|&(end, point)| {
            self.points.needs(&self.path_to(Some(end)), point.border).contains(&part)
        });
        for end in concerned.map(|(end, _)| end).collect::<Vec<_>>() {
            self.drop_point_on(tier, end);
        }
    }
}
