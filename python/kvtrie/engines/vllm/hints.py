"""Hints of a vLLM request: what its priority and `kv_transfer_params: {"kvtrie": {...}}` ask for.

Invariant: a hint is soft; one that says nothing sensible is counted and otherwise left out. Cost: a
hint per range, once per request.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvtrie.argument import real, whole
from kvtrie.errors import ConfigError
from kvtrie.hint import Retain

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from kvtrie.hint import Hint
    from kvtrie.scope import Scope

__all__ = ["FAR", "Kept", "asked_of", "hints_of", "kept_by_rank", "retained"]

FAR = 2**63 - 1
"""Where a range ends that has no end."""

_PLAIN, _HIGHEST = 35, 100
_KEYS = ("start", "end", "priority", "ttl_s")


def asked_of(request: Request) -> Mapping[str, Any]:
    """What a user's `kv_transfer_params` say to kvtrie."""
    params: dict[str, Any] = request.kv_transfer_params or {}
    asked = params.get("kvtrie")
    return cast("dict[str, Any]", asked) if isinstance(asked, dict) else {}


def hints_of(
    asked: Mapping[str, Any],
    tokens: NDArray[np.uint32],
    scope: Scope | None,
    owner: str | None,
) -> list[Hint]:
    """The hints that a request brings.

    Args:
        asked: `retain` is a list of ranges: `start`, `end` in tokens, `priority`, `ttl_s`.
        tokens: the request's prompt.
        scope: who may share its blocks.
        owner: the session, if it has one.

    Raises:
        ConfigError: a key that is not known, or a number that cannot be.
    """
    hints: list[Hint] = []
    for row in asked.get("retain") or ():
        if strange := [key for key in row if key not in _KEYS]:
            raise ConfigError(f"retain has no {', '.join(strange)}: {', '.join(_KEYS)}")
        seconds = row.get("ttl_s")
        hints.append(
            Retain(
                tokens=tokens.copy(),
                scope=scope,
                owner=owner,
                priority=row.get("priority", 35),
                start=row.get("start", 0),
                end=row.get("end"),
                ttl=None if seconds is None else timedelta(seconds=seconds),
            )
        )
    return hints


def kept_by_rank(
    rank: int, tokens: NDArray[np.uint32], scope: Scope | None, owner: str | None
) -> Retain:
    """What a request's `priority` asks for its prompt: vLLM serves lower ones first.

    0 says nothing; each step below it keeps the prompt by one of kvtrie's 100 longer, above it
    less long.
    """
    priority = min(max(_PLAIN - rank, 0), _HIGHEST)
    return Retain(tokens=tokens.copy(), scope=scope, owner=owner, priority=priority)


class Kept(NamedTuple):
    """A range of a prompt that a request asks to be kept.

    Attributes:
        start: its first token.
        last: one behind its last token.
        priority: 0 to 100.
        ttl_ns: for how long; None for good.
    """

    start: int
    last: int
    priority: int
    ttl_ns: int | None


def retained(params: Mapping[str, Any] | None) -> list[Kept]:
    """The ranges of `kv_transfer_params: {"kvtrie": {"retain": [...]}}`, where keys are opaque.

    A session that ends gives its blocks the lowest priority.

    Raises:
        ConfigError: a key that is not known, or a number that cannot be.
    """
    asked = cast("dict[str, Any]", (params or {}).get("kvtrie") or {})
    kept: list[Kept] = []
    if asked.get("end"):
        kept.append(Kept(0, FAR, 0, None))
    for row in asked.get("retain") or ():
        if strange := [key for key in row if key not in _KEYS]:
            raise ConfigError(f"retain has no {', '.join(strange)}: {', '.join(_KEYS)}")
        seconds = row.get("ttl_s")
        kept.append(
            Kept(
                whole("start", row.get("start", 0), 0, FAR),
                FAR if row.get("end") is None else whole("end", row["end"], 0, FAR),
                whole("priority", row.get("priority", 35), 0, 100),
                None if seconds is None else int(real("ttl_s", seconds, 0, 1e9) * 1e9),
            )
        )
    return kept
