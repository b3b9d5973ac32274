//! Campaign over the fast path: every kind of damage and failure below real files and both I/O
//! queues, counted; small spaces are covered completely.
//!
//! `cargo test -p kvtrie-store --test campaign -- --ignored --nocapture` runs `KVTRIE_FAULTS` cases of
//! each kind (10 000); the test that is always run, a few. A full disk is an ext4 in a file where a
//! loop device may be had, which takes root, otherwise a tmpfs; either needs `unshare`.

mod rig;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use kvtrie_core::Layers;
use kvtrie_store::{
    BlockRead, BlockWrite, Chance, Device, Durability, Error, Fault, Faults, Meta, Pages,
    QueueKind, Settings, Store, System,
};
use rig::memory::Memory;
use rig::{Block, Random, behind, bytes, first, read, write};

const ALL: Layers = Layers::new(0, 4);
const SLOTS: u32 = 6;
const SEGMENT: &str = "segment-00000";
const ROLE: &str = "KVTRIE_CAMPAIGN_ROLE";
const FOLDER: &str = "KVTRIE_CAMPAIGN_FOLDER";
const CASES: &str = "KVTRIE_CAMPAIGN_CASES";

/// Counts of the results of one kind.
#[derive(Debug, Default)]
struct Tally {
    faults: u64,
    right: u64,
    misses: u64,
    wrong: u64,
    whole: bool,
}

impl Tally {
    fn see(&mut self, found: Result<Vec<u8>, Error>, right: &[u8]) {
        match found {
            Ok(found) if found == right => self.right += 1,
            Ok(_) => self.wrong += 1,
            Err(_) => self.misses += 1,
        }
    }
}

fn settings(layer_bytes: usize) -> Settings {
    rig::settings(SLOTS, layer_bytes, Durability::Flush)
}

fn blocks() -> Vec<Block> {
    let mut all = vec![first(0)];
    for token in 1..SLOTS {
        all.push(behind(&all[all.len() - 1], token));
    }
    all
}

fn system(queue: QueueKind) -> Arc<dyn Device> {
    Arc::new(System::new(true, queue))
}

/// A folder in memory if there is one, to be independent of the device's speed.
fn quick() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// A store in memory with a block in each slot, closed.
fn filled() -> (Memory, Vec<Block>) {
    let (memory, blocks) = (Memory::default(), blocks());
    let store = rig::open(&memory.device(), &settings(700));
    for (block, slot) in blocks.iter().zip(0..) {
        write(&store, block, slot, ALL, 1).unwrap();
    }
    store.close().unwrap();
    (memory, blocks)
}

fn look(memory: &Memory) -> Store {
    let folder = Path::new("/stores").join(settings(700).folder_name());
    Store::inspect(memory.device(), &folder).unwrap()
}

fn flip(memory: &Memory, file: &str, bit: usize) {
    memory.alter(file, |bytes| bytes[bit / 8] ^= 1 << (bit % 8));
}

/// Every bit of a slot's header pages, one at a time.
fn header_bits(_cases: u64) -> Tally {
    let (memory, blocks) = filled();
    let (store, right) = (look(&memory), bytes(&settings(700), &blocks[0], ALL, 1));
    let mut tally = Tally { whole: true, ..Tally::default() };
    for bit in 0..2 * settings(700).header_bytes() * 8 {
        flip(&memory, SEGMENT, bit);
        tally.see(read(&store, &blocks[0].key, 0, ALL), &right);
        flip(&memory, SEGMENT, bit);
        tally.faults += 1;
    }
    tally
}

/// Every bit of the manifest, one at a time; the store is opened each time.
fn manifest_bits(_cases: u64) -> Tally {
    let (memory, blocks) = filled();
    let mut tally = Tally { whole: true, ..Tally::default() };
    let right: Vec<_> = blocks.iter().map(|block| bytes(&settings(700), block, ALL, 1)).collect();
    for bit in 0..memory.bytes("manifest").len() * 8 {
        let copy = memory.copy();
        flip(&copy, "manifest", bit);
        tally.faults += 1;
        // A manifest of another version is refused, and stays.
        let device = copy.device();
        let Ok(store) = Store::open(device, Path::new("/stores"), settings(700)) else {
            tally.misses += 1;
            continue;
        };
        for ((block, slot), right) in blocks.iter().zip(0..).zip(&right) {
            tally.see(read(&store, &block.key, slot, ALL), right);
        }
    }
    tally
}

