"""Predict: requests played through the production core with additional tiers.

The engine's cache is an LRU tier with write-through, as the connector fills host memory, above a
host tier and perhaps a disk. Groups of layers kept apart by the engine are apart on all tiers: a
prefix counts up to the deepest resumable border of all groups. The first two thirds of the window
fill the tiers, and the last third is counted: a tier that starts empty finds less than a warm tier.
All settings of LRU come from one pass (`play_lru`).
Invariant: the same requests and setting give the same figures. Cost: a few microseconds per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtrie._kvtrie import BlockManager, Simulation
from kvtrie.settings.resume import has_groups
from kvtrie.settings.tier import Tier
from kvtrie.sim.capacities import BlockPath, lru_curve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.resume import ResumePoints
    from kvtrie.sim.readers.rows import Record, RowWithMore
    from kvtrie.sim.trace import TraceRequest

__all__ = ["Bound", "Played", "Setting", "bound", "play", "play_lru"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Tiers of a server.

    Attributes:
        gpu: bytes of the engine's cache.
        host: bytes of host memory, 0 for none.
        disk: bytes of the disk, 0 for none.
        policy: the policy of host and disk.
    """

    gpu: int
    host: int = 0
    disk: int = 0
    policy: str = "lru"

    def tiers(self) -> list[Tier]:
        """Return the tiers, fastest first, without bytes."""
        tiers = [Tier("gpu", bytes=self.gpu, owner="none", write="through", policy="lru")]
        if self.host:
            tiers.append(Tier("host", bytes=self.host, owner="none"))
        if self.disk:
            tiers.append(Tier("disk", bytes=self.disk, owner="none"))
        return tiers


@dataclass(frozen=True, slots=True)
class Played:
    """The counted requests, in order.

    Attributes:
        prompt: int64, tokens of each prompt.
        found: int64 `(requests, tiers)`, prompt tokens found on each tier.
        refused: requests of the whole window too large for the GPU alone.
    """

    prompt: NDArray[np.int64]
    found: NDArray[np.int64]
    refused: int


@dataclass(frozen=True, slots=True)
class Bound:
    """Facts of a window, independent of settings.

    Attributes:
        requests: requests of the whole window.
        counted: requests of its last third.
        since: begin of the last third, in ns.
        end: arrival of the last request, in ns.
        prompt: tokens of the counted prompts.
        repeated: tokens of the counted prompts found by a cache of unlimited size.
        distinct: distinct blocks of the window.
        longest: blocks of the longest prompt with its answer.
    """

    requests: int
    counted: int
    since: int
    end: int
    prompt: int
    repeated: int
    distinct: int
    longest: int


def bound(requests: Callable[[], Iterable[TraceRequest]], block_tokens: int) -> Bound:
    """Read a window for its borders and an upper limit of hits."""
    first, last, count, most = None, 0, 0, -1
    for request in requests():
        first = request.at if first is None else first
        last, count = max(last, request.at), count + 1
        for blocks in (request.blocks, request.answer):
            if blocks is not None and len(blocks):
                most = max(most, int(blocks.max()))
    since = (first or 0) + (last - (first or 0)) * 2 // 3
    seen = np.zeros(most + 1, dtype=bool)
    counted = prompt = repeated = longest = 0
    for request in requests():
        new = np.flatnonzero(~seen[request.blocks])
        known = int(new[0]) if len(new) else len(request.blocks)
        if request.at >= since:
            counted, prompt = counted + 1, prompt + request.input_tokens
            repeated += min(known * block_tokens, request.input_tokens)
        seen[request.blocks] = True
        answer = 0
        if request.answer is not None:
            seen[request.answer] = True
            answer = len(request.answer)
        longest = max(longest, len(request.blocks) + answer)
    return Bound(count, counted, since, last, prompt, repeated, int(seen.sum()), longest)


