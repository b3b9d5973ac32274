"""How a call's cost grows with the blocks that are cached: flat or logarithmic is what is wanted.

    make bench-scaling
    make bench-scaling ARGS="--redraw"

Managers full of unrelated sequences of 32 blocks, from a thousand blocks to four million: the
median of a lookup, of an acquire and release that hit, of a sequence evicted and one inserted, of
the commit of one token. vLLM and SGLang, where `make peers` has installed them, do the second and
third up to a million blocks. While the largest manager is filled, the CPU time of every call is
taken: the longest one is what a scheduler may have to wait for. Then `benches/crowds.py`: one more
owner of a block, one more tenant with a quota, of a hundred to a hundred thousand. Writes
benches/results/scaling.json and docs/images/scaling.png; `--redraw` draws again what was written.
Cost: three minutes, 2 GB; with both peers twelve minutes.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from time import perf_counter, thread_time_ns
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benches import crowds
from benches.core import referee
from benches.core.place import place
from benches.core.rows import Play
from benches.ours.manager import STEP, manager
from benches.record import keep, options
from benches.workload import BLOCK, SEED, SEQUENCE, VOCABULARY
from kvtrie.settings.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from kvtrie import BlockManager

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/scaling.png"
QUICK = ((1024, 2048), (10, 30))  # sizes and crowds
SIZES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
PEERS = {
    "vLLM": Play("vllm", "benches.peers.vllm_blocks"),
    "SGLang": Play("sglang", "benches.peers.sglang_tree"),
}
PEERS_TO = 1_000_000  # blocks: above it, filling a peer takes more than ten minutes
KEPT = 500  # sequences that are asked for again
TOKENS = 256  # that one lease decodes
GOAL_US = 1000.0  # of CPU time, for any single call
LABELS = {
    "lookup": "lookup of 32 blocks",
    "hit": "acquire and release, 32 blocks found",
    "replace": "evict 32 blocks, insert 32",
    "token": "commit of one token",
}
PANELS = {
    "hit": "32 blocks found: acquire and release",
    "replace": "Cache full: evict 32 blocks, insert 32",
}
# Hues of the same lightness that differ for color-blind eyes.
HUES = {"kvtrie": "#0072b2", "vLLM": "#d55e00", "SGLang": "#009e73"}


class Worst:
    """The longest CPU time of each kind of call, and at how many blocks it was."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.at: dict[str, int] = {}

    def timed(
        self, kind: str, blocks: int, call: Callable[..., Any], *given: Any, **more: Any
    ) -> Any:
        """Make a call and remember it if it took longer than all before."""
        t = thread_time_ns()
        result = call(*given, **more)
        us = (thread_time_ns() - t) / 1000
        if us > self.us.get(kind, 0.0):
            self.us[kind], self.at[kind] = us, blocks
        return result


def sequence(draw: np.random.Generator) -> np.ndarray:
    """A new random sequence."""
    return draw.integers(1, VOCABULARY, size=SEQUENCE * BLOCK, dtype=np.uint32)


