"""Two versions of kvtrie in one run: the work tree and a git revision, row by row, as ratios.

    make bench-against REF=v0.2.0 ARGS="--rounds 9 --json"

Each version is built as a separate wheel, without a profile, below `target/against`, where a
second run finds what is built. In every round both play the same driver, one directly after the
other, and the order alternates, so a slow minute of the machine falls on both. A row's figure is
the median over the rounds of (work tree / revision), with its quartiles: above 1 the work tree is
slower.
The exit status is 1 if a median is above the row's limit.
Cost: two builds of one to two minutes each, then about two minutes a round on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benches.core.place import place
from benches.core.referee import ROOT, DriverError, parse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROOM = ROOT / "target/against"
PRINTED = 20  # last lines of a command that failed

# How much slower than the revision a row may be; baselines are there for their choices.
LIMIT = 1.10
BASELINE_LIMIT = 1.5
BASELINES = ("fifo",)
POLICIES = ("learned", "retention", "lru", "lfu", "flat", *BASELINES)
PLAYS = (
    ("request",),
    ("request", "--policy", "retention"),
    ("request", "--policy", "lru"),
    *(("leaves", "--policy", policy) for policy in POLICIES),
    ("decode",),
    ("offload",),
)
ROWS = (
    "request",
    "request.retention",
    "request.lru",
    "lookup.mean",
    *(f"evict.{policy}" for policy in POLICIES),
    "decode",
    "offload",
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One row over all rounds.

    Attributes:
        what: the row's name in the drivers' lines.
        unit: of `ours` and `theirs`.
        ours: median of the work tree.
        theirs: median of the revision.
        ratio: median over the rounds of ours / theirs.
        low: first quartile of the ratios.
        high: third quartile of the ratios.
        limit: the highest ratio that is accepted.
        ok: whether the median ratio is within it.
    """

    what: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    limit: float
    ok: bool


def main() -> int:
    """Build, play, compare."""
    parser = argparse.ArgumentParser(prog="benches.against", description=__doc__.partition("\n")[0])
    parser.add_argument("revision", help="a git revision: a tag, a branch, a commit")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of runs of each driver")
    parser.add_argument("--only", action="append", default=[], metavar="DRIVER", help="of PLAYS")
    parser.add_argument("--json", action="store_true", help="print a document, not the table")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"{given.rounds} rounds have no quartiles: at least 2 wanted")
    plays = [play for play in PLAYS if not given.only or play[0] in given.only]
    if not plays:
        parser.error(f"drivers are {', '.join(sorted({play[0] for play in PLAYS}))}")
    screen = Console(stderr=True)
    try:
        commit = output_of("git", "rev-parse", "--verify", f"{given.revision}^{{commit}}")
        screen.print(
            f"building {given.revision} ({commit[:12]}) and the work tree", highlight=False
        )
        versions = (built(ROOT, "tree"), built(checkout(commit), commit))
        pairs = played(versions, plays, given.rounds, screen)
    except DriverError as error:
        screen.print(str(error), markup=False, highlight=False)
        return 1
    rows = compared(pairs)
    if given.json:
        document = {"place": place(), "against": commit, "rounds": given.rounds}
        document["rows"] = [asdict(row) for row in rows]
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table(rows, given.revision))
    return int(any(not row.ok for row in rows))


def output_of(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command and return its output.

    Raises:
        DriverError: it failed.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-PRINTED:])
        raise DriverError(f"{' '.join(command)} ended with {done.returncode}:\n{last}")
    return done.stdout.strip()


def checkout(commit: str) -> Path:
    """A work tree of that commit."""
    tree = ROOM / commit / "tree"
    if not tree.exists():
        output_of("git", "worktree", "prune")
        output_of("git", "worktree", "add", "--detach", str(tree), commit)
    return tree


def built(tree: Path, name: str) -> Path:
    """The folder into which the kvtrie of a work tree is installed."""
    wheels, site = ROOM / name / "wheels", ROOM / name / "site"
    shutil.rmtree(wheels, ignore_errors=True)
    shutil.rmtree(site, ignore_errors=True)
    bins = ROOT / ".venv/bin"
    target = str(ROOM / name / "target")
    maturin = (str(bins / "maturin"), "build", "--quiet", "--release", "--out", str(wheels))
    output_of(*maturin, cwd=tree, CARGO_TARGET_DIR=target)
    (wheel,) = wheels.glob("*.whl")
    install = ("pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    output_of(str(bins / "uv"), *install)
    return site


def played(
    versions: tuple[Path, Path], plays: Sequence[tuple[str, ...]], rounds: int, screen: Console
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """By row and unit, the figures of work tree and revision in each round."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with Progress(console=screen, transient=True) as bar:
        task = bar.add_task("Playing", total=2 * rounds * len(plays))
        for turn in range(rounds):
            for play in plays:
                bar.update(task, description=" ".join(play))
                found: dict[Path, dict[tuple[str, str], float]] = {}
                for site in versions if turn % 2 == 0 else versions[::-1]:
                    found[site] = figures(site, play)
                    bar.advance(task)
                ours, theirs = (found[site] for site in versions)
                for row in ours.keys() & theirs.keys():
                    pairs.setdefault(row, []).append((ours[row], theirs[row]))
    return pairs


def figures(site: Path, play: tuple[str, ...]) -> dict[tuple[str, str], float]:
    """The rows that one driver prints with the version that stands in `site`."""
    module, *arguments = play
    path = os.pathsep.join((str(site), str(ROOT)))
    # The driver must not measure the version that is installed in the environment.
    where = output_of(
        sys.executable, "-c", "import kvtrie; print(kvtrie.__file__)", PYTHONPATH=path
    )
    if not where.startswith(str(site)):
        raise DriverError(f"the driver would measure {where}, not {site}")
    command = (sys.executable, "-m", f"benches.ours.{module}", *arguments)
    lines = parse(output_of(*command, PYTHONPATH=path).splitlines())
    return {(line.what, line.unit): line.value for line in lines if line.what in ROWS}


def compared(pairs: dict[tuple[str, str], list[tuple[float, float]]]) -> list[Compared]:
    """Medians and quartiles of each row, in the order of `ROWS`."""
    rows: list[Compared] = []
    for (what, unit), figures in sorted(pairs.items(), key=lambda pair: ROWS.index(pair[0][0])):
        ratios = [ours / theirs for ours, theirs in figures]
        low, middle, high = quantiles(ratios, n=4, method="inclusive")
        limit = BASELINE_LIMIT if what.removeprefix("evict.") in BASELINES else LIMIT
        rows.append(
            Compared(
                what=what,
                unit=unit,
                ours=round(median(ours for ours, _ in figures), 4),
                theirs=round(median(theirs for _, theirs in figures), 4),
                ratio=round(middle, 4),
                low=round(low, 4),
                high=round(high, 4),
                limit=limit,
                ok=middle <= limit,
            )
        )
    return rows


def table(rows: Sequence[Compared], revision: str) -> Table:
    """What people read."""
    shown = Table(title=f"the work tree against {revision}: ratios of times, below 1 is faster")
    for head in ("what", "work tree", revision, "ratio", "quartiles", "at most", ""):
        shown.add_column(head, justify="left" if head == "what" else "right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.what,
            f"{row.ours:.3g} {row.unit}",
            f"{row.theirs:.3g} {row.unit}",
            f"{row.ratio:.3f}",
            f"{row.low:.3f} to {row.high:.3f}",
            f"{row.limit:.2f}",
            "[green]ok[/]" if row.ok else "[red]slower[/]",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