/// A bit anywhere in a layer.
fn data_bits(cases: u64) -> Tally {
    let (memory, blocks) = filled();
    let (store, settings) = (look(&memory), settings(700));
    let slot_bytes = usize::try_from(settings.slot_bytes()).unwrap();
    let (mut tally, mut random) = (Tally::default(), Random(1));
    for _ in 0..cases * 70 {
        let slot = u32::try_from(random.below(SLOTS.into())).unwrap();
        let at = u16::try_from(random.below(4)).unwrap();
        let place = slot as usize * slot_bytes
            + 2 * settings.header_bytes()
            + usize::from(at) * settings.stride();
        let bit = place * 8 + usize::try_from(random.below(700 * 8)).unwrap();
        let (block, one) = (&blocks[slot as usize], Layers::new(at, at + 1));
        flip(&memory, SEGMENT, bit);
        tally.see(read(&store, &block.key, slot, one), &bytes(&settings, block, one, 1));
        flip(&memory, SEGMENT, bit);
        tally.faults += 1;
    }
    assert_eq!(tally.right, 0, "a bit of a layer that no checksum sees");
    tally
}

/// A segment truncated at every byte of its last slot and at every page.
fn cuts(_cases: u64) -> Tally {
    let (memory, blocks) = filled();
    let (store, settings) = (look(&memory), settings(700));
    let content = memory.bytes(SEGMENT);
    let mut tally = Tally { whole: true, ..Tally::default() };
    let last = content.len() - usize::try_from(settings.slot_bytes()).unwrap();
    for end in (0..last).step_by(512).chain(last..content.len()) {
        memory.alter(SEGMENT, |bytes| bytes.truncate(end));
        let slot = u32::try_from(end as u64 / settings.slot_bytes()).unwrap();
        let block = &blocks[slot as usize];
        tally.see(read(&store, &block.key, slot, ALL), &bytes(&settings, block, ALL, 1));
        memory.alter(SEGMENT, |bytes| bytes.clone_from(&content));
        tally.faults += 1;
    }
    tally
}

/// Two slots, or two layers of any slots, swapped.
fn swaps(cases: u64) -> Tally {
    let (memory, blocks) = filled();
    let (store, settings) = (look(&memory), settings(700));
    let slot_bytes = usize::try_from(settings.slot_bytes()).unwrap();
    let (mut tally, mut random) = (Tally::default(), Random(2));
    while tally.faults < cases {
        let mut draw = || usize::try_from(random.below(u64::from(SLOTS) * 5)).unwrap();
        let (one, two) = (draw(), draw());
        let layer = |at: usize| 2 * settings.header_bytes() + at * settings.stride();
        // Of five positions in a slot the first is the whole slot.
        let place = |at: usize| match at % 5 {
            0 => at / 5 * slot_bytes..(at / 5 + 1) * slot_bytes,
            of => {
                let start = at / 5 * slot_bytes + layer(of - 1);
                start..start + settings.stride()
            }
        };
        if one == two || place(one).len() != place(two).len() {
            continue;
        }
        let swap = |bytes: &mut Vec<u8>| {
            let (first, second) = (bytes[place(one)].to_vec(), bytes[place(two)].to_vec());
            bytes[place(one)].copy_from_slice(&second);
            bytes[place(two)].copy_from_slice(&first);
        };
        memory.alter(SEGMENT, swap);
        for at in [one, two] {
            let (block, slot) = (&blocks[at / 5], u32::try_from(at / 5).unwrap());
            tally.see(read(&store, &block.key, slot, ALL), &bytes(&settings, block, ALL, 1));
        }
        memory.alter(SEGMENT, swap);
        tally.faults += 1;
    }
    assert_eq!(tally.right, 0, "a block that does not know its place");
    tally
}