def fill(size: int, draw: np.random.Generator) -> tuple[BlockManager, list[np.ndarray], int, Worst]:
    """A full manager, sequences of it spread over its age, the time, and the worst calls."""
    managed, worst, stored = manager(size), Worst(), []
    number = size // SEQUENCE
    every = max(1, number // KEPT)
    # Allocations of the first use are no growth.
    warm = managed.acquire(sequence(draw)[:BLOCK], now=0)
    warm.release(now=0)
    for i in range(number):
        tokens, now, blocks = sequence(draw), STEP * (i + 1), i * SEQUENCE
        lease = worst.timed("acquire", blocks, managed.acquire, tokens, now=now)
        worst.timed("commit", blocks, lease.commit, tokens, now=now)
        worst.timed("release", blocks, lease.release, now=now)
        if i % every == 0 and len(stored) < KEPT:
            stored.append(tokens)
    assert managed.stats().blocks == number * SEQUENCE
    return managed, stored, STEP * (number + 1), worst


def costs(
    managed: BlockManager, stored: list[np.ndarray], now: int, draw: np.random.Generator
) -> dict[str, float]:
    """Median microseconds of each operation."""
    times: dict[str, list[float]] = {name: [] for name in LABELS}
    turns = 3000 // len(stored) + 1
    for tokens in stored * turns:
        t = perf_counter()
        found = managed.lookup(tokens, now=now, keep=0)
        times["lookup"].append(perf_counter() - t)
        assert found.tokens == len(tokens)
    for tokens in stored * turns:
        now += STEP
        t = perf_counter()
        lease = managed.acquire(tokens, now=now, keep=0)
        lease.release(now=now)
        times["hit"].append(perf_counter() - t)
    for _ in range(8):
        now += STEP
        prompt = sequence(draw)[:BLOCK]
        lease = managed.acquire(prompt, now=now, reserve=TOKENS)
        lease.commit(prompt, now=now)
        for token in sequence(draw)[:TOKENS].reshape(-1, 1):
            t = perf_counter()
            lease.commit(token, now=now)
            times["token"].append(perf_counter() - t)
        lease.release(now=now)
    for _ in range(2000):
        now += STEP
        tokens = sequence(draw)
        t = perf_counter()
        lease = managed.acquire(tokens, now=now)
        lease.commit(tokens, now=now)
        lease.release(now=now)
        times["replace"].append(perf_counter() - t)
    return {name: round(1e6 * float(np.median(each)), 3) for name, each in times.items()}


def of_peers(sizes: Sequence[int], screen: Console) -> list[dict[str, Any]]:
    """Medians of the peers that are installed, at each size up to `PEERS_TO` blocks."""
    installed = {
        name: play for name, play in PEERS.items() if referee.interpreter(play.environment)
    }
    for name in PEERS.keys() - installed.keys():
        screen.print(f"{name}: left out, not installed; `make peers` does it", highlight=False)
    runs = [(name, play, size) for name, play in installed.items() for size in sizes]
    found: list[dict[str, Any]] = []
    for name, play, size in track(runs, "Peers", console=screen, transient=True):
        if size <= PEERS_TO:
            sized = Play(play.environment, play.module, ("scaling", "--blocks", str(size)))
            lines = referee.run(sized)
            found.append({"peer": name, "blocks": size} | {line.what: line.value for line in lines})
    return found


def picture(document: dict[str, Any], path: Path) -> None:
    """Cost over blocks, all axes logarithmic: a panel per call, a line per block manager."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    rows = [{"peer": "kvtrie", **row} for row in document["rows"]] + document["peers"]
    sizes = sorted({row["blocks"] for row in rows})
    figure = Figure(figsize=(9, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (call, label) in zip(panels, PANELS.items(), strict=True):
        for name, hue in HUES.items():
            line = [(row["blocks"], row[call]) for row in rows if row["peer"] == name]
            if not line:
                continue
            axes.plot(*zip(*line, strict=True), color=hue, marker="o", markersize=4, linewidth=1.8)
            axes.annotate(
                *(name, line[-1]),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                color=hue,
                fontsize=9,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sizes, [words(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlim(sizes[0] * 0.8, sizes[-1] * 8)
        axes.set_xlabel("blocks in the cache", loc="left")
        axes.set_title(label, loc="left", fontsize=10)
        axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("µs per call, median")
    figure.suptitle(
        "A call stays within microseconds from a thousand to four million blocks",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def words(size: int) -> str:
    """A number of blocks, short."""
    return f"{size // 1_000_000} M" if size >= 1_000_000 else f"{size // 1000} k"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = options(__doc__, ROOT / "benches/results/scaling.json")
    parser.add_argument(
        "--picture", type=Path, help=f"default: {PICTURE.name}, if --out is not given"
    )
    parser.add_argument("--without-peers", action="store_true", help="measure kvtrie alone")
    parser.add_argument("--redraw", action="store_true", help="only draw what --out holds")
    given = parser.parse_args()
    given.without_peers |= given.quick
    if not (given.quick or given.out):
        given.picture = given.picture or PICTURE
    return given


def show(document: dict[str, Any]) -> None:
    """Print the tables and the longest calls."""
    table = Table(title="µs per call, median")
    for head in ("blocks", *LABELS.values()):
        table.add_column(head, justify="right")
    for row in document["rows"]:
        table.add_row(f"{row['blocks']:,}", *(f"{row[name]:.2f}" for name in LABELS))
    shown = Console(width=None if sys.stdout.isatty() else 120)
    shown.print(table)
    for row in document["peers"]:
        shown.print(
            f"{row['peer']}, {row['blocks']:,} blocks: acquire and release {row['hit']:.1f} µs, "
            f"evict 32 and insert 32 {row['replace']:.1f} µs",
            highlight=False,
        )
    table = Table(title="µs a call of one more, median")
    for head in ("owners, tenants", *crowds.LABELS.values()):
        table.add_column(head, justify="right")
    for row in document["crowds"]:
        table.add_row(f"{row['beside']:,}", *(f"{row[name]:.2f}" for name in crowds.LABELS))
    shown.print(table)
    worst = document["worst_call"]
    for kind, call in worst["calls"].items():
        shown.print(
            f"longest {kind} while filling to {worst['filled']:,} blocks: {call['us']:,.0f} µs of "
            f"CPU time, at {call['at_blocks']:,} blocks (goal: {GOAL_US:,.0f})",
            highlight=False,
        )


def main() -> int:
    """Measure, print, write, draw."""
    given = arguments()
    if given.redraw:
        picture(json.loads((given.out or given.default_out).read_text()), given.picture or PICTURE)
        return 0
    sizes, numbers = QUICK if given.quick else (SIZES, crowds.NUMBERS)
    screen = Console(stderr=True)
    draw, measured, where = np.random.default_rng(SEED), [], place()
    worst = Worst()
    gc.freeze()
    for size in track(sizes, "Filling", console=screen, transient=True):
        managed, stored, now, worst = fill(size, draw)
        measured.append(costs(managed, stored, now, draw))
        managed.close()
        del managed, stored
    beside = [
        {"beside": number, **crowds.costs(number)}
        for number in track(numbers, "Crowds", console=screen, transient=True)
    ]
    document: dict[str, Any] = {
        "context": where | {"policy": DEFAULT_POLICY, "sequence_blocks": SEQUENCE},
        "rows": [{"blocks": size, **us} for size, us in zip(sizes, measured, strict=True)],
        "peers": of_peers([] if given.without_peers else sizes, screen),
        "crowds": beside,
        "unit": "us",
        "worst_call": {
            "filled": sizes[-1],
            "goal_us": GOAL_US,
            "calls": {
                kind: {"us": round(us, 1), "at_blocks": worst.at[kind]}
                for kind, us in worst.us.items()
            },
            "ok": max(worst.us.values()) <= GOAL_US,
        },
    }
    if given.picture:
        picture(document, given.picture)
    if keep(given, document):
        return 0
    show(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
