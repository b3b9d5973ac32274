"""Passes: time of a model's forward pass by its tokens and the context before them.

A pass reads the weights once, so small passes cost more per token.
Invariant: times never fall with more tokens or more context. Cost of a look-up: a search in a table
of a few numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Device", "PassTable"]


class Device(NamedTuple):
    """Measured speeds of the computing device.

    Attributes:
        memory_bytes_per_s: bytes read plus bytes written per second by a copy within its memory.
        flops_per_s: operations per second of a matrix product in the model's format.
    """

    memory_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class PassTable:
    """Nanoseconds of a pass, by tokens before it and tokens in it.

    Attributes:
        contexts: tokens before the pass, ascending.
        tokens: tokens of the pass, ascending.
        ns: for each context a row with the time of a pass of each size, all layers, nanoseconds.

    Raises:
        ConfigError: axes not in ascending order, or times not above 0 or falling.
    """

    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    ns: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        table = np.array(self.ns, dtype=float)
        axes = (self.contexts, self.tokens)
        if table.shape != tuple(map(len, axes)) or not table.size:
            raise ConfigError(f"times {table.shape} for contexts and tokens {axes}")
        if any((np.diff(axis) <= 0).any() for axis in axes) or self.tokens[0] < 1:
            raise ConfigError(f"contexts and tokens of a pass must ascend: {axes}")
        falls = any((np.diff(table, axis=axis) < 0).any() for axis in (0, 1))
        if falls or not (np.isfinite(table).all() and (table > 0).all()):
            raise ConfigError(f"times of passes must be above 0 and never fall: {self.ns}")

    @classmethod
    def of(cls, cells: Iterable[tuple[int, int, float]]) -> PassTable:
        """Return the table of measured cells (context, tokens, nanoseconds).

        Measured times that fall with more tokens or more context are noise and are raised.

        Args:
            cells: a cell for each pair of context and size.

        Raises:
            ConfigError: a pair of context and size without a cell.
        """
        cells = list(cells)
        contexts = sorted({context for context, _, _ in cells})
        tokens = sorted({many for _, many, _ in cells})
        found = {(context, many): ns for context, many, ns in cells}
        try:
            table = np.array([[found[at, many] for many in tokens] for at in contexts])
        except KeyError as error:
            raise ConfigError(f"no time of a pass for {error.args[0]}") from error
        for axis in (0, 1):
            table = np.maximum.accumulate(table, axis=axis)
        return cls(tuple(contexts), tuple(tokens), tuple(map(tuple, table.tolist())))

    def pass_ns(self, tokens: float, context: float) -> float:
        """Return the time of a pass of `tokens` after `context` tokens, all layers, nanoseconds.

        Interpolates linearly between the measured cells and extrapolates with the last slope. A
        pass smaller than the smallest measured pass takes its time. 0 for 0 tokens.
        """
        if tokens <= 0:
            return 0.0
        at = max(tokens, self.tokens[0])
        column = [_along(self.tokens, row, at) for row in self.ns]
        return _along(self.contexts, column, max(context, self.contexts[0]))


def _along(axis: Sequence[int], values: Sequence[float], at: float) -> float:
    """Interpolate between the points of an axis, or extrapolate with the last slope."""
    if len(axis) == 1:  # a single point has no slope: scale in proportion
        return values[0] * at / axis[0] if axis[0] else values[0]
    low = min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)
    share = (at - axis[low]) / (axis[low + 1] - axis[low])
    return values[low] + share * (values[low + 1] - values[low])
