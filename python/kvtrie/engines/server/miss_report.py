"""Reports of misses: causes of a request's computed tokens, and a `Miss` as plain values.

Invariant: the causes of a request cover its computed tokens once, in order. Cost: a pass over the
few ranges of a `Miss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import Miss

__all__ = [
    "CAUSES",
    "UNASKED",
    "Ranges",
    "Spans",
    "breaker_example",
    "client_report",
    "computed_ranges",
    "example_tokens",
    "miss_report",
]

CAUSES = (
    "new",
    "diverged",
    "evicted",
    "other scope",
    "not stored yet",
    "recomputed",
    "not cacheable",
    "unclassified",
)
"""Causes of computed tokens."""

UNASKED: dict[str, Any] = {"state": "off", "causes": []}
"""The answer to a client if the server does not explain misses."""

Ranges = list[tuple[int, int, str]]
"""For each range of tokens: start, end (exclusive) and cause."""

Spans = Sequence[tuple[int, int]]
"""For each range of computed tokens: start and end (exclusive)."""

_BEFORE = 64  # tokens in an example before its divergence point, and after it


def computed_ranges(miss: Miss, spans: Spans, block_tokens: int) -> Ranges:
    """Return the causes of a request's computed tokens.

    Cached tokens computed anyway are `recomputed`: the request did not wait for them. An engine
    computes the last block of a completely cached prompt again. This block is `not cacheable`.

    Args:
        miss: the explanation of its prompt.
        spans: its computed tokens, in order.
        block_tokens: tokens of a block.
    """
    ranges: Ranges = []
    for first, last in spans:
        at = first
        for begin, end, cause in [*miss.causes, *_tail(miss, block_tokens)]:
            for until, why in ((begin, "recomputed"), (end, cause)):
                if (upto := min(until, last)) > at:
                    ranges.append((at, upto, why))
                    at = upto
    return ranges


def _tail(miss: Miss, block_tokens: int) -> Ranges:
    """Return the range of the last block, unless the causes reach the end of the prompt."""
    if miss.causes and miss.causes[-1][1] == miss.tokens:
        return []
    return [(miss.tokens - block_tokens, miss.tokens, "not cacheable")]


def client_report(tokens: int, found: int, findable: int) -> dict[str, Any]:
    """Return the explanation for a client, with nothing but lengths of the client's prompt.

    Further causes (new, evicted, diverged) would reveal cached prompts of different users. The
    exact divergence point is also hidden. With it, a prompt could be guessed token by token,
    whereas response times only allow guessing block by block.

    Args:
        tokens: number of tokens of the prompt.
        found: number of leading tokens not computed.
        findable: number of leading tokens that any cache could find.
    """
    ends = (found, max(found, findable), tokens)
    ranges = [
        [first, last, cause]
        for first, last, cause in zip(ends, ends[1:], ("not found", "not cacheable"), strict=False)
        if first < last
    ]
    return {
        "state": "explained",
        "tokens": tokens,
        "found": found,
        "computed": max(0, tokens - found),
        "causes": ranges,
    }


def example_tokens(tokens: NDArray[np.uint32], at: int) -> NDArray[np.uint32]:
    """Return a copy of the tokens of a prompt shown after its divergence point."""
    return tokens[at : at + _BEFORE].copy()


def miss_report(
    miss: Miss,
    ranges: Ranges,
    after: NDArray[np.uint32] | None,
    tiers: list[str],
    detail: str = "",
) -> dict[str, Any]:
    """Return a `Miss` as values of JSON.

    Args:
        miss: the explanation of a prompt.
        ranges: the causes of the request's computed tokens.
        after: the `example_tokens` of the prompt, None if it did not diverge.
        tiers: names of the tiers.
        detail: a remark, "" for none.
    """
    report: dict[str, Any] = {
        "tokens": miss.tokens,
        "computed": sum(last - first for first, last, _ in ranges),
        "causes": [list(each) for each in ranges],
        "found": dict(zip(tiers, miss.found, strict=True)),
        "diverged_at": miss.diverged_at,
        "evicted": miss.evicted,
        "in_flight": miss.in_flight,
        "other_scope": miss.other_scope,
        "recomputed": miss.recomputed,
    }
    if after is not None:
        report["asked"] = after.tolist()
        report["branches"] = [
            {
                "tokens": branch.tokens.tolist(),
                "cached": branch.cached,
                "idle_s": branch.idle / 1e9,
                "session": branch.session,
                "recurring": branch.recurring,
            }
            for branch in miss.branches
        ]
    if detail:
        report["detail"] = detail
    return report


def breaker_example(
    miss: Miss, tokens: NDArray[np.uint32], session: str | None
) -> tuple[int, dict[str, Any]]:
    """Return the number of recurring tokens after a divergence point, and the point as an example.

    Args:
        miss: the explanation of a diverged prompt.
        tokens: the prompt.
        session: the conversation of the prompt.
    """
    at = miss.diverged_at or 0
    branch = max(miss.branches, key=lambda one: one.recurring)
    return branch.recurring, {
        "position": at,
        "tokens": miss.tokens,
        "before": tokens[max(0, at - _BEFORE) : at].tolist(),
        "cached": branch.tokens.tolist(),
        "asked": example_tokens(tokens, at).tolist(),
        "session": session,
        "cached_session": branch.session,
    }
