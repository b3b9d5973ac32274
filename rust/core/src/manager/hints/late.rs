//! Late loads: blocks wanted by a deadline stay on their tiers until the latest start of their
//! load.
//!
//! Blocks of a path can be demoted while the load waits. So a load is measured at the latest start
//! for blocks on the slowest tier, and again before it starts. A load starts at once if its lanes
//! are busy beyond its latest start. Invariant: a load starts early only for this reason. Cost:
//! O(path) per measurement, three measurements per load. Without waiting loads, a comparison per
//! call.

use std::sync::Arc;

use super::coming::{Load, LoadKey};
use super::pending::{MOST, MOST_TOKENS};
use super::{accepted, rejected};
use crate::block::{BlockId, TierId};
use crate::hint::{HintCode, HintReply, Target};
use crate::manager::Manager;
use crate::manager::request::matching::path::path_border;
use crate::time::Nanos;

/// Time from the end of a prefetch to its deadline: an engine starts loads between two steps.
const STEP: Nanos = 50_000_000;

/// Divisor of its time on the lanes, for an additional margin before the deadline.
const JITTER: Nanos = 8;

impl Manager {
    /// The due time of the next waiting load, or `None`. Call [`Manager::hint`] then, with or
    /// without hints. Later calls may change the due time.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed) or [`Error::Invariant`](crate::Error::Invariant).
    pub fn next_due(&self) -> crate::Result<Option<Nanos>> {
        self.open()?;
        let now = self.clock.last();
        let Some((_, load, start)) = self.sessions.coming.first() else { return Ok(None) };
        if start <= self.busy_until(load, now) {
            return Ok(Some(now));
        }
        let look = self.sessions.coming.first_look();
        Ok(Some(look.map_or(start, |&(at, _)| at.min(start)).max(now)))
    }

    /// Loads the blocks of a target, first to last: at once, or by the deadline.
    pub(super) fn prefetch(
        &mut self,
        target: &Target,
        tier: TierId,
        deadline: Option<Nanos>,
        now: Nanos,
    ) -> HintReply {
        let path = match self.target_path(target) {
            Ok(path) if path.is_empty() => return rejected("no block of the path is cached"),
            Ok(path) => path,
            Err(reason) => return rejected(reason),
        };
        let key = self.load_key(target);
        self.sessions.coming.remove(&key);
        if let Some(deadline) = deadline {
            if let Some(reason) = self.too_many(&key) {
                return HintReply { code: HintCode::Full, ..rejected(reason) };
            }
            let load = Load::unmeasured(tier, deadline, STEP, JITTER);
            self.queue_load(key.clone(), Load { strict: true, ..load }, &path, now);
            if !self.begins(&key, now) {
                return accepted(path.len() as u64);
            }
            self.sessions.coming.remove(&key);
        }
        self.fetch_path(&path, tier, deadline, now)
    }

    /// Queues the load of a path until its latest start.
    pub(super) fn queue_load(&mut self, key: LoadKey, load: Load, path: &[BlockId], now: Nanos) {
        let worst = self.block_times(load.tier).into_iter().max().unwrap_or(0);
        let worst = worst.saturating_mul(path.len() as u64);
        let look = Some(load.latest_start(worst)).filter(|&look| look > now);
        let load = self.measured(Load { look, ..load }, path, now);
        self.sessions.coming.put(key, load);
    }

    /// Starts the due loads.
    pub(super) fn start_due_loads(&mut self, now: Nanos) {
        while let Some(key) = self.due_load(now) {
            let path = self.load_path(&key);
            let Some(load) = self.sessions.coming.get(&key) else { return };
            let load = self.measured(load, &path, now);
            self.sessions.coming.put(key.clone(), load);
            if path.is_empty() || self.begins(&key, now) {
                self.sessions.coming.remove(&key);
                self.fetch_path(&path, load.tier, load.strict.then_some(load.deadline), now);
            }
        }
    }

    /// The first load to start or to measure by `now`.
    fn due_load(&self, now: Nanos) -> Option<LoadKey> {
        let coming = &self.sessions.coming;
        let (key, ..) = coming.first()?;
        if self.begins(key, now) {
            return Some(key.clone());
        }
        coming.first_look().filter(|&&(at, _)| at <= now).map(|(_, key)| key.clone())
    }

