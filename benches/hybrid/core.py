"""Costs of groups of layers in the core: time of a request, and memory.

Invariant: both figures of a row are measured in turn, memory in a process for each. Cost: ten
seconds.
"""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from benches.measure import resident_bytes
from benches.record import Result, bounded
from kvtrie import LayerGroup, ModelShape, ResumePoints, Tier
from kvtrie.sim.replay import open_manager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie import BlockManager

BLOCK = 16
TURNS, TURN, CHATS = 12, 16, 64
"""Turns of a session, blocks of a turn, sessions at a time."""


def grouped(kinds: Sequence[str], room: int) -> BlockManager:
    """Twelve layers in groups of these kinds, on a tier for `room` blocks of the first."""
    count = len(kinds)
    groups = tuple(
        LayerGroup(
            tuple(range(at, 12, count)),
            kind=cast("Any", kind),
            window=1024 if kind == "sliding" else 0,
            state_bytes=2**17 if kind == "state" else None,
        )
        for at, kind in enumerate(kinds)
    )
    several = count > 1
    model = ModelShape(12, 2, 64, "bfloat16", groups=groups if several else ())
    return open_manager(
        [Tier("gpu", bytes=room * model.block_bytes(BLOCK, 0))],
        block_tokens=BLOCK,
        model=model,
        resume=ResumePoints() if several else None,
    )


def sessions(requests: int) -> list[Any]:
    """Prompts of sessions, of which each turn repeats the one before and adds blocks."""
    rng = np.random.default_rng(0)
    turns = np.zeros(CHATS, dtype=int)
    prompts: list[Any] = []
    for session in rng.integers(CHATS, size=requests):
        generation, turn = divmod(int(turns[session]), TURNS)
        turns[session] += 1
        start = (CHATS * generation + int(session)) * 1000
        prompts.append(np.arange(start, start + TURN * (turn + 1), dtype=np.uint32))
    return prompts


def per_request(kinds: Sequence[str], prompts: list[Any]) -> float:
    """Microseconds per request in a full tier that has room for the blocks of 128 sessions."""
    # A third more for the other groups.
    opened = grouped(kinds, 128 * TURNS * TURN * (4 if len(kinds) > 1 else 3) // 3)
    began = perf_counter()
    for now, prompt in enumerate(prompts):
        # Like a prompt that ends within a block: a repeat resumes after all full blocks.
        lease = opened.acquire(prompt, now=now, keep=0)
        lease.commit(prompt[lease.matched :], now=now)
        lease.release(now=now)
    return (perf_counter() - began) / len(prompts) * 1e6


def request(requests: int) -> Result:
    """Time per request with three groups, and with one."""
    prompts = sessions(requests)
    three, one = ("full", "sliding", "state"), ("full",)
    pairs = [(per_request(three, prompts), per_request(one, prompts)) for _ in range(5)]
    ours, peer = (min(times) for times in zip(*pairs, strict=True))
    return bounded("core three groups: per request", ours, peer, "us", "one group", 2)


def used(kinds: Sequence[str], blocks: int) -> int:
    """Bytes that a hundred sequences of `blocks` blocks in all take."""
    opened = grouped(kinds, 4 * blocks)
    before = resident_bytes()
    for first in range(0, blocks, blocks // 100):
        prompt = np.arange(first, first + blocks // 100, dtype=np.uint32)
        lease = opened.acquire(prompt, now=first)
        lease.commit(prompt, now=first)
        lease.release(now=first)
    return resident_bytes() - before


def memory(blocks: int) -> Result:
    """Bytes per further group and resident block, of two windows after the full group.

    Each manager is in a new process: memory that another one has freed would be used first.
    """

    def fresh(*kinds: str) -> int:
        driver = [sys.executable, "-m", "benches.hybrid.core", str(blocks), *kinds]
        return int(subprocess.run(driver, check=True, capture_output=True, text=True).stdout)

    more = (fresh("full", "sliding", "sliding") - fresh("full")) / blocks / 2
    return bounded("memory: per further group and resident block", more, 12, "B", "bound", 1)


def main() -> None:
    """Print the bytes that a number of blocks takes in groups of these kinds."""
    print(used(sys.argv[2:], int(sys.argv[1])))


if __name__ == "__main__":
    main()
