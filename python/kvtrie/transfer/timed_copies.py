"""Timed copies between a pool and the tier below it, for `kvtrie profile`.

Copies use the pools and storages of a real server, with their sizes. Each number is the median of
repeated runs, with half the distance between its quartiles as spread.
Invariant: every figure was timed here.
Cost: seconds per lane.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtrie._kvtrie import BlockManager
from kvtrie.errors import ConfigError, TransferError
from kvtrie.model.shape import ModelShape
from kvtrie.settings.tier import Tier
from kvtrie.tiers import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtrie.tiers import Storage

__all__ = ["Timing", "time_lane", "timing_of"]

_NS = 1_000_000_000
_QUARTERS = 4
_WARM = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Nanoseconds of repeated runs.

    Attributes:
        median: of all runs.
        spread: half the distance between the quartiles.
        runs: number of runs.
    """

    median: float
    spread: float
    runs: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Return the timing of some runs.

        Raises:
            ConfigError: fewer than two runs.
        """
        if len(samples) < 2:  # noqa: PLR2004 - a spread needs two
            raise ConfigError(f"{len(samples)} runs have no spread: at least 2 wanted")
        low, _, high = quantiles(samples, n=_QUARTERS)
        return cls(median(samples), (high - low) / 2, len(samples))


def time_lane(
    fast: Pool, slow: Pool | Storage, tier: Tier, *, repeats: int
) -> Iterator[tuple[str, Any]]:
    """Measure both directions between a pool and the tier below it.

    Args:
        fast: the upper memory.
        slow: the lower tier: memory or a storage.
        tier: the lower tier's settings, with the names of its lanes.
        repeats: runs per size and direction.

    Yields:
        The name of each direction with a dictionary for the profile, then "both" with the relative
        slowdown of a load while stores run.
    """
    blocks = min(fast.blocks, slow.blocks if isinstance(slow, Pool) else fast.blocks)
    read, store = tier.lanes()
    loads, stores = (_copy(fast, slow, up=up) for up in (True, False))
    stores(0, blocks)  # a storage can only return written blocks
    for lane, copy in ((read, loads), (store, stores)):
        few, many = (timing_of(partial(copy, 0, n), repeats) for n in (1, blocks))
        carried = slow if isinstance(slow, Pool) else fast
        unit = fast.layers * sum(plane.shape[1] for plane in carried.planes)
        slope = max(1e-9, (many.median - few.median) / max(1, blocks - 1) / unit)
        if blocks == 1:
            slope = many.median / unit
        latency = max(0.0, few.median - slope * unit)
        yield (
            lane.name,
            {
                "bytes_per_s": round(_NS / slope),
                "latency_ns": round(latency),
                "spread": round(many.spread / many.median, 4),
                "runs": many.runs,
            },
        )
    half = max(1, blocks // 2)  # stores use the second half, so no slot has two calls at a time
    one_way = timing_of(lambda: loads(0, half), repeats)
    stop = threading.Event()

    def against() -> None:
        while not stop.is_set():
            stores(blocks - half, blocks)

    other = threading.Thread(target=against, name="kvtrie-profile", daemon=True)
    other.start()
    try:
        both = timing_of(lambda: loads(0, half), repeats)
    finally:
        stop.set()
        other.join()
    yield "both", round(both.median / one_way.median - 1, 4)


def _copy(fast: Pool, slow: Pool | Storage, *, up: bool) -> Callable[[int, int], None]:
    """Return a function to copy whole blocks `[first, last)` and wait for the end."""
    names = [] if isinstance(slow, Pool) else _names(fast)
    stream = torch.cuda.Stream(fast.device) if fast.device.type == "cuda" else None

    def between_pools(first: int, last: int) -> None:
        assert isinstance(slow, Pool)  # noqa: S101 - chosen below
        units = np.arange(first * fast.layers, last * fast.layers, dtype=np.int64)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            (fast if up else slow).copy_from(slow if up else fast, units, units)
        if stream is not None:  # each direction has a separate stream
            stream.synchronize()

    def through_storage(first: int, last: int) -> None:
        assert not isinstance(slow, Pool)  # noqa: S101 - chosen below
        for at in range(first, last):
            memory = fast.planes[0][at * fast.layers : (at + 1) * fast.layers]
            if up:
                slow.read(names[at][0], at, (0, fast.layers), memory)
            else:
                slow.write(names[at][0], at, (0, fast.layers), memory, names[at][1])

    if not isinstance(slow, Pool) and len(fast.planes) != 1:
        raise TransferError("a storage exchanges bytes with joined layouts only")
    return between_pools if isinstance(slow, Pool) else through_storage


def _names(pool: Pool) -> list[tuple[bytes, bytes]]:
    """Return keys and labels for all blocks of a pool, made by a temporary manager."""
    form = pool.block_format
    shape = ModelShape(form.layers, form.heads, form.head_dim)
    tiers = [Tier("gpu", blocks=pool.blocks), Tier("disk", blocks=pool.blocks)]
    manager = BlockManager(shape, tiers, block_tokens=form.block_tokens)
    tokens = np.arange(pool.blocks * form.block_tokens, dtype=np.uint32)
    with manager.acquire(tokens, now=0, keep=0) as lease:
        lease.commit(tokens, now=0)
    manager.flush(now=1)
    moves = manager.moves()
    return [(key.tobytes(), label) for key, label in zip(moves.key, moves.label, strict=True)]


def timing_of(call: Callable[[], object], repeats: int) -> Timing:
    """Return the timing of a call: at least two runs, after three warm-up runs."""
    for _ in range(_WARM):
        call()
    samples: list[float] = []
    for _ in range(max(2, repeats)):
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
    return Timing.of(samples)
