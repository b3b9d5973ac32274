"""Tally: what the connector has done, in numbers, and a line of it once a minute.

Invariant: counters only grow. Cost: an addition per event.
"""

from __future__ import annotations

import logging
from collections import Counter

__all__ = ["Tally"]

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows
_MINUTE_NS = 60_000_000_000


class Tally:
    """Counters of one server.

    Attributes:
        tokens: prompt tokens by where their KV came from: "host", "disk", and "asked" for all that
            vLLM did not have itself.
        blocks: blocks: "stored" and "loaded".
        lost: why something was not stored or not loaded, in requests or blocks.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self._said: tuple[int, dict[str, int]] = (0, {})

    def as_dict(self) -> dict[str, int]:
        """All counters by name."""
        named = (("tokens", self.tokens), ("blocks", self.blocks), ("lost", self.lost))
        return {f"{name} {key}": one for name, each in named for key, one in sorted(each.items())}

    def line(self, now: int) -> None:
        """Log what came since the last line, if that was a minute ago and there is any."""
        at, before = self._said
        if now - at < _MINUTE_NS:
            return
        told = self.as_dict()
        new = {name: one - before.get(name, 0) for name, one in told.items()}
        if at and any(new.values()):
            _LOG.info("kvtrie: %s", ", ".join(f"{name} {n}" for name, n in new.items() if n))
        self._said = now, told
