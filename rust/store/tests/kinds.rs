//! Other types of file in place of a store's files: links, pipes, devices, huge files.

mod rig;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use kvtrie_core::Layers;
use kvtrie_store::{Durability, Error, Store, System};
use rig::{Block, behind, bytes, first, once_free, read, settings, write};

const ALL: Layers = Layers::new(0, 4);
const BLOCKS: u32 = 4;
const DIGITS: &str = "0102030405060708";

/// Contents of a file outside, which must not change.
const OUTSIDE: &[u8] = b"not the store's";

/// Type of file in place of a store's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pipe,
    Socket,
    Device,
    Folder,
    Link,
    LinkToPipe,
    DanglingLink,
    LinkToFolder,
    HardLink,
    /// A hard link outside to the file itself.
    Linked,
    /// The file, extended by zeros up to a tebibyte.
    Stretched,
    /// A tebibyte of zeros.
    Sparse,
    Unreadable,
}

const KINDS: [Kind; 13] = [
    Kind::Pipe,
    Kind::Socket,
    Kind::Device,
    Kind::Folder,
    Kind::Link,
    Kind::LinkToPipe,
    Kind::DanglingLink,
    Kind::LinkToFolder,
    Kind::HardLink,
    Kind::Linked,
    Kind::Stretched,
    Kind::Sparse,
    Kind::Unreadable,
];

/// Names that a store opens, below the folder of this test.
const FILES: [&str; 3] = [
    "one/0102030405060708/lock",
    "one/0102030405060708/manifest",
    "one/0102030405060708/segment-00000",
];

/// Other names that it knows.
const OTHERS: [&str; 4] = [
    "one/0102030405060708",
    "one/0102030405060708/manifest.tmp",
    "one/0102030405060708/manifest.aside",
    "one/0102030405060708/segment-00007",
];

fn path(count: u32) -> Vec<Block> {
    let mut all = vec![first(0)];
    for token in 1..count {
        all.push(behind(&all[all.len() - 1], token));
    }
    all
}

fn done(program: &str, arguments: &[&str], path: &Path) -> bool {
    let mut command = Command::new(program);
    command.arg(arguments[0]).arg(path).args(&arguments[1..]).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Puts a file of a kind in place of another; false if that is not permitted here.
fn plant(kind: Kind, at: &Path, outside: &Path) -> bool {
    let file = outside.join("file");
    let huge = |open: &mut fs::OpenOptions| {
        open.write(true).create(true).open(at).and_then(|file| file.set_len(1 << 40)).is_ok()
    };
    match kind {
        Kind::Linked if at.is_file() => {
            return fs::hard_link(at, outside.join("linked")).is_ok();
        }
        Kind::Stretched if !at.is_dir() => return huge(fs::OpenOptions::new().truncate(false)),
        Kind::Unreadable if at.exists() => {
            fs::set_permissions(at, fs::Permissions::from_mode(0o000)).unwrap();
            return fs::metadata(at).unwrap().uid() != 0;
        }
        Kind::Linked | Kind::Stretched | Kind::Unreadable => return false,
        _ => {}
    }
    if at.exists() {
        // Keep the old file open: its inode must not be reused.
        fs::rename(at, outside.join("was")).unwrap();
    }
    match kind {
        Kind::Pipe => done("mkfifo", &["-m600"], at),
        Kind::Socket => {
            // The path of a socket is limited, so it is created elsewhere.
            let made = PathBuf::from(format!("/tmp/kvtrie-{}", std::process::id()));
            let bound = UnixListener::bind(&made);
            bound.is_ok() && (fs::rename(&made, at).is_ok() || fs::remove_file(&made).is_err())
        }
        Kind::Device => done("mknod", &["-m600", "c", "1", "5"], at),
        Kind::Folder => {
            fs::create_dir(at).unwrap();
            fs::write(at.join("file"), OUTSIDE).is_ok()
        }
        Kind::Link => symlink(&file, at).is_ok(),
        Kind::LinkToPipe => symlink(outside.join("pipe"), at).is_ok(),
        Kind::DanglingLink => symlink(outside.join("nothing"), at).is_ok(),
        Kind::LinkToFolder => symlink(outside.join("folder"), at).is_ok(),
        Kind::HardLink => fs::hard_link(&file, at).is_ok(),
        _ => huge(fs::OpenOptions::new().truncate(true)),
    }
}

/// Everything under a folder: type, length, time of writing, and first bytes.
fn seen(folder: &Path) -> BTreeMap<PathBuf, (u32, u64, i64, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let data = fs::symlink_metadata(&path).unwrap();
        let mut start = Vec::new();
        if data.is_dir() {
            all.extend(seen(&path));
        } else if data.is_file() && data.mode() & 0o400 != 0 {
            fs::File::open(&path).unwrap().take(1 << 16).read_to_end(&mut start).unwrap();
        }
        let size = if data.is_dir() { 0 } else { data.len() };
        all.insert(path, (data.mode(), size, data.mtime_nsec(), start));
    }
    all
}

fn say(line: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "{line}").unwrap();
}

/// Reads every block: each is right or a miss. Returns how many are right.
fn found(store: &Store, blocks: &[Block]) -> usize {
    let right = |(slot, block): (u32, &Block)| match read(store, &block.key, slot, ALL) {
        Ok(found) => {
            assert!(found == bytes(store.settings(), block, ALL, 1));
            true
        }
        Err(_) => false,
    };
    (0..).zip(blocks).map(right).filter(|&right| right).count()
}

