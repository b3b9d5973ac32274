//! Bytes per block by the allocator's count, compared with the formula of the documentation.
//!
//! Invariant: `docs/design/memory.md`. Cost: a million blocks, some seconds.

#![allow(clippy::cast_precision_loss, clippy::print_stdout, reason = "figures to be read")]
#![allow(dead_code, reason = "the benches use the rest")]

#[path = "../benches/pool/mod.rs"]
mod pool;
#[path = "../benches/trace/mod.rs"]
mod trace;

use std::collections::VecDeque;

use kvtrie_core::{
    Acquire, Group, GroupKind, Groups, Manager, Outcome, Owner, Settings, Structure, Token,
};
use peak_alloc::PeakAlloc;
use trace::{Random, Request, Trace};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const SIZE: usize = 16;
const RUNNING: usize = 64;
/// Layers of the model of `pool`.
const LAYERS: f64 = 32.0;

/// A full pool whose requests have all ended.
struct Full {
    blocks: f64,
    bytes: f64,
    runs: f64,
    entries: f64,
}

impl Full {
    fn each(&self) -> f64 {
        self.bytes / self.blocks
    }

    /// The formula of `docs/design/memory.md` for one tier.
    fn formula(&self) -> f64 {
        let block = (4 * SIZE + 4 + 2 + 4) as f64;
        // A page of the entry table has eight ids; of blocks that are all linked it has one each.
        let pages = self.entries.min(self.blocks / 8.0);
        block + 0.5 + (78.0 * self.runs + 192.0 * pages) / self.blocks
    }

    fn print(&self, what: &str) {
        println!(
            "{what}: {:.1} bytes per block, {:.1} by the formula; {:.4} runs and {:.4} entries",
            self.each(),
            self.formula(),
            self.runs / self.blocks,
            self.entries / self.blocks
        );
    }
}

/// Fills a pool with requests until a hundredth is free, and releases all.
fn fill(pool: u32, tiers: usize, next: impl FnMut() -> Request) -> Full {
    fill_with(pool::settings("retention", pool, tiers), next)
}

fn fill_with(settings: Settings, mut next: impl FnMut() -> Request) -> Full {
    let pool = settings.tiers[0].blocks;
    let mut manager = Manager::new(settings).expect("good settings");
    // Slots per block: the layers, on a tier with layer slots.
    let unit = manager.occupancy(0).slots / u64::from(pool);
    let mut running = VecDeque::new();
    let mut now = 0;
    while manager.occupancy(0).free > unit * u64::from(pool / 100) {
        now += 1_000_000;
        let Request { tokens, prompt } = next();
        let reserve = tokens.len() - prompt;
        let ask = Acquire { tokens: &tokens[..prompt], reserve, ..Acquire::default() };
        let id = manager.acquire(&ask, now).expect("there is room");
        let matched = manager.lease(id).expect("held").matched();
        manager.commit(id, &tokens[matched..prompt], now).expect("there is room");
        manager.commit(id, &tokens[prompt..], now).expect("there is room");
        complete_all_moves(&mut manager, now);
        running.push_back(id);
        if running.len() > RUNNING {
            manager.release(running.pop_front().expect("not empty"), now).expect("it is held");
        }
    }
    for id in running {
        manager.release(id, now).expect("it is held");
    }
    let occupancy = manager.occupancy(0);
    let blocks = ((occupancy.slots - occupancy.free) / unit) as f64;
    let runs = manager.run_count() as f64;
    let held = HEAP.current_usage();
    drop(manager);
    let bytes = (held - HEAP.current_usage()) as f64;
    Full { blocks, bytes, runs, entries: occupancy.evictable as f64 }
}

/// Ends every move at once.
fn complete_all_moves(manager: &mut Manager, now: u64) {
    loop {
        let moves = manager.moves(usize::MAX).expect("the manager is open");
        if moves.is_empty() {
            return;
        }
        let ids: Vec<_> = moves.iter().map(|known| known.id).collect();
        manager.complete(&ids, &Outcome::default(), now).expect("the moves are known");
    }
}

fn sequences(random: &mut Random, blocks: usize) -> Request {
    let tokens: Vec<Token> = random.tokens(blocks * SIZE);
    let prompt = tokens.len() - 1;
    Request { tokens, prompt }
}

