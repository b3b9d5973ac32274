"""Capacities: the hits of leaf-only LRU with every capacity, from one pass over a trace.

One tier, and requests one after the other. Leaf-only LRU keeps the first blocks of one order,
whatever its capacity: last use, the latest first, and of one request the first blocks first (stack
distances: Mattson and others, "Evaluation techniques for storage hierarchies", 1970). A block's
distance is the capacity from which on it is still there: the deepest place that it had since its
last use, where a request that ran then counts with all that it pinned, room for its answer and
blocks that it computed again included. A block is used whenever one after it on its path is. So
the blocks that a request used last are the end of its path and move as one: block `i` is at place
`base + i`, and a tree over last uses has one number per request (`last_uses`).
Invariant: each capacity that holds every request alone has the hits of a run, block for block;
smaller ones refuse requests and are left out. Cost: an array lookup per block, O(log requests) per
earlier request whose blocks are used; a few bytes per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.sim.last_uses import LastUses
from kvtrie.sim.readers.lines import Skipped
from kvtrie.sim.requests import block_requests

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvtrie.sim.config import SimulationConfig

__all__ = ["BlockPath", "HitCurve", "lru_curve", "paths_of"]

_SPARSE = 8


@dataclass(frozen=True, slots=True)
class BlockPath:
    """One request.

    Attributes:
        blocks: uint32 `(n,)`, ids of its prompt's blocks, first to last: equal where all up to that
            block's end is equal.
        findable: how many of them at the front may be found; the others are computed again.
        room: further blocks that it takes while it runs.
        answer: uint32, ids of the blocks that its answer fills, where these are known.
    """

    blocks: NDArray[np.uint32]
    findable: int
    room: int
    answer: NDArray[np.uint32] | None = None

    def used(self) -> NDArray[np.uint32]:
        """Return the blocks of prompt and answer."""
        return self.blocks if self.answer is None else np.concatenate((self.blocks, self.answer))


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hits over capacity.

    Attributes:
        blocks: blocks of all prompts.
        least: the smallest capacity that holds every request alone.
        found: int64, blocks found with each capacity from 0 on; the last place is that of all
            larger ones, and those below `least` are of no run.
        depths: int64, the sum of the places of these blocks in their prompts, from 0 on.
        each: int64 `(requests, capacities)`, blocks that each request finds with each of the
            capacities that were asked for.
    """

    blocks: int
    least: int
    found: NDArray[np.int64]
    depths: NDArray[np.int64]
    each: NDArray[np.int64]

    def hits(self, capacity: int) -> int:
        """Return the number of blocks found with a capacity.

        Raises:
            ConfigError: a capacity below `least`.
        """
        if capacity < self.least:
            raise ConfigError(f"capacity is {capacity}, but a request takes {self.least} blocks")
        return int(self.found[min(capacity, len(self.found) - 1)])


def lru_curve(paths: Iterable[BlockPath], capacities: Sequence[int] = ()) -> HitCurve:
    """Return the curve of requests that run one after the other.

    Args:
        paths: in order.
        capacities: those for `HitCurve.each`.
    """
    bases, runs = LastUses(), list[tuple[int, int, int, int]]()
    paths = list(paths)
    used = _dense([path.used() for path in paths])
    last = np.full(max((int(one.max()) for one in used if len(one)), default=0) + 1, -1)
    for number, (path, blocks) in enumerate(zip(paths, used, strict=True)):
        earlier = last[blocks]
        last[blocks] = number
        known = int(np.argmin(earlier)) if len(blocks) and earlier.min() < 0 else len(blocks)
        ends = (np.flatnonzero(np.diff(earlier[:known])) + 1).tolist()
        moved: list[tuple[int, int, int]] = []
        for start, end in zip([0, *ends], [*ends, known] if known else [], strict=False):
            request, found = int(earlier[start]), min(end, path.findable)
            if start < found:
                runs.append((number, start, found, bases.most(request)))
            moved.append((request, end - start, end - max(start, found)))
        bases.use(moved, len(blocks), path.room)
    request, start, end, base = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    least = max(
        (len(blocks) + path.room for path, blocks in zip(paths, used, strict=True)), default=0
    )
    each = np.zeros((len(paths), len(capacities)), dtype=np.int64)
    for at, capacity in enumerate(capacities):
        np.add.at(each[:, at], request, np.clip(capacity - base + 1, start, end) - start)
    count, offset = (_over(start + base, end + base, one) for one in (np.ones_like(base), base))
    depths = count * np.arange(len(count)) - offset
    blocks = sum(len(path.blocks) for path in paths)
    return HitCurve(blocks, least, np.cumsum(count), np.cumsum(depths), each)


def _over(
    start: NDArray[np.int64], end: NDArray[np.int64], amount: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The sum of amounts at each place of their ranges, up to the last one."""
    changes = np.zeros(int(end.max(initial=1)) + 1, dtype=np.int64)
    np.add.at(changes, start, amount)
    np.subtract.at(changes, end, amount)
    return np.cumsum(changes)[:-1]


def _dense(paths: list[NDArray[np.uint32]]) -> list[NDArray[np.uint32]]:
    """The paths with ids near their number, which an array has room for."""
    every = np.concatenate([np.empty(0, dtype=np.uint32), *paths])
    if not len(every) or int(every.max()) < _SPARSE * len(every):
        return paths
    ids = np.unique(every, return_inverse=True)[1].astype(np.uint32)
    return np.split(ids, np.cumsum([len(path) for path in paths])[:-1])


def paths_of(config: SimulationConfig, skipped: Skipped | None = None) -> Iterator[BlockPath]:
    """Yield the requests of a config's trace, as `lru_curve` takes them.

    Args:
        config: the settings.
        skipped: counts lines that are left out, if the settings are lenient.

    Raises:
        ConfigError: a line that cannot be, or a prompt that ends inside a block.
    """
    size, keep = config.block_tokens, cast("int", config.manager["keep"])
    skipped = (skipped or Skipped()) if config.trace.lenient else None
    requests = block_requests(config.trace, size, skipped, config.most_blocks)
    for number, request in enumerate(requests):
        prompt, ids = request.input_tokens, request.blocks
        if not config.trace.hashed and prompt % size:
            raise ConfigError(
                f"request {number} has {prompt} tokens, no whole number of blocks of {size}"
            )
        findable = len(ids) if keep == 0 else min(len(ids), max(0, prompt - keep) // size)
        # The last token of an answer is never written.
        written = -(-(prompt + max(0, request.output_tokens - 1)) // size)
        yield BlockPath(ids, findable, max(0, written - len(ids)))
