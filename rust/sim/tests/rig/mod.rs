//! Small settings and traces for the simulator's tests.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::Arc;

use kvtrie_core::{CostModel, Kind, LaneSpec, LoadMode, Owner, Settings, TierSpec, Write};
use kvtrie_sim::cost::{Affine, PART_BITS};
use kvtrie_sim::directory::Learning;
use kvtrie_sim::engine::{self, Limits, Service, Wait};
use kvtrie_sim::record::Record;
use kvtrie_sim::request::Request;
use kvtrie_sim::router::RoundRobin;
use kvtrie_sim::simulation::{Config, Simulation};
use kvtrie_sim::transfer::{Mode, Transfer};

/// A lane.
pub(crate) fn lane(name: &str, bytes_per_s: u64, latency_ns: u64) -> LaneSpec {
    LaneSpec { name: name.into(), bytes_per_s, latency_ns, shares: None }
}

/// A tier whose lanes carry a block of 16 KiB in a millisecond.
pub(crate) fn tier(kind: Kind, blocks: u32, write: Write) -> TierSpec {
    let name = kind.name();
    TierSpec {
        kind,
        blocks,
        owner: Owner::Nobody,
        write,
        admit_after: 1,
        free_low: 0.0,
        growth_reserve: 0.0,
        retained_share: 0.5,
        layer_slots: false,
        kept: false,
        policy: None,
        read: lane(&format!("{name} read"), 16_384_000, 0),
        store: lane(&format!("{name} store"), 16_384_000, 0),
    }
}

/// Settings of a model with 4 layers and 1 KiB of KV per token, in blocks of 16 tokens.
pub(crate) fn settings(tiers: Vec<TierSpec>) -> Settings {
    Settings {
        policy: "lru".into(),
        epsilon: 0.0,
        cost: CostModel::affine(0.0, 1.0, 0.0, 1000.0).expect("a cost"),
        ..Settings::new("", 4, 4096, tiers)
    }
}

/// A run of the settings on one serial engine per machine, a microsecond per token.
pub(crate) fn config(settings: Settings, machines: usize, wait: Wait) -> Config {
    Config {
        settings,
        machines,
        hardware: Vec::new(),
        load: LoadMode::All,
        service: Service {
            kind: engine::Kind::Serial,
            cost: Arc::new(Affine { base: 1000 << PART_BITS, slope: 0 }),
            wait,
            keep: 1,
            gap: 0,
            held: 0,
        },
        transfer: Transfer {
            mode: Mode::Executor,
            moves_per_job: 64,
            layerwise: wait == Wait::Layer,
        },
        router: Box::<RoundRobin>::default(),
        peers: None,
        network: None,
        remote: None,
        directory: Learning::Exact,
        logged: false,
    }
}

/// The same on one continuous engine per machine.
pub(crate) fn together(settings: Settings, machines: usize, limits: Limits, wait: Wait) -> Config {
    let mut config = config(settings, machines, wait);
    config.service.kind = engine::Kind::Continuous(limits);
    config
}

/// A GPU of four blocks above a host of 64.
pub(crate) fn two_tiers() -> Settings {
    settings(vec![tier(Kind::Gpu, 4, Write::Through), tier(Kind::Host, 64, Write::Back)])
}

/// 64 distinct tokens for each name, each request with its time in milliseconds.
pub(crate) fn requests(trace: &[(u32, u64)]) -> Vec<Request> {
    let request = |(id, &(name, ms)): (usize, &(u32, u64))| Request {
        id: id as u64,
        arrival: ms * 1_000_000,
        tokens: (name * 1000..name * 1000 + 64).collect(),
        input: 64,
        output: 1,
        ..Request::default()
    };
    trace.iter().enumerate().map(request).collect()
}

/// Plays requests; the records and the simulation at its end.
pub(crate) fn play(config: Config, requests: Vec<Request>) -> (Vec<Record>, Simulation) {
    let mut simulation = Simulation::new(config).expect("settings");
    let mut records = Vec::new();
    let tell = |record| {
        records.push(record);
        Ok(())
    };
    simulation.run(requests.into_iter().map(Ok), tell).expect("a run");
    (records, simulation)
}

/// Time to the first token of each.
pub(crate) fn ttft(records: &[Record]) -> Vec<u64> {
    let wait = |record: &Record| record.first_token.expect("served") - record.arrival;
    records.iter().map(wait).collect()
}

/// Numbers that are drawn: a linear congruential generator, its upper bits.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    /// A number below another one.
    pub(crate) fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        u32::try_from((self.0 >> 32) % u64::from(end)).expect("below a u32")
    }

    /// One of some.
    pub(crate) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(u32::try_from(all.len()).expect("few")) as usize]
    }
}

/// Settings of two tiers in little room, and requests of which many share prompts, decode, are
/// suspended, refused or wait for copies.
pub(crate) fn drawn(seed: u64) -> (Settings, Limits, Vec<Request>) {
    let mut dice = Dice(seed);
    let mut settings = two_tiers();
    settings.tiers[0].write = dice.one_of(&[Write::Back, Write::Through, Write::Never]);
    settings.tiers[0].blocks = 6 + dice.below(10);
    settings.tiers[1].blocks = 8 + dice.below(30);
    settings.tiers[1].read.latency_ns = dice.one_of(&[0, 777]);
    let token_budget = 1 + dice.below(100);
    let max_running = u64::from(1 + dice.below(token_budget.min(9)));
    let mut now = 0;
    let request = |id| {
        now += u64::from(dice.below(2) * dice.below(3_000_000));
        let (name, length) = (1000 * dice.below(5), 1 + dice.below(90));
        let output = u64::from(dice.below(2) * dice.below(60));
        let tokens = (name..name + length).collect();
        let input = length.into();
        Request { id, arrival: now, tokens, input, output, ..Request::default() }
    };
    let trace = (0..60).map(request).collect();
    let token_budget = token_budget.into();
    let limits =
        Limits { token_budget, max_running, token_by_token: false, cache_answers: seed % 2 == 1 };
    (settings, limits, trace)
}
