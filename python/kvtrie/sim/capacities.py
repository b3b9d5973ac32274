"""Hit curve of leaf-only LRU over all capacities, from a single pass over a trace.

Assumes a single tier and sequential requests. Leaf-only LRU keeps the first blocks of a fixed
order, for any capacity: latest use first, and within a request the first blocks first (stack
distances: Mattson and others, "Evaluation techniques for storage hierarchies", 1970). A block's
distance is the smallest capacity keeping it: its deepest position since its last use. A running
request counts with all pinned blocks, including room for its answer and recomputed blocks. Using a
block also uses all blocks before it on its path. So the blocks last used by a request are the end
of its path and move together: block `i` is at position `base + i`, and a tree over last uses has a
number per request (`last_uses`).
Invariant: for each capacity large enough for every single request, the hits equal a run's, block
for block. Smaller capacities refuse requests and are left out. Cost: an array lookup per block,
O(log requests) per earlier request with reused blocks, and a few bytes per block.
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
    """Block path of a request.

    Attributes:
        blocks: uint32 `(n,)`, ids of the prompt's blocks, first to last. Equal ids mean equal
            prompts up to the end of the block.
        findable: number of leading blocks allowed to hit. The remaining blocks are recomputed.
        room: further blocks taken while it runs.
        answer: uint32, ids of the blocks filled by its answer, if known.
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
    """Hits by capacity.

    Attributes:
        blocks: blocks of all prompts.
        least: smallest capacity large enough for every single request.
        found: int64, blocks found with each capacity from 0 on. The last entry holds for all larger
            capacities. Entries below `least` correspond to no run.
        depths: int64, sum of the prompt positions of these blocks, from 0 on.
        each: int64 `(requests, capacities)`, blocks found by each request with each of the
            requested capacities.
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
    """Return the hit curve of sequential requests.

    Args:
        paths: requests in order.
        capacities: capacities of `HitCurve.each`.
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
    """Return the sum of amounts at each position of their ranges, up to the last."""
    changes = np.zeros(int(end.max(initial=1)) + 1, dtype=np.int64)
    np.add.at(changes, start, amount)
    np.subtract.at(changes, end, amount)
    return np.cumsum(changes)[:-1]


def _dense(paths: list[NDArray[np.uint32]]) -> list[NDArray[np.uint32]]:
    """Renumber the ids of the paths densely, if an array over them would be too sparse."""
    every = np.concatenate([np.empty(0, dtype=np.uint32), *paths])
    if not len(every) or int(every.max()) < _SPARSE * len(every):
        return paths
    ids = np.unique(every, return_inverse=True)[1].astype(np.uint32)
    return np.split(ids, np.cumsum([len(path) for path in paths])[:-1])


def paths_of(config: SimulationConfig, skipped: Skipped | None = None) -> Iterator[BlockPath]:
    """Yield the requests of a config's trace for `lru_curve`.

    Args:
        config: settings of the run.
        skipped: counts skipped lines, if the settings are lenient.

    Raises:
        ConfigError: an invalid line, or a prompt ending inside a block.
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
