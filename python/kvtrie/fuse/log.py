"""Log: reused and computed tokens of a fusion, and the time of each part.

Invariant: `computed` counts only chunk tokens, neither prefix nor query. Cost: a byte per token and
layer.
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
    """Outcome of a chunk of a context.

    Attributes:
        tokens: number of its tokens.
        reused: number of its tokens reused at every layer.
        bytes: reused bytes of K and V, over all layers.
        state: "hit" for cached KV, "absent" for a chunk computed and kept, "lost" for a chunk
            computed after its load failed, "given" for KV from the caller.
        exact: whether its KV equals a full prefill, so that no token is recomputed.
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
        grid: bool `(layers, tokens)`: computed tokens of prefix, chunks and query, without the last
            token of the query.
        span: columns of the chunks' tokens in `grid`, from the first to the end, exclusive.
        ratio: requested share of chunk tokens to compute.
        nanoseconds: by part: "wait" for loads of layers, "layout" of buffers and rotation, "select"
            for ranking, "recompute" for passes of the model, including selection passes, "scatter"
            for writes of fresh K and V within them, "absent" for computing missing chunks.
        waits: layers loaded before the first recomputed token, to rank by the query's attention.
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
        """Per chunk, the number of tokens reused at every layer."""
        return [chunk.reused for chunk in self.chunks]

    @property
    def shares(self) -> list[float]:
        """Per layer, the computed share of chunk tokens."""
        return [float(layer.mean()) if layer.size else 0.0 for layer in self._chunks]

    @property
    def overlaps(self) -> list[float]:
        """Per layer from 1 on, the share of its tokens also computed at the previous layer.

        1 for a layer without computed tokens.
        """
        rows = self._chunks
        return [
            float((above & below).sum() / above.sum()) if above.any() else 1.0
            for below, above in pairwise(rows)
        ]

    @property
    def computed(self) -> float:
        """Computed share of the chunks' (token, layer) pairs."""
        return float(self._chunks.mean()) if self._chunks.size else 0.0

    @property
    def layers_full(self) -> int:
        """Number of layers at which all tokens of inexact chunks were computed."""
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

    Parts nest: the time of an inner part is not counted in the outer part.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: list[Part] = []
        self._marks: list[tuple[Part | None, Any]] = []

    @contextmanager
    def part(self, name: Part) -> Generator[None]:
        """Count the time inside the `with` block for a part."""
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def read(self) -> dict[Part, int]:
        """Return nanoseconds by part. On a GPU this waits for the submitted work."""
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
