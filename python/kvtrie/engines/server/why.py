"""MissCounter: counts the computed prompt tokens of requests by cause.

A request is explained when it is admitted, before its blocks are stored. To decide whether the rest
of a prompt `diverged`, it must be compared with cached branches. A background thread compares some
requests. The rest are counted with the last result for the same divergence point.
Invariant: each computed prompt token is counted once. Nothing waits for the thread. If its queue is
full, a request is counted without a comparison.
Cost: a lookup per request. A compared request also copies the branches, 4 bytes per token.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtrie.at_exit import end_at_exit
from kvtrie.engines.server.miss_report import (
    Ranges,
    Spans,
    breaker_example,
    computed_ranges,
    example_tokens,
    miss_report,
)
from kvtrie.engines.server.top_breakers import TopBreakers
from kvtrie.errors import KvtrieError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import BlockManager, Miss
    from kvtrie.settings.scope import Scope

__all__ = ["Admitted", "Explained", "MissCounter"]

_NS = 1_000_000_000
_BRANCHES = 8
_QUEUED = 32
_POLL_S = 0.05  # a notification takes longer than the rest of an admission
_IDLE_POLLS = 20  # empty polls before the thread ends
_REQUESTS = 256
_LONGEST_ID = 256  # remembered characters of a client's id
_DIGEST = 16
_POINTS = _SALTS = 4096
_UNDECIDED = "unclassified"
_PENDING: dict[str, Any] = {"state": "pending"}
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request at its admission.

    Attributes:
        request_id: its name.
        tokens: its prompt, never modified.
        scope: the scope of its blocks.
        session: the conversation of the request.
        asked: whether it asks for an explanation.
    """

    request_id: str
    tokens: NDArray[np.uint32]
    scope: Scope
    session: str | None = None
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Explained:
    """A request and the explanation of its miss.

    Attributes:
        request: the request.
        miss: its explanation.
        compared: whether cached branches are compared.
        detail: a remark, "" for none.
    """

    request: Admitted
    miss: Miss
    compared: bool
    detail: str


@dataclass(frozen=True, slots=True)
class _Counted:
    """Parts of a counted request's report. Few reports are read, so JSON is made at a read.

    Attributes:
        miss: its explanation.
        ranges: the causes of its computed tokens.
        after: tokens after its divergence point, None if it did not diverge.
        detail: a remark, "" for none.
    """

    miss: Miss
    ranges: Ranges
    after: NDArray[np.uint32] | None
    detail: str


