"""Step times of an engine, as two tables of integers.

A step takes a fixed time for reading the weights, plus the time in `prefill` of each prefill (by
context and tokens) and in `decode` of all decodes (by mean context and requests).
Invariant: times never decrease along an axis, and are rounded to nanoseconds before a run.
Cost: read or computed once per run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.input import read_text, toml_of
from kvtrie.model.cost import Cost
from kvtrie.settings.argument import real

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Grid", "Passes", "read_passes"]

Grid: TypeAlias = "tuple[list[int], list[int], list[list[int]]]"
"""Contexts, counts, and a row of nanoseconds per context."""

_MOST_NS = 2.0**50
_MANY = 2**16
_LEAST_NS = 1e-3


@dataclass(frozen=True, slots=True)
class Passes:
    """Step times of an engine in nanoseconds.

    Attributes:
        base: time of a step without tokens.
        prefill: additional time of a pass, by context length and number of tokens.
        decode: additional time of a token per request, by mean context and number of requests.
        request: time of a request outside of steps, before its first token.
    """

    base: int
    prefill: Grid
    decode: Grid
    request: int = 0

    @classmethod
    def of(
        cls,
        base: float,
        prefill: tuple[Sequence[int], Sequence[int], NDArray[np.float64]],
        decode: tuple[Sequence[int], Sequence[int], NDArray[np.float64]],
        request: float = 0,
    ) -> Passes:
        """Return step times from measured times of whole steps.

        Times decreasing along an axis are noise, and are raised.

        Args:
            base: nanoseconds of a step without tokens.
            prefill: contexts, numbers of tokens, and nanoseconds `(contexts, numbers)`.
            decode: mean contexts, numbers of requests, and nanoseconds `(contexts, numbers)`.
            request: nanoseconds of a request outside of steps.

        Raises:
            ConfigError: axes not ascending, times of a wrong shape, below 0 or above 13 days.
        """
        base = real("base of steps", base, 0, _MOST_NS)
        request = real("time of a request outside of steps", request, 0, _MOST_NS)
        return cls(round(base), _grid(base, *prefill), _grid(base, *decode), round(request))

    def price(self) -> tuple[int, Grid, Grid, int]:
        """Return all times in nanoseconds, for `Simulation(price=...)`."""
        return self.base, self.prefill, self.decode, self.request

    def cost(self) -> Cost:
        """Return the managers' cost model: the time of a token in the largest pass, by context."""
        contexts, counts, rows = self.prefill
        table = [
            (at, max(_LEAST_NS, row[-1] / counts[-1]))
            for at, row in zip(contexts, rows, strict=True)
        ]
        return Cost(table=tuple(table), ns_per_token=table[0][1])


def _grid(
    base: float, contexts: Sequence[int], counts: Sequence[int], ns: NDArray[np.float64]
) -> Grid:
    axes = (list(contexts), list(counts))
    if ns.shape != tuple(map(len, axes)) or not ns.size:
        raise ConfigError(f"times {ns.shape} of steps for contexts and counts {axes}")
    if any((np.diff(axis) <= 0).any() or axis[0] < 0 for axis in axes):
        raise ConfigError(f"contexts and counts of steps must ascend: {axes}")
    if not (np.isfinite(ns).all() and (ns >= 0).all() and (ns <= _MOST_NS).all()):
        raise ConfigError(f"times of steps are {ns.tolist()}, 0 to {_MOST_NS:.0f} ns wanted")
    beyond = np.maximum(0, np.round(ns) - round(base))
    for axis in (0, 1):
        beyond = np.maximum.accumulate(beyond, axis=axis)
    return (*axes, beyond.astype(np.int64).tolist())


def read_passes(path: Path) -> Passes:
    """Return the step times from a file of `kvtrie profile`.

    The fixed time of a step is the time of the smallest pass. Without decodes of several requests
    in the file, each request takes the additional time of a single token.

    Raises:
        ConfigError: an unreadable file, or a profile without a model.
    """
    wrong = f"{path} is no profile of `kvtrie profile` with a model"
    document = toml_of(read_text(path, "the profile"), wrong)
    try:
        passes = document["passes"]
        contexts = [int(at) for at in passes["contexts"]]
        tokens = [int(at) for at in passes["tokens"]]
        ns = np.array(passes["ns"], dtype=np.float64)
        base = float(ns[0, 0])
        request = document.get("server", {}).get("request_ns", 0)
        if "decode" in document:
            decode = document["decode"]
            contexts_of, requests = decode["contexts"], decode["requests"]
            decodes = (
                [int(at) for at in contexts_of],
                [int(at) for at in requests],
                np.array(decode["ns"], dtype=np.float64),
            )
        else:
            beyond = ns[:, :1] - base
            decodes = (contexts, [1, _MANY], base + beyond * np.array([[1, _MANY]]))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ConfigError(f"{wrong}: {error!r}") from error
    if decodes[1][:1] != [1]:
        raise ConfigError(f"{path}: decode.requests begins with {decodes[1][:1]}, 1 wanted")
    try:
        return Passes.of(base, (contexts, tokens, ns), decodes, request)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
