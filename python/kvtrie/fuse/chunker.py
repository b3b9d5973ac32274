"""Chunkers: ways to cut a text into pieces with reusable KV.

Invariant: no piece is empty, and the pieces in order are the text. Equal tokens between two cuts
give equal pieces at any position. Cost: one pass over the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.fuse.context import as_tokens
from kvtrie.settings.argument import few, put, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["BySeparator", "BySize", "Given"]

_MOST = 2**32 - 1


@dataclass(frozen=True, slots=True)
class BySeparator:
    """Cuts after each occurrence of a separator and leaves the separator in the piece before it.

    Attributes:
        separator: its tokens.

    Raises:
        ConfigError: no token.
    """

    separator: tuple[int, ...]

    def __post_init__(self) -> None:
        mark = as_tokens("separator", self.separator)
        object.__setattr__(self, "separator", tuple(mark.tolist()))
        if not self.separator:
            raise ConfigError("a separator of 0 tokens separates nothing")

    def __call__(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> list[NDArray[np.int64]]:
        """Return the pieces of `tokens`, int64 each."""
        text, mark = as_tokens("text", tokens), np.array(self.separator)
        cuts: list[int] = []
        if len(text) >= len(mark):
            windows = np.lib.stride_tricks.sliding_window_view(text, len(mark))
            for at in np.flatnonzero((windows == mark).all(axis=1)).tolist():
                if not cuts or at >= cuts[-1]:  # an overlapping separator is part of the last
                    cuts.append(at + len(mark))
        return _pieces(text, cuts)


@dataclass(frozen=True, slots=True)
class BySize:
    """Cuts at the last end of a sentence within `size` tokens, or at `size` where there is none.

    Attributes:
        size: the most tokens of a piece.
        ends: tokens at the end of a sentence. They stay in the piece.

    Raises:
        ConfigError: a size below 1.
    """

    size: int
    ends: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        ends = as_tokens("sequence of ends", few("ends", self.ends, _MOST))
        put(self, ends=frozenset(ends.tolist()), size=whole("size", self.size, 1, _MOST))

    def __call__(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> list[NDArray[np.int64]]:
        """Return the pieces of `tokens`, int64 each."""
        text = as_tokens("text", tokens)
        borders = np.flatnonzero(np.isin(text, list(self.ends))) + 1
        cuts: list[int] = []
        start = 0
        while len(text) - start > self.size:
            inside = borders[(borders > start) & (borders <= start + self.size)]
            start = int(inside[-1]) if len(inside) else start + self.size
            cuts.append(start)
        return _pieces(text, cuts)


class Given:
    """Takes the pieces as the caller has cut them, without empty pieces."""

    def __call__(
        self, chunks: Iterable[Sequence[int] | NDArray[np.integer[Any]]]
    ) -> list[NDArray[np.int64]]:
        """Return the pieces, int64 each."""
        pieces = [as_tokens("chunk", chunk) for chunk in few("chunks", chunks, _MOST)]
        return [piece for piece in pieces if len(piece)]


def _pieces(text: NDArray[np.int64], cuts: list[int]) -> list[NDArray[np.int64]]:
    return [piece for piece in np.split(text, cuts) if len(piece)]
