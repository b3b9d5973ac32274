"""What KV events and a router by them cost, and what they save.

    make bench-cluster ARGS="--quick"

Events: chats over one manager, in processor time. A batch of blocks is encoded from the manager's
ring to the bytes of a message, next to `take_events` and `msgspec`; chats run with events and a
publisher, next to chats without. Steps of a vLLM scheduler (`make engines`) with KV events and
without. The selector: `examples.cluster`, where three engines answer the same chats by round-robin
and by Dynamo's selection service (`make peers ARGS=dynamo`). Rows without their environment are
left out.
Invariant: both sides do the same work. Cost: four minutes.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track

from benches.core.place import place
from benches.engines.__main__ import tiny_folder
from benches.engines.launch import PYTHON, run
from benches.ours.manager import MODEL, STEP
from benches.record import Result, document, keep, options, show
from benches.workload import BLOCK, RUNNING, SEED, Trace
from kvtrie import BlockManager, Tier
from kvtrie._kvtrie import EventBatches
from kvtrie.cluster import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtrie import Event

OUT = Path(__file__).parent / "results/cluster.json"
ROOT = Path(__file__).parents[1]
POOL = 20_000
EVENTS = 1_000_000
ENCODE_GOAL, OVERHEAD_GOAL, STEP_GOAL, SELECTOR_GOAL = 5.0, 0.4, 0.8, 1.5


class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """vLLM's event of stored blocks."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    """vLLM's event of removed blocks."""

    block_hashes: list[int]
    medium: str


def chats(*, quick: bool) -> list[tuple[int, np.ndarray]]:
    """Length of each prompt, and its tokens with those of its answer."""
    trace = Trace(SEED, 100 if quick else 3000)
    return [(prompt, signed.view(np.uint32)) for _, prompt, signed in trace]


def manager(*, events: bool) -> BlockManager:
    """One tier, which a tenth of the trace fills."""
    kept: dict[str, Any] = {"events": EVENTS, "events_of": "residency"} if events else {}
    return BlockManager(MODEL, [Tier("gpu", blocks=POOL, owner="none")], block_tokens=BLOCK, **kept)


def play(
    requests: list[tuple[int, np.ndarray]], managed: BlockManager, pump: Callable[[], None]
) -> float:
    """Play chats, with a call after each; processor seconds of all of it."""
    running: deque[Any] = deque()
    gc.collect()
    begun = time.process_time()
    for at, (prompt, tokens) in enumerate(requests):
        now = STEP * at
        lease = managed.acquire(tokens[:prompt], now=now, reserve=len(tokens) - prompt)
        lease.commit(tokens[lease.matched :], now=now)
        running.append(lease)
        if len(running) > RUNNING:
            running.popleft().release(now=now)
        pump()
    return time.process_time() - begun


def in_python(events: list[Event], encoder: msgspec.msgpack.Encoder) -> bytes:
    """The payload that the encoder in Rust makes, by msgspec; blocks that follow are one event."""
    found: list[Stored | Removed] = []
    last = b""
    for event in events:
        name = int.from_bytes(event.key[-8:], "big")
        run = found[-1] if found else None
        if event.kind == "removed":
            if isinstance(run, Removed):
                run.block_hashes.append(name)
            else:
                found.append(Removed([name], "GPU"))
            continue
        if isinstance(run, Stored) and event.parent == last:
            run.block_hashes.append(name)
            run.token_ids += event.tokens
        else:
            parent = None if event.first else int.from_bytes(event.parent[-8:], "big")
            found.append(Stored([name], parent, event.tokens, BLOCK, None, "GPU", None))
        last = event.key
    return encoder.encode([time.time(), found, 0])


class Timed:
    """A call, timed in processor time.

    Attributes:
        seconds: of all calls.
        found: what they returned.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.seconds, self.found = call, 0.0, list[Any]()

    def __call__(self) -> None:
        """Make the call."""
        begun = time.process_time()
        found = self._call()
        self.seconds += time.process_time() - begun
        self.found.append(found)


