"""Hints of a vLLM request: its priority and its ranges, as hints of the manager.

Invariant: a hint is soft. Cost: a hint per range, once per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.engines.asked import FAR, Kept
from kvtrie.hint import Retain

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.scope import Scope

__all__ = ["hints_of", "kept_by_rank"]

_PLAIN, _HIGHEST = 35, 100


def hints_of(
    kept: Iterable[Kept], tokens: NDArray[np.uint32], scope: Scope | None, owner: str | None
) -> list[Retain]:
    """Return the hints that keep ranges of a prompt.

    Args:
        kept: the ranges.
        tokens: the request's prompt.
        scope: the scope of its blocks.
        owner: the session, if it has one.
    """
    return [
        Retain(
            tokens=tokens.copy(),
            scope=scope,
            owner=owner,
            priority=each.priority,
            start=each.start,
            end=None if each.last == FAR else each.last,
            ttl=each.ttl_ns,
        )
        for each in kept
    ]


def kept_by_rank(
    rank: int, tokens: NDArray[np.uint32], scope: Scope | None, owner: str | None
) -> Retain:
    """Return the hint of a request's `priority`: vLLM serves lower ones first.

    0 asks for nothing; each step below it keeps the prompt by one of kvtrie's 100 longer, above it
    less long.
    """
    priority = min(max(_PLAIN - rank, 0), _HIGHEST)
    return Retain(tokens=tokens.copy(), scope=scope, owner=owner, priority=priority)
