//! The manager's metrics, counted again from its outputs.
//!
//! Invariant: it reads plans, moves, events and the clock, never a counter.

use std::collections::{BTreeMap, BTreeSet};

use kvtrie_core::{
    Action, Cause, Error, Event, LeaseId, Manager, Move, MoveId, MoveKind, Reason, RequestStats,
    TierId, TierStats,
};

/// Count and sum of times.
type Times = (u64, u128);

#[derive(Default)]
struct Tier {
    stats: TierStats,
    evict_age: Times,
    moves: BTreeMap<&'static str, Times>,
}

/// The counts of a naive observer.
#[derive(Default)]
pub(super) struct Tally {
    requested: RequestStats,
    tiers: Vec<Tier>,
    /// Every move handed out and not ended, with its time.
    handed: BTreeMap<MoveId, (Move, u64)>,
    ended: u64,
    /// Blocks of leases that loaded nothing at first, as long as none of them was loaded whole.
    undecided: BTreeMap<LeaseId, BTreeSet<u32>>,
    last: Vec<Event>,
    /// All events, in their order.
    pub(super) events: Vec<Event>,
}

fn add(times: &mut Times, time: u64) {
    *times = (times.0 + 1, times.1 + u128::from(time));
}

/// The tier on which a plan has a block; none if any of it is computed.
fn found(manager: &Manager, id: LeaseId, block: u32) -> Option<TierId> {
    let lease = manager.lease(id).unwrap();
    let spans = lease.plan().spans.iter().filter(|s| s.start <= block && block < s.stop);
    let spans: Vec<_> = spans.collect();
    if spans.iter().any(|span| span.action == Action::Recompute) {
        return None;
    }
    Some(spans.iter().find(|span| span.action == Action::Load).map_or(0, |span| span.tier))
}

impl Tally {
    pub(super) fn new(tiers: usize) -> Self {
        Self { tiers: (0..tiers).map(|_| Tier::default()).collect(), ..Self::default() }
    }

    fn tier(&mut self, tier: TierId) -> &mut Tier {
        &mut self.tiers[tier]
    }

    /// Counts the end of a request.
    pub(super) fn acquired(
        &mut self,
        manager: &Manager,
        (tokens, deferred): (usize, bool),
        lease: std::result::Result<LeaseId, &Error>,
    ) {
        let id = match lease {
            Ok(id) => id,
            Err(error) => {
                self.requested.refused += u64::from(matches!(error, Error::NoSpace { .. }));
                return;
            }
        };
        let size = manager.settings().block_tokens;
        self.requested.requests += 1;
        self.requested.tokens += tokens as u64;
        self.requested.blocks += tokens as u64 / u64::from(size);
        for block in 0..u32::try_from(manager.lease(id).unwrap().matched()).unwrap() / size {
            match found(manager, id, block) {
                Some(tier) => self.hit(tier, size),
                None if deferred => drop(self.undecided.entry(id).or_default().insert(block)),
                None => {}
            }
        }
    }

    /// The blocks of a lease that the plan computes, before a call of `load`.
    pub(super) fn computed(&self, manager: &Manager, id: LeaseId) -> Vec<u32> {
        let undecided = self.undecided.get(&id).into_iter().flatten().copied();
        undecided.filter(|&block| found(manager, id, block).is_none()).collect()
    }

    /// Counts those of these blocks that the plan computes no more, after it.
    pub(super) fn loaded(&mut self, manager: &Manager, id: LeaseId, before: Vec<u32>) {
        for block in before {
            if let Some(tier) = found(manager, id, block) {
                self.undecided.get_mut(&id).unwrap().remove(&block);
                self.hit(tier, manager.settings().block_tokens);
            }
        }
    }

    fn hit(&mut self, tier: TierId, size: u32) {
        let stats = &mut self.tier(tier).stats;
        stats.hits += 1;
        stats.tokens_hit += u64::from(size);
    }

    pub(super) fn handed(&mut self, known: &Move, now: u64) {
        self.handed.insert(known.id, (known.clone(), now));
    }

