//! Runs whose every byte is on file: the same in each build, and through Python.
//!
//! `golden/trace.txt` has a request per line: arrival, tokens of the answer, and the prompt as
//! `first+count` ranges. Each other file there is one run of it: a line per request, and a digest of all
//! calls. `KVTRIE_GOLDEN=record cargo test -p kvtrie-sim --test all golden::` writes them again;
//! `tests/sim/test_golden.py` has the same settings.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use kvtrie_core::{Kind, Write};
use kvtrie_sim::call::Call;
use kvtrie_sim::cost::{Affine, PART_BITS};
use kvtrie_sim::engine::{self, Limits, Wait};
use kvtrie_sim::network::PeerSpec;
use kvtrie_sim::record::Record;
use kvtrie_sim::request::Request;
use kvtrie_sim::simulation::{Config, Simulation};

use crate::rig::{config, play, settings, tier, together};

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn trace() -> Vec<Request> {
    let text = std::fs::read_to_string(file("trace.txt")).expect("a trace");
    let number = |word: &str| word.parse::<u32>().expect("a number");
    let request = |(id, line): (u64, &str)| {
        let mut words = line.split(' ');
        let mut next = || words.next().expect("two numbers");
        let (arrival, output) = (number(next()).into(), number(next()).into());
        let ranges = words.map(|range| range.split_once('+').expect("a range"));
        let tokens: Vec<u32> = ranges
            .flat_map(|(first, count)| number(first)..number(first) + number(count))
            .collect();
        let input = tokens.len() as u64;
        Request { id, arrival, tokens, input, output, ..Request::default() }
    };
    (0..).zip(text.lines()).map(request).collect()
}

fn check(name: &str, mut config: Config) {
    config.service.cost = Arc::new(Affine { base: 1000 << PART_BITS, slope: 1 << PART_BITS });
    config.logged = true;
    let (records, simulation) = play(config, trace());
    let mut text = String::new();
    for record in &records {
        line(record, &mut text);
    }
    writeln!(text, "calls {:016x}", digest(&simulation)).expect("a string");
    let path = file(name);
    if std::env::var("KVTRIE_GOLDEN").is_ok_and(|what| what == "record") {
        std::fs::write(&path, &text).expect("written");
    }
    let known = std::fs::read_to_string(&path).expect("a golden file");
    for (at, (seen, known)) in std::iter::zip(text.lines(), known.lines()).enumerate() {
        assert_eq!(seen, known, "line {} of {name}", at + 1);
    }
    assert_eq!(text, known);
}

/// `id machine arrival first end hits.. peer computed`, with `-` for what a refused request lacks.
fn line(record: &Record, text: &mut String) {
    let time = |at: Option<u64>| at.map_or("-".to_owned(), |at| at.to_string());
    let Record { id, machine, arrival, first_token, end, hits, peer, computed, .. } = record;
    write!(text, "{id} {machine} {arrival} {} {}", time(*first_token), time(*end)).expect("fine");
    for hits in hits {
        write!(text, " {hits}").expect("fine");
    }
    writeln!(text, " {peer} {computed}").expect("fine");
}

