"""Count the computed prompt tokens of an SGLang server by cause.

SGLang matches a waiting request in every round, locks its prefix when it is admitted, and inserts
its blocks after its first step. The cause of misses is found at the lock, before requests of the
same batch insert blocks. The tokens are counted at the first insert. A request with output is
already counted. Invariant: each computed prompt token of an inserted request is counted once. Cost:
as `MissCounter`. A match keeps references only.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.engines.server.why import Admitted, MissCounter

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from kvtrie import BlockManager
    from kvtrie.engines.server.why import Explained
    from kvtrie.settings.scope import Scope

__all__ = ["Matched", "RequestMisses"]

_NAME = "kvtrie_missed_tokens_total"
_MEANING = "Prompt tokens that engines computed, by cause"


class Matched:
    """A matched request without output.

    Args:
        name: its id.
        key: its prompt.
        scope: the scope of its blocks, None for a request that is not cached.

    Attributes:
        span: the tokens to compute, once its prefix is locked.
        explained: the cause of its misses, None if unknown.
    """

    __slots__ = ("explained", "key", "name", "scope", "span")

    def __init__(self, name: str, key: RadixKey, scope: Scope | None) -> None:
        self.name, self.key, self.scope = name, key, scope
        self.span: tuple[int, int] | None = None
        self.explained: Explained | None = None


class RequestMisses:
    """Counts computed tokens of admitted requests, and exports them to Prometheus.

    Attributes:
        tokens: computed tokens by cause.
        labels: labels of the exported counter, as on SGLang's own metrics.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.labels: dict[str, Any] = {}
        self._exported: Counter[str] = Counter()
        self._why: MissCounter | None = None

    def use(self, manager: BlockManager) -> None:
        """Count misses of this manager from now on."""
        self._why = MissCounter(manager, tokens=self.tokens)

    def locked(self, matched: Matched, found: int) -> None:
        """Find the cause of misses of a request with a locked prefix, once.

        Args:
            matched: the request.
            found: tokens of its prefix.
        """
        if matched.span is not None or self._why is None:
            return
        tokens: NDArray[np.int64] = np.asarray(matched.key.token_ids, dtype=np.int64)
        matched.span = found, len(tokens)
        if matched.scope is not None:
            request = Admitted(matched.name, tokens.astype(np.uint32), matched.scope)
            now = time.monotonic_ns()
            matched.explained = self._why.explain(request, len(tokens) - found, now)

    def inserted(self, matched: Matched | None) -> None:
        """Count a request before its first blocks are inserted."""
        if matched is None or matched.span is None or self._why is None:
            return
        first, last = matched.span
        if matched.scope is None:
            self._why.uncached(last - first)
        else:
            self._why.count(matched.explained, [(first, last)])
        self._export()

    def drain(self) -> None:
        """Wait until all comparisons have ended, and export."""
        if self._why is not None:
            self._why.drain()
        self._export()

    def _export(self) -> None:
        counter = _counter(tuple(sorted(self.labels)))
        for cause, count in dict(self.tokens).items():
            if (more := count - self._exported[cause]) > 0:
                counter.labels(**self.labels, cause=cause).inc(more)
                self._exported[cause] = count


@cache
def _counter(labels: tuple[str, ...]) -> Any:  # noqa: ANN401 - prometheus_client is optional
    """Return the counter of this process. Prometheus' registry takes a name only once."""
    # Imported after SGLang has set the directory of its multiprocess mode.
    from prometheus_client import Counter as Exported

    return Exported(_NAME, _MEANING, [*labels, "cause"])