def encode_rows(rounds: int, *, quick: bool) -> Iterator[Result]:
    """Nanoseconds per block, from the ring of events to the payload."""
    requests, encoder = chats(quick=quick), msgspec.msgpack.Encoder()
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    blocks = 0
    for _ in range(rounds):
        managed = manager(events=True)
        rust = EventBatches(managed, ["GPU"], hashes="int", form="map", rank=0)
        ours = Timed(partial(rust.take, 0.0, contents=False))
        play(requests, managed, ours)
        blocks = sum(stored + removed for _, _, (stored, removed, _), _ in ours.found)
        times["ours"].append(1e9 * ours.seconds / blocks)
        managed = manager(events=True)
        peer = Timed(partial(_encoded, managed, encoder))
        play(requests, managed, peer)
        times["peer"].append(1e9 * peer.seconds / blocks)
    about = {"goal": ENCODE_GOAL, "blocks": blocks}
    yield _row("events encode", times, "ns", "take_events + msgspec", about)


def _encoded(managed: BlockManager, encoder: msgspec.msgpack.Encoder) -> bytes:
    return in_python(managed.take_events(), encoder)


def overhead_rows(rounds: int, *, quick: bool) -> Iterator[Result]:
    """Microseconds per request, with a publisher that is pumped after each, and without events."""
    requests = chats(quick=quick)
    times: dict[str, list[float]] = {"ours": [], "peer": [], "not taken": []}
    for _ in range(rounds):
        times["peer"].append(play(requests, manager(events=False), lambda: None))
        times["not taken"].append(play(requests, manager(events=True), lambda: None))
        managed = manager(events=True)
        with Publisher(managed, "tcp://127.0.0.1:0") as publisher:
            times["ours"].append(play(requests, managed, publisher.pump))
    scaled = {name: [1e6 * each / len(requests) for each in all_] for name, all_ in times.items()}
    about = {"goal": OVERHEAD_GOAL, "requests": len(requests)}
    about["not taken"] = round(median(scaled["peer"]) / median(scaled["not taken"]), 3)
    yield _row("events overhead", scaled, "us", "no events", about)


def step_rows(rounds: int, *, quick: bool) -> Iterator[Result]:
    """Microseconds of the connector's calls in a step of vLLM's scheduler."""
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_folder(folder)
        few = ["--requests", "8", "--answer", "16"] if quick else []
        for _ in range(rounds):
            for side, more in (("peer", []), ("ours", ["--events"])):
                about = ["--what", "kvtrie", "--model", model, *few, *more]
                figures = run("vllm_scheduler_step", "kvtrie", about)
                if "error" in figures:
                    raise SystemExit(f"vllm step: {figures['error']}")
                times[side].append(figures["us"])
    yield _row("vllm step", times, "us", "no events", {"goal": STEP_GOAL})


def selector_rows(_: int, *, quick: bool) -> Iterator[Result]:
    """Prompt tokens that three engines compute."""
    few = ["--chats", "6", "--turns", "3"] if quick else []
    command = [sys.executable, "-m", "examples.cluster", "--json", *few]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"selector: {ran.stderr or ran.stdout}")
    report = json.loads(ran.stdout)
    computed = report["computed"]
    times = {"ours": [computed["selector"]], "peer": [computed["round-robin"]]}
    about = {"goal": SELECTOR_GOAL, "index and locality": computed["index"]}
    yield _row("selector", times, "tokens computed", "round-robin", about)


def _row(
    what: str, times: dict[str, list[float]], unit: str, peer: str, about: dict[str, Any]
) -> Result:
    """A row: medians, and the median of the pairs' ratios."""
    goal = about.pop("goal")
    ratio = median(theirs / ours for ours, theirs in zip(times["ours"], times["peer"], strict=True))
    ours, theirs = median(times["ours"]), median(times["peer"])
    figures = (round(ours, 4), unit, round(theirs, 4), peer, round(ratio, 3))
    more = about | {"rounds": len(times["ours"])}
    return Result(what, *figures, goal, ratio >= goal, more)


def main() -> int:
    """Measure, print, write."""
    given = options(__doc__, OUT).parse_args()
    dynamo = ROOT / "benches/peers/envs/dynamo/bin/python"
    cells = {"encode": (encode_rows, 5), "overhead": (overhead_rows, 7)}
    if PYTHON.exists() and not given.quick:
        cells["vllm step"] = (step_rows, 3)
    if dynamo.exists() and not given.quick:
        cells["selector"] = (selector_rows, 1)
    rows: list[Result] = []
    screen = Console(stderr=True)
    for measure, rounds in track(cells.values(), "Events", console=screen, transient=True):
        rows += measure(1 if given.quick else rounds, quick=given.quick)
    if not keep(given, document(place(), rows)):
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