class MissCounter:
    """Counts the computed tokens of a server's requests by cause.

    Args:
        manager: the manager of the blocks, made with `explain=True`.
        min_tokens: smallest number of computed tokens for a comparison.
        per_second: largest number of comparisons per second. Requests with `asked` are always
            compared, even with 0.
        tokens: the counter to use.
        place: converts an index in the tokens of an `Admitted` to an index in the prompt, if the
            manager's sequences differ from prompts. None if they are equal.

    Attributes:
        tokens: computed tokens by cause.
        dropped: number of comparisons dropped by a full queue.
        first_salts: number of first requests of tenants.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        min_tokens: int = 1024,
        per_second: int = 20,
        tokens: Counter[str] | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self._manager, self._place = manager, place
        self._tiers = [str(name) for name in manager.stats().tiers]
        self._min_tokens, self._per_second = min_tokens, per_second
        self._allowed, self._allowed_at = float(per_second), 0
        self.tokens: Counter[str] = Counter() if tokens is None else tokens
        self.dropped = self.first_salts = 0
        self._top = TopBreakers()
        # The last class of a divergence point, the last requests by id, and the last tenants.
        self._classes: OrderedDict[Hashable, str] = OrderedDict()
        self._requests: OrderedDict[str, _Counted | None] = OrderedDict()
        self._salts: OrderedDict[bytes, None] = OrderedDict()
        # Waiting comparisons, and whether a comparison is running.
        self._queue: deque[tuple[Explained, Spans]] = deque()
        self._comparing = self._closed = False
        self._thread: threading.Thread | None = None  # ends after a second without comparisons
        # Guards all fields above. Never held during a comparison of branches.
        self._lock = threading.Condition()

    def admitted(self, request: Admitted, start: int, now: int) -> None:
        """Count the computed tokens of an admitted request.

        Args:
            request: the request.
            start: its first computed token.
            now: the time.
        """
        count = len(request.tokens) - start
        if count > 0:  # otherwise it was counted before it was preempted
            self.count(self.explain(request, count, now), [(start, len(request.tokens))])

    def explain(self, request: Admitted, computed: int, now: int) -> Explained | None:
        """Explain a request before its tokens are counted by `count`. Return None on failure.

        Args:
            request: the request.
            computed: the number of tokens to compute, as far as known.
            now: the time.
        """
        with self._lock:
            detail = self._salted(request.scope.tenant)
            compared = request.asked or (computed >= self._min_tokens and self._may_compare(now))
            if compared and len(self._queue) >= _QUEUED:
                self.dropped += 1
                compared = False
        try:
            miss = self._manager.explain_miss(
                request.tokens,
                now=now,
                scope=request.scope,
                session=request.session,
                limit=_BRANCHES if compared else 0,
            )
        except KvtrieError:
            return None
        return Explained(request, miss, compared, detail)

    def count(self, explained: Explained | None, spans: Spans) -> None:
        """Count the computed tokens of an explained request.

        Args:
            explained: the result of `explain`.
            spans: the tokens, as `[first, last)`, in order.
        """
        with self._lock:
            if explained is None:
                self.tokens[_UNDECIDED] += sum(last - first for first, last in spans)
            elif not explained.compared:
                self._count(explained, self._classified(explained, spans))
            else:
                self._keep(explained.request.request_id, None)
                self._queue.append((explained, spans))
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="kvtrie why", daemon=True
                    )
                    self._thread.start()
                    end_at_exit(self._thread, self._end)

    def uncached(self, count: int) -> None:
        """Count the computed tokens of an uncached request."""
        with self._lock:
            self.tokens["not cacheable"] += count

    def answer(self, request_id: str) -> dict[str, Any] | None:
        """Return the explanation of a request, None if it is not among the last 256 requests.

        Its `state` is "pending" until the comparison has ended. Branches are reported for compared
        requests.

        Args:
            request_id: its name, or the part of its name before a "-".
        """
        start = request_id + "-"
        with self._lock:
            name: str | None = request_id[:_LONGEST_ID]
            if name not in self._requests:
                name = next((one for one in self._requests if one.startswith(start)), None)
            if name is None:
                return None
            counted = self._requests[name]
        return dict(_PENDING) if counted is None else self._report(counted)

    def summary(self) -> dict[str, Any]:
        """Return the counts by cause and the top divergence points, with token ids."""
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
        """Return the top divergence point for the log, without tokens, "" if there is none."""
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
        with self._lock:
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._queue and not self._comparing)

    def close(self) -> None:
        """Stop the thread after the queued comparisons."""
        self._end()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _may_compare(self, now: int) -> bool:
        """Return whether the rate allows a further comparison, and count it."""
        more = (now - self._allowed_at) * self._per_second / _NS
        self._allowed = min(self._allowed + max(more, 0.0), float(self._per_second))
        self._allowed_at = now
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True

    def _run(self) -> None:
        """Compare queued requests, until the queue is empty for several polls."""
        try:
            while self._compare_next():
                pass
        except BaseException:
            with self._lock:
                self._thread = None  # the next comparison starts a new thread
            raise

    def _compare_next(self) -> bool:
        with self._lock:
            for _ in range(_IDLE_POLLS):
                if self._queue or self._closed:
                    break
                self._lock.wait(_POLL_S)
            if not self._queue:
                self._thread = None
                return False
            explained, spans = self._queue.popleft()
            self._comparing = True
        try:
            self._compare(explained, spans)
        finally:
            with self._lock:
                self._comparing = False
                self._lock.notify_all()
        return True

    def _compare(self, explained: Explained, spans: Spans) -> None:
        """Compare the branches of a request, and count its tokens."""
        request, miss = explained.request, explained.miss
        causes = {cause for *_, cause in miss.causes}  # compares, without the interpreter's lock
        ranges = self._ranges(miss, spans)
        point = _point(explained)
        with self._lock:
            self._count(explained, ranges)
            if "diverged" in causes:
                self._classify(point, "diverged")
                self._top.add(point, *breaker_example(miss, request.tokens, request.session))
            elif "new" in causes and miss.diverged_at is not None:
                self._classify(point, "new")

    def _count(self, explained: Explained, ranges: Ranges) -> None:
        request, at = explained.request, explained.miss.diverged_at
        for first, last, cause in ranges:
            self.tokens[cause] += last - first
        after = None if at is None else example_tokens(request.tokens, at)
        self._keep(request.request_id, _Counted(explained.miss, ranges, after, explained.detail))

    def _report(self, counted: _Counted) -> dict[str, Any]:
        """Return the explanation of a counted request as values of JSON."""
        miss, ranges, after, detail = counted.miss, counted.ranges, counted.after, counted.detail
        report = miss_report(miss, ranges, after, self._tiers, detail)
        if (place := self._place) is not None:
            report["tokens"] = place(report["tokens"])
            report["found"] = {tier: place(count) for tier, count in report["found"].items()}
            if report["diverged_at"] is not None:
                report["diverged_at"] = place(report["diverged_at"])
        return {"state": "explained", **report}

    def _classified(self, explained: Explained, spans: Spans) -> Ranges:
        """Return the causes of an uncompared request, with the last class of its divergence."""
        miss = explained.miss
        ranges = self._ranges(miss, spans)
        if miss.diverged_at is None:
            return ranges
        cause = self._classes.get(_point(explained), _UNDECIDED)
        return [(first, last, cause if why == "new" else why) for first, last, why in ranges]

    def _ranges(self, miss: Miss, spans: Spans) -> Ranges:
        """Return the causes of computed tokens, by index in the prompt."""
        ranges, place = computed_ranges(miss, spans, self._manager.block_tokens), self._place
        if place is None:
            return ranges
        return [(place(first), place(last), why) for first, last, why in ranges]

    def _classify(self, point: Hashable, cause: str) -> None:
        self._classes[point] = cause
        self._classes.move_to_end(point)
        if len(self._classes) > _POINTS:
            self._classes.popitem(last=False)

    def _keep(self, request_id: str, counted: _Counted | None) -> None:
        request_id = request_id[:_LONGEST_ID]
        self._requests[request_id] = counted
        self._requests.move_to_end(request_id)
        if len(self._requests) > _REQUESTS:
            self._requests.popitem(last=False)

    def _salted(self, tenant: bytes) -> str:
        """Note a request of a tenant. Return a remark for the first request, else ""."""
        if not tenant:
            return ""
        tenant = _digest(tenant)
        known = tenant in self._salts
        self._salts[tenant] = None
        self._salts.move_to_end(tenant)
        if len(self._salts) > _SALTS:
            self._salts.popitem(last=False)
        if known:
            return ""
        self.first_salts += 1
        return "first request of this salt"


def _point(explained: Explained) -> Hashable:
    """Return an identity of a divergence point, different in each scope."""
    scope = explained.request.scope
    return explained.miss.divergence or (_digest(scope.tenant), _digest(scope.lora.encode()))


def _digest(name: bytes) -> bytes:
    """Return a digest of bounded length, because clients can choose any name."""
    return hashlib.blake2b(name, digest_size=_DIGEST).digest()
