"""Ends of sessions: mark each session's last request, as an engine with clients' hints knows it.

Cost: one pass over the trace before it is played; a number per session is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie.sim.readers.rows import RequestRow, RowWithEnd

__all__ = ["last_ones", "with_ends"]


def last_ones(sessions: Iterable[str | None]) -> set[int]:
    """Return the indices in a trace of the last request of each session.

    Args:
        sessions: of each request, in the trace's order; None for one without.
    """
    last = {session: at for at, session in enumerate(sessions) if session is not None}
    return set(last.values())


def with_ends(requests: Iterable[RequestRow], last: set[int]) -> Iterator[RowWithEnd]:
    """Yield each request, with whether its session ends with it."""
    for at, request in enumerate(requests):
        yield (*request, at in last)