/// A wall clock with any value when a store is listed: ages never fall, and never wrap.
fn clock_jumps(cases: u64) -> Tally {
    let memory = Memory::default();
    let store = rig::open(&memory.device(), &settings(700));
    let (block, mut tally, mut random) = (first(0), Tally::default(), Random(3));
    let (data, layers) = (bytes(&settings(700), &block, ALL, 1), ALL);
    for _ in 0..cases {
        let (wrote, now) = (random.next() >> random.below(64), random.next() >> random.below(64));
        let (age, ttl) = (random.next() >> random.below(64), random.next() >> random.below(64));
        let meta = Meta { age, ttl, ..Meta::default() };
        store.remove(0).unwrap();
        store.write(&block.key, 0, layers, &block.record, meta, &data, wrote).unwrap();
        let found = store.rows(now).unwrap()[0].meta;
        let elapsed = now.saturating_sub(wrote);
        let lives = if ttl == u64::MAX { ttl } else { ttl.saturating_sub(elapsed) };
        let kept = (found.age, found.ttl) == (age.saturating_add(elapsed), lives);
        tally.wrong += u64::from(!kept);
        tally.right += u64::from(kept);
        tally.faults += 1;
    }
    tally
}

/// Batches on files, below a queue, while the device fails in one way.
fn below_a_queue(queue: QueueKind, fault: Fault, cases: u64) -> Tally {
    let (folder, settings, blocks) = (quick(), settings(64 << 10), blocks());
    let faults = Arc::new(Faults::new(system(queue), 5));
    let device: Arc<dyn Device> = Arc::clone(&faults) as Arc<dyn Device>;
    let store = Store::open(device, folder.path(), settings.clone()).unwrap();
    let data: Vec<[Pages; 2]> = blocks
        .iter()
        .map(|block| {
            [0, 1].map(|version| {
                let mut pages = Pages::new(settings.bytes_of(ALL));
                pages.copy_from_slice(&bytes(&settings, block, ALL, version));
                pages
            })
        })
        .collect();
    let mut memory: Vec<Pages> = data.iter().map(|_| Pages::new(settings.bytes_of(ALL))).collect();
    let mut tally = Tally::default();
    let mut shift = 0;
    let mut held: [Option<(usize, usize)>; SLOTS as usize] = [None; SLOTS as usize];
    while faults.injected(fault) < cases {
        shift += 1;
        let version = shift / blocks.len() % 2;
        let block = |slot: u32| (slot as usize + shift) % blocks.len();
        let given = (0..SLOTS).map(|slot| BlockWrite {
            key: &blocks[block(slot)].key,
            slot,
            layers: ALL,
            record: &blocks[block(slot)].record,
            meta: Meta::default(),
            bytes: &data[block(slot)][version],
        });
        faults.inject(fault, Chance::PerMille(150));
        let wrote = store.write_many(given.collect(), 0, 4);
        let wanted = memory.iter_mut().zip(0..).map(|(out, slot)| BlockRead {
            key: &blocks[block(slot)].key,
            slot,
            layers: ALL,
            out,
        });
        let read = store.read_many(wanted.collect(), 4);
        faults.heal();
        for (slot, (wrote, read)) in (0..SLOTS).zip(wrote.iter().zip(&read)) {
            let (held, now) = (&mut held[slot as usize], block(slot));
            // A block that could not be freed is still there; the test does not write it a second
            // time.
            let same = held.filter(|&(block, _)| block == now);
            if let (Err(_), Some((block, version)), None) = (wrote, *held, same) {
                let mut out = vec![0; settings.bytes_of(ALL)];
                let found = store.read(&blocks[block].key, slot, ALL, &mut out);
                tally.wrong += u64::from(found.is_ok() && out[..] != data[block][version][..]);
                *held = held.filter(|_| found.is_ok());
            }
            let wanted = same.or(wrote.is_ok().then_some((now, version)));
            match (read, wanted) {
                (Ok(()), Some((block, version)))
                    if memory[slot as usize][..] == data[block][version][..] =>
                {
                    tally.right += 1;
                }
                (Ok(()), _) => tally.wrong += 1,
                (Err(_), _) => tally.misses += 1,
            }
            if wanted.is_some() {
                *held = wanted;
            }
        }
    }
    tally.faults = faults.injected(fault);
    tally
}

/// Runs this test again as another process, in separate namespaces and after the command
/// `before`; returns the numbers that it prints.
fn elsewhere(own: &str, before: &str, role: &str, folder: &Path, cases: u64) -> Option<Tally> {
    let me = std::env::current_exe().unwrap();
    let output = Command::new("unshare")
        .args([own, "sh", "-c"])
        .arg(format!("{before} && exec {} --exact another_process --nocapture", me.display()))
        .env(ROLE, role)
        .env(FOLDER, folder)
        .env(CASES, cases.to_string())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.contains("tally "))?;
    let numbers = line.split("tally ").nth(1)?.split(' ').map(|number| number.parse().unwrap());
    let numbers: Vec<u64> = numbers.collect();
    assert!(output.status.success(), "{text}");
    let &[faults, right, misses, wrong] = &numbers[..] else { return None };
    Some(Tally { faults, right, misses, wrong, whole: false })
}