def play(
    requests: Iterable[TraceRequest],
    setting: Setting,
    *,
    model: ModelShape,
    block_tokens: int,
    since: int,
    resume: ResumePoints | None = None,
) -> Played:
    """Play a window through fresh tiers.

    Args:
        requests: in order of arrival.
        setting: the tiers.
        model: decides bytes and times.
        block_tokens: tokens of a block.
        since: time of the first counted request, in ns.
        resume: resumable borders, if groups of layers are kept apart. None keeps all tokens of all
            layers. With it a prompt's partial last block is not played: no border is after it.

    Raises:
        ConfigError: an unknown policy, or bytes unsuitable for sharing between groups.
    """
    tiers, grouped = setting.tiers(), has_groups(model, resume)
    manager = BlockManager(
        model,
        tiers,
        block_tokens=1,
        token_weight=block_tokens,
        policy=setting.policy,
        resume=resume,
    )
    prompts: list[int] = []
    found: list[list[int]] = []
    places: dict[int, int] = {}  # index among the counted requests, by number of the played request
    refused = 0

    def rows() -> Iterator[RowWithMore]:
        number = 0
        for request in requests:
            blocks = request.blocks
            if grouped:
                blocks = blocks[: request.input_tokens // block_tokens]
            if request.at >= since:
                if len(blocks):
                    places[number] = len(prompts)
                prompts.append(request.input_tokens)
                found.append([0] * len(tiers))
            if not len(blocks):
                continue  # a prompt below a block finds nothing
            none = request.blocks[:0]
            answer = none if request.answer is None else request.answer
            whole = min(request.input_tokens, len(blocks) * block_tokens)
            number += 1
            yield request.at, blocks, whole, 0, None, {"answer": answer}

    def on_record(record: Record) -> None:
        nonlocal refused
        refused += record[3] is None
        if record[5] and (at := places.get(record[0])) is not None:
            found[at] = list(record[5])

    Simulation.over(manager).run(rows(), on_record)
    shape = (len(found), len(tiers))
    return Played(
        np.array(prompts, dtype=np.int64), np.array(found, np.int64).reshape(shape), refused
    )


def play_lru(
    requests: Iterable[TraceRequest],
    settings: Sequence[Setting],
    *,
    model: ModelShape,
    block_tokens: int,
    since: int,
) -> dict[Setting, Played]:
    """Play a window once for all settings of LRU.

    The engine's cache writes through, so GPU and host together find the hits of the larger of the
    two. A disk has the blocks evicted from the host, so host and disk count as a single tier.

    Args:
        requests: as for `play`.
        settings: tiers of LRU.
        model: as for `play`, without groups of layers.
        block_tokens: as for `play`.
        since: as for `play`.

    Returns:
        The counted requests for each setting with room for every single request.
    """
    block = model.block_bytes(block_tokens)
    capacities = [
        max(setting.gpu, below) // block
        for setting in settings
        for below in (0, setting.host, setting.host + setting.disk)
    ]
    at: list[int] = []
    prompts: list[int] = []

    def paths() -> Iterator[BlockPath]:
        for request in requests:
            at.append(request.at)
            prompts.append(request.input_tokens)
            yield BlockPath(request.blocks, len(request.blocks), 0, request.answer)

    curve = lru_curve(paths(), capacities)
    counted, tokens = np.array(at) >= since, np.array(prompts, dtype=np.int64)
    found = np.minimum(curve.each.astype(np.int64) * block_tokens, tokens[:, None])[counted]
    played: dict[Setting, Played] = {}
    for number, setting in enumerate(settings):
        if curve.least > setting.gpu // block:
            continue
        upto = found[:, 3 * number : 3 * number + 3]
        kinds = [0, *([1] if setting.host else []), *([2] if setting.disk else [])]
        each = np.diff(upto[:, kinds], axis=1, prepend=0)
        played[setting] = Played(tokens[counted], each, 0)
    return played
