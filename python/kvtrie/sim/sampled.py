"""Hit shares of any policy with several tiers, estimated from sampled sessions.

A sample plays 1/n of the sessions in rooms of 1/n (SHARDS: Waldspurger and others, FAST 2015). A
session is chosen by the hash of its name. If sessions are missing, a request is chosen by the first
block of its prompt shared by at most 1 % of the requests, so a common system prompt does not make
all requests a single session. A sample estimates the difference between the settings and LRU on a
single tier. This difference is added to LRU's exact share (`capacities`), because both err alike on
a sample. Several disjoint samples give the error.
Invariant: a sample has at least 4000 requests, and its smallest room holds `ROOM` of the longest
prompts. Otherwise the whole trace is replayed, without an error. The error covers the choice of
sessions, not a bias of all samples: `learned` learns from fewer requests, and finds up to 2 points
less than in the whole trace. Cost: `SAMPLES / n` replays per capacity.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvtrie.sim.capacities import BlockPath, lru_curve
from kvtrie.sim.replay import SHAPE, open_manager
from kvtrie.sim.replay import replay as replay_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.scope import Structure
    from kvtrie.settings.tier import Tier
    from kvtrie.sim.capacities import HitCurve
    from kvtrie.sim.trace import TraceRequest

__all__ = ["Point", "Sampling", "session_names"]

ROOM = 16
SAMPLES = 3
_MOST = 8
_REQUESTS = 4000
_SHARED = 0.01


@dataclass(frozen=True, slots=True)
class Point:
    """A capacity and its hit share.

    Attributes:
        capacity: blocks of the last tier.
        share: found share of the blocks of all prompts.
        error: standard error of the share, 0 after a replay of the whole trace.
        one_in: inverse of the played share of sessions, 1 for the whole trace.
    """

    capacity: int
    share: float
    error: float
    one_in: int


class Sampling:
    """A trace with sampled sessions.

    Args:
        requests: requests in arrival order.
        tiers: tiers, fastest first. The capacity replaces the last tier's blocks.
        policy: as for `open_manager`, like `structure`, `objective`, `model` and `block_tokens`.
        running: as for `replay`.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        tiers: Sequence[Tier],
        *,
        policy: str,
        block_tokens: int,
        running: int = 1,
        structure: Structure = "leaf-only",
        objective: Literal["cost", "balanced", "hits"] = "cost",
        model: ModelShape = SHAPE,
    ) -> None:
        self._requests, self._tiers, self._running = requests, list(tiers), running
        self._block_tokens = block_tokens
        self._open = partial(
            open_manager,
            policy=policy,
            structure=structure,
            block_tokens=block_tokens,
            objective=objective,
            model=model,
        )
        self._names = session_names(requests)
        self._longest = max((len(one.blocks) for one in requests), default=1)
        self._curves: dict[tuple[int, int], HitCurve] = {}

    def point(self, capacity: int) -> Point:
        """Return the hit share with a capacity."""
        tiers = [*self._tiers[:-1], replace(self._tiers[-1], blocks=capacity, bytes=None)]
        rooms = [tier.blocks or 0 for tier in tiers]
        fitting = min(rooms) // (ROOM * self._longest)
        one_in = min(_MOST, fitting, len(self._requests) // _REQUESTS)
        if one_in <= 1:
            return Point(capacity, self._share(self._requests, tiers, 1), 0.0, 1)
        whole = self._lru(1, 0, max(rooms))
        shares: list[float] = []
        for part in range(min(SAMPLES, one_in)):
            played = self._share(self._sample(one_in, part), tiers, one_in)
            shares.append(whole + played - self._lru(one_in, part, max(rooms) // one_in))
        error = float(np.std(shares, ddof=1)) / len(shares) ** 0.5
        return Point(capacity, min(1.0, max(0.0, float(np.mean(shares)))), error, one_in)

    def _sample(self, one_in: int, part: int) -> list[TraceRequest]:
        pairs = zip(self._requests, self._names, strict=True)
        return [one for one, name in pairs if name % one_in == part]

    def _lru(self, one_in: int, part: int, capacity: int) -> float:
        """Return LRU's hit share on a single tier for a sample."""
        if (one_in, part) not in self._curves:
            sample = self._requests if one_in == 1 else self._sample(one_in, part)
            paths = (BlockPath(one.blocks, len(one.blocks), 0, one.answer) for one in sample)
            self._curves[one_in, part] = lru_curve(paths)
        curve = self._curves[one_in, part]
        return float(curve.found[min(capacity, len(curve.found) - 1)]) / max(1, curve.blocks)

    def _share(self, requests: Sequence[TraceRequest], tiers: Sequence[Tier], one_in: int) -> float:
        scaled = [replace(tier, blocks=(tier.blocks or 0) // one_in, bytes=None) for tier in tiers]
        running = max(1, self._running // one_in)
        size = self._block_tokens
        return replay_once(
            requests, self._open(scaled), block_tokens=size, running=running
        ).hit_rate


def session_names(requests: Sequence[TraceRequest]) -> list[int]:
    """Return an evenly distributed number for the session of each request."""
    if all(one.session is not None for one in requests):
        names = [f"{one.session}" for one in requests]
    else:
        paths = [one.blocks for one in requests]
        every = np.concatenate([np.empty(0, np.uint32), *paths])
        ids, counts = np.unique(every, return_counts=True)
        names: list[str] = []
        for path in paths:
            own = counts[np.searchsorted(ids, path)] <= max(1.0, _SHARED * len(requests))
            names.append(str(path[int(np.argmax(own)) if own.any() else -1]) if len(path) else "")
    numbers = {
        name: int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
        for name in set(names)
    }
    return [numbers[name] for name in names]
