"""RequestRow: a request as the simulator takes it, and the record that it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Computed", "Record", "RequestRow", "RowWithAnswer", "RowWithEnd"]

RequestRow: TypeAlias = "tuple[int, NDArray[np.uint32], int, int, str | None]"
"""Arrival in ns, tokens as managers take them, tokens of prompt and answer, session."""

RowWithEnd: TypeAlias = "tuple[int, NDArray[np.uint32], int, int, str | None, bool]"
"""The same, and whether the session ends with it."""

RowWithAnswer: TypeAlias = (
    "tuple[int, NDArray[np.uint32], int, int, str | None, bool, NDArray[np.uint32]]"
)
"""The same, and the tokens of the answer, which are committed with the prompt."""

Computed: TypeAlias = tuple[int, int, list[int]]
"""Tokens computed, tokens of the match, blocks of the match that were computed again."""

Record: TypeAlias = tuple[
    int,
    int,
    int,
    int | None,
    int | None,
    list[int],
    int,
    Computed,
    int,
    list[int],
    int,
    int,
]
"""The report of `Simulation.run` on a request."""
