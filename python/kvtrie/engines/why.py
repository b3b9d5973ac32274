"""MissCounter: why requests compute the tokens that they compute, counted by cause.

A request is explained when it is admitted, before its blocks are stored. Whether the rest of a
prompt `diverged` takes a comparison with cached branches: a background thread makes it for some
requests, and the others are counted with its last answer for the same parting point.
Invariant: each computed prompt token is counted once. Nothing waits for the thread; a request for
which its queue has no room is counted without it.
Cost: a lookup per request; for a compared one also a copy of the branches, of 4 bytes per token.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtrie.engines.miss_report import (
    Ranges,
    breaker_example,
    computed_ranges,
    miss_report,
    sums,
)
from kvtrie.engines.top_breakers import TopBreakers
from kvtrie.errors import KvtrieError

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import BlockManager, Miss
    from kvtrie.scope import Scope

__all__ = ["Admitted", "MissCounter"]

_NS = 1_000_000_000
_BRANCHES = 8
_QUEUED = 32
_REQUESTS = 256
_POINTS = _SALTS = 4096
_UNDECIDED = "unclassified"
_PENDING: dict[str, Any] = {"state": "pending"}
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request at its admission.

    Attributes:
        request_id: its name.
        tokens: its prompt, which nothing changes any more.
        start: the first token that it computes.
        scope: the scope of its blocks.
        session: the conversation that it belongs to.
        asked: whether it asks for an explanation.
    """

    request_id: str
    tokens: NDArray[np.uint32]
    start: int
    scope: Scope
    session: str | None = None
    asked: bool = False


@dataclass(frozen=True, slots=True)
class _Explained:
    """A request and its explanation."""

    request: Admitted
    miss: Miss
    detail: str


