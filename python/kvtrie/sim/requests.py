"""Requests: what a simulation is asked, read from a trace as it runs.

Invariant: a line is checked before it is played, and an error names the line and the field.
Cost: one pass over the file, of which one line is held.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from kvtrie.argument import shown, text, whole
from kvtrie.errors import ConfigError
from kvtrie.sim.trace import iter_trace, lines_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvtrie.sim.config import TraceSource

__all__ = ["Asked", "token_requests", "trace_requests"]

Asked: TypeAlias = "tuple[int, NDArray[np.uint32], int, int, str | None]"
"""Arrival in ns, tokens as managers take them, tokens of prompt and answer, session."""

_LATEST = 2**63 - 1
_MOST = 2**32 - 1


def trace_requests(source: TraceSource, block_tokens: int) -> Iterator[Asked]:
    """The requests of a trace, in its order.

    Args:
        source: the trace.
        block_tokens: real tokens of a block. A hash of a Mooncake trace becomes one token for each
            block that it stands for.

    Raises:
        ConfigError: a line that cannot be, or a file without one.
    """
    asked = (
        token_requests(source)
        if source.format == "tokens"
        else _hash_requests(source, source.hash_tokens // block_tokens)
    )
    for at, tokens, prompt, answer, session in asked:
        yield at, tokens, prompt, answer if source.output else 1, session


def token_requests(source: TraceSource) -> Iterator[Asked]:
    """Requests with `arrival_ns`, `tokens`, `output_tokens` and perhaps `session`."""
    earliest = 0
    for number, line in lines_of(source.path):
        try:
            asked = _token_request(line, earliest)
        except ConfigError as error:
            raise ConfigError(f"{source.path}, line {number}: {error}") from None
        earliest = asked[0]
        yield asked


def _token_request(line: str, earliest: int) -> Asked:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"a JSON object wanted, not {line.strip()[:40]}")
    row = cast("dict[str, Any]", row)
    at = whole("arrival_ns", row.get("arrival_ns"), 0, _LATEST)
    if at < earliest:
        raise ConfigError(f"arrival_ns is {at}, before the {earliest} of the request above")
    answer = whole("output_tokens", row.get("output_tokens", 1), 0, _MOST)
    session = row.get("session")
    tokens: Any = row.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"tokens is {shown(cast('Any', tokens))}, a list of at least one wanted")
    ids = cast("list[Any]", tokens)
    try:
        found = np.array(ids)
    except (ValueError, OverflowError):
        found = np.array([])
    if found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0 or found.max() > _MOST:
        wrong = (at for at, one in enumerate(ids) if type(one) is not int or not 0 <= one <= _MOST)
        at = next(wrong, 0)
        raise ConfigError(f"tokens[{at}] is {ids[at]!r}, 0 to {_MOST} wanted")
    named = None if session is None else text("session", session)
    return at, found.astype(np.uint32), len(ids), answer, named


def _hash_requests(source: TraceSource, parts: int) -> Iterator[Asked]:
    """The requests of a Mooncake trace, each hash as the blocks that it stands for."""
    beside = np.arange(parts, dtype=np.uint64)
    for request in iter_trace(source.path):
        tokens = request.blocks
        if parts > 1:
            wide = (tokens.astype(np.uint64)[:, None] * parts + beside).reshape(-1)
            # The last hash may stand for fewer tokens.
            full = len(tokens) * source.hash_tokens
            short = max(0, full - request.input_tokens) // (source.hash_tokens // parts)
            wide = wide[: len(wide) - min(short, parts - 1)]
            if int(wide.max()) > _MOST:
                raise ConfigError(
                    f"{source.path}: hash_ids has {int(tokens.max())}, at most {_MOST // parts} "
                    f"wanted where a hash is {parts} blocks"
                )
            tokens = wide.astype(np.uint32)
        yield request.at, tokens, request.input_tokens, request.output_tokens, None