    /// Counts a move that ended well.
    pub(super) fn ended(&mut self, id: MoveId, layer_bytes: u64, now: u64) {
        let (known, then) = self.handed.remove(&id).expect("it was handed out");
        let bytes = u64::from(known.layers.len()) * layer_bytes;
        self.ended += 1;
        self.tier(known.src).stats.bytes_read += bytes;
        self.tier(known.dst).stats.bytes_written += bytes;
        let (tier, kind) = match known.kind {
            MoveKind::Load => (known.src, "load"),
            MoveKind::Store => (known.dst, "store"),
            MoveKind::Copy => (known.dst, "copy"),
        };
        add(self.tier(tier).moves.entry(kind).or_default(), now - then);
    }

    /// Counts everything since the last call, and compares all metrics.
    pub(super) fn check(&mut self, manager: &mut Manager) {
        let bytes = manager.settings().layer_bytes;
        for event in manager.take_events().unwrap() {
            let tier = self.tier(event.tier);
            tier.stats.evicted[Cause::ALL.iter().position(|&c| c == event.cause).unwrap()] += 1;
            match event.reason {
                Reason::Clean => tier.stats.evicted_clean += 1,
                Reason::Demoted => tier.stats.evicted_dirty += 1,
                Reason::Dropped => tier.stats.dropped += 1,
            }
            tier.stats.bytes_freed += u64::from(event.layers.len()) * bytes;
            add(&mut tier.evict_age, event.idle);
            self.last.push(event);
            self.events.push(event);
        }
        let kept = self.last.len().saturating_sub(manager.settings().eviction_log);
        self.last.drain(..kept);
        let log = manager.evictions(usize::MAX).unwrap().into_iter().map(|entry| Event {
            at: entry.at,
            block: entry.block,
            layers: entry.layers,
            tier: entry.tier,
            reason: entry.reason,
            cause: entry.cause,
            to: entry.to,
            idle: entry.idle,
        });
        assert_eq!(log.collect::<Vec<_>>(), self.last, "the log is the last events");
        let asked = manager.requested();
        self.undecided.retain(|&id, _| manager.lease(id).is_ok_and(|lease| !lease.suspended()));
        let wanted = RequestStats {
            undecided: self.undecided.values().map(|blocks| blocks.len() as u64).sum(),
            inserted: asked.inserted,
            duplicates: asked.duplicates,
            ..self.requested
        };
        assert_eq!(asked, wanted);
        let (mut moves, mut ends) = (0, self.ended);
        for (at, tier) in self.tiers.iter().enumerate() {
            let (stats, times) = (manager.stats(at), manager.times(at));
            let exact = manager.settings().epsilon == 0.0;
            assert!(stats.regrets == 0 || !exact, "{} regrets on tier {at}", stats.regrets);
            assert_eq!(stats.retained, manager.retained(at).0, "tier {at}");
            let wanted = TierStats {
                hits: tier.stats.hits,
                tokens_hit: tier.stats.tokens_hit,
                evicted: tier.stats.evicted,
                evicted_clean: tier.stats.evicted_clean,
                evicted_dirty: tier.stats.evicted_dirty,
                dropped: tier.stats.dropped,
                bytes_freed: tier.stats.bytes_freed,
                bytes_read: tier.stats.bytes_read,
                bytes_written: tier.stats.bytes_written,
                ..stats
            };
            assert_eq!(stats, wanted, "tier {at}");
            let ages = (times.evict_age.count(), times.evict_age.sum());
            assert_eq!(ages, tier.evict_age, "ages at eviction on tier {at}");
            for (kind, seen) in
                [("load", &times.load), ("store", &times.store), ("copy", &times.copy)]
            {
                let known = tier.moves.get(kind).copied().unwrap_or_default();
                assert_eq!((seen.count(), seen.sum()), known, "{kind}s of tier {at}");
            }
            assert_eq!(times.hit_age.count(), stats.hits);
            moves += stats.moves;
            ends += stats.failed;
        }
        let open = manager.pending().1 as u64;
        assert!((ends..=ends + open).contains(&moves), "{moves} begun, {ends} ended, {open} open");
    }
}