    /// Whether a load is the first and due, or its lanes are busy until its latest start.
    fn begins(&self, key: &LoadKey, now: Nanos) -> bool {
        let first = self.sessions.coming.first().filter(|&(first, ..)| first == key);
        first.is_some_and(|(_, load, start)| start <= self.busy_until(load, now))
    }

    /// The earliest time with all lanes of a load idle.
    fn busy_until(&self, load: &Load, now: Nanos) -> Nanos {
        let read = (0..self.tiers.len()).filter(|&tier| load.sources >> tier & 1 == 1);
        read.map(|tier| self.lanes.free_at(self.tiers[tier].read)).fold(now, Nanos::max)
    }

    /// Measures a load's time from the present tiers of its blocks.
    fn measured(&self, load: Load, path: &[BlockId], now: Nanos) -> Load {
        let times = self.block_times(load.tier);
        let (tier, all) = (load.tier, self.all_layers());
        let (mut takes, mut sources): (Nanos, u64) = (0, 0);
        for &block in path {
            if (0..=tier).any(|upper| self.expected(upper, block) == all) {
                continue;
            }
            let mut below = tier + 1..self.tiers.len();
            let Some(from) = below.find(|&from| self.expected(from, block) == all) else {
                continue;
            };
            takes = takes.saturating_add(times[from - tier - 1]);
            sources |= 1 << from;
            sources |= self.transit(tier, from).map_or(0, |host| 1 << host);
        }
        if self.points.several() {
            let path = &path[..self.longest_border(path, self.tiers.len()) as usize];
            for part in self.points.needs(path, path_border(path)) {
                let from = self.nearest(part);
                if from > tier {
                    let group = u8::try_from(part.group).expect("few groups");
                    let bytes = self.settings.move_bytes(group, all);
                    let one = self.lanes.takes(self.tiers[from].read, bytes);
                    takes = takes.saturating_add(one);
                    sources |= 1 << from;
                }
            }
        }
        Load { takes, sources, look: load.look.filter(|&look| look > now), ..load }
    }

    /// Load time of a block from each tier below `tier`, summed over all lanes.
    fn block_times(&self, tier: TierId) -> Vec<Nanos> {
        let time = |from: TierId| {
            let via = self.transit(tier, from);
            let pieces = self.pieces(from, tier, via, self.all_layers());
            let lanes = [Some(from), via].into_iter().flatten().map(|at| self.tiers[at].read);
            lanes.fold(0, |all: Nanos, lane| {
                pieces.iter().fold(all, |all, layers| {
                    let bytes = self.settings.move_bytes(0, *layers);
                    all.saturating_add(self.lanes.takes(lane, bytes))
                })
            })
        };
        (tier + 1..self.tiers.len()).map(time).collect()
    }

    /// The key of a waiting load of a target.
    fn load_key(&self, target: &Target) -> LoadKey {
        match target {
            Target::Session { name, scope } => {
                LoadKey::Session(self.session(name, scope).expect("it has a path"))
            }
            Target::Lease(id) => LoadKey::Lease(*id),
            Target::Tokens { tokens, scope } => {
                LoadKey::Tokens(Arc::new((scope.clone(), tokens.clone())))
            }
        }
    }

    /// The cached blocks of a load.
    fn load_path(&self, key: &LoadKey) -> Vec<BlockId> {
        match key {
            LoadKey::Session(id) => self.path_to(self.sessions.tip(*id)),
            LoadKey::Lease(id) => self.target_path(&Target::Lease(*id)).unwrap_or_default(),
            LoadKey::Tokens(path) => self.cached_path(&path.0, &path.1),
        }
    }

    /// The reason why a tenant can have no further waiting sequence.
    fn too_many(&self, key: &LoadKey) -> Option<String> {
        let LoadKey::Tokens(path) = key else { return None };
        let (number, tokens) = self.sessions.coming.held_by(&path.0);
        if number >= MOST {
            return Some(format!("{number} loads of the scope wait already, {MOST} can"));
        }
        let more = path.1.len();
        (tokens.saturating_add(more) > MOST_TOKENS).then(|| {
            format!("{tokens} tokens of the scope's loads wait and {more} more, {MOST_TOKENS} can")
        })
    }
}
