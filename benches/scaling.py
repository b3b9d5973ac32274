"""How a call's cost grows with the blocks that are cached: flat or logarithmic is what is wanted.

    make bench-scaling
    make bench-scaling ARGS="--redraw"

Managers full of unrelated sequences of 32 blocks, from a thousand blocks to four million: the
median of a lookup, of an acquire and release that hit, of a sequence evicted and one inserted, of
the commit of one token. While the largest is filled, every call's own CPU time is taken too: the
worst one is what a scheduler may have to wait for. Then `benches/crowds.py`: one more owner of a
block, one more tenant with a quota, of a hundred to a hundred thousand. Writes
benches/results/scaling.json and docs/images/scaling.png; `--redraw` draws again what was written.
Cost: three minutes, 2 GB.
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
from benches.core.place import place
from benches.ours.manager import STEP, manager
from benches.record import keep, options
from benches.workload import BLOCK, SEED, VOCABULARY
from kvtrie.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvtrie import BlockManager

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/scaling.png"
QUICK = ((1024, 2048), (10, 30))  # sizes and crowds
SIZES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
LENGTH = 32  # blocks of a sequence
KEPT = 500  # sequences that are asked for again
TOKENS = 256  # that one lease decodes
GOAL_US = 1000.0  # of CPU time, for any single call
LABELS = {
    "lookup": "lookup of 32 blocks",
    "hit": "acquire and release, 32 blocks found",
    "replace": "evict 32 blocks, insert 32",
    "token": "commit of one token",
}
LABEL_APART = 0.04  # of the picture's height, between two labels
# Four hues of the same lightness that differ for color-blind eyes.
HUES = {"lookup": "#0072b2", "hit": "#d55e00", "replace": "#009e73", "token": "#cc79a7"}


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
    return draw.integers(1, VOCABULARY, size=LENGTH * BLOCK, dtype=np.uint32)


def fill(size: int, draw: np.random.Generator) -> tuple[BlockManager, list[np.ndarray], int, Worst]:
    """A full manager, sequences of it spread over its age, the time, and the worst calls."""
    managed, worst, stored = manager(size), Worst(), []
    number = size // LENGTH
    every = max(1, number // KEPT)
    # Allocations of the first use are no growth.
    warm = managed.acquire(sequence(draw)[:BLOCK], now=0)
    warm.release(now=0)
    for i in range(number):
        tokens, now, blocks = sequence(draw), STEP * (i + 1), i * LENGTH
        lease = worst.timed("acquire", blocks, managed.acquire, tokens, now=now)
        worst.timed("commit", blocks, lease.commit, tokens, now=now)
        worst.timed("release", blocks, lease.release, now=now)
        if i % every == 0 and len(stored) < KEPT:
            stored.append(tokens)
    assert managed.stats().blocks == number * LENGTH
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


def picture(sizes: list[int], measured: list[dict[str, float]], path: Path) -> None:
    """Cost over blocks, both axes logarithmic, each line named at its end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # Whole decades, so that slopes are not stretched.
    lowest, highest = (pick(pick(each.values()) for each in measured) for pick in (min, max))
    low, high = np.floor(np.log10(lowest)), np.ceil(np.log10(highest))
    axes.set_ylim(10**low, 10**high)
    ends = {name: float(np.log10(measured[-1][name])) for name in LABELS}
    heights = spread(ends, apart=LABEL_APART * float(high - low))
    for name, label in LABELS.items():
        us = [each[name] for each in measured]
        axes.plot(sizes, us, color=HUES[name], marker="o", markersize=4, linewidth=1.8)
        axes.annotate(
            *(label, (sizes[-1], 10 ** heights[name])),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=HUES[name],
            fontsize=9,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [words(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(sizes[0] * 0.8, sizes[-1] * 80)
    axes.set_xlabel("blocks in the cache", loc="left")
    axes.set_ylabel("µs per call, median")
    axes.set_title(
        "From a thousand to four million blocks, calls stay within microseconds",
        loc="left",
        fontsize=11,
    )
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def spread(ends: dict[str, float], apart: float) -> dict[str, float]:
    """Heights of labels in the order of their lines' ends, each at least so far from the next.

    Labels that would overlap are spread evenly around the mean of their group.
    """
    groups: list[list[str]] = []
    for name in sorted(ends, key=ends.__getitem__):
        groups.append([name])
        while len(groups) > 1:
            under, over = (_stack(group, ends, apart) for group in groups[-2:])
            if min(over.values()) - max(under.values()) >= apart - 1e-9:
                break
            groups[-2:] = [groups[-2] + groups[-1]]
    return {name: at for group in groups for name, at in _stack(group, ends, apart).items()}


def _stack(group: list[str], ends: dict[str, float], apart: float) -> dict[str, float]:
    middle = sum(ends[name] for name in group) / len(group)
    return {name: middle + apart * (i - (len(group) - 1) / 2) for i, name in enumerate(group)}


def words(size: int) -> str:
    """A number of blocks, short."""
    return f"{size // 1_000_000} M" if size >= 1_000_000 else f"{size // 1000} k"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = options(__doc__, ROOT / "benches/results/scaling.json")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BLOCKS")
    parser.add_argument("--crowds", type=int, nargs="+", metavar="NUMBER")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--picture", type=Path, help=f"default: {PICTURE.name}, if --out is not given"
    )
    parser.add_argument("--redraw", action="store_true", help="only draw what --out holds")
    given = parser.parse_args()
    given.sizes = given.sizes or list(QUICK[0] if given.quick else SIZES)
    given.crowds = given.crowds or list(QUICK[1] if given.quick else crowds.NUMBERS)
    if not (given.quick or given.out):
        given.picture = given.picture or PICTURE
    if min(given.sizes) < 16 * LENGTH:
        parser.error(f"{min(given.sizes)} blocks: at least {16 * LENGTH} are needed")
    return given


def main() -> int:
    """Measure, print, write, draw."""
    given = arguments()
    if given.redraw:
        rows = json.loads((given.out or given.default_out).read_text())["rows"]
        sizes = [row.pop("blocks") for row in rows]
        picture(sizes, rows, given.picture or PICTURE)
        return 0
    sizes, screen = sorted(given.sizes), Console(stderr=True)
    draw, measured, where = np.random.default_rng(given.seed), [], place()
    worst = Worst()
    gc.freeze()
    for size in track(sizes, "Filling", console=screen, transient=True):
        managed, stored, now, worst = fill(size, draw)
        measured.append(costs(managed, stored, now, draw))
        managed.close()
        del managed, stored
    beside = [
        {"beside": number, **crowds.costs(number)}
        for number in track(sorted(given.crowds), "Crowds", console=screen, transient=True)
    ]
    document = {
        "context": where | {"policy": DEFAULT_POLICY, "sequence_blocks": LENGTH},
        "rows": [{"blocks": size, **us} for size, us in zip(sizes, measured, strict=True)],
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
        picture(sizes, measured, given.picture)
    if keep(given, document):
        return 0
    table = Table(title="µs per call, median")
    for head in ("blocks", *LABELS.values()):
        table.add_column(head, justify="right")
    for size, us in zip(sizes, measured, strict=True):
        table.add_row(f"{size:,}", *(f"{us[name]:.2f}" for name in LABELS))
    shown = Console(width=None if sys.stdout.isatty() else 120)
    shown.print(table)
    table = Table(title="µs a call of one more, median")
    for head in ("owners, tenants", *crowds.LABELS.values()):
        table.add_column(head, justify="right")
    for row in beside:
        table.add_row(f"{row['beside']:,}", *(f"{row[name]:.2f}" for name in crowds.LABELS))
    shown.print(table)
    for kind, us in worst.us.items():
        shown.print(
            f"worst {kind} while filling to {sizes[-1]:,} blocks: {us:,.0f} µs of CPU time, at "
            f"{worst.at[kind]:,} blocks (goal: {GOAL_US:,.0f})",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
