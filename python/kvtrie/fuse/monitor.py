"""Monitor: estimates the quality of fusions and raises the ratio when it is low.

Every fusion computes a few more tokens as probes, and the error of their V estimates the error of
the remaining tokens. Some requests are also compared with a full prefill. A score below the
threshold raises the ratio by a step. After some good requests in a row the ratio falls by a step.
Invariant: the addition to the ratio is from 0 to 1. Cost: the probed tokens in every fusion, and a
full prefill in the share `rate` of fusions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import RLock
from typing import Literal, NamedTuple

from kvtrie.errors import ConfigError
from kvtrie.fuse.turns import in_turn
from kvtrie.settings.argument import real, whole

__all__ = ["Monitor", "Quality"]

_MOST = 2**32 - 1


class Quality(NamedTuple):
    """Closeness of fused attention to the attention of a full prefill.

    Attributes:
        score: from 0 to 1, 1 for equal results. None if not estimated.
        how: "full prefill": e^-KL of the next token's distribution. "attention": 1 - d m, where d
            is the root mean square error of V of probed tokens relative to V, the mean over
            layers, and m the uncomputed tokens' share of the query's attention to candidates.
            "count": 1 - d m as well, with m the share of uncomputed tokens. "exact": reused KV
            equals a full prefill. "nothing": not estimated, because no token was recomputed.
        kl: KL divergence from a full prefill, in nats, None without a full prefill.
    """

    score: float | None
    how: Literal["full prefill", "attention", "count", "exact", "nothing"]
    kl: float | None = None


@dataclass(slots=True)
class Monitor:
    """Settings and the current addition to the ratio.

    Attributes:
        rate: share of requests to compare with a full prefill.
        threshold: scores below it raise the ratio.
        step: change of the ratio per rise or fall.
        good: number of successive requests at or above the threshold before the ratio falls.
        probe: tokens computed by each fusion only to estimate the error.
        extra: current addition to the ratio.
        raised: number of rises.
        lowered: number of falls.
        lock: held by each method, so Fusors of several threads may share a monitor.

    Raises:
        ConfigError: a number out of range.
    """

    rate: float = 0.01
    threshold: float = 0.9
    step: float = 0.05
    good: int = 20
    probe: int = 8
    extra: float = 0.0
    raised: int = 0
    lowered: int = 0
    lock: RLock = field(default_factory=RLock, init=False, repr=False, compare=False)
    _credit: float = 0.0
    _row: int = 0

    def __post_init__(self) -> None:
        for name in ("rate", "threshold", "step", "extra"):
            setattr(self, name, real(name, getattr(self, name), 0, 1))
        if not self.step:
            raise ConfigError("step is 0: above 0 and at most 1 wanted")
        self.good = whole("good", self.good, 1, _MOST)
        self.probe = whole("probe", self.probe, 0, _MOST)

    @in_turn
    def samples(self) -> bool:
        """Return whether to compare the next request with a full prefill, with frequency `rate`."""
        self._credit += self.rate
        if self._credit < 1 - 1e-9:
            return False
        self._credit -= 1
        return True

    @in_turn
    def ratio(self, base: float) -> float:
        """Return a ratio plus the current addition, at most 1."""
        return min(1.0, base + self.extra)

    @in_turn
    def observe(self, quality: Quality) -> None:
        """Update the addition from the score of a request."""
        if quality.score is None:
            return
        if quality.score < self.threshold:
            self._row = 0
            if self.extra < 1:
                self.extra = min(1.0, self.extra + self.step)
                self.raised += 1
            return
        self._row += 1
        if self._row >= self.good and self.extra > 0:
            self._row = 0
            self.extra = max(0.0, self.extra - self.step)
            self.lowered += 1
