"""Breaks the core on purpose, one small change at a time, and sees whether its tests notice.

Each mutation replaces one piece of text in a copy of the core and runs the Rust tests there, the
likeliest first. Tests that fail in an unbroken copy do not count. Exit status 1 if anything does,
if a mutation survives, or if the text that it replaces is no longer there exactly once.
`docs/mutations.md` lists them. Takes about a minute each.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = Path("rust/core")
SUITES = ("contract", "scenarios", "model", "groups", "lib")
FAILED = re.compile(r"^test (\S+) .*FAILED$", re.MULTILINE)
LIMIT_S = 900

# Below the folder of the project's own builds, but apart from them: cargo takes a copy of a package
# for the package itself and would later believe a broken build to be the sound one.
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target")))


@dataclass(frozen=True)
class Mutation:
    """A change that breaks an invariant.

    Attributes:
        title: The invariant that no longer holds.
        file: Below `src`.
        old: A text that is there once.
        new: What it becomes.
        suite: The module of the integration tests that should notice, or `lib` for the unit tests.
    """

    title: str
    file: str
    old: str
    new: str
    suite: str = "contract"


MUTATIONS = (
    Mutation(
        "a slot is written at once while a store still reads it",
        "manager/slots.rs",
        "return self.blocks.waits(private.tier, private.slot);",
        "return MoveIds::new();",
    ),
    Mutation(
        "the last layer of a hole is not computed",
        "manager/request/matching/residency_scan.rs",
        "(None, _) => gap_end = layer + 1,",
        "(None, _) => gap_end = layer,",
    ),
    Mutation(
        "a dirty victim leaves like a clean victim",
        "manager/evict/set/decide.rs",
        "out, Fate::Demote(dirty)));",
        "out, Fate::Clean));",
    ),
    Mutation(
        "a fork does not pin its shared blocks",
        "manager/request/life/branch.rs",
        "        self.pin(path.blocks());\n        for private in path.private_slots()",
        "        for private in path.private_slots()",
    ),
    Mutation(
        "a request without room keeps its pins",
        "manager/request/life/acquire.rs",
        "            self.unpin(&path, None);\n        })?;",
        "        })?;",
    ),
    Mutation(
        "the victim is the most valuable entry",
        "eviction.rs",
        ".filter_map(head).min_by(|a, b| self.compare(a, b, now))",
        ".filter_map(head).max_by(|a, b| self.compare(a, b, now))",
    ),
    Mutation(
        "leaf-only evicts from the middle of a path",
        "manager/node.rs",
        "&& (self.departures(block) == Structure::Holes\n",
        "&& (self.departures(block) != Structure::Holes\n"
        "                || self.departures(block) == Structure::Holes\n",
    ),
    Mutation(
        "a move is done when the first rank says so",
        "manager/moves/complete.rs",
        "self.moves[id].done_ranks.count_ones() == self.settings.ranks",
        "self.moves[id].done_ranks.count_ones() >= 1",
    ),
    Mutation(
        "equally valuable holes are made from the end of a path",
        "manager/node.rs",
        "Structure::Holes => depth,",
        "Structure::Holes => u32::MAX - depth,",
        "scenarios",
    ),
    Mutation(
        "the weight of a layer is not reversed for drops",
        "cost.rs",
        "Departure::Drop => indices + number,",
        "Departure::Drop => number * all - indices,",
    ),
    Mutation(
        "the slots of a hung move are free at once",
        "manager/moves/complete.rs",
        "if outcome.hung { &mut known.hung_ranks } else { &mut known.done_ranks };",
        "&mut known.done_ranks;",
    ),
    Mutation(
        "a block already committed by a request counts as new",
        "trie.rs",
        "return (self.tokens(block + 1) == tokens).then_some(block + 1),",
        "return Some(block + 1),",
        "lib",
    ),
    Mutation(
        "a block being demoted leaves its destination tier",
        "manager/evict/set/decide.rs",
        "            && !set.moving.contains(&parent)\n",
        "",
    ),
    Mutation(
        "a move waiting for the slot of a failed move waits for ever",
        "manager/moves/complete.rs",
        "            self.moves.ended(&[id], false);\n",
        "            self.moves.ended(&[], false);\n",
    ),
    Mutation(
        "an ended lease still awaits its moves",
        "manager/request/life/lease.rs",
        "        self.awaits.forget(id);\n",
        "",
    ),
    Mutation(
        "blocks used by a lease until its end were last used at its start",
        "manager/request/life/lease.rs",
        "            node.access = until.map_or(node.access, stamp);\n",
        "            let _ = until.map(stamp);\n",
    ),
    Mutation(
        "a resume needs a block less of a window than its first token attends to",
        "group.rs",
        "border - blocks(window - 1))",
        "border - blocks(window - 1).saturating_sub(1))",
        "lib",
    ),
    Mutation(
        "a resume goes on from the state of the border before it",
        "group.rs",
        "GroupKind::State => (0, border.saturating_sub(1)),",
        "GroupKind::State if border > 1 => {\n"
        "    return Needed { leading: 0..0, trailing: border - 2..border - 1 };\n"
        "}\n"
        "GroupKind::State => (0, border.saturating_sub(1)),",
        "lib",
    ),
    Mutation(
        "a window is released while a lease attends to it",
        "manager/request/slots/place.rs",
        "slots.held.extract_if(.., |place| !needed.contains(*place));",
        "slots.held.extract_if(.., |place| !needed.contains(*place + 1));",
        "groups",
    ),
    Mutation(
        "an evicted block that its child linked again keeps its entry",
        "manager/evict.rs",
        "self.tiers[tier].eviction.unlink(block);",
        "",
        "groups",
    ),
    Mutation(
        "a page returns while a slot of it is live",
        "residency/arena.rs",
        "if free == usize::from(share.per_page) {",
        "if free + 1 >= usize::from(share.per_page) {",
        "lib",
    ),
    Mutation(
        "the window before a hole is not held",
        "manager/points.rs",
        "group.needed_at(starts.chain([border])",
        "group.needed_at(starts.take(0).chain([border])",
        "groups",
    ),
    Mutation(
        "a hole is computed in slots read by other leases",
        "manager/request/slots/request_room.rs",
        "if holes.binary_search(&place).is_ok() {",
        "let block = path[place as usize];\n"
        "if holes.binary_search(&place).is_ok() && !self.part_on(Part { group, block }, 2) {",
        "groups",
    ),
)


def copy_of_the_core(folder: Path) -> Path:
    """A workspace with nothing but the core in it."""
    shutil.rmtree(folder, ignore_errors=True)
    # Fresh times of change, or cargo would believe that it had built this before.
    shutil.copytree(ROOT / CORE, folder / CORE, copy_function=shutil.copy)
    manifest = (ROOT / "Cargo.toml").read_text()
    manifest, found = re.subn(r"members = \[[^]]*\]", f'members = ["{CORE}"]', manifest)
    if not found:
        message = "Cargo.toml names no members"
        raise SystemExit(message)
    (folder / "Cargo.toml").write_text(manifest)
    shutil.copy(ROOT / "Cargo.lock", folder)
    return folder / CORE / "src"


def failures(folder: Path, suite: str) -> list[str]:
    """The tests of one suite that fail in a copy; one word if it does not even compile or end."""
    cargo = shutil.which("cargo")
    if cargo is None:
        message = "cargo is not on the path"
        raise SystemExit(message)
    which = ["--lib"] if suite == "lib" else ["--test", "all", f"{suite}::"]
    command = [cargo, "test", "--offline", "-p", "kvtrie-core", *which, "--no-fail-fast"]
    env = {**os.environ, "CARGO_TARGET_DIR": str(TARGET / "mutated"), "RUST_BACKTRACE": "0"}
    # Random cases, but the same ones for every mutation.
    env |= {"PROPTEST_RNG_SEED": "1", "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "true"}
    env |= {"KVTRIE_DEEP": "1"}  # all cases of slow properties
    try:
        run = subprocess.run(
            command,
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"(no end within {LIMIT_S} s)"]
    if run.returncode == 0:
        return []
    found = FAILED.findall(run.stdout)
    if not found and "error: could not compile" in run.stderr:
        raise SystemExit(run.stderr)
    return found or ["(the test binary died)"]


def noticed_by(mutation: Mutation, folder: Path, known: set[str]) -> str:
    """Which suite notices a mutation, how many of its tests, and one of them; or nothing."""
    for suite in sorted(SUITES, key=lambda suite: suite != mutation.suite):
        found = [test for test in failures(folder, suite) if test not in known]
        if found:
            return f"{suite}: {len(found)} tests, {found[0]}"
    return ""


def broken(mutation: Mutation, folder: Path, known: set[str]) -> tuple[bool, str]:
    """Whether a mutation is caught, and by what."""
    path = copy_of_the_core(folder) / mutation.file
    source = path.read_text()
    if source.count(mutation.old) != 1:
        return False, f"LOST      its text stands {source.count(mutation.old)} times"
    path.write_text(source.replace(mutation.old, mutation.new))
    by = noticed_by(mutation, folder, known)
    return bool(by), f"caught    {by}" if by else "SURVIVED"


def say(text: str) -> None:
    """A line that is seen at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Runs the mutations, all or those whose numbers are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="from 1; default: all")
    numbers = parser.parse_args().numbers or range(1, len(MUTATIONS) + 1)
    folder = TARGET / "mutations"
    copy_of_the_core(folder)
    known = {test for suite in SUITES for test in failures(folder, suite)}
    for test in sorted(known):
        say(f"fails without any mutation: {test}")
    caught = 0
    for number in numbers:
        mutation = MUTATIONS[number - 1]
        ok, said = broken(mutation, folder, known)
        caught += ok
        say(f"{number:2}  {mutation.title}  ({mutation.file})\n      {said}")
    say(f"{caught} of {len(numbers)} mutations caught")
    return 0 if caught == len(numbers) and not known else 1


if __name__ == "__main__":
    sys.exit(main())
