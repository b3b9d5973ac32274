"""Profile: measured speeds of this machine: prefill over context, and every lane.

Copies go through the pools and storages that serve, in the sizes that serve. Each number is the
median of repeated runs, with half the distance between its quartiles as spread.
Invariant: every figure was timed here. Cost: seconds per lane, and for a model as long
as the longest context takes to prefill.
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
from kvtrie.cost import Cost
from kvtrie.errors import ConfigError, TransferError
from kvtrie.input import read_text, toml_of
from kvtrie.shape import ModelShape
from kvtrie.tier import Lane, Tier
from kvtrie.tiers import Pool, default_device
from kvtrie.transfer.passes import Device, PassTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvtrie.tiers import Storage

__all__ = ["Profile", "Timing", "load_profile", "time_lane", "time_prefill"]

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
            ConfigError: fewer than two.
        """
        if len(samples) < 2:  # noqa: PLR2004 - a spread needs two
            raise ConfigError(f"{len(samples)} runs have no spread: at least 2 wanted")
        low, _, high = quantiles(samples, n=_QUARTERS)
        return cls(median(samples), (high - low) / 2, len(samples))


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile as `kvtrie profile` wrote it.

    Attributes:
        cost: what `BlockManager(cost=...)` takes; None if no model was measured.
        lanes: by name, what `Tier(read=..., store=...)` take.
        both: by kind of tier, how much longer a load takes while a store runs the other way, as a
            share.
        passes: times of the model's passes; None if no model was measured.
        device: speeds of the device that computes; None if they were not measured.
    """

    cost: Cost | None
    lanes: dict[str, Lane]
    both: dict[str, float]
    passes: PassTable | None = None
    device: Device | None = None


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: the file is no profile.
    """
    wrong = f"{path} is no profile of `kvtrie profile`"
    parsed = toml_of(read_text(path, "the profile"), wrong)
    try:
        cost = parsed.get("cost")
        table = cost and tuple((int(at), float(each)) for at, each in cost["table"])
        return Profile(
            Cost(table=table, ns_per_token=float(cost["ns_per_token"])) if cost and table else None,
            {
                name: Lane(name, float(each["bytes_per_s"]), int(each["latency_ns"]))
                for name, each in parsed.get("lanes", {}).items()
            },
            {kind: float(share) for kind, share in parsed.get("both", {}).items()},
            _passes(parsed["passes"]) if "passes" in parsed else None,
            Device(**{name: float(parsed["compute"][name]) for name in Device._fields})
            if "compute" in parsed
            else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{wrong}: {error}") from error


def _passes(parsed: dict[str, Any]) -> PassTable:
    rows = tuple(tuple(float(ns) for ns in row) for row in parsed["ns"])
    return PassTable(tuple(map(int, parsed["contexts"])), tuple(map(int, parsed["tokens"])), rows)


def time_lane(
    fast: Pool, slow: Pool | Storage, tier: Tier, *, repeats: int
) -> Iterator[tuple[str, Any]]:
    """Measure both directions between a pool and the tier below it.

    Args:
        fast: the upper memory.
        slow: the lower tier: memory or a storage.
        tier: the lower tier's settings; its lanes are named by them.
        repeats: runs per size and direction.

    Yields:
        After each direction its name, with a dictionary for the profile; last "both" with how much
        longer a load takes while stores run, as a share.
    """
    blocks = min(fast.blocks, slow.blocks if isinstance(slow, Pool) else fast.blocks)
    read, store = tier.lanes()
    loads, stores = (_copy(fast, slow, up=up) for up in (True, False))
    stores(0, blocks)  # a storage can only give what it was given
    for lane, copy in ((read, loads), (store, stores)):
        few, many = (_time(partial(copy, 0, n), repeats) for n in (1, blocks))
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
    half = max(1, blocks // 2)  # stores go to the other half: no slot has two calls at a time
    one_way = _time(lambda: loads(0, half), repeats)
    stop = threading.Event()

    def against() -> None:
        while not stop.is_set():
            stores(blocks - half, blocks)

    other = threading.Thread(target=against, name="kvtrie-profile", daemon=True)
    other.start()
    try:
        both = _time(lambda: loads(0, half), repeats)
    finally:
        stop.set()
        other.join()
    yield "both", round(both.median / one_way.median - 1, 4)


def time_prefill(
    model: Any,  # noqa: ANN401 - a transformers model
    block_tokens: int,
    contexts: Sequence[int],
    *,
    repeats: int,
) -> Iterator[tuple[int, Timing]]:
    """Measure the prefill of one block after warm contexts.

    Args:
        model: a causal language model; it moves to the device of a `gpu` tier.
        block_tokens: tokens of a block.
        contexts: tokens before it, ascending.
        repeats: runs per context.

    Yields:
        Each context with the nanoseconds per token of the block.
    """
    from transformers import DynamicCache

    model.to(default_device())
    vocabulary = int(model.config.get_text_config().vocab_size)
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.integers(1, vocabulary, max(contexts) + block_tokens))[None]  # type: ignore[no-untyped-call]
    ids = ids.to(model.device)
    cache = DynamicCache(config=model.config)
    cached = 0
    with torch.no_grad():
        for context in contexts:
            if context > cached:
                model(input_ids=ids[:, cached:context], past_key_values=cache)
                cached = context
            block = ids[:, context : context + block_tokens]

            def once(block: torch.Tensor = block, context: int = context) -> None:
                model(input_ids=block, past_key_values=cache)
                _settle(model.device)
                cache.crop(context - cache.get_seq_length())

            timing = _time(once, repeats)
            per_token = Timing(
                timing.median / block_tokens, timing.spread / block_tokens, timing.runs
            )
            yield context, per_token


def _copy(fast: Pool, slow: Pool | Storage, *, up: bool) -> Callable[[int, int], None]:
    """Return a function that copies whole blocks `[first, last)` and waits for the end."""
    names = [] if isinstance(slow, Pool) else _names(fast)
    stream = torch.cuda.Stream(fast.device) if fast.device.type == "cuda" else None

    def between_pools(first: int, last: int) -> None:
        assert isinstance(slow, Pool)  # noqa: S101 - chosen below
        units = np.arange(first * fast.layers, last * fast.layers, dtype=np.int64)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            (fast if up else slow).copy_from(slow if up else fast, units, units)
        if stream is not None:  # the other direction has another stream
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
    """Return keys and labels of as many blocks as a pool holds, made by a temporary manager."""
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


def _time(call: Callable[[], object], repeats: int) -> Timing:
    for _ in range(_WARM):
        call()
    samples: list[float] = []
    for _ in range(max(2, repeats)):
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
    return Timing.of(samples)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
