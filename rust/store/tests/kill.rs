//! A process killed at any moment: the writes that it had reported under `Flush` are found and
//! right.
//!
//! The writer is this test binary again, configured by its environment: `io_uring` or threads,
//! direct I/O or the page cache. `KVTRIE_KILLS` is the number of kills in the test that `--ignored`
//! runs (500).

mod rig;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use kvtrie_core::Layers;
use kvtrie_store::{Durability, Meta, QueueKind, Settings, Store, System};
use rig::{Block, Model, Random, behind, first, read, write};

const FOLDER: &str = "KVTRIE_KILL_FOLDER";
const ROUND: &str = "KVTRIE_KILL_ROUND";
const SLOTS: u32 = 8;

fn settings() -> Settings {
    rig::settings(SLOTS, 40_000, Durability::Flush)
}

fn blocks() -> Vec<Block> {
    let mut all = vec![first(0)];
    for token in 0..11 {
        all.push(behind(&all[all.len() - 1], token));
    }
    all
}

fn open(folder: &Path, round: u64) -> Store {
    let queue = if round.is_multiple_of(2) { QueueKind::Best } else { QueueKind::Threads };
    let system = System::new(!round.is_multiple_of(3), queue);
    Store::open(Arc::new(system), folder, settings()).unwrap()
}

/// Writes until it is killed, and prints each write before and after.
#[test]
fn the_writer() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let round: u64 = std::env::var(ROUND).unwrap().parse().unwrap();
    let store = open(Path::new(&folder), round);
    let blocks = blocks();
    let mut random = Random(round);
    for version in round << 32.. {
        let slot = u32::try_from(random.below(SLOTS.into())).unwrap();
        let number = usize::try_from(random.below(12)).unwrap();
        let lo = u16::try_from(random.below(4)).unwrap();
        let hi = lo + 1 + u16::try_from(random.below(u64::from(4 - lo))).unwrap();
        let line = format!("{slot} {number} {lo} {hi} {version}");
        writeln!(std::io::stdout(), "\nbegin {line}").unwrap();
        write(&store, &blocks[number], slot, Layers::new(lo, hi), version).unwrap();
        let every = |slot| blocks.iter().map(move |block| (slot, block));
        let named: Vec<(u32, &Block)> = (0..SLOTS).flat_map(every).collect();
        rig::note(&store, &named, Meta::default(), version).unwrap();
        writeln!(std::io::stdout(), "wrote {line}").unwrap();
    }
}

#[test]
fn reported_writes_survive_kills() {
    kills(60);
}

#[test]
#[ignore = "a minute; KVTRIE_KILLS says how many die"]
fn reported_writes_survive_many_kills() {
    let rounds = std::env::var("KVTRIE_KILLS").map_or(500, |rounds| rounds.parse().unwrap());
    let (writes, found) = kills(rounds);
    writeln!(
        std::io::stdout(),
        "{rounds} processes killed at random points, {writes} writes reported, {found} blocks found \
         again and right, 0 wrong or lost"
    )
    .unwrap();
}

/// Kills `rounds` writers; returns the writes that they reported and the blocks that were found.
fn kills(rounds: u64) -> (u64, u64) {
    let folder = tempfile::tempdir().unwrap();
    let blocks = blocks();
    let mut random = Random(7);
    let mut model = Model::default();
    let (mut writes, mut found) = (0, 0);
    for round in 1..=rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_writer", "--nocapture"])
            .env(FOLDER, folder.path())
            .env(ROUND, round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut left = 1 + random.below(120);
        let mut begun = None;
        while let Some(Ok(line)) = lines.next() {
            let words: Vec<&str> = line.split(' ').collect();
            let &[verb @ ("begin" | "wrote"), slot, number, lo, hi, version] = &words[..] else {
                continue;
            };
            // A line torn by the kill does not parse, and was not reported.
            let Ok(version) = version.parse::<u64>() else { continue };
            let slot: u32 = slot.parse().unwrap();
            let key = blocks[number.parse::<usize>().unwrap()].key;
            let layers = Layers::new(lo.parse().unwrap(), hi.parse().unwrap());
            if verb == "begin" {
                begun = Some((slot, key, layers));
            } else if version >> 32 == round {
                begun = None;
                model.write(&key, slot, layers, version);
                writes += 1;
            }
            left = left.saturating_sub(1);
            if left == 0 {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        if let Some((slot, key, layers)) = begun {
            let extends = model
                .0
                .get(&slot)
                .is_some_and(|holds| holds.key == key && holds.layers().join(layers).is_some());
            if !extends {
                model.0.remove(&slot);
            }
        }
        let store = open(folder.path(), round + 1);
        for (slot, holds) in &model.0 {
            let bytes = read(&store, &holds.key, *slot, holds.layers()).unwrap();
            assert!(bytes == holds.bytes(40_000), "slot {slot} in round {round}");
            found += 1;
        }
        // A write in flight is there completely or not at all; either way the slot is freed.
        for row in store.rows(0).unwrap() {
            read(&store, &row.key, row.slot, row.layers).unwrap();
            let known = model.0.get(&row.slot);
            if known.is_none_or(|holds| holds.key != row.key || holds.layers() != row.layers) {
                store.remove(row.slot).unwrap();
                model.0.remove(&row.slot);
            }
        }
    }
    assert!(writes > 10 * rounds && found > 5 * rounds, "{writes} writes, {found} found");
    (writes, found)
}
