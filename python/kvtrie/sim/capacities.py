"""Capacities: the hits of leaf-only LRU with every capacity, from one pass over a trace.

One tier, and requests one after the other. Leaf-only LRU keeps the first blocks of one order,
whatever its capacity: last use, the latest first, and of one request the first blocks first (stack
distances: Mattson and others, "Evaluation techniques for storage hierarchies", 1970). A block's
distance is the capacity from which on it is still there: the deepest place that it had since its
last use, where a request that ran then counts with all that it pinned, room for its answer and
blocks that it computed again included. Distances ascend along the order.
Invariant: each capacity that holds every request alone has the hits of a run, block for block;
smaller ones refuse requests and are left out. Cost: O(distinct blocks) per request, a few machine
words each; a few bytes per distinct block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.sim.readers.lines import Skipped
from kvtrie.sim.requests import block_requests

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvtrie.sim.config import SimulationConfig

__all__ = ["BlockPath", "HitCurve", "lru_curve", "paths_of"]


@dataclass(frozen=True, slots=True)
class BlockPath:
    """One request.

    Attributes:
        blocks: int64 `(n,)`, ids of its prompt's blocks, first to last: equal where all up to that
            block's end is equal, below the number of distinct ones.
        findable: how many of them at the front may be found; the others are computed again.
        room: further blocks that it takes while it runs.
    """

    blocks: NDArray[np.int64]
    findable: int
    room: int


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hits over capacity.

    Attributes:
        blocks: blocks of all prompts.
        least: the smallest capacity that holds every request alone.
        found: int64, blocks found with each capacity from 0 on; the last place is that of all
            larger ones, and those below `least` are of no run.
    """

    blocks: int
    least: int
    found: NDArray[np.int64]

    def hits(self, capacity: int) -> int:
        """Return the number of blocks found with a capacity.

        Raises:
            ConfigError: a capacity below `least`.
        """
        if capacity < self.least:
            raise ConfigError(f"capacity is {capacity}, but a request takes {self.least} blocks")
        return int(self.found[min(capacity, len(self.found) - 1)])


def lru_curve(paths: Iterable[BlockPath]) -> HitCurve:
    """Return the curve of requests that run one after the other."""
    order = np.empty(0, dtype=np.int64)  # ids, the latest used first
    distance = np.empty(0, dtype=np.int64)
    own = np.zeros(1, dtype=bool)  # by id: of the running request's blocks
    distances: list[NDArray[np.int64]] = []
    blocks = least = 0
    for path in paths:
        size = len(path.blocks)
        blocks += size
        least = max(least, size + path.room)
        if size and (most := int(path.blocks.max())) >= len(own):
            own = np.concatenate((own, np.zeros(most + 1, dtype=bool)))
        own[path.blocks[: path.findable]] = True
        unpinned = ~own[order]
        distances.append(distance[~unpinned])
        # A block stays if the pinned blocks and those before it in the order leave room for it.
        deep = np.cumsum(unpinned) + size + path.room
        own[path.blocks[path.findable :]] = True
        others = ~own[order]
        own[path.blocks] = False
        order = np.concatenate((path.blocks, order[others]))
        distance = np.concatenate(
            (np.arange(1, size + 1), np.maximum(distance[others], deep[others]))
        )
    return HitCurve(blocks, least, np.cumsum(np.bincount(np.concatenate([[0], *distances]))) - 1)


def paths_of(config: SimulationConfig, skipped: Skipped | None = None) -> Iterator[BlockPath]:
    """Yield the requests of a config's trace, as `lru_curve` takes them.

    Args:
        config: the settings.
        skipped: counts lines that are left out, if the settings are lenient.

    Raises:
        ConfigError: a line that cannot be, or a prompt that ends inside a block.
    """
    numbers: dict[int, int] = {}
    size, keep = config.block_tokens, cast("int", config.manager["keep"])
    skipped = (skipped or Skipped()) if config.trace.lenient else None
    requests = block_requests(config.trace, size, skipped, config.most_blocks)
    for number, request in enumerate(requests):
        prompt, ids = request.input_tokens, request.blocks.tolist()
        if not config.trace.hashed and prompt % size:
            raise ConfigError(
                f"request {number} has {prompt} tokens, no whole number of blocks of {size}"
            )
        blocks = np.array(
            [numbers.setdefault(block, len(numbers)) for block in ids], dtype=np.int64
        )
        findable = len(ids) if keep == 0 else min(len(ids), max(0, prompt - keep) // size)
        # The last token of an answer is never written.
        written = -(-(prompt + max(0, request.output_tokens - 1)) // size)
        yield BlockPath(blocks, findable, max(0, written - len(ids)))