class MissCounter:
    """Causes of computed tokens of a server's requests.

    Args:
        manager: the manager whose blocks they are, made with `explain=True`.
        min_tokens: computed tokens from which a request is compared.
        per_second: requests that are compared per second; 0 for none but those that ask.

    Attributes:
        tokens: computed tokens by cause.
        dropped: comparisons for which the queue had no room.
        first_salts: requests that were the first of their tenant.
    """

    def __init__(self, manager: BlockManager, *, min_tokens: int, per_second: int) -> None:
        self._manager = manager
        self._tiers = [str(name) for name in manager.stats().tiers]
        self._min_tokens, self._per_second = min_tokens, per_second
        self._allowed, self._allowed_at = float(per_second), 0
        self.tokens: Counter[str] = Counter()
        self.dropped = self.first_salts = 0
        self._top = TopBreakers()
        # The last class of a parting point, the last requests by id, and the last tenants.
        self._classes: OrderedDict[Hashable, str] = OrderedDict()
        self._requests: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._salts: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()  # of all that is above; never held while comparing
        self._queue: queue.Queue[_Explained | None] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None

    def admitted(self, request: Admitted, now: int) -> None:
        """Count the tokens that a request computes.

        Args:
            request: the request.
            now: the time.
        """
        count = len(request.tokens) - request.start
        if count <= 0:  # it was counted before it was preempted
            return
        with self._lock:
            detail = self._salted(request.scope.tenant)
        compared = request.asked or (count >= self._min_tokens and self._may_compare(now))
        try:
            explained = self._explain(request, now, detail, _BRANCHES if compared else 0)
            if compared:
                with self._lock:
                    self._keep(request.request_id, _PENDING)
                if self._submit(explained):
                    return
                explained = self._explain(request, now, detail, 0)
        except KvtrieError:
            with self._lock:
                self._requests.pop(request.request_id, None)
                self.tokens[_UNDECIDED] += count
            return
        with self._lock:
            self._count(explained, self._classified(explained))

    def uncached(self, count: int) -> None:
        """Count computed tokens of a request whose blocks are not cached."""
        with self._lock:
            self.tokens["not cacheable"] += count

    def answer(self, request_id: str) -> dict[str, Any] | None:
        """Return the explanation of one of the last 256 requests; None for another one.

        Its `state` is "pending" until the comparison has ended. Branches are reported for requests
        that were compared.

        Args:
            request_id: its name, or the part of it that precedes a "-".
        """
        start = request_id + "-"
        with self._lock:
            found = self._requests.get(request_id)
            if found is None:
                named = (one for name, one in self._requests.items() if name.startswith(start))
                found = next(named, None)
        return found

    def summary(self) -> dict[str, Any]:
        """Return the counts by cause and the first parting points, with token ids."""
        with self._lock:
            return {
                "missed_tokens": dict(self.tokens),
                "dropped": self.dropped,
                "first_salt_requests": self.first_salts,
                "breakers": [
                    {"recurring": one.tokens, "error": one.error, "requests": one.requests}
                    | one.example
                    for one in self._top.first(_LISTED)
                ],
            }

    def line(self) -> str:
        """Return the first parting point for the log, without tokens; "" if there is none."""
        with self._lock:
            first = self._top.first(1)
        if not first:
            return ""
        one = first[0]
        return (
            f"top breaker: {one.tokens} recurring tokens computed after token "
            f"{one.example['position']} by {one.requests} requests"
        )

    def drain(self) -> None:
        """Wait until all comparisons have ended."""
        self._queue.join()

    def close(self) -> None:
        """End the thread after the comparisons that are queued."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _explain(self, request: Admitted, now: int, detail: str, limit: int) -> _Explained:
        miss = self._manager.explain_miss(
            request.tokens, now=now, scope=request.scope, session=request.session, limit=limit
        )
        return _Explained(request, miss, detail)

    def _may_compare(self, now: int) -> bool:
        """Whether the rate allows one more comparison, which it then counts."""
        more = (now - self._allowed_at) * self._per_second / _NS
        self._allowed = min(self._allowed + max(more, 0.0), float(self._per_second))
        self._allowed_at = now
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True

    def _submit(self, explained: _Explained) -> bool:
        """Queue a comparison, if there is room."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtrie why", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(explained)
        except queue.Full:
            with self._lock:
                self.dropped += 1
            return False
        return True

    def _run(self) -> None:
        while True:
            explained = self._queue.get()
            try:
                if explained is None:
                    return
                self._compare(explained)
            finally:
                self._queue.task_done()

    def _compare(self, explained: _Explained) -> None:
        """Compare the branches of a request, and count its tokens."""
        request, miss = explained.request, explained.miss
        causes = {cause for *_, cause in miss.causes}  # compares, without the interpreter's lock
        ranges = computed_ranges(miss, request.start, self._manager.block_tokens)
        point = _point(explained)
        with self._lock:
            self._count(explained, ranges)
            if "diverged" in causes:
                self._classify(point, "diverged")
                self._top.add(point, *breaker_example(miss, request.tokens, request.session))
            elif "new" in causes and miss.parted_at is not None:
                self._classify(point, "new")

    def _count(self, explained: _Explained, ranges: Ranges) -> None:
        request = explained.request
        self.tokens += sums(ranges)
        report = miss_report(explained.miss, ranges, request.tokens, self._tiers, explained.detail)
        self._keep(request.request_id, {"state": "explained", **report})

    def _classified(self, explained: _Explained) -> Ranges:
        """The causes of a request that is not compared: of the same parting point's last class."""
        miss = explained.miss
        ranges = computed_ranges(miss, explained.request.start, self._manager.block_tokens)
        if miss.parted_at is None:
            return ranges
        cause = self._classes.get(_point(explained), _UNDECIDED)
        return [(first, last, cause if why == "new" else why) for first, last, why in ranges]

    def _classify(self, point: Hashable, cause: str) -> None:
        self._classes[point] = cause
        self._classes.move_to_end(point)
        if len(self._classes) > _POINTS:
            self._classes.popitem(last=False)

    def _keep(self, request_id: str, answer: dict[str, Any]) -> None:
        self._requests[request_id] = answer
        self._requests.move_to_end(request_id)
        if len(self._requests) > _REQUESTS:
            self._requests.popitem(last=False)

    def _salted(self, tenant: bytes) -> str:
        """Note a request of a tenant; a remark if it is the first one."""
        if not tenant:
            return ""
        known = tenant in self._salts
        self._salts[tenant] = None
        self._salts.move_to_end(tenant)
        if len(self._salts) > _SALTS:
            self._salts.popitem(last=False)
        if known:
            return ""
        self.first_salts += 1
        return "first request of this salt"


def _point(explained: _Explained) -> Hashable:
    """Identify a parting point: no two scopes share one."""
    scope = explained.request.scope
    return explained.miss.parting or (scope.tenant, scope.lora)
