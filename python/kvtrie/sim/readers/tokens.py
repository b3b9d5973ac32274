"""Traces with the token ids of each prompt, with a JSON object per line.

Fields: `arrival_ns`, `tokens`, `output_tokens` (default 1) and optionally `session`.
Invariant: as of `checked`. Cost: a line in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.settings.argument import whole
from kvtrie.sim.readers.hashes import session_of
from kvtrie.sim.readers.lines import (
    MOST,
    Ascending,
    checked,
    ids_of,
    lines_of,
    name_unread,
    row_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtrie.sim.readers.lines import Skipped
    from kvtrie.sim.readers.rows import RequestRow

__all__ = ["token_requests"]

_LATEST = 2**63 - 1


def token_requests(path: Path, skipped: Skipped | None = None) -> Iterator[RequestRow]:
    """Yield the requests of a file of token ids.

    Args:
        path: the file.
        skipped: counts and skips invalid lines. None stops at the first invalid line.

    Raises:
        ConfigError: an invalid line, or a file without a valid line.
    """
    clock = Ascending("arrival_ns")
    return checked(path, lines_of(path), lambda line: _request(path, line, clock), skipped)


def _request(path: Path, line: str, clock: Ascending) -> RequestRow:
    row = row_of(line)
    name_unread(path, row)
    at = whole("arrival_ns", row.get("arrival_ns"), 0, _LATEST)
    answer = whole("output_tokens", row.get("output_tokens", 1), 0, MOST)
    session = session_of(row)
    tokens = ids_of("tokens", row.get("tokens"))
    return clock.take(at), tokens, len(tokens), answer, session
