"""Monitor: watches how far fused attention is from full attention, and raises the ratio.

Every fusion is probed: a few tokens that were not chosen are computed as well, and the error of
their V estimates the error of the rest. Some requests are also compared with a full prefill, which
is the truth and costs one. A score below the threshold raises the ratio by a step; after some good
requests in a row it falls by one again.
Invariant: what is added to the ratio is at least 0 and at most 1. Cost: the probed tokens in every
fusion; a full prefill in `rate` of them.
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
    """How near fused attention is to that of a full prefill.

    Attributes:
        score: from 0 to 1, the nearer the higher; None where nothing was looked at.
        how: "full prefill": e^-KL of the next token's distribution. "attention": 1 - d m, where d
            is the root mean square error of V of probed tokens relative to V, the mean over
            layers, and m the share of the query's attention to reused tokens that falls on those
            that were not computed. "count": 1 - d m as well, with m the share of tokens that were
            not computed. "exact": reused KV is that of a full prefill. "nothing": not estimated,
            nothing was recomputed.
        kl: of a full prefill, in nats; None otherwise.
    """

    score: float | None
    how: Literal["full prefill", "attention", "count", "exact", "nothing"]
    kl: float | None = None


@dataclass(slots=True)
class Monitor:
    """The knobs, and what is added to the ratio now.

    Attributes:
        rate: share of requests that are compared with a full prefill.
        threshold: scores below it raise the ratio.
        step: by how much it rises, and falls.
        good: requests in a row at or above the threshold after which it falls.
        probe: tokens that each fusion computes only to look at.
        extra: what is added to the ratio now.
        raised: how often it has risen.
        lowered: how often it has fallen.
        lock: held by each method, so that Fusors of several threads may share a monitor.

    Raises:
        ConfigError: a number that cannot be.
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
        """Return whether to compare the next request with a full prefill: each 1 / rate-th is."""
        self._credit += self.rate
        if self._credit < 1 - 1e-9:
            return False
        self._credit -= 1
        return True

    @in_turn
    def ratio(self, base: float) -> float:
        """Return a ratio with what is added to it now."""
        return min(1.0, base + self.extra)

    @in_turn
    def saw(self, quality: Quality) -> None:
        """Take the score of a request."""
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
