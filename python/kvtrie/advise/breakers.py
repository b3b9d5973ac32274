"""Top breakers of a window: the tokens at which prompts part from earlier ones that they repeat.

Every request of the window is explained before its blocks are stored in a cache that nothing
leaves. A request whose rest recurs in a cached branch diverged; the parting points are ranked by
the recurring tokens.
Invariant: without token ids there are none. Cost: an `explain_miss` per request, of the newest
`MOST_EXPLAINED` ones, and 8 bytes per token of the window.
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
"""Requests that are explained, the newest of a window."""

LISTED = 5
"""Parting points that are returned."""

_SHOWN = 16


@dataclass(slots=True)
class Breaker:
    """A parting point.

    Attributes:
        recurring: tokens that were computed after it though they recur.
        requests: requests that parted there.
        position: the token at which the first of them parted.
        tokens: tokens of its prompt, in full blocks.
        cached: token ids of the cached branch from there on, at most 16.
        asked: those of the prompt.
    """

    recurring: int
    requests: int
    position: int
    tokens: int
    cached: list[int]
    asked: list[int]


def top_breakers(rebuilt: Rebuilt) -> list[Breaker] | None:
    """Return the first parting points of a window; None if it has no token ids.

    Args:
        rebuilt: the window, which keeps tokens.
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
    """Count a request that diverged."""
    position = miss.parted_at or 0
    branch = max(miss.branches, key=lambda one: one.recurring)
    found = points.get(miss.parting)
    if found is None:
        found = points[miss.parting] = Breaker(
            0,
            0,
            position,
            miss.tokens,
            branch.tokens[:_SHOWN].tolist(),
            tokens[position : position + _SHOWN],
        )
    found.recurring += branch.recurring
    found.requests += 1
