"""Both sides of the benches of a remote tier: loads by an executor, and a client without one.

Invariant: both sides move the same bytes into the same pool memory. Cost: a load of all blocks per
run.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from benches.disk import quartiles
from benches.record import Result
from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Size:
    """Blocks of one size.

    Attributes:
        name: for people.
        layers: layers of a block.
        tokens: tokens of a block, 4 KiB each per layer.
        blocks: blocks of a run.
    """

    name: str
    layers: int
    tokens: int
    blocks: int

    @property
    def model(self) -> ModelShape:
        """The shape whose blocks have this size."""
        return ModelShape(self.layers, 8, head_dim=128, dtype="float16", fingerprint="bench")

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return self.layers * self.model.layer_bytes(self.tokens)


def sizes(*, quick: bool) -> list[Size]:
    """A chunk of 256 tokens of a model with 8 B weights, and a block of a small one."""
    if quick:
        return [Size("1 MiB", 16, 16, 2)]
    return [Size("1 MiB", 16, 16, 64), Size("32 MiB", 32, 256, 6)]


class Ours:
    """A manager with host memory above a store that has all of its blocks."""

    def __init__(self, url: str, size: Size) -> None:
        tiers = [
            Tier("host", blocks=size.blocks, write="through"),
            Tier("remote", blocks=10 * size.blocks, path=url),
        ]
        manager = BlockManager(size.model, tiers, block_tokens=size.tokens)
        self.executor = Executor(
            manager, open_pools(size.model, tiers, size.tokens), deadline_s=DEADLINE_S
        )
        self.size, self.manager = size, manager
        self.memory = self.executor.pools[0].planes[0].numpy().reshape(size.blocks, -1)
        # Nothing that a network or a device could make smaller.
        self.right = np.random.default_rng(1).integers(0, 256, self.memory.shape, dtype=np.uint8)
        self.tokens = np.arange(size.blocks * size.tokens, dtype=np.uint32)
        clock = self.executor.clock
        with manager.acquire(self.tokens, now=clock(), keep=0) as lease:
            self.executor.wait(lease)
            self.memory[lease.slots(0)] = self.right
            lease.commit(self.tokens, now=clock())
        self.executor.drain()

    def __call__(self) -> float:
        """Bytes per second of a load of all blocks."""
        clock = self.executor.clock
        self.manager.mark(self.tokens, "host", present=False, now=clock())
        self.memory[:] = 0
        began = time.perf_counter()
        with self.manager.acquire(self.tokens, now=clock(), keep=0, load="all") as lease:
            self.executor.wait(lease)
            took = time.perf_counter() - began
            if lease.matched < len(self.tokens):
                raise SystemExit(f"{lease.matched} of {len(self.tokens)} tokens were found")
            self.check(lease.slots(0))
        return self.right.nbytes / took

    def check(self, slots: object) -> None:
        """Compare all bytes, which is not timed."""
        if not np.array_equal(self.memory[slots], self.right):
            raise SystemExit("a load gave wrong bytes")

    def close(self) -> None:
        """End its threads."""
        self.executor.close()


def timed(ours: Ours, fill: Callable[[np.ndarray], None]) -> Callable[[], float]:
    """Bytes per second of a peer that fills the pool's memory block by block."""

    def run() -> float:
        ours.memory[:] = 0
        began = time.perf_counter()
        fill(ours.memory)
        took = time.perf_counter() - began
        ours.check(slice(None))
        return ours.right.nbytes / took

    return run


def nothing() -> None:
    """Do nothing before a run."""


def paired(
    what: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    name: str,
    *,
    goal: float | None,
    pairs: int,
    before: Callable[[], object] = nothing,
) -> Result:
    """A row: both in turn, the other one first each time."""
    mine: list[float] = []
    theirs: list[float] = []
    for pair in range(pairs):
        turn = [(ours, mine), (peer, theirs)]
        for side, figures in turn if pair % 2 else turn[::-1]:
            before()
            figures.append(side())
    ratios = [our / their for our, their in zip(mine, theirs, strict=True)]
    low, middle, high = quartiles(ratios)
    return Result(
        what=what,
        ours=round(median(mine) / 1e9, 3),
        unit="GB/s",
        peer=round(median(theirs) / 1e9, 3),
        peer_name=name,
        ratio=round(middle, 3),
        goal=goal,
        ok=None if goal is None else middle >= goal,
        more={"ratio_low": low, "ratio_high": high, "pairs": pairs, "load": os.getloadavg()[0]},
    )