/// Writes blocks to a full file system, by both queues in turn; returns which file system it was.
fn full_disk(cases: u64) -> (&'static str, Option<Tally>) {
    let (folder, inside) = (tempfile::tempdir().unwrap(), quick());
    let (place, image) =
        (folder.path().display(), inside.path().join("image").display().to_string());
    let ext4 = format!(
        "truncate -s 3M {image} && mkfs.ext4 -q -F -m 0 -b 1024 -J size=1 {image} && \
         mount -o loop {image} {place}"
    );
    if let Some(tally) = elsewhere("-m", &ext4, "full", folder.path(), cases) {
        return ("full disk, ext4", Some(tally));
    }
    let tmpfs = format!("mount -t tmpfs -o size=1500k none {place}");
    ("full disk, tmpfs", elsewhere("-Urm", &tmpfs, "full", folder.path(), cases))
}

/// A store in a file system that became read-only, reopened again and again.
fn read_only_folder(cases: u64) -> Option<Tally> {
    let folder = tempfile::tempdir().unwrap();
    let (place, inner) = (folder.path().display(), folder.path().join("in"));
    let mount = format!("mount -t tmpfs none {place} && mkdir {}", inner.display());
    elsewhere("-Urm", &mount, "read-only", &inner, cases)
}

/// Another process has the store's lock while this one opens it.
fn two_processes(cases: u64) -> Tally {
    let (folder, blocks) = (quick(), blocks());
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "another_process", "--nocapture"])
        .env(ROLE, "hold")
        .env(FOLDER, folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = std::io::BufReader::new(holder.stdout.take().unwrap());
    let mut lines = std::io::BufRead::lines(output).map_while(Result::ok);
    assert!(lines.any(|line| line.contains("holding")));
    let mut tally = Tally::default();
    for case in 0..cases {
        let queue = if case % 2 == 0 { QueueKind::Best } else { QueueKind::Threads };
        let store = Store::open(system(queue), folder.path(), settings(4096)).unwrap();
        let refused = store.remove(0).is_err() && write(&store, &blocks[0], 0, ALL, 9).is_err();
        tally.wrong += u64::from(!store.read_only() || !refused);
        let slot = u32::try_from(case % u64::from(SLOTS)).unwrap();
        let block = &blocks[slot as usize];
        tally.see(read(&store, &block.key, slot, ALL), &bytes(&settings(4096), block, ALL, 1));
        tally.faults += 1;
    }
    drop(holder.stdin.take());
    lines.for_each(drop);
    assert!(holder.wait().unwrap().success());
    assert_eq!(tally.misses, 0, "a process that may read finds everything");
    tally
}

fn fill_up(folder: &Path, cases: u64) -> Tally {
    // Slots of 72 KiB, 2160 KiB together, for files of at most 1500 or 1900 KiB.
    let settings = Settings { blocks: 30, ..settings(16 << 10) };
    let mut chain = vec![first(0)];
    (1..40).for_each(|token| chain.push(behind(&chain[chain.len() - 1], token)));
    let (mut tally, mut random) = (Tally::default(), Random(4));
    while tally.faults < cases {
        let queue = if random.below(2) == 0 { QueueKind::Best } else { QueueKind::Threads };
        let store = Store::open(system(queue), folder, settings.clone()).unwrap();
        for _ in 0..400 {
            let slot = u32::try_from(random.below(30)).unwrap();
            let block = &chain[usize::try_from(random.below(40)).unwrap()];
            let wrote = write(&store, block, slot, ALL, 1);
            let found = read(&store, &block.key, slot, ALL);
            assert!(wrote.is_err() || found.is_ok(), "{found:?}");
            tally.faults += u64::from(matches!(wrote, Err(Error::Full(_))));
            tally.see(found, &bytes(&settings, block, ALL, 1));
            if random.below(20) == 0 {
                for slot in 0..15 {
                    let _ = store.remove(slot);
                }
                let _ = store.gc();
            }
        }
    }
    tally
}

