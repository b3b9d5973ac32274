//! Tail eviction has the same results as evicting its blocks one by one.
//!
//! Blocks that count against a quota are evicted one by one: a manager whose tenant has a quota,
//! never reached, is compared with a manager without. Blocks are identified by their paths, since
//! ids that are freed in another order are reused in another order. With two tiers both have a
//! quota of another tenant, or the one without would use transfer batches.

use std::collections::{BTreeMap, VecDeque};

use kvtrie_core::{
    Acquire, Handle, Hint, Kind, LeaseId, LoadMode, Manager, Nanos, Outcome, POLICIES, Reason,
    Result, Retain, Scope, Settings, Target, TierId, TierSpec, Token, Write,
};
use proptest::prelude::*;

use crate::rig::{SIZE, retain, settings, tier, tokens};

/// One operation on both managers.
#[derive(Clone, Debug)]
enum Op {
    /// A request for blocks of a head and of a stem after it, leased for a while.
    Ask { head: (u32, usize), stem: (u32, usize) },
    /// The oldest request ends.
    End,
    /// A hint with a priority for blocks of such a path, from one on.
    Retain { head: (u32, usize), stem: (u32, usize), from: u64, priority: u8 },
}

fn op() -> impl Strategy<Value = Op> {
    let path = || ((1..4_u32, 0..6_usize), (10..16_u32, 1..7_usize));
    let priority = prop::sample::select(vec![0, 20, 50, 100]);
    prop_oneof![
        6 => path().prop_map(|(head, stem)| Op::Ask { head, stem }),
        4 => Just(Op::End),
        1 => (path(), 0..8_u64, priority).prop_map(|((head, stem), from, priority)| {
            Op::Retain { head, stem, from, priority }
        }),
    ]
}

fn path(head: (u32, usize), stem: (u32, usize)) -> Vec<Token> {
    [tokens(head.0, head.1), tokens(stem.0, stem.1)].concat()
}

fn scope() -> Scope {
    Scope { tenant: b"ours".to_vec(), ..Scope::default() }
}

fn shape() -> impl Strategy<Value = Settings> {
    let policies = POLICIES.to_vec();
    let below = prop::option::of((10..40_u32, prop::sample::select(policies.clone())));
    let policy = prop::sample::select(policies);
    (12..30_u32, below, policy).prop_map(|(gpu, below, policy)| {
        let mut tiers = vec![TierSpec { write: Write::Through, ..tier(Kind::Gpu, gpu) }];
        tiers.extend(below.map(|(host, policy)| TierSpec {
            policy: Some(policy.to_owned()),
            ..tier(Kind::Host, host)
        }));
        Settings { policy: policy.to_owned(), ..settings(tiers) }
    })
}

struct Run {
    manager: Manager,
    leases: VecDeque<LeaseId>,
    names: BTreeMap<Handle, Vec<Token>>,
}

impl Run {
    fn new(settings: Settings, single: bool) -> Result<Self> {
        let mut manager = Manager::new(settings)?;
        let tiers = manager.settings().tiers.len();
        for (tenant, wanted) in [("nobody", tiers > 1), ("ours", single)] {
            for tier in (0..tiers).filter(|_| wanted) {
                let tenant = tenant.as_bytes().to_vec();
                let quota = Hint::Quota { tenant, tier, blocks: Some(1000), share: None };
                manager.hint(&[quota], 0)?;
            }
        }
        Ok(Self { manager, leases: VecDeque::new(), names: BTreeMap::new() })
    }

    /// Returns the evictions: tier, tokens up to the block's end, and reason.
    fn take(&mut self, op: &Op, now: Nanos) -> Result<Vec<(TierId, Vec<Token>, Reason)>> {
        match *op {
            Op::Ask { head, stem } => {
                let (tokens, load) = (path(head, stem), LoadMode::All);
                let ask = Acquire { tokens: &tokens, scope: scope(), load, ..Acquire::default() };
                // Success does not depend on how the slots are made free.
                if let Ok(id) = self.manager.acquire(&ask, now) {
                    self.carry_out(now)?;
                    let held = self.manager.lease_tokens(id)?;
                    let new = self.manager.commit(id, &tokens[held..], now)?.new;
                    for (handle, at) in new.iter().zip(held / SIZE + 1..) {
                        self.names.insert(*handle, tokens[..at * SIZE].to_vec());
                    }
                    self.leases.push_back(id);
                }
            }
            Op::End => {
                if let Some(id) = self.leases.pop_front() {
                    self.manager.release(id, now)?;
                }
            }
            Op::Retain { head, stem, from, priority } => {
                let target = Target::Tokens { tokens: path(head, stem), scope: scope() };
                let retain = Retain { start: from * SIZE as u64, ..retain(target, priority) };
                self.manager.hint(&[Hint::Retain(retain)], now)?;
            }
        }
        self.carry_out(now)?;
        self.manager.audit()?;
        let events = self.manager.take_events()?;
        Ok(events.iter().map(|e| (e.tier, self.names[&e.block].clone(), e.reason)).collect())
    }

    fn carry_out(&mut self, now: Nanos) -> Result<()> {
        let moves = self.manager.moves(usize::MAX)?;
        let ids: Vec<_> = moves.iter().map(|known| known.id).collect();
        self.manager.complete(&ids, &Outcome::default(), now).map(drop)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn tail_eviction_equals_its_blocks_one_by_one(
        shape in shape(),
        ops in prop::collection::vec(op(), 1..80),
    ) {
        let batched = Run::new(shape.clone(), false);
        let single = Run::new(shape, true);
        let (mut batched, mut single) = (batched.unwrap(), single.unwrap());
        for (op, now) in ops.iter().zip((1..).map(|step| step * 1_000)) {
            let left = batched.take(op, now).unwrap();
            prop_assert_eq!(left, single.take(op, now).unwrap(), "after {:?}", op);
            prop_assert_eq!(batched.leases.len(), single.leases.len());
        }
    }
}
