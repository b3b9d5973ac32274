"""Token ids: traces with the tokens of each prompt, one JSON object per line.

`arrival_ns`, `tokens`, `output_tokens` (1 if it is left out) and perhaps `session`.
Invariant: as of `checked`. Cost: one line is held.
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
        skipped: counts lines that cannot be, which are left out; None ends with the first.

    Raises:
        ConfigError: a line that cannot be, or a file without one that can.
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