/// 64-bit FNV-1a of all calls of all machines, a line each.
fn digest(simulation: &Simulation) -> u64 {
    let mut text = String::new();
    for machine in 0..simulation.machines().count() {
        for call in simulation.log(machine) {
            text.push_str(&words(call).join(" "));
            text.push('\n');
        }
    }
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A call as words: its name, then all numbers in it.
fn words(call: &Call) -> Vec<String> {
    let (name, numbers): (&str, Vec<u64>) = match call {
        Call::Acquire { tokens, keep, reserve, layerwise, lease, now, .. } => {
            let tokens = tokens.iter().map(|&token| token.into());
            let rest = [*keep as u64, *reserve as u64, (*layerwise).into(), *lease, *now];
            ("acquire", tokens.chain(rest).collect())
        }
        Call::Moves(moves) => {
            let numbers = moves.iter().flat_map(|order| {
                let slots = [order.src_slot.into(), order.dst_slot.into()];
                let ends = [order.src as u64, order.dst as u64];
                let layers = [order.layers.lo.into(), order.layers.hi.into()];
                let (id, lease, after) = (order.id, order.lease, order.after);
                [[id, order.kind as u64, lease].as_slice(), &ends, &slots, &layers, &[after]]
                    .concat()
            });
            ("moves", numbers.collect())
        }
        Call::Complete(moves, now) => ("complete", [moves.as_slice(), &[*now]].concat()),
        Call::Commit(lease, tokens, now) => {
            let tokens = tokens.iter().map(|&token| token.into());
            ("commit", std::iter::once(*lease).chain(tokens).chain([*now]).collect())
        }
        Call::Release(lease, now) => ("release", vec![*lease, *now]),
        Call::End(_, now) => ("end", vec![*now]),
        Call::Progress(_, eta, now) => ("progress", vec![*eta, *now]),
        Call::Bring(_, deadline, now) => ("bring", vec![deadline.unwrap_or(0), *now]),
        Call::Demote(_, now) => ("demote", vec![*now]),
        Call::LoadsDue(now) => ("loads-due", vec![*now]),
        Call::Reserve(lease, tokens, fits, now) => {
            ("reserve", vec![*lease, *tokens as u64, (*fits).into(), *now])
        }
        Call::Suspend(lease, _, now) => ("suspend", vec![*lease, *now]),
        Call::Resume(lease, fits, now) => ("resume", vec![*lease, (*fits).into(), *now]),
        Call::Mark { tokens, tier, skip, times, fits, now } => {
            let tokens = tokens.iter().map(|&token| token.into());
            let rest = [*tier as u64, *skip as u64, times.0, times.1, (*fits).into(), *now];
            ("mark", tokens.chain(rest).collect())
        }
        Call::Prefetch(tokens, now) => {
            let tokens = tokens.iter().map(|&token| token.into());
            ("prefetch", tokens.chain([*now]).collect())
        }
        Call::Clear { tokens, tier, skip, fits, now } => {
            let tokens = tokens.iter().map(|&token| token.into());
            let rest = [*tier as u64, *skip as u64, (*fits).into(), *now];
            ("clear", tokens.chain(rest).collect())
        }
        Call::Pin(blocks, tier, pin, now) => {
            let blocks = blocks.iter().map(|block| block.0);
            ("pin", blocks.chain([*tier as u64, *pin, *now]).collect())
        }
        Call::Unpin(pin, now) => ("unpin", vec![*pin, *now]),
    };
    std::iter::once(name.to_owned()).chain(numbers.iter().map(u64::to_string)).collect()
}

/// A GPU of ten blocks above a host of 30.
fn small() -> kvtrie_core::Settings {
    settings(vec![tier(Kind::Gpu, 10, Write::Back), tier(Kind::Host, 30, Write::Back)])
}

#[test]
fn serial() {
    let mut config = config(small(), 2, Wait::Layer);
    config.peers = Some(PeerSpec { bytes_per_s: 8_192_000, latency_ns: 5, shares: None });
    check("serial.txt", config);
}

#[test]
fn continuous() {
    let limits =
        Limits { token_budget: 64, max_running: 8, token_by_token: false, cache_answers: false };
    check("continuous.txt", together(small(), 1, limits, Wait::All));
}

#[test]
fn disaggregated() {
    let limits =
        Limits { token_budget: 64, max_running: 8, token_by_token: false, cache_answers: false };
    let mut config = together(small(), 3, limits, Wait::All);
    config.service.kind = engine::Kind::Disaggregated(limits, 1);
    let shares = Some("net".into());
    config.network = Some(PeerSpec { bytes_per_s: 8_192_000, latency_ns: 5, shares });
    check("disaggregated.txt", config);
}
