"""The kernels and copies on a CUDA device: one table, in minutes; `--json` for scripts.

Without a device it says so and measures nothing. `--quick` runs every part with small sizes on the
CPU, to prove this program; its figures mean nothing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from benches.core.place import place
from benches.gpu import attention, bandwidth, link, overlap
from benches.gpu.clock import Clock, Row
from benches.record import keep, options
from kvtrie.cli.progress import watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SMALL = overlap.Size(hidden=64, heads=4, kv_heads=2, dim=16, inner=64, layers=3, cached=32)


def parts(clock: Clock) -> dict[str, Callable[[], Iterable[Row]]]:
    """Measurements by name; each gives rows."""
    if not clock.cuda:
        return {
            "bandwidth": lambda: bandwidth.measure(clock, 256),
            "link": lambda: link.measure(clock, 2),
            "overlap": lambda: overlap.measure(clock, SMALL, (16,)),
            "attention": lambda: attention.measure(clock, ((4, 64),)),
        }
    return {
        "bandwidth": lambda: bandwidth.measure(clock, 65_536),
        "link": lambda: link.measure(clock, 512),
        "overlap": lambda: overlap.measure(clock, overlap.Size(), (512, 1024, 2048, 4096)),
        "attention": lambda: attention.measure(clock),
    }


def main() -> int:
    """Measure and print; 1 if a part stopped or a goal was missed."""
    parser = options(__doc__)
    parser.add_argument(
        "--only", action="append", choices=["bandwidth", "link", "overlap", "attention"]
    )
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.quick:
        reason = "not run: no CUDA device"
        print(json.dumps({"not_run": reason}) if given.json else reason)
        return 0
    device = torch.device("cpu" if given.quick else "cuda")
    clock = Clock(device)
    chosen = {name: run for name, run in parts(clock).items() if name in (given.only or [name])}
    rows: dict[str, list[Row]] = {}
    stopped: dict[str, str] = {}
    for name in watched(list(chosen), "measuring", quiet=given.json):
        rows[name], error = collected(chosen[name])
        if error:
            stopped[name] = error
    if not clock.cuda:
        rows = {name: [replace(row, goal=None) for row in each] for name, each in rows.items()}
    about = place() | {
        "device": torch.cuda.get_device_name(device)
        if clock.cuda
        else "none: a rehearsal on the CPU, whose figures mean nothing",
        "torch": torch.__version__,
    }
    figures = {name: [asdict(row) | {"ok": row.ok} for row in each] for name, each in rows.items()}
    if keep(given, {"about": about, **figures, "stopped": stopped}):
        return int(bool(stopped))
    print(", ".join(f"{name} {about[name]}" for name in ("date", "device", "torch")))
    for row in chain.from_iterable(rows.values()):
        print(line(row))
    for name, error in stopped.items():
        print(f"{name} stopped: {error}")
    missed = [row for row in chain.from_iterable(rows.values()) if row.ok is False]
    return int(bool(missed or stopped))


def collected(run: Callable[[], Iterable[Row]]) -> tuple[list[Row], str]:
    """The rows of a part, and why it stopped before its end; a part that fails costs no other."""
    rows: list[Row] = []
    try:
        for row in run():
            rows.append(row)  # noqa: PERF402 - what came before an error is kept
    except Exception as error:  # noqa: BLE001 - reported, and the run ends with 1
        return rows, f"{type(error).__name__}: {error}"
    return rows, ""


def line(row: Row) -> str:
    """A row as people read it."""
    beside = "" if row.ratio is None else f"{row.ratio:8.1%} of {row.of}"
    if row.of.startswith(("index_", "torch's")):
        beside = f"{row.ratio:8.2f} × {row.of}"
    if row.of.startswith("hidden"):
        beside = f"{row.ratio:8.1%} {row.of}"
    goal = "" if row.goal is None else f", goal {row.goal:.0%}: {'reached' if row.ok else 'missed'}"
    return f"{row.what:<44} {row.figure:10.1f} {row.unit:<5}{beside}{goal}"


if __name__ == "__main__":
    sys.exit(main())
