"""Random lengths, times and texts with the distributions of workloads.

Invariant: the same seed gives the same draws everywhere. Cost: linear in the blocks.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.sim.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NS_PER_S", "Draw", "Text", "begin", "gathered", "opened", "ordered", "texts"]

NS_PER_S = 1_000_000_000
BLOCK = 512


@dataclass(slots=True)
class Text:
    """A growing token sequence: ids of its full blocks, and the number of remaining tokens."""

    ids: Iterator[int]
    path: list[int] = field(default_factory=list[int])
    rest: int = 0

    def grow(self, tokens: int) -> None:
        """Append tokens not in any earlier text."""
        whole, self.rest = divmod(self.rest + tokens, BLOCK)
        self.path.extend(next(self.ids) for _ in range(whole))

    def fork(self) -> Text:
        """Return a sequence with the full blocks of this text as its prefix."""
        return Text(self.ids, list(self.path))

    def request(self, at: float, answer: int) -> TraceRequest:
        """Return a request with the whole text as its prompt."""
        partial = [next(self.ids)] if self.rest or not self.path else []
        return TraceRequest(
            at=int(at * NS_PER_S),
            input_tokens=len(self.path) * BLOCK + self.rest,
            output_tokens=answer,
            blocks=np.array(self.path + partial, dtype=np.uint32),
        )


@dataclass(slots=True)
class Draw:
    """Random numbers with the distributions of workloads."""

    rng: random.Random

    def length(self, median: float, spread: float) -> int:
        """Return a log-normal length, at least 1."""
        return max(1, round(self.rng.lognormvariate(math.log(median), spread)))

    def seconds(self, median: float, spread: float) -> float:
        """Return a log-normal time."""
        return self.rng.lognormvariate(math.log(median), spread)

    def happens(self, share: float) -> bool:
        """Return True with a probability of `share`."""
        return self.rng.random() < share

    def turns(self, mean: float) -> int:
        """Return a geometric number, at least 1."""
        return 1 + int(math.log(1 - self.rng.random()) / math.log(1 - 1 / mean))

    def popular(self, number: int) -> int:
        """Return an index below `number`. Index n has about 1/(n + 1) the frequency of 0 (Zipf)."""
        return int((number + 1) ** self.rng.random()) - 1


def ordered(requests: list[TraceRequest], most: int) -> list[TraceRequest]:
    """Return the first `most` requests in time order. Late turns of the last sessions are cut."""
    return sorted(requests, key=lambda request: request.at)[:most]


def gathered(
    sessions: Iterator[list[TraceRequest]], most: int, surplus: float
) -> list[TraceRequest]:
    """Return `most` requests in time order, from sessions with over `surplus * most` requests."""
    made: list[TraceRequest] = []
    while len(made) <= surplus * most:
        made.extend(next(sessions))
    return ordered(made, most)


def texts(draw: Draw, ids: Iterator[int], number: int, median: float, spread: float) -> list[Text]:
    """Return `number` unrelated texts."""
    texts = [Text(ids) for _ in range(number)]
    for text in texts:
        text.grow(draw.length(median, spread))
    return texts


def opened(draw: Draw, per_s: float) -> Iterator[float]:
    """Yield start times of sessions in seconds, with a mean of `per_s` per second."""
    at = 0.0
    while True:
        at += draw.rng.expovariate(per_s)
        yield at


def begin(requests: int, seed: int) -> tuple[Draw, Iterator[int]]:
    """Return the random numbers and the ids of a workload.

    Raises:
        ConfigError: `requests` is below 1.
    """
    if requests < 1:
        raise ConfigError(f"requests is {requests}, at least 1 wanted")
    rng = random.Random(seed)  # noqa: S311 - a workload needs no secrecy
    return Draw(rng), itertools.count()
