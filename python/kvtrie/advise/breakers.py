"""Top breakers of a window: the tokens at which prompts diverge from repeated earlier prompts.

Every request of the window is explained before its blocks enter a cache without evictions. A
request diverged if the rest of its prompt recurs in a cached branch. The points of divergence are
ranked by their recurring tokens.
Invariant: without token ids there are no breakers. Cost: an `explain_miss` for each of the newest
`MOST_EXPLAINED` requests, and 8 bytes per token of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie import BlockManager, ModelShape, Tier

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvtrie import Miss
    from kvtrie.advise.rebuild import Rebuilt

__all__ = ["LISTED", "MOST_EXPLAINED", "Breaker", "top_breakers"]

MOST_EXPLAINED = 2000
"""Number of explained requests, the newest of a window."""

LISTED = 5
"""Maximum number of returned points."""

_SHOWN = 16


@dataclass(slots=True)
class Breaker:
    """A point of divergence.

    Attributes:
        recurring: recurring tokens computed after it.
        requests: requests that diverged there.
        position: position of the divergence in the first request.
        tokens: tokens of the first request's prompt, in full blocks.
        cached: token ids of the cached branch from there on, at most 16.
        asked: token ids of the prompt from there on.
    """

    recurring: int
    requests: int
    position: int
    tokens: int
    cached: list[int]
    asked: list[int]


def top_breakers(rebuilt: Rebuilt) -> list[Breaker] | None:
    """Return the top points of divergence of a window. None without token ids.

    Args:
        rebuilt: the window, with kept tokens.
    """
    shape = ModelShape(layers=1, kv_heads=1, head_dim=4)
    tiers = [Tier("host", blocks=rebuilt.distinct + 1, owner="none")]
    manager = BlockManager(shape, tiers, block_tokens=max(1, rebuilt.size), policy="lru")
    points: dict[Hashable, Breaker] = {}
    first, known = len(rebuilt) - MOST_EXPLAINED, False
    for at, request in enumerate(rebuilt.requests()):
        tokens = rebuilt.tokens(request.blocks)
        if tokens is None:
            continue
        known = True
        if at >= first:
            miss = manager.explain_miss(tokens, now=request.at, session=request.session)
            if any(cause == "diverged" for *_, cause in miss.causes):
                _add(points, miss, tokens.tolist())
        answer = None if request.answer is None else rebuilt.tokens(request.answer)
        path = tokens.tolist() + ([] if answer is None else answer.tolist())
        with manager.acquire(path, now=request.at, session=request.session, keep=0) as lease:
            lease.commit(path[lease.matched :], now=request.at)
    if not known:
        return None
    return sorted(points.values(), key=lambda one: -one.recurring)[:LISTED]


def _add(points: dict[Hashable, Breaker], miss: Miss, tokens: list[int]) -> None:
    """Count a diverged request."""
    position = miss.diverged_at or 0
    branch = max(miss.branches, key=lambda one: one.recurring)
    found = points.get(miss.divergence)
    if found is None:
        found = points[miss.divergence] = Breaker(
            0,
            0,
            position,
            miss.tokens,
            branch.tokens[:_SHOWN].tolist(),
            tokens[position : position + _SHOWN],
        )
    found.recurring += branch.recurring
    found.requests += 1
