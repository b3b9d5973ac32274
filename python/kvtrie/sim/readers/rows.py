"""RequestRow: a request for the simulator, and the record of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypedDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.settings.scope import Scope

__all__ = ["AnyRow", "Computed", "OptionalFields", "Record", "RequestRow", "RowWithMore", "Waited"]

RequestRow: TypeAlias = "tuple[int, NDArray[np.uint32], int, int, str | None]"
"""Arrival in ns, manager tokens, tokens of prompt and answer, session."""


class OptionalFields(TypedDict, total=False):
    """Optional fields of a request.

    Attributes:
        last: whether its session ends with it.
        answer: tokens of its answer, committed with the prompt.
        scope: cache scope of its blocks and its session name.
        tool: end in ns of the tool its session waits for, and its reports: pairs of report time and
            reported time left, in thousandths of its duration and of the actual time left.
        after: trace positions, from 0 on, of the earlier requests to wait for.
        pause: ns from the last of their ends to its arrival, which is not before its trace time.
        named: whether later requests may wait for it.
    """

    last: bool
    answer: NDArray[np.uint32]
    scope: Scope
    tool: tuple[int, list[tuple[int, int]]]
    after: list[int]
    pause: int
    named: bool


RowWithMore: TypeAlias = "tuple[int, NDArray[np.uint32], int, int, str | None, OptionalFields]"
"""A request with optional fields."""

AnyRow: TypeAlias = "RequestRow | RowWithMore"
"""A request with or without optional fields."""

Computed: TypeAlias = tuple[int, int, list[int]]
"""Computed tokens, matched tokens, and recomputed blocks of the match."""

Waited: TypeAlias = tuple[int, int]
"""Nanoseconds in the queue, and waiting for copies."""

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
"""Result of a request, reported by `Simulation.run`."""
