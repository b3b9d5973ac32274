"""RequestRow: a request as the simulator takes it, and the record that it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypedDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.settings.scope import Scope

__all__ = ["AnyRow", "Computed", "More", "Record", "RequestRow", "RowWithMore", "Waited"]

RequestRow: TypeAlias = "tuple[int, NDArray[np.uint32], int, int, str | None]"
"""Arrival in ns, tokens as managers take them, tokens of prompt and answer, session."""


class More(TypedDict, total=False):
    """What a request may have in addition.

    Attributes:
        last: whether its session ends with it.
        answer: the tokens of its answer, which are committed with the prompt.
        scope: within which its blocks are shared, and its session named.
        tool: when the tool that its session waits for ends, in ns, and its reports: when, and the
            time left that it states, in thousandths of its time and of the time left.
        after: places in the trace, from 0 on, of the requests above it that it waits for.
        pause: ns between the last of their ends and its arrival, which is not before its time.
        named: whether requests below it may wait for it.
    """

    last: bool
    answer: NDArray[np.uint32]
    scope: Scope
    tool: tuple[int, list[tuple[int, int]]]
    after: list[int]
    pause: int
    named: bool


RowWithMore: TypeAlias = "tuple[int, NDArray[np.uint32], int, int, str | None, More]"
"""A request with more."""

AnyRow: TypeAlias = "RequestRow | RowWithMore"
"""A request, perhaps with more."""

Computed: TypeAlias = tuple[int, int, list[int]]
"""Tokens computed, tokens of the match, blocks of the match that were computed again."""

Waited: TypeAlias = tuple[int, int]
"""Nanoseconds in the queue, and waited for copies."""

Record: TypeAlias = tuple[
    int,
    int,
    int,
    int | None,
    int | None,
    list[int],
    int,
    Computed,
    Waited,
    list[int],
    int,
    int,
]
"""The report of `Simulation.run` on a request."""
