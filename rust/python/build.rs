//! Passes `KVTRIE_COMMIT` to the extension: the commit that is checked out while it is compiled.
//!
//! `+` follows it if tracked files differ from that commit. Without a repository it is read from the
//! file `COMMIT` of a source distribution; without that it is `unknown`.
//!
//! Invariant: the script runs again only if a source changed, which compiles the extension anyway.
//! A commit that changes no source of the extension compiles nothing.

#![allow(clippy::print_stdout)] // cargo reads it

use std::{fs, path::Path, process::Command};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const SOURCES: [&str; 7] = [
    "COMMIT",
    "Cargo.lock",
    "cuda",
    "rust/core/src",
    "rust/python/src",
    "rust/sim/src",
    "rust/store/src",
];

fn main() {
    let root = Path::new(ROOT);
    // Cargo would run the script each time for a file that is not there.
    for source in SOURCES.map(|each| root.join(each)).iter().filter(|path| path.exists()) {
        println!("cargo::rerun-if-changed={}", source.display());
    }
    let commit = if root.join(".git").exists() {
        described(root)
    } else {
        fs::read_to_string(root.join("COMMIT")).ok()
    };
    let commit = commit.as_deref().map_or("unknown", str::trim);
    println!("cargo::rustc-env=KVTRIE_COMMIT={commit}");
}

fn described(root: &Path) -> Option<String> {
    let words = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"];
    let done = Command::new("git").arg("-C").arg(root).args(words).output().ok()?;
    done.status.success().then(|| String::from_utf8_lossy(&done.stdout).into_owned())
}
