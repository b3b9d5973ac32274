//! Batched moves have the same results as moves one by one.
//!
//! Slots of a batch are allocated at once, so their numbers may differ, and its stores precede its
//! loads: here there are no stores. A quota for a tenant without blocks forces single moves and
//! changes nothing else: a manager with one is compared with a manager without.

use kvtrie_core::{
    Acquire, Hint, Kind, LeaseId, LoadMode, Manager, MoveId, Nanos, Outcome, Result, Settings,
    Structure, TierSpec, Write,
};
use proptest::prelude::*;

use crate::rig::{GPU, settings, tier, tokens};

/// One operation on both managers.
#[derive(Clone, Debug)]
enum Op {
    /// A request for the first blocks of a stem.
    Ask { stem: u32, blocks: usize, load: LoadMode },
    /// The oldest request computes the missing blocks and ends.
    End,
    /// Some of the moves in flight end, well or, the last of them, not.
    Report { moves: usize, well: bool },
}

fn op() -> impl Strategy<Value = Op> {
    let load = prop::sample::select(vec![LoadMode::All, LoadMode::Plan]);
    prop_oneof![
        4 => (0..4_u32, 1..9_usize, load)
            .prop_map(|(stem, blocks, load)| Op::Ask { stem, blocks, load }),
        3 => Just(Op::End),
        4 => (0..12_usize, prop::bool::weighted(0.9))
            .prop_map(|(moves, well)| Op::Report { moves, well }),
    ]
}

fn shape() -> impl Strategy<Value = Settings> {
    let second = prop::sample::select(vec![Write::Through, Write::Never]);
    let below = (4..20_u32, second, any::<bool>());
    (8..20_u32, below, any::<bool>(), prop::sample::select(vec!["lru", "retention"])).prop_map(
        |(gpu, (host, second, disk), holes, policy)| {
            let mut tiers = vec![
                TierSpec { write: Write::Through, ..tier(Kind::Gpu, gpu) },
                TierSpec { write: second, ..tier(Kind::Host, host) },
            ];
            // The tier holds all blocks.
            tiers.extend(disk.then(|| tier(Kind::Disk, 32)));
            let structure = if holes { Structure::Holes } else { Structure::LeafOnly };
            Settings { structure, policy: policy.to_owned(), ..settings(tiers) }
        },
    )
}

/// One of the two managers, with the state of its engine and executor.
struct Run {
    manager: Manager,
    leases: Vec<(LeaseId, usize, u32)>,
    running: Vec<MoveId>,
    report: String,
}

impl Run {
    fn new(settings: Settings, single: bool) -> Result<Self> {
        let mut manager = Manager::new(settings)?;
        if single {
            let (tenant, tier, share) = (b"nobody".to_vec(), GPU, None);
            manager.hint(&[Hint::Quota { tenant, tier, blocks: Some(1), share }], 0)?;
        }
        Ok(Self { manager, leases: Vec::new(), running: Vec::new(), report: String::new() })
    }

    fn take(&mut self, op: &Op, now: Nanos) -> Result<()> {
        match *op {
            Op::Ask { stem, blocks, load } => {
                let tokens = tokens(stem, blocks);
                let ask = Acquire { tokens: &tokens, load, ..Acquire::default() };
                match self.manager.acquire(&ask, now) {
                    Ok(id) => self.leases.push((id, blocks, stem)),
                    Err(error) => self.report = error.to_string(),
                }
            }
            Op::End if !self.leases.is_empty() => {
                let (id, blocks, stem) = self.leases.remove(0);
                self.report(usize::MAX, true, now)?;
                let held = self.manager.lease_tokens(id)?;
                self.manager.commit(id, &tokens(stem, blocks)[held..], now)?;
                self.manager.release(id, now)?;
            }
            Op::End => {}
            Op::Report { moves, well } => self.report(moves, well, now)?,
        }
        self.manager.audit()
    }

    fn report(&mut self, moves: usize, well: bool, now: Nanos) -> Result<()> {
        let handed = self.manager.moves(usize::MAX)?;
        self.running.extend(handed.iter().map(|known| known.id));
        let mut ended: Vec<MoveId> = self.running.drain(..moves.min(self.running.len())).collect();
        if let (false, Some(last)) = (well, ended.pop()) {
            self.manager.complete(&ended, &Outcome::default(), now)?;
            let failed = Outcome { ok: false, error: Some("EIO"), ..Outcome::default() };
            self.manager.complete(&[last], &failed, now)?;
            ended.clear();
        }
        self.manager.complete(&ended, &Outcome::default(), now)?;
        // Moves that depend on a failed one end with it.
        let failed = self.manager.failed()?;
        self.report = format!("{handed:?} {failed:?}");
        Ok(())
    }

    /// The state without hints and slot numbers.
    fn state(&self) -> (String, String) {
        let text = String::from_utf8(self.manager.snapshot()).expect("text") + &self.report;
        let lists = ["Hints", "gpu", "host", "disk", "SlotMap"];
        let lines = text.lines().filter(|line| !lists.iter().any(|list| line.starts_with(list)));
        let lines: Vec<String> = lines.map(without_slots).collect();
        let tiers = 0..self.manager.settings().tiers.len();
        let stats: Vec<_> = tiers.map(|tier| self.manager.stats(tier)).collect();
        (lines.join("\n"), format!("{stats:?}"))
    }
}

/// The line without the numbers after `slot: `.
fn without_slots(line: &str) -> String {
    let mut parts = line.split("slot: ");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        text + "slot " + part.trim_start_matches(|digit: char| digit.is_ascii_digit())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_batch_equals_its_moves_one_by_one(
        shape in shape(),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let batched = Run::new(shape.clone(), false);
        let single = Run::new(shape, true);
        let (mut batched, mut single) = (batched.unwrap(), single.unwrap());
        for (op, now) in ops.iter().zip((1..).map(|step| step * 1_000)) {
            let results = [batched.take(op, now), single.take(op, now)].map(|r| format!("{r:?}"));
            prop_assert_eq!(&results[0], &results[1]);
            prop_assert_eq!(batched.state(), single.state(), "after {:?}", op);
        }
    }
}
