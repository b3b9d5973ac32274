"""The soak: three full tiers of real bytes under traces without end, and every block compared.

    make soak MINUTES=10

The first tenth, at least twenty seconds, is the warm-up; by its end every tier must have evicted.
From then on resident memory stays within two per cent and the number of open files the same; over
the second half memory grows by no more than 64 bytes a request, though tenants, sessions and images
are ever new, requests are given up and reads fail. With `--keep` host memory is a file in
`/dev/shm`, and at the end a second engine finds its blocks and serves the last requests again. All
bytes that a request finds are compared with what they must be. Each minute one line reports the
throughput. The first wrong block, or failed move that was not planned, ends it. Needs Linux's
`/proc`.
Exit status 1 if a check fails.
Cost: the minutes that are asked for, both workers and one more core.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from benches.core.place import place
from benches.record import keep, options
from benches.soak.asks import asks
from benches.soak.check import Check, checks, taken_over
from benches.soak.engine import AT_ONCE, Engine
from benches.soak.sample import DESCRIPTORS, Sample
from benches.soak.slope import Slope
from kvtrie.cli.progress import watched
from kvtrie.errors import KvtrieError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

LEAST_WARM_S = 20
MINUTE = 60
MEMORY = Path("/dev/shm")  # noqa: S108 - the file system of kept memory
POINTS = 60
FEW_POINTS = 10
LEAST_APART = 10


class Soaked(NamedTuple):
    """Result of a soak: lines of the minutes, samples of the warm-up's end and the end."""

    minutes: list[str]
    warm: Sample
    end: Sample
    slope: Slope


def soak(engine: Engine, given: argparse.Namespace, clock: Callable[[], float]) -> Soaked:
    """Serve until the end or until something goes wrong.

    A tick is a second by the clock, or a request if a number of requests is given.
    """
    stream = asks(given.seed, engine.most)
    ticks = given.requests or round(MINUTE * given.minutes)
    warm_at = ticks // 2 if given.requests else max(LEAST_WARM_S, ticks // 10)
    minutes: list[str] = []
    # A sample collects garbage, which takes longer than a request.
    apart = max(LEAST_APART, ticks // (FEW_POINTS if given.requests else POINTS))
    start = last = Sample.of(engine, clock())
    samples = [start]
    warm = None
    try:
        for tick in watched(range(1, ticks + 1), "soak", quiet=False):
            next_tick = start.at_s + tick
            engine.serve(next(stream))
            while engine.healthy and not given.requests and clock() < next_tick:
                engine.serve(next(stream))
            if tick % apart == 0 or tick % MINUTE == 0 or tick in (warm_at, ticks):
                engine.finish_and_audit()
            if tick % apart == 0:
                samples.append(Sample.of(engine, clock()))
            if tick == warm_at:
                warm = Sample.of(engine, clock())
            if tick % MINUTE == 0:
                now = Sample.of(engine, clock())
                minutes.append(now.line(last))
                print(f"{len(minutes):>4}  {minutes[-1]}", file=sys.stderr, flush=True)
                last = now
            if not engine.healthy:
                engine.finish_and_audit()
                break
    except KvtrieError as error:
        engine.what.append(f"{type(error).__name__}: {error}")
    end = Sample.of(engine, clock())
    return Soaked(minutes, warm or end, end, Slope.of([*samples, end]))


def take_over(given: argparse.Namespace, first: Engine, folder: Path, memory: Path) -> list[Check]:
    """Close an engine, and let a second one find its blocks and serve its last requests again."""
    first.executor.save()
    kept = first.manager.stats().tiers["host"].copies
    first.close()
    with closing(Engine(given.blocks, folder, memory)) as second:
        for ask in first.recent:
            second.serve(ask)
        second.finish_and_audit()
        first.what += second.what
        return taken_over(kept, second.restored, Sample.of(second, 0.0))


def table_of(rows: Sequence[Check]) -> Table:
    """The checks for people."""
    table = Table("", title="The soak")
    for name in ("after the warm-up", "at the end", "wanted", ""):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{number:,}".replace(",", " ") for number in (row.warm, row.end))
        table.add_row(row.what, *numbers, row.wanted, "" if row.ok else "not so")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, compare, print."""
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--requests", type=int, help="their number instead; half of them warm up")
    parser.add_argument("--blocks", type=int, nargs=3, help="per tier (default: 256 768 2048)")
    parser.add_argument("--seed", type=int, default=0, help="of the first trace")
    parser.add_argument("--keep", action="store_true", help="host memory outlives the engine")
    parser.add_argument("--folder", type=Path, help="folder of the files; the default is temporary")
    given = parser.parse_args(arguments)
    given.blocks = given.blocks or ([32, 48, 64] if given.quick else [256, 768, 2048])
    if given.quick and given.requests is None:
        given.requests = 300
    if given.requests is None and not given.minutes >= 1:
        parser.error(f"--minutes is {given.minutes}, at least 1 wanted")
    if given.requests is not None and given.requests < 2:
        parser.error(f"--requests is {given.requests}, at least 2 wanted")
    if min(given.blocks) < 4 * AT_ONCE:
        parser.error(f"--blocks are {given.blocks}, each at least {4 * AT_ONCE} wanted")
    if not DESCRIPTORS.exists():
        parser.error(f"there is no {DESCRIPTORS}: the soak runs on Linux")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        memory = None
        if given.keep:
            memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))) / "host"
        engine = stack.enter_context(closing(Engine(given.blocks, folder, memory)))
        context = place() | {"blocks": given.blocks, "travel": engine.pools[2].store.travel}
        context |= {"keep": given.keep}
        done = soak(engine, given, monotonic)
        rows = checks(done.warm, done.end, done.slope)
        if memory is not None and engine.healthy:
            rows += take_over(given, engine, folder, memory)
    ok = engine.healthy and all(row.ok for row in rows)
    document = {
        "place": context,
        "minutes": done.minutes,
        "warm": asdict(done.warm),
        "end": asdict(done.end),
        "slope": asdict(done.slope),
        "checks": [asdict(row) for row in rows],
        "what": engine.what,
        "ok": ok,
    }
    if not keep(given, document):
        console = Console(width=100)
        console.print(table_of(rows))
        for what in engine.what:
            console.print(what, markup=False)
        console.print(
            f"{done.end.requests} requests, {done.end.read} blocks read and "
            f"{done.end.checked / 1e9:.1f} GB compared; memory {done.slope.per_request:+.1f} B a "
            f"request, {done.slope.per_hour / 1e6:+.2f} MB an hour over the last "
            f"{done.slope.requests}: {'all is well' if ok else 'it failed'}"
        )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
