"""Log: what one fusion reused, what it computed, and how long each part took.

Invariant: `computed` counts the chunks' own tokens alone, neither prefix nor query. Cost: a bit per
token and layer.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["FusionLog", "Reused", "Stopwatch"]

Part = Literal["wait", "layout", "select", "recompute", "scatter", "absent"]


class Reused(NamedTuple):
    """Outcome of one chunk of a context.

    Attributes:
        tokens: how many it has.
        reused: of those, how many are reused at every layer.
        bytes: of K and V that are reused, over all layers.
        state: "hit" was found, "absent" was computed alone and kept, "lost" was found and had to be
            computed alone midway, because its KV was damaged or went away, "given" came with its
            KV.
        exact: whether its KV needs no recomputation: it is the first chunk after the prefix.
    """

    tokens: int
    reused: int
    bytes: int
    state: str
    exact: bool


@dataclass(slots=True)
class FusionLog:
    """Record of one fusion.

    Attributes:
        chunks: outcome of each chunk, in the order of the context.
        grid: bool `(layers, tokens)`: what was computed, of prefix, chunks and query, the last
            token of the query left out.
        span: columns of the chunks' tokens in `grid`, from the first to the end, exclusive.
        ratio: share of the chunks' tokens that was to be computed.
        nanoseconds: by part: "wait" for layers that are loaded, "layout" of buffers and turning,
            "select" ranking and what is not a pass, "recompute" passes of the model, those made
            to select included, "scatter" fresh K and V within them, "absent" computing chunks
            that were not there.
        waits: layers whose loads the selection waited for before a token was recomputed, to rank by
            the query's attention.
        load_ns: busy time of the manager's lanes during the fusion; 0 without a store.
    """

    chunks: list[Reused]
    grid: NDArray[np.bool_]
    span: tuple[int, int]
    ratio: float
    nanoseconds: dict[Part, int] = field(default_factory=dict[Part, int])
    load_ns: int = 0
    waits: int = 0

    @property
    def reused(self) -> list[int]:
        """Per chunk, its tokens that are reused at every layer."""
        return [chunk.reused for chunk in self.chunks]

    @property
    def shares(self) -> list[float]:
        """Per layer, the share of the chunks' tokens that was computed."""
        return [float(layer.mean()) if layer.size else 0.0 for layer in self._chunks]

    @property
    def overlaps(self) -> list[float]:
        """Per layer from 1 on, the share of its computed tokens that the one before computed too.

        1 for a layer that computed none.
        """
        rows = self._chunks
        return [
            float((above & below).sum() / above.sum()) if above.any() else 1.0
            for below, above in pairwise(rows)
        ]

    @property
    def computed(self) -> float:
        """The share of the chunks' (token, layer) pairs that was computed."""
        return float(self._chunks.mean()) if self._chunks.size else 0.0

    @property
    def layers_full(self) -> int:
        """Layers at which every token of the chunks that may be wrong was computed."""
        exact = sum(chunk.tokens for chunk in self.chunks if chunk.exact)
        return int((self._chunks.sum(axis=1) >= self._chunks.shape[1] - exact).sum())

    @property
    def _chunks(self) -> NDArray[np.bool_]:
        return self.grid[:, slice(*self.span)]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields but the grid, for JSON."""
        return {
            "chunks": [chunk._asdict() for chunk in self.chunks],
            "ratio": self.ratio,
            "computed": self.computed,
            "shares": self.shares,
            "overlaps": self.overlaps,
            "nanoseconds": dict(self.nanoseconds),
            "load_ns": self.load_ns,
            "waits": self.waits,
        }


class Stopwatch:
    """Time of each part of a fusion: by the clock, on a GPU by events of its stream.

    Parts nest: the inner one's time is not the outer one's.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: list[Part] = []
        self._marks: list[tuple[Part | None, Any]] = []

    @contextmanager
    def part(self, name: Part) -> Generator[None]:
        """Count what runs inside as a part's."""
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def read(self) -> dict[Part, int]:
        """Return nanoseconds by part; on a GPU this waits for the work that was submitted."""
        if self._cuda and self._marks:
            self._marks[-1][1].synchronize()
        total: dict[Part, int] = {}
        for (name, begin), (_, end) in zip(self._marks[:-1], self._marks[1:], strict=True):
            if name is not None:
                spent = round(begin.elapsed_time(end) * 1e6) if self._cuda else end - begin
                total[name] = total.get(name, 0) + spent
        return total

    def _mark(self) -> None:
        now: Any = time.perf_counter_ns()
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((self._open[-1] if self._open else None, now))
