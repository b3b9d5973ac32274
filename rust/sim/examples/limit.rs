//! A trace through one simulated machine, and the run's calls through a manager alone.
//!
//!     limit FILE serial|continuous GPU_BLOCKS HOST_BLOCKS
//!
//! FILE has a line per request: arrival in ns, tokens of prompt and answer, and the hashes of its
//! blocks. Prints processor nanoseconds of the run, of the calls, and how many calls they were; of
//! the first two the mean of several turns. The second cannot be beaten by a simulator that asks
//! the same of the same manager.

use std::error::Error;
use std::io::Write as _;
use std::sync::Arc;

use kvtrie_core::{CostModel, Kind, LoadMode, Locked, Manager, Settings, TierSpec, Write};
use kvtrie_sim::call::{Call, Calls};
use kvtrie_sim::cost::{Affine, PART_BITS};
use kvtrie_sim::engine::{self, Limits, Wait};
use kvtrie_sim::request::Request;
use kvtrie_sim::simulation::{Config, Simulation};

#[path = "../tests/rig/mod.rs"]
mod rig;

type Failure = Box<dyn Error>;

/// Tokens of a hash.
const TOKENS: u32 = 512;
/// Of a model of 8 billion parameters: 32 layers, 8 heads of 128, 16 bits, K and V.
const LAYERS: u16 = 32;
const LAYER_BYTES: u64 = TOKENS as u64 * 8 * 128 * 2 * 2;
const NS_PER_TOKEN: u64 = 20_000;
/// The managers alone are played again until they have taken this long.
const LONG_NS: u64 = 500_000_000;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [file, kind, gpu, host] = &words[..] else {
        return Err("limit FILE serial|continuous GPU_BLOCKS HOST_BLOCKS".into());
    };
    let requests = read(file)?;
    let (gpu, host) = (gpu.parse()?, host.parse()?);
    let kind = match kind.as_str() {
        "serial" => engine::Kind::Serial,
        _ => engine::Kind::Continuous(Limits {
            token_budget: 8192,
            max_running: 256,
            token_by_token: false,
            cache_answers: false,
        }),
    };
    let logged = play(config(kind, gpu, host, true), requests.clone())?;
    let log = logged.log(0);
    // The processor's time is counted in ticks of some milliseconds: in turns, until they are few.
    let (mut rounds, mut run, mut alone) = (0, 0, 0);
    while alone < LONG_NS {
        let begun = spent()?;
        again(&settings(gpu, host), log)?;
        alone += spent()? - begun;
        let copy = requests.clone();
        let begun = spent()?;
        play(config(kind, gpu, host, false), copy)?;
        run += spent()? - begun;
        rounds += 1;
    }
    writeln!(std::io::stdout(), "{} {} {}", run / rounds, alone / rounds, log.len())?;
    Ok(())
}

/// Nanoseconds that this thread has had a processor.
fn spent() -> Result<u64, Failure> {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(schedstat.split_whitespace().next().ok_or("no schedstat")?.parse()?)
}

fn read(file: &str) -> Result<Vec<Request>, Failure> {
    let text = std::fs::read_to_string(file)?;
    let mut requests = Vec::new();
    for (id, line) in (0..).zip(text.lines()) {
        let mut numbers = line.split(' ');
        let mut number = || numbers.next().ok_or("a short line");
        let (arrival, input, output) = (number()?.parse()?, number()?.parse()?, number()?.parse()?);
        let tokens = numbers.map(str::parse).collect::<Result<_, _>>()?;
        requests.push(Request { id, arrival, tokens, input, output, ..Request::default() });
    }
    Ok(requests)
}

fn play(config: Config, requests: Vec<Request>) -> Result<Simulation, Failure> {
    let mut simulation = Simulation::new(config)?;
    simulation.run(requests.into_iter().map(Ok), |_| Ok(()))?;
    Ok(simulation)
}

/// The same calls to a second manager, which hands out the same moves.
fn again(settings: &Settings, log: &[Call]) -> Result<(), Failure> {
    let manager = Arc::new(Locked::new(Manager::new(settings.clone())?));
    let mut calls = Calls::new(manager, LoadMode::All, false);
    for call in log {
        match call {
            Call::Acquire { tokens, keep, reserve, layerwise, scope, session, lease, now } => {
                let room = (*keep, *reserve);
                let found =
                    calls.acquire(tokens, room, *layerwise, (scope, session.as_deref()), *now)?;
                assert_eq!(found.unwrap_or(0), *lease, "the same lease");
            }
            Call::Moves(moves) => {
                assert_eq!(calls.moves(usize::MAX)?.len(), moves.len(), "the same moves");
            }
            Call::Complete(moves, now) => calls.complete(moves, *now)?,
            Call::Commit(lease, tokens, now) => calls.commit(*lease, tokens, *now)?,
            Call::Prefetch(tokens, now) => calls.prefetch(tokens, *now)?,
            Call::Release(lease, now) => calls.release(*lease, *now)?,
            Call::Reserve(lease, tokens, fits, now) => {
                assert_eq!(calls.reserve(*lease, *tokens, *now)?, *fits, "the same room");
            }
            Call::Suspend(lease, _, now) => calls.suspend(*lease, *now)?,
            Call::Resume(lease, fits, now) => {
                assert_eq!(calls.resume(*lease, *now)?, *fits, "the same room");
            }
            // One machine has no peers and no shared store.
            Call::End(..)
            | Call::Progress(..)
            | Call::Bring(..)
            | Call::Demote(..)
            | Call::LoadsDue(..)
            | Call::Mark { .. }
            | Call::Clear { .. }
            | Call::Pin(..)
            | Call::Unpin(..) => return Err("a peer".into()),
        }
    }
    Ok(())
}

fn settings(gpu: u32, host: u32) -> Settings {
    let tier = |kind: Kind, blocks| {
        let lane = |way| rig::lane(&format!("{} {way}", kind.name()), 25_000_000_000, 10_000);
        let (read, store) = (lane("read"), lane("store"));
        TierSpec { read, store, ..rig::tier(kind, blocks, Write::Back) }
    };
    let mut tiers = vec![tier(Kind::Gpu, gpu)];
    if host > 0 {
        tiers.push(tier(Kind::Host, host));
    }
    Settings {
        layers: LAYERS,
        layer_bytes: LAYER_BYTES,
        block_tokens: 1,
        token_weight: TOKENS,
        epsilon: 1.0 / 64.0,
        cost: CostModel::affine(0.0, 1.0, 0.0, 20_000.0).expect("a cost"),
        ..rig::settings(tiers)
    }
}

fn config(kind: engine::Kind, gpu: u32, host: u32, logged: bool) -> Config {
    let mut config = rig::config(settings(gpu, host), 1, Wait::All);
    config.service.kind = kind;
    config.service.cost = Arc::new(Affine { base: NS_PER_TOKEN << PART_BITS, slope: 0 });
    config.logged = logged;
    config
}