/// Fills a store, plants the file, reopens the store and checks the result.
fn one(kind: Kind, name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let outside = folder.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::create_dir(outside.join("folder")).unwrap();
    fs::write(outside.join("file"), OUTSIDE).unwrap();
    fs::write(outside.join("folder/file"), OUTSIDE).unwrap();
    assert!(done("mkfifo", &["-m600"], &outside.join("pipe")));
    // A manifest of this number of slots could be that long.
    let slots = if name.ends_with("/manifest") { u32::MAX - 1 } else { BLOCKS };
    let settings = settings(slots, 700, Durability::Flush);
    let one = folder.path().join("one");
    let opened = || Store::open(Arc::new(System::default()), &one, settings.clone());
    let blocks = path(BLOCKS);
    let store = opened().unwrap();
    for (slot, block) in (0..).zip(&blocks) {
        write(&store, block, slot, ALL, 1).unwrap();
    }
    store.close().unwrap();

    let at = folder.path().join(name);
    if !plant(kind, &at, &outside) {
        return;
    }
    let before = seen(&outside);
    let own = at.ends_with(DIGITS);
    let inspected = Store::inspect(Arc::new(System::default()), &one.join(DIGITS));
    let looked = inspected.map(|store| found(&store, &blocks)).map_err(|error| error.to_string());
    assert_eq!(before, seen(&outside));
    let last = name.rsplit('/').next().unwrap();
    let mut reasons = String::new();
    match opened() {
        Ok(store) => {
            reasons += &store.reasons().join("; ");
            reasons += store.refusal().unwrap_or_default();
            let right = found(&store, &blocks);
            // Defects that only reading shows.
            reasons += &store.reasons().join("; ");
            reasons = format!("{reasons}; {right} right, {looked:?} when looked at");
            // A bad lock file does not prevent reading.
            let harmless =
                last == "lock" || last.starts_with("manifest.") || last == "segment-00007";
            let whole = matches!(kind, Kind::Stretched | Kind::Linked) && last == "manifest";
            let sparse = matches!(kind, Kind::Stretched) && last.starts_with("segment");
            if !own && (harmless || whole || sparse) {
                assert_eq!(right, blocks.len(), "{reasons}");
            }
            if store.read_only() {
                assert!(own || last == "lock", "{reasons}");
            } else {
                for (slot, block) in (0..).zip(&blocks) {
                    write(&store, block, slot, ALL, 1).unwrap();
                }
                assert_eq!(found(&store, &blocks), blocks.len(), "{reasons}");
                store.gc().unwrap();
                store.disk_bytes().unwrap();
                store.close().unwrap();
                let again = opened().unwrap();
                assert!(!again.read_only());
                assert_eq!(again.reasons(), Vec::<String>::new());
                assert_eq!(found(&again, &blocks), blocks.len());
            }
            // Without a lost block there may be no reason to report.
            let plain = matches!(kind, Kind::Stretched | Kind::Sparse);
            let silent = last.starts_with("manifest.")
                || plain && (last == "lock" || last == "segment-00007")
                || sparse;
            let named = reasons.contains(last)
                || reasons.contains("no header of block")
                || reasons.contains("may be written");
            assert!(silent || named, "no reason names {last}: {reasons}");
        }
        Err(Error::Config(why)) => {
            assert!(own, "{why}");
            assert!(why.contains(DIGITS), "{why}");
            reasons = why;
        }
        Err(Error::Io { what, .. }) if own && kind == Kind::Unreadable => reasons = what,
        Err(other) => panic!("{other}"),
    }
    assert_eq!(before, seen(&outside), "{reasons}");
    say(&format!("{kind:?} as {name}: {reasons}"));
    if kind == Kind::Unreadable {
        // Or the folder could not be removed.
        let _ = fs::set_permissions(&at, fs::Permissions::from_mode(0o755));
    }
}

const CHILD: &str = "KVTRIE_KINDS_CHILD";

#[test]
fn child_tries_all_kinds() {
    let Ok(given) = std::env::var(CHILD) else { return };
    let (user, name) = given.split_once(' ').unwrap();
    let kinds = KINDS.into_iter().filter(|&kind| (kind == Kind::Unreadable) == (user != "0"));
    for kind in kinds {
        // The last name printed is the one that hangs.
        say(&format!("{kind:?} as {name}"));
        one(kind, name);
    }
}

/// Tries all kinds in place of one name, in a process that is killed after 30 s.
fn goes_through(name: &str) {
    // Root may read everything, so root runs a copy of this binary as a user that cannot read the
    // files.
    let folder = tempfile::tempdir().unwrap();
    let binary = folder.path().join("test");
    fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let root = fs::metadata(folder.path()).unwrap().uid() == 0;
    for user in [0, 65_534] {
        let mut command = Command::new(&binary);
        if root && user > 0 {
            command.uid(user).gid(user);
        }
        command.args(["--exact", "child_tries_all_kinds", "--nocapture"]);
        command.env(CHILD, format!("{user} {name}")).stdout(Stdio::piped());
        command.stderr(Stdio::piped());
        let mut child = once_free(|| command.spawn());
        let (send, receive) = mpsc::channel();
        let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            let mut output = String::new();
            let _ = out.read_to_string(&mut output);
            let _ = err.read_to_string(&mut output);
            send.send(output)
        });
        let output = receive.recv_timeout(Duration::from_secs(30));
        if output.is_err() {
            child.kill().unwrap();
        }
        let ended = child.wait().unwrap();
        let output = output.unwrap_or_else(|_| format!("killed: {}", receive.recv().unwrap()));
        assert!(ended.success() && output.contains("1 passed"), "{name} as user {user}: {output}");
    }
}

#[test]
fn any_kind_of_file_in_place_of_each_ends_as_a_miss_with_a_reason() {
    for name in FILES {
        goes_through(name);
    }
}

#[test]
#[ignore = "the full grid"]
fn any_kind_of_file_under_any_other_name_ends_as_a_miss_with_a_reason() {
    for name in OTHERS {
        goes_through(name);
    }
}