/// Bytes per block of managers with this number of windows after the first group, in sequences of
/// `blocks` blocks that all fit.
fn with_windows(windows: usize, slot_bytes: u64, blocks: usize) -> f64 {
    const MOST: u32 = 200_000;
    let sequences = MOST as usize / blocks;
    let kind = GroupKind::Sliding { window: 64 * SIZE as u64, sinks: 0 };
    let mut groups = vec![Group { kind: GroupKind::Full, slot_bytes: 32 * 65_536, layers: 32 }];
    groups.extend((0..windows).map(|_| Group { kind, slot_bytes, layers: 32 }));
    let room = u64::from(MOST) * groups.iter().map(|group| group.slot_bytes).sum::<u64>();
    let mut settings = pool::settings("retention", MOST, 1);
    settings.tiers[0].owner = Owner::Nobody;
    if windows > 0 {
        let bytes = vec![room * 11 / 10];
        let slots = vec![groups.iter().map(|group| group.slot_bytes).collect()];
        settings.groups = Some(Groups { groups, bytes, slots, newest: 1, every: 0 });
    }
    let mut manager = Manager::new(settings).expect("good settings");
    let mut random = Random::new(7);
    for now in 0..sequences as u64 {
        let tokens = random.tokens(blocks * SIZE);
        let id = manager.acquire(&Acquire { tokens: &tokens, ..Acquire::default() }, now);
        let id = id.expect("there is room");
        manager.commit(id, &tokens, now).expect("there is room");
        manager.release(id, now).expect("it is held");
    }
    let held = HEAP.current_usage();
    drop(manager);
    (held - HEAP.current_usage()) as f64 / (sequences * blocks) as f64
}

fn main() {
    // Slots of one size, pages of several, and sequences that points hold as a whole.
    for (slot_bytes, blocks) in [(32 * 65_536, 5_000), (5 * 32 * 65_536, 5_000), (32 * 65_536, 64)]
    {
        let [one, three] = [0, 2].map(|windows| with_windows(windows, slot_bytes, blocks));
        let more = (three - one) / 2.0;
        println!("two windows, sequences of {blocks}: {more:.2} bytes more per group and block");
        assert!(more <= 12.0, "{more:.2} bytes for a group");
    }

    let mut trace = Trace::new(1234);
    let million = fill(1_000_000, 1, || trace.take_next());
    million.print("common trace");
    assert!(million.each() <= 80.0, "{:.1} bytes per block", million.each());

    for (policy, structure, most) in [
        ("retention", Structure::Holes, 110.0),
        ("weighted", Structure::LeafOnly, 110.0),
        ("weighted", Structure::Holes, 140.0),
    ] {
        let mut trace = Trace::new(1234);
        let settings = Settings { structure, ..pool::settings(policy, 1_000_000, 1) };
        let full = fill_with(settings, || trace.take_next());
        println!("{policy}, {}: {:.1} bytes per block", structure.name(), full.each());
        assert!(full.each() <= most, "{:.1} bytes per block", full.each());
    }

    let few = 200_000;
    let [plain, learned] = ["lru", "learned"].map(|policy| {
        let mut trace = Trace::new(1234);
        fill_with(pool::settings(policy, few, 1), || trace.take_next()).each()
    });
    // 8 for the last use, and 344 kB in this room for lives and the heads of their chains. Eviction
    // adds 8 for ghosts.
    let more = learned - plain;
    println!("learned: {more:.1} bytes more per block");
    assert!((8.0..=11.0).contains(&more), "{more:.1} bytes for what is learned");

    let [whole, rows] = [false, true].map(|layer_slots| {
        let mut trace = Trace::new(1234);
        let mut settings = pool::settings("retention", 50_000, 1);
        settings.tiers[0].layer_slots = layer_slots;
        fill_with(settings, || trace.take_next()).each()
    });
    let layer = (rows - whole) / LAYERS;
    println!("layer slots: {layer:.2} bytes more per resident layer");
    assert!(layer <= 4.1, "{layer:.2} bytes per layer");

    let mut all = vec![million];
    for blocks in [4, 1] {
        let mut random = Random::new(7);
        let full = fill(few, 1, || sequences(&mut random, blocks));
        full.print(&format!("sequences of {blocks}"));
        all.push(full);
    }
    // If every block has a run and an entry, the formula depends on their tables' load.
    for (full, most) in all.iter().zip([0.05, 0.15, 0.15]) {
        let off = full.each() / full.formula() - 1.0;
        assert!(off.abs() < most, "the formula is off by {:.1} %", 100.0 * off);
    }

    let each = [1, 2, 3].map(|tiers| {
        let mut trace = Trace::new(1234);
        fill(few, tiers, || trace.take_next()).each()
    });
    for (tier, pair) in ["second", "third"].iter().zip(each.windows(2)) {
        let more = pair[1] - pair[0];
        println!("a {tier} tier with a copy of each block: {more:.1} bytes more");
        assert!(more <= 12.0, "{more:.1} bytes for a {tier} tier");
    }
}