fn open_read_only(folder: &Path, cases: u64) -> Tally {
    let blocks = blocks();
    let store = Store::open(system(QueueKind::Best), folder, settings(4096)).unwrap();
    for (block, slot) in blocks.iter().zip(0..) {
        write(&store, block, slot, ALL, 1).unwrap();
    }
    store.close().unwrap();
    let above = folder.parent().unwrap();
    let done = Command::new("mount").args(["-o", "remount,ro"]).arg(above).status().unwrap();
    assert!(done.success());
    let mut tally = Tally::default();
    for case in 0..cases {
        let queue = if case % 2 == 0 { QueueKind::Best } else { QueueKind::Threads };
        let store = Store::open(system(queue), folder, settings(4096)).unwrap();
        tally.wrong += u64::from(!store.read_only() || store.remove(0).is_ok());
        let slot = u32::try_from(case % u64::from(SLOTS)).unwrap();
        let block = &blocks[slot as usize];
        tally.see(read(&store, &block.key, slot, ALL), &bytes(&settings(4096), block, ALL, 1));
        tally.faults += 1;
    }
    assert_eq!(tally.misses, 0, "a process that may read finds everything");
    tally
}

/// Body of this binary when it is started as another process.
#[test]
fn another_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    if role == "hold" {
        let store = Store::open(system(QueueKind::Best), &folder, settings(4096)).unwrap();
        for (block, slot) in blocks().iter().zip(0..) {
            write(&store, block, slot, ALL, 1).unwrap();
        }
        writeln!(std::io::stdout(), "holding").unwrap();
        let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
        return;
    }
    let cases = std::env::var(CASES).unwrap().parse().unwrap();
    let tally = match role.as_str() {
        "full" => fill_up(&folder, cases),
        _ => open_read_only(&folder, cases),
    };
    let Tally { faults, right, misses, wrong, .. } = tally;
    writeln!(std::io::stdout(), "tally {faults} {right} {misses} {wrong}").unwrap();
}

fn campaign(cases: u64, short: bool, out: &mut dyn Write) {
    writeln!(out, "{:<30}{:>10}{:>12}{:>10}{:>7}", "kind", "faults", "right", "misses", "wrong")
        .unwrap();
    let mut sum = 0;
    let mut tell = |name: &str, tally: Option<Tally>| {
        let Some(Tally { faults, right, misses, wrong, whole }) = tally else {
            writeln!(out, "{name:<30}  not run: no private file system here").unwrap();
            return;
        };
        let every = if whole { "  every one" } else { "" };
        writeln!(out, "{name:<30}{faults:>10}{right:>12}{misses:>10}{wrong:>7}{every}").unwrap();
        assert!(wrong == 0 && (whole || faults >= cases), "{name}");
        sum += faults;
    };
    if !short {
        tell("bits of header pages", Some(header_bits(cases)));
        tell("bits of the manifest", Some(manifest_bits(cases)));
        tell("ends of a segment", Some(cuts(cases)));
    }
    tell("bits of layers", Some(data_bits(cases)));
    tell("swapped slots and layers", Some(swaps(cases)));
    tell("clock jumps", Some(clock_jumps(cases)));
    tell("two processes", Some(two_processes(cases)));
    let (name, tally) = full_disk(cases);
    tell(name, tally);
    tell("read-only folder", read_only_folder(cases));
    for (queue, name) in [(QueueKind::Best, "io_uring"), (QueueKind::Threads, "threads")] {
        for fault in
            [Fault::Read, Fault::Write, Fault::ShortRead, Fault::ShortWrite, Fault::NoSpace]
        {
            let name = format!("{}, {name}", fault.name());
            tell(&name, Some(below_a_queue(queue, fault, cases)));
        }
    }
    writeln!(out, "{:<30}{sum:>10}", "all").unwrap();
}

#[test]
fn a_few_cases_of_each_kind() {
    campaign(20, true, &mut std::io::sink());
}

#[test]
#[ignore = "minutes; KVTRIE_FAULTS says how many cases of each kind"]
fn many_cases_of_each_kind() {
    let cases = std::env::var("KVTRIE_FAULTS").map_or(10_000, |cases| cases.parse().unwrap());
    campaign(cases, false, &mut std::io::stdout());
}
